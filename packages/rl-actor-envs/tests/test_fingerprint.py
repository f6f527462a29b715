"""Whether what environments were made from is still what is here."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from rl_actor_envs import table
from rl_actor_envs.errors import ActorEnvironmentError, FingerprintMismatchError, WorkspaceError
from rl_actor_envs.fingerprint import check_fingerprint, fingerprint, read_fingerprint, write_fingerprint

IN_WORKSPACE = (
    "uv.lock",
    "apps/container/pyproject.toml",
    "apps/container/trtllm/uv.lock",
    "apps/container/trtllm/pyproject.toml",
)


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A workspace, which this process is told about."""
    for name in ("RL_ACTOR_ENVS_FINGERPRINT", "RL_ACTOR_ENVS_IGNORE_FINGERPRINT"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "workspace"
    for name in IN_WORKSPACE:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"this is {name}\n")
    monkeypatch.setenv("RL_ACTOR_ENVS_WORKSPACE", str(folder))
    return folder


@pytest.fixture
def recorded(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The fingerprint of that workspace in a file, which the variable names."""
    path = tmp_path / "fingerprint.json"
    write_fingerprint(path)
    monkeypatch.setenv("RL_ACTOR_ENVS_FINGERPRINT", str(path))
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_it_holds_the_hash_of_each_file_that_counts_and_of_no_other(root: Path) -> None:
    (root / "README.md").write_text("words")
    expected = {name: sha256(root / name) for name in IN_WORKSPACE}
    expected["rl_actor_envs/table.py"] = sha256(Path(table.__file__))
    made = fingerprint()
    assert dict(made.files) == expected
    assert len(made.digest) == 64
    assert made == fingerprint(root)


def test_a_workspace_without_tensorrt_llm_has_one(root: Path) -> None:
    for name in IN_WORKSPACE[2:]:
        (root / name).unlink()
    assert set(fingerprint().files) == {*IN_WORKSPACE[:2], "rl_actor_envs/table.py"}


def test_what_is_written_is_read_and_is_the_same_each_time(
    recorded: Path, root: Path, tmp_path: Path
) -> None:
    assert read_fingerprint(recorded) == fingerprint()
    again = tmp_path / "again.json"
    write_fingerprint(again, root)
    assert again.read_bytes() == recorded.read_bytes()
    assert set(json.loads(recorded.read_text())) == {"digest", "files"}


def test_the_same_sources_pass_and_without_a_record_nothing_is_compared(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_fingerprint()
    for value in ("", None):
        if value is None:
            monkeypatch.delenv("RL_ACTOR_ENVS_FINGERPRINT")
        else:
            monkeypatch.setenv("RL_ACTOR_ENVS_FINGERPRINT", value)
        monkeypatch.setenv("RL_ACTOR_ENVS_WORKSPACE", "/nowhere")
        check_fingerprint()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((name, "changed") for name in IN_WORKSPACE),
        # Without the others there is no workspace.
        *((name, change) for name in IN_WORKSPACE[2:] for change in ("gone", "new")),
    ],
)
def test_every_file_counts(name: str, change: str, root: Path, recorded: Path) -> None:
    path = root / name
    text = path.read_text()
    path.unlink()
    if change == "new":
        write_fingerprint(recorded)
    if change != "gone":
        path.write_text(text if change == "new" else "something else\n")
    with pytest.raises(FingerprintMismatchError) as caught:
        check_fingerprint()
    message = str(caught.value)
    assert f"{name} ({change})" in message
    for other in (*IN_WORKSPACE, "rl_actor_envs/table.py"):
        assert (f" {other} (" in message) is (other == name)
    for remedy in ("rebuild the image", "RL_ACTOR_ENVS_IGNORE_FINGERPRINT=1", str(recorded)):
        assert remedy in message


def test_the_table_counts(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "table.py"
    other.write_text(Path(table.__file__).read_text() + "# one more line\n")
    monkeypatch.setattr(table, "__file__", str(other))
    with pytest.raises(FingerprintMismatchError, match=r"rl_actor_envs/table\.py \(changed\)"):
        check_fingerprint()


def test_every_file_that_differs_is_named(root: Path, recorded: Path) -> None:
    for name in IN_WORKSPACE:
        (root / name).write_text("something else\n")
    with pytest.raises(FingerprintMismatchError) as caught:
        check_fingerprint()
    assert all(f"{name} (changed)" in str(caught.value) for name in IN_WORKSPACE)


@pytest.mark.parametrize("value", ["1", "0", "", "true", "yes", " 1", "1 ", "01"])
def test_it_is_ignored_if_the_flag_is_exactly_1(
    value: str, root: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "uv.lock").write_text("something else\n")
    monkeypatch.setenv("RL_ACTOR_ENVS_IGNORE_FINGERPRINT", value)
    if value == "1":
        check_fingerprint()
        recorded.unlink()
        check_fingerprint()
    else:
        with pytest.raises(FingerprintMismatchError):
            check_fingerprint()


def test_a_record_that_is_named_is_compared_whatever_the_flag_says(
    root: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL_ACTOR_ENVS_IGNORE_FINGERPRINT", "1")
    monkeypatch.delenv("RL_ACTOR_ENVS_FINGERPRINT")
    check_fingerprint(recorded)
    (root / "uv.lock").write_text("something else\n")
    with pytest.raises(FingerprintMismatchError):
        check_fingerprint(recorded)


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", '{"files": [], "digest": ""}', "forged"])
def test_a_record_that_cannot_be_read_is_a_mismatch(text: str | None, recorded: Path) -> None:
    if text is None:
        recorded.unlink()
    elif text == "forged":
        held = json.loads(recorded.read_text())
        held["files"]["uv.lock"] = "0" * 64
        recorded.write_text(json.dumps(held))
    else:
        recorded.write_text(text)
    with pytest.raises(FingerprintMismatchError, match=r"cannot be read.*fingerprint --write") as caught:
        check_fingerprint()
    assert caught.value.__cause__ is not None


def test_without_a_workspace_there_is_none(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "uv.lock").unlink()
    with pytest.raises(WorkspaceError):
        fingerprint()


def test_a_place_that_cannot_be_written_is_named(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ActorEnvironmentError, match=r"nowhere.*cannot be written"):
        write_fingerprint(tmp_path / "nowhere" / "f.json")


def test_the_command_line_prints_writes_and_checks(mini: Any) -> None:
    printed = mini.cli("fingerprint")
    assert (printed.returncode, printed.stderr) == (0, "")
    path = mini.folder / "fingerprint.json"
    assert mini.cli("fingerprint", "--write", str(path)).returncode == 0
    assert path.read_text() == printed.stdout
    checked = mini.cli("fingerprint", "--check", str(path))
    assert (checked.returncode, checked.stderr) == (0, "")
    (mini.root / "uv.lock").write_text("another")
    differs = mini.cli("fingerprint", "--check", str(path), RL_ACTOR_ENVS_IGNORE_FINGERPRINT="1")
    assert differs.returncode == 1
    assert "uv.lock (changed)" in differs.stderr
    assert mini.cli("fingerprint", "--write", str(path), "--check", str(path)).returncode == 2
