"""One real Gym with all seven environments, shared by every test here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_gym_bridge.testing import AcceptanceCase, ScriptedModelServer, gym_cases
from rl_gym_bridge.testing.gym_run import GymRun, gym_root
from rl_gym_bridge.testing.gym_settings import acceptance_gym_config

CASES = {case.name: case for case in gym_cases()}
# A minute on an idle machine with warm caches.
START_TIMEOUT_S = 600.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test waits for Gym."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(START_TIMEOUT_S + 120))


@pytest.fixture(scope="session")
def started_gym(gym_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GymRun]:
    server = ScriptedModelServer()
    run = GymRun(
        acceptance_gym_config(CASES.values(), judge_model=server.judge_model),
        server=server,
        python=gym_python,
        start_timeout_s=START_TIMEOUT_S,
        work_dir=str(tmp_path_factory.mktemp("gym")),
    )
    with run:
        yield run


@pytest.fixture
def gym(started_gym: GymRun) -> Iterator[GymRun]:
    """The shared Gym with its model as it was at the start."""
    server = started_gym.server
    server.start()
    server.clear()
    usual = {name: getattr(server, name) for name in ("judge", "alter", "style", "context_length", "default")}
    yield started_gym
    for name, value in usual.items():
        setattr(server, name, value)


@pytest.fixture(scope="session")
def rows(started_gym: GymRun) -> dict[str, dict[str, Any]]:
    """The pinned rows of the installed Gym, by case."""
    assert started_gym.interpreter is not None
    root = gym_root(started_gym.interpreter)
    return {name: case.row.read(root) for name, case in CASES.items()}


@pytest.fixture(params=sorted(CASES))
def case(request: pytest.FixtureRequest) -> AcceptanceCase:
    return CASES[request.param]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for line in _FACTS:
        terminalreporter.write_line(line)


_FACTS: list[str] = []


@pytest.fixture(scope="session", autouse=True)
def facts(started_gym: GymRun) -> None:
    interpreter = started_gym.interpreter
    assert interpreter is not None
    _FACTS.append(
        f"NeMo Gym {interpreter.version} on Python {interpreter.python_version}: "
        f"{len(started_gym.session.agents)} agents ready after {started_gym.start_s:.1f} s"
    )
