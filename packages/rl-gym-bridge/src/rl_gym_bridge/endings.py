"""Ends several things at the same time, within a bound that holds even for one that hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from .failures import GymTimeout

#: Seconds that ending a Gym may take beyond its bound, to kill what is left and to see that nothing is.
GRACE_S = 10.0
#: What each layer around another one waits longer, so that the inner one's own words arrive.
LAYER_S = 2.0


def end_all(steps: Mapping[str, Callable[[], object]], bound_s: float) -> list[BaseException]:
    """Take all ``steps`` at the same time and wait at most ``bound_s`` seconds for all of them together.

    Args:
        steps: what ends each thing, by how it is called in an error.
        bound_s: after which a step is left alone.

    Returns:
        What went wrong, in the order of ``steps``; a :class:`GymTimeout` for one that still runs.
    """
    problems: dict[str, BaseException] = {}

    def take(name: str) -> None:
        try:
            steps[name]()
        except BaseException as error:
            problems[name] = error

    began = time.monotonic()
    # Daemons: one that hangs must not hold the process up.
    threads = {name: threading.Thread(target=take, args=(name,), daemon=True) for name in steps}
    for thread in threads.values():
        thread.start()
    for name, thread in threads.items():
        thread.join(max(0.0, began + bound_s - time.monotonic()))
        if thread.is_alive():
            problems[name] = GymTimeout("it did not end", component=name, elapsed_s=time.monotonic() - began)
    return [problems[name] for name in steps if name in problems]
