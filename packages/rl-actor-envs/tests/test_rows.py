"""The rows that a command is about."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_actor_envs.errors import RowsError
from rl_actor_envs.rows import chosen_extras
from rl_actor_envs.table import ACTOR_ENVIRONMENTS, build_rows


def test_without_a_file_it_is_the_table() -> None:
    expected = {
        actor: tuple(extras) for actor, extras in sorted(ACTOR_ENVIRONMENTS.items()) if extras is not None
    }
    assert chosen_extras() == expected


def test_what_the_script_prints_is_read_back(tmp_path: Path) -> None:
    table: dict[str, list[str] | None] = {
        "z.Last": ["gym", "mcore"],
        "a.Bare": [],
        "a.Bare2": ["trtllm"],
        "a.Driver": None,
    }
    path = tmp_path / "rows.tsv"
    path.write_text("".join("\t".join(row) + "\n" for row in build_rows(table)))
    assert list(chosen_extras(path).items()) == [
        ("a.Bare", ()),
        ("a.Bare2", ("trtllm",)),
        ("z.Last", ("gym", "mcore")),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no rows"),
        ("a.B\tdeps\n", "which table.py does not print"),
        ("a.B deps --extra gym\n", "which table.py does not print"),
        ("a.B\tdeps\t--extra gym\textra\n", "which table.py does not print"),
        ("a.B\tdeps\t--extra gym mcore\n", "which table.py does not print"),
        ("a.B\ttrtllm\t--extra gym\n", "which table.py does not print"),
        ("a.B\tdeps\t--extra trtllm\n", "which table.py does not print"),
        ("a.B\tdeps\t--extra gym\na.B\tdeps\t--extra mcore\n", "line 2 of"),
        ("a.B\tdeps\t--extra cuda\n", "'cuda'"),
        ("../../etc\tdeps\t--extra gym\n", "full name of a class"),
        ("\n", "which table.py does not print"),
        (None, "cannot be read"),
    ],
)
def test_rows_that_table_py_did_not_write_are_refused(text: str | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(RowsError) as caught:
        chosen_extras(path)
    assert said in str(caught.value)
