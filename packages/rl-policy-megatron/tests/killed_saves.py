"""Saves a policy over and over, each time in a child that kills itself one step later.

Run as ``killed_saves.py MODEL DIRECTORY``. Prints one line of JSON: for every moment what the child
left, whether that loads, and whether the next save into the same directory works.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_policy_megatron import CheckpointError, MegatronPolicy, manifest, tensor_files

_MOST_MOMENTS = 60


class _Countdown:
    """Kills this process at the given step of a save."""

    def __init__(self, moment: int) -> None:
        self._left = moment

    def step(self) -> bool:
        self._left -= 1
        return self._left < 0

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            if self.step():
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return counted

    def within(self, save_file: Callable[..., Any]) -> Callable[..., Any]:
        """safetensors writes a file under a name of its own, and renames it when it is whole."""

        def counted(tensors: Any, path: Path, **options: Any) -> Any:
            if self.step():
                (path.parent / ".tmpAbC123").write_bytes(b"\1\2\3")
                os.kill(os.getpid(), signal.SIGKILL)
            return save_file(tensors, path, **options)

        return counted


def _killed_save(policy: MegatronPolicy, directory: Path, moment: int) -> int:
    child = os.fork()
    if child == 0:
        countdown = _Countdown(moment)
        tensor_files.save_file = countdown.within(countdown.before(tensor_files.save_file))
        manifest.sync_path = countdown.before(manifest.sync_path)
        tensor_files.sync_path = countdown.before(tensor_files.sync_path)
        os.replace = countdown.before(os.replace)
        try:
            policy.save(directory)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _outcome(action: Callable[[], None], done: str) -> str:
    try:
        action()
    except CheckpointError as error:
        return "complete" if "not empty" in str(error) else str(error)
    return done


def main(model: Path, directory: Path) -> None:
    moments = []
    with MegatronPolicy(model) as policy:
        for moment in range(_MOST_MOMENTS):
            target = directory / str(moment)
            status = _killed_save(policy, target, moment)
            files = sorted(path.name for path in target.iterdir())
            loaded = _outcome(lambda at=target: policy.load(at), "loaded") == "loaded"
            following = _outcome(lambda at=target: policy.save(at), "saved")
            moments.append(
                {
                    "moment": moment,
                    "status": status,
                    "files": files,
                    "had_manifest": "policy.json" in files,
                    "loaded": loaded,
                    "next": following,
                }
            )
            if status == 0:
                break
    print(json.dumps(moments))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
