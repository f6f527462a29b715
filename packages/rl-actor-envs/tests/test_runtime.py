from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_actor_envs.errors import ActorEnvironmentError, MissingEnvironmentError, UnknownActorError
from rl_actor_envs.identity import environment_name, lock_hash, python_tag
from rl_actor_envs.registry import ActorRegistry
from rl_actor_envs.runtime import actor_name, environments_directory, make_actor_runtime_env
from rl_actor_envs.table import ACTOR_ENVIRONMENTS

TABLE: dict[str, list[str] | None] = {"a.Worker": ["mcore", "vllm"], "a.Driver": None}


class Worker:
    pass


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RL_ACTOR_ENVS_SYSTEM", "RL_ACTOR_ENVS_LOCK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RL_ACTOR_ENVS_DIR", str(tmp_path / "envs"))


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    path = tmp_path / "uv.lock"
    path.write_text("version = 1\n")
    return path


def name_of(actor: str, extras: list[str], lock: Path, python: str | None = None) -> str:
    return environment_name(actor=actor, extras=extras, lock=lock_hash(lock), python=python or python_tag())


def build(name: str) -> Path:
    root = Path(environments_directory()) / name
    (root / "bin").mkdir(parents=True)
    (root / "pyvenv.cfg").write_text("home = /usr/bin\n")
    (root / "bin" / "python").symlink_to(sys.executable)
    return root


def test_i2_the_variables_name_the_root_directory_and_not_the_interpreter(lock: Path) -> None:
    root = build(name_of("a.Worker", ["mcore", "vllm"], lock))
    made = make_actor_runtime_env("a.Worker", lock=lock, registry=ActorRegistry(TABLE))
    assert made == {
        "py_executable": f"{root}/bin/python",
        "env_vars": {"VIRTUAL_ENV": str(root), "UV_PROJECT_ENVIRONMENT": str(root)},
    }


def test_a_relative_directory_becomes_absolute(
    lock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RL_ACTOR_ENVS_DIR", "here")
    root = build(name_of("a.Worker", ["mcore", "vllm"], lock))
    made = make_actor_runtime_env("a.Worker", lock=lock, registry=ActorRegistry(TABLE))
    assert root == tmp_path / "here" / root.name
    assert made["env_vars"]["VIRTUAL_ENV"] == str(root)


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
    assert make_actor_runtime_env(actor, registry=registry) == {
        "py_executable": sys.executable,
        "env_vars": {},
    }


def test_an_actor_without_extras_row_gets_the_drivers_interpreter_without_any_flag() -> None:
    made = make_actor_runtime_env("a.Driver", registry=ActorRegistry(TABLE))
    assert made == {"py_executable": sys.executable, "env_vars": {}}


def test_a_process_that_does_not_know_its_interpreter_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(ActorEnvironmentError, match=r"a\.Driver"):
        make_actor_runtime_env("a.Driver", registry=ActorRegistry(TABLE))


@pytest.mark.parametrize("value", ["", "0"])
def test_the_flag_can_be_off(value: str, monkeypatch: pytest.MonkeyPatch, lock: Path) -> None:
    monkeypatch.setenv("RL_ACTOR_ENVS_SYSTEM", value)
    with pytest.raises(MissingEnvironmentError):
        make_actor_runtime_env("a.Worker", lock=lock, registry=ActorRegistry(TABLE))


@pytest.mark.parametrize("value", ["true", "yes", "2", " 1"])
def test_a_flag_of_another_value_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_ACTOR_ENVS_SYSTEM", value)
    with pytest.raises(ActorEnvironmentError, match="RL_ACTOR_ENVS_SYSTEM"):
        make_actor_runtime_env("a.Driver", registry=ActorRegistry(TABLE))


def test_the_flag_is_read_in_one_place() -> None:
    source = Path(sys.modules["rl_actor_envs.runtime"].__file__ or "").parent
    reading = [path.name for path in source.glob("*.py") if "environ.get(SYSTEM_FLAG" in path.read_text()]
    spelling = [path.name for path in source.glob("*.py") if '"RL_ACTOR_ENVS_SYSTEM"' in path.read_text()]
    assert reading == spelling == ["system.py"]


def test_an_environment_that_is_not_built_names_actor_place_and_remedies(lock: Path) -> None:
    with pytest.raises(MissingEnvironmentError) as caught:
        make_actor_runtime_env("a.Worker", lock=lock, registry=ActorRegistry(TABLE))
    message = str(caught.value)
    root = Path(environments_directory()) / name_of("a.Worker", ["mcore", "vllm"], lock)
    for part in ("a.Worker", str(root), "--extra mcore --extra vllm", "RL_ACTOR_ENVS_SYSTEM=1"):
        assert part in message
    assert caught.value.actor == "a.Worker"


@pytest.mark.parametrize("missing", ["pyvenv.cfg", "bin/python"])
def test_a_half_built_environment_is_not_used(missing: str, lock: Path) -> None:
    root = build(name_of("a.Worker", ["mcore", "vllm"], lock))
    (root / missing).unlink()
    with pytest.raises(MissingEnvironmentError, match=missing):
        make_actor_runtime_env("a.Worker", lock=lock, registry=ActorRegistry(TABLE))


def test_i5_changed_extras_do_not_reuse_the_old_environment(lock: Path) -> None:
    build(name_of("a.Worker", ["mcore", "vllm"], lock))
    make_actor_runtime_env("a.Worker", lock=lock, registry=ActorRegistry(TABLE))
    changed = ActorRegistry({"a.Worker": ["mcore"]})
    with pytest.raises(MissingEnvironmentError):
        make_actor_runtime_env("a.Worker", lock=lock, registry=changed)


def test_i5_a_changed_lock_does_not_reuse_the_old_environment(lock: Path) -> None:
    build(name_of("a.Worker", ["mcore", "vllm"], lock))
    lock.write_text("version = 2\n")
    with pytest.raises(MissingEnvironmentError):
        make_actor_runtime_env("a.Worker", lock=lock, registry=ActorRegistry(TABLE))


def test_i5_another_python_does_not_reuse_the_old_environment(lock: Path) -> None:
    root = build(name_of("a.Worker", ["mcore", "vllm"], lock, python="cpython-3.12.1"))
    registry = ActorRegistry(TABLE)
    with pytest.raises(MissingEnvironmentError):
        make_actor_runtime_env("a.Worker", lock=lock, registry=registry)
    made = make_actor_runtime_env("a.Worker", lock=lock, registry=registry, python="cpython-3.12.1")
    assert made["env_vars"]["VIRTUAL_ENV"] == str(root)


def test_i5_each_part_of_the_identity_changes_the_name() -> None:
    base = {"actor": "a.Worker", "extras": ["x", "y"], "lock": "l", "python": "p"}
    names = {environment_name(**base)}  # type: ignore[arg-type]
    for change in (
        {"actor": "b.Worker"},
        {"extras": ["x"]},
        {"extras": ["xy"]},
        {"extras": ["x", "y", ""]},
        {"lock": "m"},
        {"python": "q"},
    ):
        names.add(environment_name(**{**base, **change}))  # type: ignore[arg-type]
    assert len(names) == 7
    assert all(name.startswith("Worker-") for name in names)


def test_the_python_tag_is_that_of_this_interpreter() -> None:
    assert python_tag() == f"{sys.implementation.name}-{'.'.join(map(str, sys.version_info[:3]))}"


def test_the_lock_may_come_from_the_environment(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_ACTOR_ENVS_LOCK", str(lock))
    root = build(name_of("a.Worker", ["mcore", "vllm"], lock))
    made = make_actor_runtime_env("a.Worker", registry=ActorRegistry(TABLE))
    assert made["py_executable"] == f"{root}/bin/python"


def test_without_a_lock_the_error_says_how_to_name_one() -> None:
    with pytest.raises(ActorEnvironmentError, match=r"lock=.*RL_ACTOR_ENVS_LOCK"):
        make_actor_runtime_env("a.Worker", registry=ActorRegistry(TABLE))


def test_a_lock_that_cannot_be_read_keeps_its_cause(tmp_path: Path) -> None:
    with pytest.raises(ActorEnvironmentError, match=r"gone\.lock") as caught:
        make_actor_runtime_env("a.Worker", lock=tmp_path / "gone.lock", registry=ActorRegistry(TABLE))
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_a_class_stands_for_its_full_name() -> None:
    full = f"{Worker.__module__}.Worker"
    assert actor_name(Worker) == full
    registry = ActorRegistry({})
    with pytest.raises(UnknownActorError, match="Worker"):
        make_actor_runtime_env(Worker, registry=registry)


def test_what_is_neither_class_nor_name_is_refused() -> None:
    with pytest.raises(ActorEnvironmentError, match=r"ray\.remote"):
        make_actor_runtime_env(Worker())  # type: ignore[arg-type]


def test_unknown_actors_are_errors_even_under_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_ACTOR_ENVS_SYSTEM", "1")
    with pytest.raises(UnknownActorError):
        make_actor_runtime_env("a.Wroker", registry=ActorRegistry(TABLE))


def test_the_default_directory_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RL_ACTOR_ENVS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert environments_directory() == str(tmp_path / "cache" / "rl-actor-envs")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert environments_directory() == str(tmp_path / ".cache" / "rl-actor-envs")
