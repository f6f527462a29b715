"""How the suite is spread over processes: what shares an expensive fixture stays together, and goes first."""

from __future__ import annotations

from pathlib import PurePath

import pytest

#: Files and folders whose tests share something expensive, longest first; other files are groups of their own
TOGETHER = (
    "tests/e2e/test_variants.py",
    "tests/image",
    "tests/e2e",
    "tests/acceptance/gym",
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
    """Name every test's group (for ``--dist loadgroup``) and start the longest groups first."""
    groups = {item: group_of(PurePath(item.path.relative_to(config.rootpath))) for item in items}
    for item, (_, name) in groups.items():
        item.add_marker(pytest.mark.xdist_group(name))
        if config.rootpath / "tests" / "faults" in item.path.parents:
            item.add_marker(pytest.mark.faults)
    if config.getoption("dist", "no") != "no" or hasattr(config, "workerinput"):
        items.sort(key=lambda item: groups[item][0])
