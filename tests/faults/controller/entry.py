"""The command ``single-controller`` with a witness beside it and, if it is told to, a fault inside it.

``python -m tests.faults.controller.entry WORDS``. WITNESS names a file that gets a line for every step that
was trained, from the tokens themselves and not from what the controller believes. FAULT=POINT@N ends the
process by SIGKILL when it comes to that point for the N-th time.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

POINTS = (
    "rollout ends",
    "before training",
    "after training",
    "publish",
    "evaluate",
    "save begins",
    "save has files",
    "save is published",
    "groups are written",
    "groups were written",
)


class Fault:
    """Counts down to the end of this process."""

    def __init__(self, told: str | None) -> None:
        point, _, count = (told or "").partition("@")
        if point and point not in POINTS:
            raise ValueError(f"there is no point {point!r}; there are {', '.join(POINTS)}")
        self._point, self._left = point, int(count or 0)

    def at(self, point: str) -> None:
        if point != self._point:
            return
        self._left -= 1
        if self._left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(self, point: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.at(point)
            return function(*args, **kwargs)

        return wrapped

    def after(self, point: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            found = function(*args, **kwargs)
            self.at(point)
            return found

        return wrapped


def write_line(path: Path, content: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(content) + "\n")
        file.flush()
        os.fsync(file.fileno())


def install(fault: Fault, witness: Path) -> None:
    """Put fault and witness around the product's own functions."""
    from rl_algorithms import checkpointing, group_files
    from rl_algorithms.loops import asynchronous, persist
    from rl_app_single_controller import rollout_pump

    learn = asynchronous.learn

    def witnessed(samples: Any, method: Any, settings: Any, policy: Any, **words: Any) -> Any:
        before = policy.weight_version()
        fault.at("before training")
        found = learn(samples, method, settings, policy, **words)
        line = {
            "pid": os.getpid(),
            "step": words["step"],
            "counter": before,
            "counter_after": policy.weight_version(),
            "groups": sorted(
                {t.group_id for t in samples.trajectories} | {f.group_id for f in samples.failures}
            ),
            "oldest": min((v for t in samples.trajectories for v in t.weight_versions), default=before),
            "unversioned": sum(not t.weight_versions for t in samples.trajectories),
        }
        write_line(witness, line)
        fault.at("after training")
        return found

    asynchronous.learn = witnessed  # type: ignore[assignment]
    pump, trainer = rollout_pump.RolloutPump, asynchronous.AsyncTrainer
    pump._ended = fault.before("rollout ends", pump._ended)  # type: ignore[method-assign]
    trainer.evaluate = fault.before("evaluate", trainer.evaluate)  # type: ignore[method-assign]
    trainer.save = fault.before("save begins", trainer.save)  # type: ignore[method-assign]
    persist.write_json = fault.after("save has files", persist.write_json)
    store, groups = checkpointing.CheckpointStore, group_files.GroupStore
    store._publish = fault.after("save is published", store._publish)  # type: ignore[method-assign]
    groups.write = fault.before("groups are written", groups.write)  # type: ignore[method-assign]
    groups.write = fault.after("groups were written", groups.write)  # type: ignore[method-assign]
    from rl_app_core.rollout_engine import ColocatedEngine, FleetEngine

    for engine in (ColocatedEngine, FleetEngine):
        engine.refresh = fault.before("publish", engine.refresh)  # type: ignore[method-assign]


def main() -> None:
    install(Fault(os.environ.get("FAULT")), Path(os.environ["WITNESS"]))
    from rl_app_single_controller.cli import main as command

    command()


if __name__ == "__main__":
    main()
