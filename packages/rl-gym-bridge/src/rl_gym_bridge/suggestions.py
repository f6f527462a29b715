"""The name that somebody may have meant."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """``did you mean 'x'?`` for the known name that is most alike, empty where none is alike enough."""
    # Only a mistake needs it, and the bridge has to start fast.
    from difflib import get_close_matches

    close = get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {close[0]!r}?" if close else ""
