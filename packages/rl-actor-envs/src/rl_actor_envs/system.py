"""The switch that puts every actor on the driver's interpreter. Nothing else reads its variable."""

from __future__ import annotations

import os

from .errors import ActorEnvironmentError

SYSTEM_FLAG = "RL_ACTOR_ENVS_SYSTEM"


def system_interpreter_forced() -> bool:
    """Whether ``RL_ACTOR_ENVS_SYSTEM`` is ``1``; unset, empty and ``0`` mean no.

    Raises:
        ActorEnvironmentError: it has any other value.
    """
    value = os.environ.get(SYSTEM_FLAG, "")
    if value not in ("", "0", "1"):
        raise ActorEnvironmentError(f"{SYSTEM_FLAG} is {value!r}; set it to 1 or to 0, or unset it")
    return value == "1"
