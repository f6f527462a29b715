"""The interpreter and the variables that an actor gets, from files alone."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rl_actor_envs.environment import COMPLETE, MARKERS, Environment, actor_environment
from rl_actor_envs.errors import (
    ActorEnvironmentError,
    FingerprintMismatchError,
    MissingEnvironmentError,
    UnknownActorError,
    WorkspaceError,
)
from rl_actor_envs.registry import ActorRegistry
from rl_actor_envs.runtime import actor_name, environment_of, make_actor_runtime_env
from rl_actor_envs.table import ACTOR_ENVIRONMENTS
from rl_actor_envs.workspace import Workspace

TABLE: dict[str, list[str] | None] = {"a.Worker": ["mcore", "vllm"], "a.Driver": None}
REGISTRY = ActorRegistry(TABLE)


class Worker:
    pass


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A workspace that this process is told about."""
    for name in list(os.environ):
        if name.startswith("RL_ACTOR_ENVS_"):
            monkeypatch.delenv(name)
    folder = tmp_path / "workspace"
    (folder / "apps" / "container" / "trtllm").mkdir(parents=True)
    (folder / "apps" / "container" / "pyproject.toml").write_text("")
    for lock in ("uv.lock", "apps/container/trtllm/uv.lock"):
        (folder / lock).write_text("version = 1\n")
    monkeypatch.setenv("RL_ACTOR_ENVS_WORKSPACE", str(folder))
    monkeypatch.setenv("RL_ACTOR_ENVS_DIR", str(tmp_path / "envs"))
    return folder


def expected(python: str | None = None, extras: tuple[str, ...] = ("mcore", "vllm")) -> Environment:
    workspace = Workspace(os.environ["RL_ACTOR_ENVS_WORKSPACE"])
    return actor_environment("a.Worker", extras, workspace, python)


def complete(environment: Environment) -> str:
    """Make an environment look finished; returns its root."""
    os.makedirs(os.path.dirname(environment.interpreter))
    Path(environment.root, "pyvenv.cfg").write_text("home = /usr/bin\n")
    os.symlink(sys.executable, environment.interpreter)
    environment.mark(COMPLETE)
    return environment.root


def test_i2_the_variables_name_the_root_directory_and_not_the_interpreter() -> None:
    root = complete(expected())
    assert make_actor_runtime_env("a.Worker", registry=REGISTRY) == {
        "py_executable": f"{root}/bin/python",
        "env_vars": {"VIRTUAL_ENV": root, "UV_PROJECT_ENVIRONMENT": root},
    }


@pytest.mark.parametrize("actor", [*ACTOR_ENVIRONMENTS, "a.Worker", "a.Driver"])
def test_i3_under_the_flag_every_actor_gets_the_drivers_interpreter_unchanged_and_starts_nothing(
    actor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **settings: object) -> None:
        raise AssertionError("a process was started")

    for module, attribute in ((subprocess, "Popen"), (os, "system"), (os, "posix_spawn"), (os, "fork")):
        monkeypatch.setattr(module, attribute, refuse)
    monkeypatch.setenv("RL_ACTOR_ENVS_SYSTEM", "1")
    registry = ActorRegistry({**ACTOR_ENVIRONMENTS, **TABLE})
    for build in (False, True):
        made = make_actor_runtime_env(actor, registry=registry, build=build)
        assert made == {"py_executable": sys.executable, "env_vars": {}}


@pytest.mark.parametrize("case", ["environment", "driver", "flag"])
def test_i4_the_callers_variables_pass_through_unchanged(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = complete(expected())
    if case == "flag":
        monkeypatch.setenv("RL_ACTOR_ENVS_SYSTEM", "1")
    given = {"PYTHONPATH": "/a:/b", "OMP_NUM_THREADS": "1"}
    actor = "a.Driver" if case == "driver" else "a.Worker"
    made = make_actor_runtime_env(actor, env_vars=given, registry=REGISTRY)["env_vars"]
    own = {"VIRTUAL_ENV": root, "UV_PROJECT_ENVIRONMENT": root} if case == "environment" else {}
    assert made == {**given, **own}
    assert given == {"PYTHONPATH": "/a:/b", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("name", ["VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT"])
@pytest.mark.parametrize("actor", ["a.Worker", "a.Driver"])
def test_variables_that_the_table_decides_are_refused_from_the_caller(name: str, actor: str) -> None:
    complete(expected())
    with pytest.raises(ActorEnvironmentError, match=name) as caught:
        make_actor_runtime_env(actor, env_vars={name: "/x"}, registry=REGISTRY)
    assert caught.value.actor == actor


def test_variables_that_are_no_strings_are_refused() -> None:
    with pytest.raises(ActorEnvironmentError, match="'N': 1"):
        make_actor_runtime_env("a.Driver", env_vars={"N": 1}, registry=REGISTRY)  # type: ignore[dict-item]


def test_an_actor_without_extras_row_gets_the_drivers_interpreter_without_flag_or_workspace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RL_ACTOR_ENVS_WORKSPACE", "/nowhere")
    made = make_actor_runtime_env("a.Driver", registry=REGISTRY)
    assert made == {"py_executable": sys.executable, "env_vars": {}}


def test_a_process_that_does_not_know_its_interpreter_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(ActorEnvironmentError, match=r"a\.Driver"):
        make_actor_runtime_env("a.Driver", registry=REGISTRY)


@pytest.mark.parametrize("value", ["", "0"])
def test_the_flag_can_be_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_ACTOR_ENVS_SYSTEM", value)
    with pytest.raises(MissingEnvironmentError):
        make_actor_runtime_env("a.Worker", registry=REGISTRY)


@pytest.mark.parametrize("value", ["true", "yes", "2", " 1"])
def test_a_flag_of_another_value_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_ACTOR_ENVS_SYSTEM", value)
    with pytest.raises(ActorEnvironmentError, match="RL_ACTOR_ENVS_SYSTEM"):
        make_actor_runtime_env("a.Driver", registry=REGISTRY)


def test_the_flag_is_read_in_one_place() -> None:
    source = Path(sys.modules["rl_actor_envs.runtime"].__file__ or "").parent
    reading = [path.name for path in source.glob("*.py") if "environ.get(SYSTEM_FLAG" in path.read_text()]
    spelling = [path.name for path in source.glob("*.py") if '"RL_ACTOR_ENVS_SYSTEM"' in path.read_text()]
    assert reading == spelling == ["system.py"]


def test_an_environment_that_is_not_built_names_actor_place_and_remedies() -> None:
    with pytest.raises(MissingEnvironmentError) as caught:
        make_actor_runtime_env("a.Worker", registry=REGISTRY)
    message = str(caught.value)
    for part in ("a.Worker", expected().root, "--extra mcore --extra vllm", "RL_ACTOR_ENVS_SYSTEM=1"):
        assert part in message
    assert caught.value.actor == "a.Worker"
    assert not Path(expected().root).parent.exists()


@pytest.mark.parametrize("actor", [actor for actor, extras in ACTOR_ENVIRONMENTS.items() if extras])
def test_the_command_for_an_actor_of_the_table_names_it(actor: str) -> None:
    with pytest.raises(MissingEnvironmentError, match=r"prefetch --only " + actor) as caught:
        make_actor_runtime_env(actor)
    assert shlex.quote(sys.executable) in str(caught.value)


def test_for_another_python_the_command_is_that_pythons() -> None:
    with pytest.raises(MissingEnvironmentError, match=r" python3\.9 -m rl_actor_envs"):
        make_actor_runtime_env("a.Worker", registry=REGISTRY, python="cpython-3.9.1")


@pytest.mark.parametrize("missing", ["pyvenv.cfg", "bin/python", *sorted(MARKERS - {"building.json"})])
def test_a_half_built_environment_is_not_used(missing: str) -> None:
    root = Path(complete(expected()))
    if missing == "dependencies.json":
        (root / COMPLETE).rename(root / missing)
    else:
        (root / missing).unlink()
    with pytest.raises(MissingEnvironmentError, match=COMPLETE if "json" in missing else missing):
        make_actor_runtime_env("a.Worker", registry=REGISTRY)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"actor": "a.Other"}', "\udcff"])
def test_an_environment_with_a_damaged_mark_is_not_used(text: str) -> None:
    root = Path(complete(expected()))
    (root / COMPLETE).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(MissingEnvironmentError, match=COMPLETE):
        make_actor_runtime_env("a.Worker", registry=REGISTRY)


@pytest.mark.parametrize("fact", ["actor", "extras", "lock", "python", "workspace"])
def test_i5_an_environment_whose_mark_says_another_thing_is_not_used(fact: str) -> None:
    environment = expected()
    complete(environment)
    environment.mark(COMPLETE, **{fact: "another"})
    with pytest.raises(MissingEnvironmentError, match=f"{fact}='another'"):
        make_actor_runtime_env("a.Worker", registry=REGISTRY)


def test_i5_changed_extras_do_not_reuse_the_old_environment() -> None:
    complete(expected())
    make_actor_runtime_env("a.Worker", registry=REGISTRY)
    for extras in (["mcore"], ["vllm", "mcore"], ["mcore", "vllm", "gym"]):
        with pytest.raises(MissingEnvironmentError):
            make_actor_runtime_env("a.Worker", registry=ActorRegistry({"a.Worker": extras}))


def test_i5_a_changed_lock_does_not_reuse_the_old_environment(root: Path) -> None:
    complete(expected())
    (root / "uv.lock").write_text("version = 2\n")
    with pytest.raises(MissingEnvironmentError):
        make_actor_runtime_env("a.Worker", registry=REGISTRY)


def test_i5_another_python_does_not_reuse_the_old_environment() -> None:
    root = complete(expected(python="cpython-3.12.1"))
    with pytest.raises(MissingEnvironmentError):
        make_actor_runtime_env("a.Worker", registry=REGISTRY)
    made = make_actor_runtime_env("a.Worker", registry=REGISTRY, python="cpython-3.12.1")
    assert made["env_vars"]["VIRTUAL_ENV"] == root


def test_i5_another_workspace_does_not_reuse_the_old_environment(root: Path) -> None:
    complete(expected())
    other = root.rename(root.with_name("moved"))
    with pytest.raises(MissingEnvironmentError):
        make_actor_runtime_env("a.Worker", registry=REGISTRY, workspace=other)


def test_without_a_workspace_the_error_says_how_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_ACTOR_ENVS_WORKSPACE", "/nowhere")
    with pytest.raises(WorkspaceError, match="RL_ACTOR_ENVS_WORKSPACE"):
        make_actor_runtime_env("a.Worker", registry=REGISTRY)


@pytest.mark.parametrize("actor", ["a.Worker", "a.Driver", "a.Wroker"])
@pytest.mark.parametrize("flag", ["0", "1"])
def test_the_fingerprint_is_checked_before_anything_else(
    actor: str, flag: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    complete(expected())
    monkeypatch.setenv("RL_ACTOR_ENVS_SYSTEM", flag)
    monkeypatch.setenv("RL_ACTOR_ENVS_FINGERPRINT", str(tmp_path / "nothing.json"))
    with pytest.raises(FingerprintMismatchError):
        make_actor_runtime_env(actor, registry=REGISTRY)


def test_a_class_stands_for_its_full_name() -> None:
    assert actor_name(Worker) == f"{Worker.__module__}.Worker"
    with pytest.raises(UnknownActorError, match="Worker"):
        make_actor_runtime_env(Worker, registry=ActorRegistry({}))


def test_what_is_neither_class_nor_name_is_refused() -> None:
    with pytest.raises(ActorEnvironmentError, match=r"ray\.remote"):
        make_actor_runtime_env(Worker())  # type: ignore[arg-type]


def test_unknown_actors_are_errors_even_under_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_ACTOR_ENVS_SYSTEM", "1")
    with pytest.raises(UnknownActorError):
        make_actor_runtime_env("a.Wroker", registry=REGISTRY)


def test_the_environment_of_an_actor_is_known_before_it_is_built() -> None:
    assert environment_of("a.Worker", registry=REGISTRY) == expected()
    assert environment_of("a.Driver", registry=REGISTRY) is None
