"""The table as data and as a script that runs by path."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rl_actor_envs import table as table_module
from rl_actor_envs.table import (
    ACTOR_ENVIRONMENTS,
    DECLARED_EXTRAS,
    build_rows,
    main,
    stage_of,
    undeclared_extras,
)

SCRIPT = Path(table_module.__file__)

TABLE: dict[str, list[str] | None] = {
    "z.Policy": ["mcore"],
    "a.vllm.Server": ["vllm", "mcore"],
    "a.Plain": ["vllm"],
    "a.Trt": ["mcore", "trtllm"],
    "a.Driver": None,
    "a.Bare": [],
}


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-S", "-I", str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd="/",
        env={},
    )


def test_by_path_and_isolated_it_prints_the_rows_of_the_table() -> None:
    done = script()
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines == sorted(lines)
    assert "rl_app_core.workers.ColocatedWorker\tdeps\t--extra mcore" in lines
    assert {line.split("\t")[0] for line in lines} == {
        actor for actor, extras in ACTOR_ENVIRONMENTS.items() if extras is not None
    }
    assert all(len(line.split("\t")) == 3 for line in lines)
    assert script("all").stdout == done.stdout


@pytest.mark.parametrize(
    "arguments", [("dep",), ("",), ("all", "nosuch"), ("deps", "mcore", "nosuch"), ("mcore",)]
)
def test_unknown_words_are_an_error_and_print_no_rows(arguments: tuple[str, ...]) -> None:
    done = script(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert repr(arguments[-1] if len(arguments) > 1 else arguments[0]) in done.stderr


def test_a_skipped_extra_takes_its_rows_away() -> None:
    done = script("all", "mcore")
    assert done.returncode == 0
    assert "ColocatedWorker" not in done.stdout


def test_rows_are_sorted_with_extras_in_order_and_without_the_drivers_actors() -> None:
    assert build_rows(TABLE) == [
        ("a.Bare", "deps", ""),
        ("a.Plain", "deps", "--extra vllm"),
        ("a.Trt", "trtllm", "--extra mcore --extra trtllm"),
        ("a.vllm.Server", "deps", "--extra vllm --extra mcore"),
        ("z.Policy", "deps", "--extra mcore"),
    ]


@pytest.mark.parametrize(
    ("stage", "actors"),
    [
        ("deps", ["a.Bare", "a.Plain", "a.vllm.Server", "z.Policy"]),
        ("trtllm", ["a.Trt"]),
    ],
)
def test_a_stage_has_the_rows_of_that_stage_only(stage: str, actors: list[str]) -> None:
    assert [row[0] for row in build_rows(TABLE, stage=stage)] == actors


def test_j3_a_row_is_skipped_by_its_extras_and_never_by_its_name() -> None:
    named = {f"x.vllm{n}": ["mcore"] for n in range(2)}
    using = {f"x.Other{n}": ["vllm"] for n in range(3)} | {
        f"x.vllm_user{n}": ["mcore", "vllm"] for n in range(4)
    }
    kept = [row[0] for row in build_rows({**named, **using}, skip=["vllm"])]
    assert kept == ["x.vllm0", "x.vllm1"]


def test_several_extras_can_be_skipped() -> None:
    assert [row[0] for row in build_rows(TABLE, skip=["vllm", "trtllm"])] == ["a.Bare", "z.Policy"]


def test_the_stage_is_trtllm_iff_that_extra_is_there() -> None:
    assert stage_of(["mcore", "trtllm"]) == "trtllm"
    assert stage_of(["trtllm-like"]) == "deps"


def test_every_extra_of_the_table_is_declared() -> None:
    assert undeclared_extras(ACTOR_ENVIRONMENTS) == []
    assert len(set(DECLARED_EXTRAS)) == len(DECLARED_EXTRAS)


def test_undeclared_extras_stop_the_script_naming_actor_and_extra(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], {"a.B": ["mcore"], "a.C": ["mcore", "cuda"]}) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "a.C" in captured.err
    assert "'cuda'" in captured.err


def test_the_tables_values_are_lists_of_names_or_none() -> None:
    for extras in ACTOR_ENVIRONMENTS.values():
        assert extras is None or (type(extras) is list and all(type(extra) is str for extra in extras))
