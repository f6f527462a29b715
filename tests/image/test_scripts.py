"""The scripts of the image's layers, run by themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TABLE = """
import runpy, sys
module = runpy.run_path({table!r})
rows = {{
    "pkg.VllmWorker": ["mcore"],
    "pkg.Named_vllm": ["gym"],
    "pkg.Engine": ["vllm", "gym"],
    "pkg.OnCpu": ["vllm-cpu"],
    "pkg.Trt": ["trtllm"],
    "pkg.Driver": None,
}}
sys.exit(module["main"](sys.argv[1:], rows))
"""

FLAGS = ["SKIP_GYM_BUILD", "SKIP_MCORE_BUILD", "SKIP_TRTLLM_BUILD", "SKIP_VLLM_BUILD"]


@pytest.fixture
def scripts(root: Path) -> Path:
    return root / "docker"


@pytest.fixture
def table(root: Path, tmp_path: Path) -> Path:
    """The real script with a table of more actors."""
    file = tmp_path / "table.py"
    real = root / "packages/rl-actor-envs/src/rl_actor_envs/table.py"
    file.write_text(TABLE.format(table=str(real)))
    return file


def run(script: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SKIP_")}
    return subprocess.run(
        ["sh", str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**clean, "RL_BUILD_PYTHON": sys.executable, **variables},
        check=False,
    )


def actors(rows: Path) -> list[str]:
    return [line.partition("\t")[0] for line in rows.read_text().splitlines()]


def test_the_list_holds_every_environment(scripts, table, tmp_path):
    rows = tmp_path / "rows.tsv"
    done = run(scripts / "write_rows.sh", str(rows), RL_BUILD_TABLE=str(table))
    assert done.returncode == 0, done.stderr
    assert actors(rows) == ["pkg.Engine", "pkg.Named_vllm", "pkg.OnCpu", "pkg.Trt", "pkg.VllmWorker"]
    assert done.stdout == rows.read_text()


@pytest.mark.parametrize(
    ("flags", "left"),
    [
        ({"SKIP_VLLM_BUILD": "1"}, ["pkg.Named_vllm", "pkg.Trt", "pkg.VllmWorker"]),
        ({"SKIP_GYM_BUILD": "1"}, ["pkg.OnCpu", "pkg.Trt", "pkg.VllmWorker"]),
        ({"SKIP_MCORE_BUILD": "1", "SKIP_TRTLLM_BUILD": "1"}, ["pkg.Engine", "pkg.Named_vllm", "pkg.OnCpu"]),
        (
            {"SKIP_VLLM_BUILD": "0", "SKIP_TRTLLM_BUILD": ""},
            ["pkg.Engine", "pkg.Named_vllm", "pkg.OnCpu", "pkg.Trt", "pkg.VllmWorker"],
        ),
    ],
)
def test_j3_rows_are_skipped_by_extra_and_not_by_name(scripts, table, tmp_path, flags, left):
    rows = tmp_path / "rows.tsv"
    done = run(scripts / "write_rows.sh", str(rows), RL_BUILD_TABLE=str(table), **flags)
    assert done.returncode == 0, done.stderr
    assert actors(rows) == left


def test_every_flag_of_the_build_is_one_that_the_script_reads(scripts):
    flags = [
        line.split()[1].partition("=")[0]
        for line in (scripts / "Dockerfile").read_text().splitlines()
        if line.startswith("ARG SKIP_")
    ]
    assert sorted(flags) == FLAGS
    text = (scripts / "write_rows.sh").read_text()
    assert [flag for flag in flags if f'skip {flag} "${{{flag}:-}}"' not in text] == []


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("value", ["yes", "true", "2", "1 "])
def test_a_flag_with_another_value_fails_the_build(scripts, table, tmp_path, flag, value):
    done = run(scripts / "write_rows.sh", str(tmp_path / "rows"), RL_BUILD_TABLE=str(table), **{flag: value})
    assert done.returncode == 2
    assert f"{flag} is '{value}'; set it to 1 or to 0" in done.stderr


def test_j1_a_generator_that_fails_fails_the_build(scripts, tmp_path):
    """Also when it has printed half of its rows."""
    table = tmp_path / "table.py"
    table.write_text("print('pkg.A\\tdeps\\t--extra mcore')\nraise SystemExit(3)\n")
    done = run(scripts / "write_rows.sh", str(tmp_path / "rows"), RL_BUILD_TABLE=str(table))
    assert done.returncode == 3


def test_an_empty_list_fails_the_build(scripts, table, tmp_path):
    flags = dict.fromkeys(FLAGS, "1")
    done = run(scripts / "write_rows.sh", str(tmp_path / "rows"), RL_BUILD_TABLE=str(table), **flags)
    assert done.returncode == 1
    assert "no environment is left to build" in done.stderr


@pytest.fixture
def recorder(tmp_path: Path):
    """An interpreter that writes down how it is called and fails where it is told to."""
    log = tmp_path / "calls"
    file = tmp_path / "python"
    file.write_text(f'#!/bin/sh\necho "$*" >>{log}\ncase "$*" in *"$FAILING"*) exit 1 ;; esac\n')
    file.chmod(0o755)
    return file, log


def test_an_unknown_stage_fails_the_build(scripts, recorder):
    python, log = recorder
    done = run(
        scripts / "install_dependencies.sh", "everything", RL_BUILD_PYTHON=str(python), FAILING="nothing"
    )
    assert done.returncode == 2
    assert "unknown stage 'everything'; use deps or trtllm" in done.stderr
    assert not log.exists()


@pytest.mark.parametrize("failing", ["prefetch", "driver"])
def test_j2_the_others_are_still_built_when_one_fails(scripts, recorder, failing):
    python, log = recorder
    done = run(scripts / "install_dependencies.sh", "deps", RL_BUILD_PYTHON=str(python), FAILING=failing)
    assert done.returncode == 1
    assert [line.split()[2] for line in log.read_text().splitlines()] == ["prefetch", "driver"]


UV = """#!/bin/sh
# Makes environments without packages; has none for the extra "gym".
case "$*" in
*"--extra gym"*) echo "no such package" >&2; exit 2 ;;
venv*)
    for word in "$@"; do case $word in /*) root=$word ;; esac; done
    mkdir -p "$root/bin" && touch "$root/pyvenv.cfg" "$root/bin/python"
    ;;
esac
"""


def test_j2_one_of_three_environments_fails(scripts, root, tmp_path):
    """The other two and the driver's are built; the failed one alone is named; the build fails."""
    build, workspace, programs = (tmp_path / name for name in ("build", "workspace", "bin"))
    for folder in (build, workspace / "apps/container", programs):
        folder.mkdir(parents=True)
    script = build / "install_dependencies.sh"
    script.write_text((scripts / script.name).read_text())
    (build / "rl_actor_envs").symlink_to(root / "packages/rl-actor-envs/src/rl_actor_envs")
    for name in ("uv.lock", "apps/container/pyproject.toml"):
        (workspace / name).touch()
    (programs / "uv").write_text(UV)
    (programs / "uv").chmod(0o755)
    rows = tmp_path / "rows.tsv"
    rows.write_text(
        "".join(f"pkg.{extra.title()}\tdeps\t--extra {extra}\n" for extra in ("gym", "mcore", "vllm"))
    )
    done = run(
        script,
        "deps",
        RL_BUILD_ROWS=str(rows),
        RL_BUILD_DRIVER=str(tmp_path / "driver"),
        PATH=f"{programs}:{os.environ['PATH']}",
        RL_ACTOR_ENVS_WORKSPACE=str(workspace),
        RL_ACTOR_ENVS_DIR=str(tmp_path / "environments"),
    )
    assert done.returncode == 1, done.stderr
    assert "pkg.Gym" in done.stderr
    assert "pkg.Mcore" not in done.stderr
    assert "pkg.Vllm" not in done.stderr
    marked = {path.parent.name.partition("-")[0] for path in tmp_path.glob("**/dependencies.json")}
    assert marked == {"Mcore", "Vllm", "driver"}


def test_both_passes_read_the_same_list(scripts, recorder):
    python, log = recorder
    for stage in ("deps", "trtllm"):
        variables = {"RL_BUILD_PYTHON": str(python), "FAILING": "nothing", "RL_BUILD_ROWS": "/the/rows"}
        assert run(scripts / "install_dependencies.sh", stage, **variables).returncode == 0
    prefetches = [line for line in log.read_text().splitlines() if "prefetch" in line]
    wanted = "-m rl_actor_envs prefetch --rows /the/rows --stage {} --phase dependencies"
    assert prefetches == [wanted.format("deps"), wanted.format("trtllm")]


def test_the_pass_for_tensorrt_llm_ends_early_when_its_rows_are_skipped(scripts, root, tmp_path):
    rows = tmp_path / "rows.tsv"
    rows.write_text("pkg.A\tdeps\t--extra mcore\n")
    build = tmp_path / "build"
    build.mkdir()
    script = build / "install_dependencies.sh"
    script.write_text((scripts / script.name).read_text())
    (build / "rl_actor_envs").symlink_to(root / "packages/rl-actor-envs/src/rl_actor_envs")
    done = run(script, "trtllm", RL_BUILD_ROWS=str(rows), RL_ACTOR_ENVS_DIR=str(tmp_path / "environments"))
    assert done.returncode == 0, done.stderr
    assert "nothing to build" in done.stdout
    assert not (tmp_path / "environments").exists()


@pytest.mark.parametrize(
    "program",
    [
        "exit 127",
        f"""exec {sys.executable} -c "import sys; sys.version_info = (3, 10, 13); exec(sys.argv[1])" "$2" """,
        f"""exec {sys.executable} -c "import sys; sys.modules['venv'] = None; exec(sys.argv[1])" "$2" """,
    ],
    ids=["none", "old", "without venv"],
)
def test_a_base_without_a_fit_python_is_refused(scripts, tmp_path, program):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)
    done = run(scripts / "install_uv.sh", str(python))
    assert done.returncode == 1
    assert "the base image needs Python 3.11 or newer" in done.stderr
