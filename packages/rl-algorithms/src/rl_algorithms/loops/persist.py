"""What a loop writes into a checkpoint, and how it goes on from one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from ..checkpoint_files import read_json, write_json
from ..checkpointing import Checkpoint, CheckpointStore
from ..protocols import PolicyTrainer
from .state import LoopError, LoopState

POLICY_FOLDER = "policy"
STATE_FILE = "loop.json"

# What must be the same for a resume to draw the rows that come next.
Identity = Mapping[str, int | str]


def check_store(checkpoints: CheckpointStore | None, resume_from: Checkpoint | None) -> None:
    """That nothing newer than what the run starts from would be left behind.

    Raises:
        LoopError: the store holds a later checkpoint.
    """
    newest = checkpoints.latest() if checkpoints is not None else None
    if newest is not None and (resume_from is None or newest.step > resume_from.step):
        raise LoopError(
            f"{newest.path} is ahead of this run, which starts from "
            f"{resume_from.path if resume_from else 'nothing'}: resume from it, or write to another directory"
        )


def write_checkpoint(
    checkpoints: CheckpointStore,
    policy: PolicyTrainer,
    state: LoopState,
    identity: Identity,
    *,
    score: float | None,
    add: Callable[[Path], None] | None = None,
) -> None:
    """The policy and the loop's state, published as one.

    Args:
        score: how good it is.
        add: writes whatever else belongs to it into its folder.

    Raises:
        CheckpointError: it cannot be written.
    """
    with checkpoints.write(state.step, score=score) as folder:
        (folder / POLICY_FOLDER).mkdir()
        policy.save(folder / POLICY_FOLDER)
        write_json(folder / STATE_FILE, {"run": dict(identity), "state": state.to_json()})
        if add is not None:
            add(folder)


def resumed(policy: PolicyTrainer, checkpoint: Checkpoint, identity: Identity) -> LoopState:
    """The state that the loop goes on from; the policy is loaded.

    Raises:
        LoopError: the checkpoint is of a run with other rows, or that draws them otherwise.
        CheckpointError: it cannot be read.
    """
    content = read_json(checkpoint.path / STATE_FILE)
    if not _same_run(content.get("run"), identity):
        raise LoopError(
            f"{checkpoint.path} belongs to a run with {content.get('run')}, this one has {dict(identity)}: "
            "the rows of the remaining steps would differ; resume with the same settings and rows"
        )
    state = LoopState.from_json(content.get("state", {}))
    policy.load(checkpoint.path / POLICY_FOLDER)
    return state


def _same_run(stored: object, identity: Identity) -> bool:
    """An absent or empty digest, on either side, says nothing about the rows."""
    if not isinstance(stored, dict):
        return False
    comparable = dict(stored)
    if not comparable.get("rows_digest") or not identity["rows_digest"]:
        comparable["rows_digest"] = identity["rows_digest"]
    return comparable == identity
