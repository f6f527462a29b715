"""What a command's exit code says of its end."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Why a command ended. 0 means that the target steps are done, nothing less; 128 + n a signal n."""

    #: None of those below.
    FAILED = 1
    WRONG_CONFIGURATION = 2
    #: A process of the policy died, or the policy refused its work.
    POLICY = 10
    #: No replica of the rollout engine could serve.
    ENGINE = 11
    #: An environment did not start, or broke its contract.
    ENVIRONMENT = 12
    #: A checkpoint could not be written or read.
    CHECKPOINT = 13
    #: The loop cannot go on: too many failures, a loss that is no number, too many steps in vain.
    LOOP = 14
    #: Nothing happened for too long.
    STALLED = 15
    INTERRUPTED = 130


# By name: a command that fails early must not import what it has not needed.
_BY_CLASS = {
    "rl_algorithms.controller.errors.StalledError": ExitCode.STALLED,
    "rl_algorithms.controller.errors.ControllerError": ExitCode.LOOP,
    "rl_algorithms.controller.snapshot.SnapshotError": ExitCode.CHECKPOINT,
    "rl_algorithms.checkpoint_files.CheckpointError": ExitCode.CHECKPOINT,
    "rl_algorithms.loops.state.LoopError": ExitCode.LOOP,
    "rl_policy_megatron.errors.CheckpointError": ExitCode.CHECKPOINT,
    "rl_policy_megatron.errors.PolicyError": ExitCode.POLICY,
    "rl_generation.failures.GenerationError": ExitCode.ENGINE,
    "rl_gym_bridge.failures.GymError": ExitCode.ENVIRONMENT,
    "rl_gym_bridge.environment.EnvironmentDefinitionError": ExitCode.ENVIRONMENT,
}


def exit_code_of(error: BaseException) -> ExitCode:
    """Of a command that ``error`` ends; one that says nothing by itself is what caused it."""
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        for kind in type(error).__mro__:
            if (code := _BY_CLASS.get(f"{kind.__module__}.{kind.__qualname__}")) is not None:
                return code
        if error.__cause__ is None:
            break
        error = error.__cause__
    return ExitCode.FAILED
