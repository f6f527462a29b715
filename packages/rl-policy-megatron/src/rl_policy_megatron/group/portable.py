"""What a rank raises, made fit for the way to the driver."""

from __future__ import annotations

from ..errors import RankError


def portable(error: Exception, call: str) -> Exception:
    """``error`` itself if it survives pickling, else one that does and tells its type and text.

    An exception that pickles and cannot be read again, as one whose class takes other arguments than it
    hands on, would reach the driver without name and text.

    Args:
        error: that a rank raised.
        call: the method that it was raised in.
    """
    # The way that Ray takes, which also knows classes of the script itself.
    from ray import cloudpickle

    try:
        again = cloudpickle.loads(cloudpickle.dumps(error))
        reason = "it is read as another type" if type(again) is not type(error) else ""
    except Exception as failure:
        reason = f"{type(failure).__name__}: {failure}"
    if not reason:
        return error
    return RankError(
        f"{call} raised {type(error).__name__}: {_text(error)} (the exception itself stayed on the rank, "
        f"because it does not survive pickling: {reason}; give its class a __reduce__, or hand all that its "
        "__init__ takes to super().__init__)",
        call=call,
        answered=True,
    )


def _text(error: Exception) -> str:
    try:
        return str(error)
    except Exception as failure:
        return f"(its text cannot be had: {type(failure).__name__})"
