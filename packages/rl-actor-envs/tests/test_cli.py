"""The command line with a real uv and a small workspace."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rl_actor_envs.cli import main
from rl_actor_envs.table import ACTOR_ENVIRONMENTS

WORKER = "rl_app_core.workers.ColocatedWorker"
GYM = "rl_gym_bridge.actor.NemoGym"
RANK = "rl_policy_megatron.group.rank.PolicyRank"
ENGINES = {
    "rl_generation.trtllm.worker.TrtllmWorker": ["trtllm"],
    "rl_generation.vllm.worker.VllmCpuWorker": ["vllm-cpu"],
    "rl_generation.vllm.worker.VllmWorker": ["vllm"],
}
ACTORS = [WORKER, *ENGINES, GYM, RANK]
THREE = (("a.First", "gym"), ("b.Second", "mcore"), ("c.Third", "gym mcore"))


def test_j2_prefetch_goes_on_after_a_failure_and_ends_with_1_naming_what_failed(mini: Any) -> None:
    mini.shim('case "$*" in *venv*/Second-*) echo no such luck >&2; exit 3;; esac')
    done = mini.cli("prefetch", "--rows", mini.rows(*THREE))
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0].startswith("[1/3] a.First (gym) … built in ")
    assert lines[1].startswith("[2/3] b.Second (mcore) … FAILED: ")
    assert "no such luck" in done.stdout
    assert lines[-1].startswith("[3/3] c.Third (gym, mcore) … built in ")
    assert done.stderr.splitlines()[-1] == "1 of 3 environments not built: b.Second"
    complete = {path.parent.name.partition("-")[0] for path in mini.environments.glob("*/environment.json")}
    assert complete == {"First", "Third"}


def test_what_failed_is_built_the_next_time_and_the_rest_is_there_already(mini: Any) -> None:
    mini.shim('case "$*" in *venv*/Second-*) exit 3;; esac')
    rows = mini.rows(*THREE)
    mini.cli("prefetch", "--rows", rows)
    mini.shim()
    done = mini.cli("prefetch", "--rows", rows)
    assert (done.returncode, done.stderr) == (0, "")
    endings = [line.partition(" … ")[2][:7] for line in done.stdout.splitlines()]
    assert endings == ["already", "built i", "already"]


def test_a_missing_lock_of_one_does_not_keep_the_others_from_being_built(mini: Any) -> None:
    (mini.root / "apps" / "container" / "trtllm" / "uv.lock").unlink()
    done = mini.cli("prefetch", "--rows", mini.rows(("a.Trt", "trtllm"), ("b.Gym", "gym")))
    assert done.returncode == 1
    assert "trtllm/uv.lock" in done.stdout
    assert [path.parent.name[:4] for path in mini.environments.glob("*/environment.json")] == ["Gym-"]
    assert done.stderr.endswith("1 of 2 environments not built: a.Trt\n")


def test_i7_without_uv_prefetch_says_how_to_get_it(mini: Any) -> None:
    link = mini.folder / "alone" / "python"
    link.parent.mkdir()
    link.symlink_to(sys.executable)
    done = subprocess.run(
        [link, "-m", "rl_actor_envs", "prefetch"],
        env={**mini.settings, "PATH": str(link.parent)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "FAILED: uv, which builds environments" in done.stdout
    assert "pip install uv" in done.stdout
    assert done.stderr == f"6 of 6 environments not built: {', '.join(ACTORS)}\n"


def test_the_phases_follow_one_another(mini: Any) -> None:
    rows = mini.rows(*THREE)
    early = mini.cli("prefetch", "--rows", rows, "--phase", "members")
    assert (early.returncode, mini.calls("")) == (1, 0)
    assert mini.cli("prefetch", "--rows", rows, "--phase", "dependencies").returncode == 0
    assert not list(mini.environments.glob("*/environment.json"))
    assert mini.cli("prefetch", "--rows", rows, "--phase", "members").returncode == 0
    assert len(list(mini.environments.glob("*/environment.json"))) == 3


def test_without_rows_the_table_is_built_and_the_path_is_told(mini: Any) -> None:
    assert {WORKER: ["mcore"], **ENGINES, GYM: ["gym"], RANK: ["mcore"]} == ACTOR_ENVIRONMENTS
    told = {actor: mini.cli("path", actor) for actor in ACTORS}
    assert {(done.returncode, done.stderr) for done in told.values()} == {(0, "")}
    assert mini.cli("prefetch", "--only", WORKER).returncode == 0
    assert told[WORKER].stdout == f"{mini.only_environment()}\n"
    assert mini.cli("prefetch").returncode == 0
    built = {f"{path}\n" for path in mini.environments.iterdir() if path.is_dir()}
    assert built == {done.stdout for done in told.values()}
    assert mini.cli("path", WORKER, RL_ACTOR_ENVS_SYSTEM="1").stdout == f"{sys.prefix}\n"
    unknown = mini.cli("path", "rl_app_core.workers.ColocatedWroker")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert f"did you mean '{WORKER}'" in unknown.stderr


def test_the_command_that_a_missing_environment_is_told_with_builds_exactly_it(mini: Any) -> None:
    code = (
        "from rl_actor_envs.registry import register_actor_environment as register\n"
        "from rl_actor_envs.runtime import make_actor_runtime_env as make\n"
        "register('out.side.Judge', ['gym'])\n"
        f"for actor in ('out.side.Judge', {WORKER!r}):\n"
        "    try: print(make(actor)['env_vars']['VIRTUAL_ENV'])\n"
        "    except Exception as error: print(str(error).split('`')[1])"
    )

    def run() -> list[str]:
        return mini.start("-c", code).communicate(timeout=60)[0].splitlines()

    commands = run()
    surroundings = {name: v for name, v in mini.settings.items() if not name.startswith("RL_")}
    for command in commands:
        subprocess.run(["sh", "-c", command], env=surroundings, cwd="/", check=True, timeout=60)
    assert sorted(run()) == sorted(str(path.parent) for path in mini.environments.glob("*/environment.json"))
    assert len(commands) == 2


@pytest.mark.parametrize(
    ("words", "built"),
    [
        (("--stage", "deps"), ["First"]),
        (("--stage", "trtllm"), ["Trt"]),
        (("--skip", "trtllm"), ["First"]),
        (("--skip", "gym", "--skip", "vllm"), ["Trt"]),
        (("--only", "b.Trt"), ["Trt"]),
    ],
)
def test_stage_skip_and_only_choose_rows(words: tuple[str, ...], built: list[str], mini: Any) -> None:
    rows = mini.rows(("a.First", "gym"), ("b.Trt", "trtllm"))
    done = mini.cli("prefetch", "--rows", rows, "--phase", "dependencies", *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.parent.name.partition("-")[0] for path in mini.environments.glob("*/*.json")] == built


def test_nothing_to_build_in_a_stage_is_said_and_no_failure(mini: Any) -> None:
    done = mini.cli("prefetch", "--rows", mini.rows(*THREE), "--stage", "trtllm")
    assert (done.returncode, done.stderr) == (0, "")
    assert "nothing to build" in done.stdout
    assert "trtllm" in done.stdout


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("nosuchverb",),
        ("prefetch", "--stage", "nosuchstage"),
        ("prefetch", "--skip", "nosuchextra"),
        ("prefetch", "--only", "no.Such"),
        ("prefetch", "--phase", "nosuchphase"),
        ("driver",),
        ("path",),
        ("wrappers",),
    ],
)
def test_wrong_words_end_with_2_and_do_nothing(
    words: tuple[str, ...], mini: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mini.apply(monkeypatch)
    try:
        status = main(words)
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr()
    assert (status, said.out) == (2, "")
    assert said.err
    assert (mini.calls(""), mini.environments.exists()) == (0, False)


@pytest.mark.parametrize("words", [["prefetch"], ["wrappers", "nowhere"]])
def test_an_empty_list_of_rows_ends_with_2(words: list[str], mini: Any) -> None:
    path = mini.folder / "rows.tsv"
    path.write_text("")
    done = mini.cli(*words, "--rows", str(path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "no rows" in done.stderr


def test_the_rows_may_be_those_that_the_script_prints(mini: Any) -> None:
    script = Path(mini.settings["PYTHONPATH"]) / "rl_actor_envs" / "table.py"
    printed = subprocess.run(
        [sys.executable, "-I", "-S", script, "all"], capture_output=True, text=True, check=True
    )
    done = mini.cli("prefetch", "--rows", "-", stdin=printed.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert mini.cli("prefetch").stdout.endswith(" … already built\n")


def test_the_drivers_environment_is_built_where_it_is_told(mini: Any) -> None:
    place = mini.folder / "driver"
    for phase in ("dependencies", "members"):
        done = mini.cli("driver", str(place), "--phase", phase)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("driver … built in ")
    assert mini.cli("driver", str(place)).stdout == "driver … already built\n"
    assert mini.installed(place) == {"mini_core": "0.1.0", "mini_library": "0.1.0"}
    failed = mini.cli("driver", str(mini.root))
    assert failed.returncode == 1
    assert "FAILED" in failed.stdout
    assert (mini.root / "uv.lock").exists()


def test_a_log_that_cannot_hold_every_character_does_not_fail_a_build(mini: Any) -> None:
    done = mini.cli("prefetch", "--rows", mini.rows(("a.First", "gym")), PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "built in" in done.stdout


def test_without_a_workspace_it_ends_with_1_and_says_how_to_name_one(mini: Any) -> None:
    done = mini.cli("prefetch", RL_ACTOR_ENVS_WORKSPACE="/nowhere")
    assert (done.returncode, done.stdout) == (1, "")
    assert "RL_ACTOR_ENVS_WORKSPACE" in done.stderr


def test_wrappers_run_the_environments_python_with_its_variables(mini: Any) -> None:
    commands = mini.folder / "some commands"
    rows = mini.rows(*THREE)
    assert mini.cli("wrappers", str(commands), "--rows", rows).returncode == 1
    assert not commands.exists()
    assert mini.cli("prefetch", "--rows", rows).returncode == 0
    done = mini.cli("wrappers", str(commands), "--rows", rows)
    assert (done.returncode, done.stderr) == (0, "")
    assert [Path(line).name for line in done.stdout.splitlines()] == [
        "python-First",
        "python-Second",
        "python-Third",
    ]
    assert sorted(os.listdir(commands)) == ["python-First", "python-Second", "python-Third"]
    code = (
        "import mini_core, os, sys; "
        "print(sys.prefix, os.environ['VIRTUAL_ENV'], os.environ['UV_PROJECT_ENVIRONMENT'], sys.argv[1:])"
    )
    words = [commands / "python-Third", "-I", "-c", code, "a b", ""]
    told = subprocess.run(words, env={"PATH": os.defpath}, capture_output=True, text=True, check=True)
    (root,) = (
        path for path in mini.environments.iterdir() if path.name.startswith("Third-") and path.is_dir()
    )
    assert told.stdout == f"{root} {root} {root} ['a b', '']\n"


def test_two_actors_of_one_class_name_cannot_both_have_a_wrapper(mini: Any) -> None:
    rows = mini.rows(("a.Same", "gym"), ("b.Same", "mcore"))
    assert mini.cli("prefetch", "--rows", rows).returncode == 0
    done = mini.cli("wrappers", str(mini.folder / "commands"), "--rows", rows)
    assert done.returncode == 1
    for part in ("a.Same", "b.Same", "python-Same"):
        assert part in done.stderr
    assert not (mini.folder / "commands").exists()


@pytest.mark.slow
def test_the_wheel_alone_builds_an_environment(mini: Any) -> None:
    """In an empty environment; everything that the package does works from there."""
    package = Path(mini.settings["PYTHONPATH"]).parent
    copy = shutil.copytree(package, mini.folder / "package", ignore=shutil.ignore_patterns("__pycache__"))
    words = ["-m", "hatchling", "build", "-t", "wheel", "-d", str(mini.folder / "dist")]
    subprocess.run([sys.executable, *words], cwd=copy, check=True, timeout=120, capture_output=True)
    (wheel,) = (mini.folder / "dist").iterdir()
    empty = mini.folder / "empty"
    surroundings = {**mini.settings, "PATH": os.environ["PATH"]}
    del surroundings["PYTHONPATH"]

    def run(*words: str | Path) -> str:
        done = subprocess.run(words, env=surroundings, cwd="/", capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(mini.uv, "venv", "--quiet", f"--python={sys.executable}", empty)
    run(mini.uv, "pip", "install", "--quiet", "--no-deps", f"--python={empty}/bin/python", wheel)
    surroundings["PATH"] = mini.settings["PATH"]
    command = empty / "bin" / "rl-actor-envs"
    assert " … built in " in run(command, "prefetch")
    built = {path.name.partition("-")[0]: str(path) for path in mini.environments.iterdir() if path.is_dir()}
    assert built.keys() == {actor.rpartition(".")[2] for actor in ACTORS}
    root = built["ColocatedWorker"]
    assert run(command, "path", WORKER) == f"{root}\n"
    assert run(command, "path", GYM) == f"{built['NemoGym']}\n"
    assert '"uv.lock"' in run(command, "fingerprint")
    code = f"from rl_actor_envs.runtime import make_actor_runtime_env as make; print(make({WORKER!r}))"
    assert f"'VIRTUAL_ENV': '{root}'" in run(empty / "bin" / "python", "-I", "-c", code)
    table = next(empty.glob("lib/*/site-packages/rl_actor_envs/table.py"))
    assert run(empty / "bin" / "python", "-I", "-S", table, "all").startswith(f"{WORKER}\tdeps\t")
