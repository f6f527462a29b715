"""What the whole suite shares: how it is spread over processes, a real Gym and a real vLLM.

Tests that share an expensive fixture stay together, and go first.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePath
from typing import Any

import pytest

#: Files and folders whose tests share something expensive, longest first; other files are groups of their own
TOGETHER = (
    "tests/vllm_environment",
    "tests/e2e/test_variants.py",
    "tests/image",
    "tests/e2e",
    "tests/acceptance/gym",
    "tests/faults/controller/test_controller_killed.py",
    "tests/faults/controller/test_trainer_killed.py",
    "tests/faults/test_driver_signals.py",
    "tests/faults/gym_process",
)


def group_of(file: PurePath) -> tuple[int, str]:
    """Rank and name of the group of a test file, given relative to the workspace."""
    for rank, place in enumerate(TOGETHER):
        if file == PurePath(place) or PurePath(place) in file.parents:
            return rank, place
    return len(TOGETHER), str(file)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start the longest groups first where processes share the tests; mark what lies in tests/faults."""
    for item in items:
        if config.rootpath / "tests" / "faults" in item.path.parents:
            item.add_marker(pytest.mark.faults)
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: group_of(item.path.relative_to(config.rootpath))[0])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each group to one process (xdist 3.8 cannot pass names of groups on with pytest 9.2)."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(PurePath(nodeid.partition("::")[0]))[1]

    return ByGroup(config, log)


@pytest.fixture(scope="session")
def gym_python() -> str:
    """An interpreter that has NeMo Gym: the one that is named, else this checkout's, installed if need be."""
    from rl_actor_envs.errors import ActorEnvironmentError
    from rl_gym_bridge.failures import GymConfigError
    from rl_gym_bridge.interpreter import VARIABLE, find_gym_interpreter
    from tools.gym import NoPythonError, base_python, gym_python, install_gym

    root = Path(__file__).resolve().parent
    try:
        python = os.environ.get(VARIABLE) or gym_python(root) or install_gym(root, base_python())[0]
        find_gym_interpreter(str(python))
    except (ActorEnvironmentError, GymConfigError, NoPythonError) as error:
        pytest.fail(f"{error}\n(these tests need a real NeMo Gym: see docs/gym.md)", pytrace=False)
    return str(python)


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter of `.venv-vllm`, which the front door installs if need be."""
    from tools.vllm_environment import NoEnvironmentError, vllm_python

    try:
        return str(vllm_python(Path(__file__).resolve().parent))
    except NoEnvironmentError as error:
        pytest.fail(str(error), pytrace=False)
