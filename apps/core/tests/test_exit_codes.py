"""What a scheduler sees of an end: the class of an error, its bases, or what caused it."""

from __future__ import annotations

import importlib
import io
import subprocess
import sys

import pytest
from rich.console import Console

from rl_algorithms.checkpoint_files import CheckpointCorruptError, CheckpointError
from rl_algorithms.controller import ControllerError, SnapshotError, StalledError
from rl_algorithms.loops import LoopError
from rl_algorithms.loops.collect import DynamicSamplingError
from rl_app_core.cli import guarded
from rl_app_core.exit_codes import _BY_CLASS, ExitCode, exit_code_of
from rl_generation.failures import EngineDeadError, GenerationError, InvalidRequestError
from rl_gym_bridge.environment import EnvironmentDefinitionError
from rl_gym_bridge.failures import GymError, GymServerDied
from rl_policy_megatron import errors as policy

NAMES = {
    "rl_algorithms.controller.errors.StalledError": 15,
    "rl_algorithms.controller.errors.ControllerError": 14,
    "rl_algorithms.controller.snapshot.SnapshotError": 13,
    "rl_algorithms.checkpoint_files.CheckpointError": 13,
    "rl_algorithms.loops.state.LoopError": 14,
    "rl_policy_megatron.errors.CheckpointError": 13,
    "rl_policy_megatron.errors.PolicyError": 10,
    "rl_generation.failures.GenerationError": 11,
    "rl_gym_bridge.failures.GymError": 12,
    "rl_gym_bridge.environment.EnvironmentDefinitionError": 12,
}


def class_of(name: str) -> type[BaseException]:
    module, _, kind = name.rpartition(".")
    return getattr(importlib.import_module(module), kind)


def made(kind: type[BaseException]) -> BaseException:
    """Without its own arguments."""
    return kind.__new__(kind)


def caused(error: BaseException, by: BaseException) -> BaseException:
    error.__cause__ = by
    return error


def test_the_codes_are_those_that_were_promised() -> None:
    """Scripts go by the numbers."""
    assert {code.name: code.value for code in ExitCode} == {
        "FAILED": 1,
        "WRONG_CONFIGURATION": 2,
        "POLICY": 10,
        "ENGINE": 11,
        "ENVIRONMENT": 12,
        "CHECKPOINT": 13,
        "LOOP": 14,
        "STALLED": 15,
        "INTERRUPTED": 130,
    }


@pytest.mark.parametrize(("name", "code"), NAMES.items())
def test_every_class_of_the_table_is_where_the_table_says_and_has_its_code(name: str, code: int) -> None:
    """They are named as text: one that moves would silently become a failure of no kind."""
    kind = class_of(name)
    assert f"{kind.__module__}.{kind.__qualname__}" == name
    assert issubclass(kind, Exception)
    assert exit_code_of(made(kind)) == code


def test_this_file_knows_the_whole_table() -> None:
    assert {name: int(code) for name, code in _BY_CLASS.items()} == NAMES


@pytest.mark.parametrize(
    ("error", "code"),
    [
        # A kind of its own before that of its base.
        (StalledError("nothing happened"), ExitCode.STALLED),
        (ControllerError("odd"), ExitCode.LOOP),
        (policy.CheckpointError("no room"), ExitCode.CHECKPOINT),
        (policy.RankError("rank 1 is gone", 1), ExitCode.POLICY),
        (policy.SettingsError("wrong"), ExitCode.POLICY),
        (DynamicSamplingError("in vain"), ExitCode.LOOP),
        (CheckpointCorruptError("half"), ExitCode.CHECKPOINT),
        (SnapshotError("of another version"), ExitCode.CHECKPOINT),
        (EngineDeadError("gone"), ExitCode.ENGINE),
        (InvalidRequestError("cannot be asked"), ExitCode.ENGINE),
        (GymServerDied("gone"), ExitCode.ENVIRONMENT),
    ],
)
def test_a_subclass_is_what_its_nearest_base_is(error: BaseException, code: ExitCode) -> None:
    assert exit_code_of(error) is code


def test_an_error_that_came_from_another_process_is_what_it_was_there() -> None:
    """As Ray makes them: of its own class and of the one that was raised."""

    class FromTheWorker(RuntimeError):
        pass

    class Both(FromTheWorker, policy.PolicyError):
        pass

    assert exit_code_of(Both("rank 0")) is ExitCode.POLICY


def test_a_class_of_ones_own_with_a_name_of_the_table_is_none_of_it() -> None:
    class LoopError(RuntimeError):
        pass

    assert exit_code_of(LoopError("mine")) is ExitCode.FAILED


@pytest.mark.parametrize(
    ("cause", "code"),
    [
        (GymError("it did not start"), ExitCode.ENVIRONMENT),
        (EnvironmentDefinitionError("no such environment"), ExitCode.ENVIRONMENT),
        (StalledError("nothing happened"), ExitCode.STALLED),
        (EngineDeadError("gone"), ExitCode.ENGINE),
    ],
)
def test_an_error_that_says_nothing_is_what_caused_it(cause: Exception, code: ExitCode) -> None:
    def wrapped() -> None:
        try:
            raise cause
        except Exception as error:
            raise RuntimeError("the job has failed") from error

    with pytest.raises(RuntimeError) as raised:
        wrapped()
    assert exit_code_of(raised.value) is code
    assert exit_code_of(caused(KeyError("again"), raised.value)) is code, "however deep"


def test_an_error_that_says_something_is_that_and_not_its_cause() -> None:
    assert exit_code_of(caused(LoopError("too many"), GymError("gone"))) is ExitCode.LOOP
    assert exit_code_of(caused(CheckpointError("cannot be written"), OSError("full"))) is ExitCode.CHECKPOINT
    assert exit_code_of(caused(GenerationError("none left"), policy.PolicyError("x"))) is ExitCode.ENGINE


def test_what_merely_happened_before_is_no_cause() -> None:
    """An error while another was being handled has it for a context; nobody said that it was why."""

    def clumsy() -> None:
        try:
            raise GymError("gone")
        except GymError:
            {}["missing"]

    with pytest.raises(KeyError) as raised:
        clumsy()
    assert isinstance(raised.value.__context__, GymError)
    assert exit_code_of(raised.value) is ExitCode.FAILED


@pytest.mark.parametrize("error", [ValueError("?"), OSError("?"), MemoryError(), KeyboardInterrupt()])
def test_what_is_none_of_them_has_failed(error: BaseException) -> None:
    assert exit_code_of(error) is ExitCode.FAILED


def test_errors_that_caused_each_other_are_gone_through_once() -> None:
    first, second = RuntimeError("first"), RuntimeError("second")
    caused(first, second)
    caused(second, first)
    assert exit_code_of(first) is ExitCode.FAILED
    third = caused(RuntimeError("third"), first)
    assert exit_code_of(third) is ExitCode.FAILED


def test_a_command_ends_with_the_code_and_says_the_error_in_a_line() -> None:
    said = io.StringIO()
    with pytest.raises(SystemExit) as ended, guarded(Console(file=said, width=200)):
        raise RuntimeError("the job has failed") from StalledError("nothing happened for 60 s")
    assert ended.value.code == 15
    assert said.getvalue().startswith("error: the job has failed")


def test_to_know_a_code_nothing_is_imported() -> None:
    """A command that fails early must not wait for torch in order to say so."""
    code = (
        "import sys\n"
        "from rl_app_core.exit_codes import exit_code_of\n"
        "heavy = {'torch', 'ray', 'numpy', 'rl_algorithms'} & set(sys.modules)\n"
        "print(int(exit_code_of(ValueError())), sorted(heavy))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "1 []"
