"""Rules about the files of the workspace, each proved by a planted violation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pip._internal.models.index import PyPI

from tools.checks.links import broken_links
from tools.checks.modules import MOST_LINES, nameless, oversized
from tools.checks.places import machine_folders, registry_hosts

RULES = [registry_hosts, machine_folders, oversized, nameless, broken_links]

PLANTED: list[tuple[Callable[[Path], list[str]], str, str]] = [
    (registry_hosts, "docs/install.md", f"pip install -i {PyPI.simple_url} rl-gym-bridge"),
    (registry_hosts, "uv.lock", f'source = {{ url = "//{PyPI.file_storage_domain}/a.whl" }}'),
    (machine_folders, "apps/a/recipes/cpu.yaml", "model: " + "/".join(["", "root", "models", "tiny"])),
    (machine_folders, "packages/a/src/a/places.py", "OUT = '" + "/".join(["", "tmp", "out"]) + "'"),
    (oversized, "packages/a/src/a/long.py", "x = 1\n" * (MOST_LINES + 1)),
    (nameless, "packages/a/src/a/utils.py", "x = 1"),
    (nameless, "apps/a/src/a/helpers/rows.py", "x = 1"),
    (broken_links, "README.md", "See [the guide](docs/missing.md)."),
    (broken_links, "docs/guide.md", "# Start\n\nSee [the end](#finish)."),
    (broken_links, "docs/guide.md", "See [it][there].\n\n[there]: ../nowhere.md\n"),
]


@pytest.mark.parametrize("rule", RULES)
def test_the_rule_holds(root: Path, rule: Callable[[Path], list[str]]) -> None:
    assert rule(root) == []


@pytest.mark.parametrize(("rule", "name", "text"), PLANTED)
def test_a_planted_violation_is_seen(
    tmp_path: Path, rule: Callable[[Path], list[str]], name: str, text: str
) -> None:
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    (complaint,) = rule(tmp_path)
    assert complaint.startswith(name)


def test_every_rule_has_a_planted_violation() -> None:
    assert {rule for rule, _, _ in PLANTED} == set(RULES)


@pytest.mark.parametrize(
    ("rule", "name", "text"),
    [
        (machine_folders, "README.md", "`runs/tmp/x`, https://example.org/home/page and https://e.org/tmp/a"),
        (machine_folders, "packages/a/tests/test_a.py", "PATH = '" + "/".join(["", "tmp", "x"]) + "'"),
        (broken_links, "docs/a.md", "# The `key` Table\n\n[k](#the-key-table) [web](https://example.org/x)"),
        (broken_links, "docs/a.md", "```\n[not](a-link.md)\n```\nand `[neither](b.md)`"),
        (oversized, "packages/a/src/a/long.py", "x = 1\n" * MOST_LINES),
    ],
)
def test_what_is_fine_stays_fine(
    tmp_path: Path, rule: Callable[[Path], list[str]], name: str, text: str
) -> None:
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    assert rule(tmp_path) == []
