"""What vLLM puts into files while it starts is gone when it has started, or has not."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import ModuleType

import pytest

from rl_generation.vllm import scratch
from rl_generation.vllm.scratch import ROOT, meeting_there, start_files

SOCKETS = "VLLM_RPC_BASE_PATH"


@pytest.fixture(autouse=True)
def shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of its own in the place of the machine's."""
    root = tmp_path / "root"
    root.mkdir()
    monkeypatch.setenv(ROOT, str(root))
    monkeypatch.delenv(SOCKETS, raising=False)
    segments = tmp_path / "shm"
    segments.mkdir()
    monkeypatch.setattr(scratch, "_SHARED_MEMORY", segments)
    return segments


def test_a_start_has_a_folder_below_the_one_that_somebody_removes(tmp_path: Path) -> None:
    with start_files() as folder:
        assert folder.parent == tmp_path / "root"
        assert os.environ[SOCKETS] == str(folder)
        (folder / "socket").touch()
    assert SOCKETS not in os.environ
    assert list((tmp_path / "root").iterdir()) == []


def test_a_start_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with start_files() as folder:
            (folder / "socket").touch()
            raise RuntimeError("the start")

    with pytest.raises(RuntimeError, match="the start"):
        fail()
    assert list((tmp_path / "root").iterdir()) == []


def test_a_root_that_is_gone_is_no_obstacle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ROOT, str(tmp_path / "gone"))
    monkeypatch.setattr(scratch.tempfile, "tempdir", str(tmp_path))
    with start_files() as folder:
        assert folder.parent == tmp_path
    assert not folder.exists()


def test_starts_at_the_same_time_keep_the_folder_until_the_last(tmp_path: Path) -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with start_files():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with start_files() as folder:
        thread.start()
        assert entered.wait(10)
    assert os.environ[SOCKETS] == str(folder)
    assert folder.is_dir()
    leave.set()
    thread.join()
    assert SOCKETS not in os.environ
    assert not folder.exists()


def test_ranks_meet_in_it_and_their_shared_memory_loses_its_names(shared_memory: Path) -> None:
    executors = ModuleType("executors")
    executors.__dict__["get_file_store_init_method"] = theirs = lambda: "file://elsewhere"
    with start_files() as folder:
        with meeting_there(executors):
            place = Path(executors.get_file_store_init_method().removeprefix("file://"))
        assert executors.get_file_store_init_method is theirs
        assert place.parent == folder
        place.touch()
        for name in (f"{place.name}-tp:0-[0-1]-cpushm_0", "vllm_dist_another-tp:0-[0-1]-cpushm_0"):
            (shared_memory / name).touch()
    assert [segment.name for segment in shared_memory.iterdir()] == ["vllm_dist_another-tp:0-[0-1]-cpushm_0"]


def test_a_vllm_that_meets_by_a_port_is_left_alone() -> None:
    with start_files(), meeting_there(ModuleType("older")):
        pass
