"""Settings of chat templates that take earlier thinking out of the history, where training must see it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..failures import GymConfigError

#: Flags of chat templates that remove earlier thinking when they are on.
DROPS_WHEN_TRUE = frozenset(
    {
        "clear_thinking",
        "drop_history_thinking",
        "drop_old_thinking",
        "drop_thinking",
        "strip_history_thinking",
        "strip_thinking_from_history",
        "truncate_history_thinking",
    }
)
#: Those that remove it when they are off.
DROPS_WHEN_FALSE = frozenset({"keep_history_thinking", "keep_thinking", "preserve_thinking"})

#: What a model server's settings say when nothing that it answers is trained on.
_NOT_TRAINED = "return_token_id_information"


def refuse_dropped_thinking(settings: Any, where: str) -> None:
    """Look through nested settings for a flag that drops earlier thinking.

    The sampled tokens of a turn are trained on as they stand in the sequence. A template that removes the
    thinking of earlier turns makes the next prompt another sequence than the one that was sampled, so its
    log-probabilities would belong to a context that training never sees. Settings of a server that says
    ``return_token_id_information: false`` (a judge's, say) are left alone: nothing of it is trained on.

    Args:
        settings: mappings and sequences, nested; chat-template arguments may be JSON in a string.
        where: dotted place of ``settings``, for the message.

    Raises:
        GymConfigError: there is such a flag; names the place, the value and the reason.
    """
    if isinstance(settings, Mapping):
        if settings.get(_NOT_TRAINED) is False:
            return
        for name, value in settings.items():
            place = f"{where}.{name}"
            if _drops(name, value):
                wanted = "false" if name in DROPS_WHEN_TRUE else "true"
                raise GymConfigError(
                    f"it is {value!r}, which removes the thinking of earlier turns from the prompt: the "
                    f"tokens of a turn would then be trained in a context that they were not sampled in",
                    component=place,
                    remedy=f"set it to {wanted}, or use a chat template that keeps earlier thinking",
                )
            refuse_dropped_thinking(_decoded(name, value), place)
    elif isinstance(settings, Sequence) and not isinstance(settings, (str, bytes)):
        for index, item in enumerate(settings):
            refuse_dropped_thinking(item, f"{where}[{index}]")


def _drops(name: Any, value: Any) -> bool:
    if name in DROPS_WHEN_TRUE:
        return _truth(value) is True
    return name in DROPS_WHEN_FALSE and _truth(value) is False


def _truth(value: Any) -> bool | None:
    if isinstance(value, str):
        return {"true": True, "1": True, "false": False, "0": False}.get(value.strip().lower())
    return value if isinstance(value, bool) else bool(value) if isinstance(value, int) else None


def _decoded(name: Any, value: Any) -> Any:
    if name not in ("chat_template_kwargs", "extra_body") or not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        # Whoever uses it says what is wrong with it.
        return value
