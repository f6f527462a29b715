"""Where environments are built from and where they lie."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rl_actor_envs import workspace as workspace_module
from rl_actor_envs.errors import WorkspaceError
from rl_actor_envs.identity import environment_name, lock_hash, python_tag
from rl_actor_envs.workspace import Workspace, find_workspace

MARKS = ("uv.lock", "apps/container/pyproject.toml")


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RL_ACTOR_ENVS_WORKSPACE", "RL_ACTOR_ENVS_DIR"):
        monkeypatch.delenv(name, raising=False)


def checkout(folder: Path) -> Path:
    for mark in MARKS:
        (folder / mark).parent.mkdir(parents=True, exist_ok=True)
        (folder / mark).write_text("")
    return folder


def test_the_argument_comes_before_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named, given = checkout(tmp_path / "named"), checkout(tmp_path / "given")
    monkeypatch.setenv("RL_ACTOR_ENVS_WORKSPACE", str(named))
    assert find_workspace() == Workspace(str(named))
    assert find_workspace(given) == Workspace(str(given))


def test_the_variable_comes_before_the_checkout_and_loses_its_links_and_its_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checkout(tmp_path / "real")
    (tmp_path / "link").symlink_to(real)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (str(tmp_path / "link"), "~/link"):
        monkeypatch.setenv("RL_ACTOR_ENVS_WORKSPACE", name)
        assert find_workspace().root == str(real)


def test_without_a_word_it_is_the_checkout_that_the_package_lies_in(tmp_path: Path) -> None:
    root = checkout(tmp_path / "checkout")
    source = root / "packages" / "rl-actor-envs" / "src"
    shutil.copytree(Path(workspace_module.__file__).parent, source / "rl_actor_envs")
    code = (
        f"import sys; sys.path.insert(0, {str(source)!r}); "
        f"from rl_actor_envs.workspace import find_workspace; print(find_workspace().root)"
    )

    def found() -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-I", "-S", "-c", code]
        return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, cwd="/", env={})

    assert found().stdout == f"{root}\n"
    (root / "uv.lock").unlink()
    alone = found()
    assert alone.returncode == 1
    assert "WorkspaceError" in alone.stderr
    assert "RL_ACTOR_ENVS_WORKSPACE" in alone.stderr


@pytest.mark.parametrize("lacking", MARKS)
@pytest.mark.parametrize("by_variable", [True, False])
def test_a_folder_that_is_no_workspace_is_refused_naming_what_it_lacks(
    lacking: str, by_variable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = checkout(tmp_path / "w")
    (root / lacking).unlink()
    if by_variable:
        monkeypatch.setenv("RL_ACTOR_ENVS_WORKSPACE", str(root))
    with pytest.raises(WorkspaceError, match=lacking) as caught:
        find_workspace(None if by_variable else root)
    assert str(root) in str(caught.value)
    assert ("RL_ACTOR_ENVS_WORKSPACE" if by_variable else "workspace=") in str(caught.value)


def test_environments_are_in_the_workspace_unless_a_variable_names_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = Workspace("/w")
    assert workspace.environments == "/w/.actor-envs"
    monkeypatch.setenv("RL_ACTOR_ENVS_DIR", "")
    assert workspace.environments == "/w/.actor-envs"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RL_ACTOR_ENVS_DIR", "here")
    assert workspace.environments == str(tmp_path / "here")
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("RL_ACTOR_ENVS_DIR", "~/there")
    assert workspace.environments == "/home/somebody/there"


def test_tensorrt_llm_has_a_project_and_a_lock_of_its_own() -> None:
    plain, separate = Workspace("/w").project_of(["mcore"]), Workspace("/w").project_of(["mcore", "trtllm"])
    assert (plain.package, plain.lock) == ("rl-app-container", "/w/uv.lock")
    assert separate.package == "rl-app-container-trtllm"
    assert separate.lock == "/w/apps/container/trtllm/uv.lock"
    assert Workspace("/w").project_of(["trtllm-like"]) == plain


def test_i5_each_part_of_the_identity_changes_the_name() -> None:
    base = {"actor": "a.Worker", "extras": ["x", "y"], "lock": "l", "python": "p", "workspace": "/w"}
    names = {environment_name(**base)}  # type: ignore[arg-type]
    for change in (
        {"actor": "b.Worker"},
        {"extras": ["x"]},
        {"extras": ["y", "x"]},
        {"extras": ["xy"]},
        {"extras": ["x", "y", ""]},
        {"lock": "m"},
        {"python": "q"},
        {"workspace": "/v"},
    ):
        names.add(environment_name(**{**base, **change}))  # type: ignore[arg-type]
    assert len(names) == 9
    assert all(name.startswith("Worker-") and len(name) == len("Worker-") + 16 for name in names)


def test_the_python_tag_is_that_of_this_interpreter() -> None:
    assert python_tag() == f"{sys.implementation.name}-{'.'.join(map(str, sys.version_info[:3]))}"


def test_a_lock_that_cannot_be_read_keeps_its_cause(tmp_path: Path) -> None:
    with pytest.raises(WorkspaceError, match=r"gone\.lock") as caught:
        lock_hash(tmp_path / "gone.lock")
    assert isinstance(caught.value.__cause__, FileNotFoundError)
