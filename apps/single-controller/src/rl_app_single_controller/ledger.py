"""``trained.jsonl``: which rows each step has trained, and how old their tokens were."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rl_algorithms.replay import Group
from rl_app_core.run_directory import RunDirectory, append_record
from rl_gym_bridge.dataset import GymRow
from rl_gym_bridge.trajectory import Trajectory


def ledger(directory: RunDirectory, row: Callable[[int], GymRow]) -> Callable[[int, Sequence[Group]], None]:
    """A listener that writes a line for each step.

    Args:
        directory: of the run.
        row: at a position in the order of draws.
    """

    def write(version: int, groups: Sequence[Group]) -> None:
        append_record(
            directory.trained_file,
            {
                "step": version,
                "groups": [
                    {
                        "position": group.position,
                        "row_id": row(group.position).row_id,
                        "oldest": group.oldest,
                        "newest": group.newest,
                        "samples": sum(isinstance(outcome, Trajectory) for outcome in group.outcomes),
                    }
                    for group in groups
                ],
            },
        )

    return write
