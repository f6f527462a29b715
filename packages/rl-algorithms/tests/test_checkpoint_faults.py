"""What a crash, a damaged byte and a full disk do to checkpoints: never anything to an earlier one.

RL_FAULTS_N does not change the counts here: they are quick.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from rl_algorithms import checkpoint_files, checkpointing
from rl_algorithms.checkpointing import CheckpointCorruptError, CheckpointError, CheckpointStore
from rl_algorithms.group_files import GroupStore
from rl_algorithms.replay import Group, Missing

KILLS = 200
MUTATIONS = 300

# Writes one checkpoint after the other until it is killed; each holds what its step says.
WRITER = """
import hashlib, json, sys
from pathlib import Path
from rl_algorithms.checkpointing import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]), keep=3)
newest = store.latest()
step = newest.step + 1 if newest else 0
while True:
    with store.write(step) as folder:
        (folder / "policy").mkdir()
        for number in range(4):
            content = hashlib.sha256(f"{step}/{number}".encode()).digest() * 4096
            (folder / "policy" / f"{number}.safetensors").write_bytes(content)
        (folder / "loop.json").write_text(json.dumps({"step": step}))
    step += 1
"""


def check(folder: Path, step: int) -> None:
    assert json.loads((folder / "loop.json").read_text()) == {"step": step}
    for number in range(4):
        wanted = hashlib.sha256(f"{step}/{number}".encode()).digest() * 4096
        assert (folder / "policy" / f"{number}.safetensors").read_bytes() == wanted


def is_writing(directory: Path) -> bool:
    try:
        return any(entry.name.startswith(".writing-") for entry in directory.iterdir())
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_h10_killed_at_any_moment_of_a_save_the_newest_complete_one_is_loadable(tmp_path: Path) -> None:
    rng = random.Random(0)
    directory = tmp_path / "checkpoints"
    aimed = newest = 0
    for kill in range(KILLS):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(directory)])
        deadline = time.monotonic() + 60
        while not (is_writing(directory) and (kill or CheckpointStore(directory).steps())):
            assert writer.poll() is None
            assert time.monotonic() < deadline
        time.sleep(rng.random() * 0.02)
        aimed += is_writing(directory)
        writer.send_signal(signal.SIGKILL)
        writer.wait(30)
        latest = CheckpointStore(directory).latest()
        assert latest is not None, f"nothing to load after kill {kill}"
        check(latest.path, latest.step)
        assert latest.step >= newest, "an earlier one than before"
        newest = latest.step
    assert aimed > KILLS / 2, "most kills were meant to fall into a save"


def mutate(folder: Path, rng: random.Random) -> str:
    """Damage one file of a checkpoint, in one of the ways in which files are damaged."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = rng.choice(files)
    content = bytearray(path.read_bytes())
    kind = rng.choice(["flip", "cut", "grow", "empty", "remove", "swap", "zeros"])
    if kind == "flip":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del content[rng.randrange(len(content)) :]
    elif kind == "grow":
        content += bytes([rng.randrange(256)])
    elif kind == "empty":
        content.clear()
    elif kind == "zeros":
        start = rng.randrange(len(content))
        count = min(len(content) - start, 64)
        content[start : start + count] = bytes(count)
    elif kind == "swap":
        other = rng.choice([file for file in files if file != path])
        content = bytearray(other.read_bytes())
    if kind == "remove":
        path.unlink()
    elif bytes(content) == path.read_bytes():
        path.write_bytes(bytes(content) + b" ")
        kind = "grow"
    else:
        path.write_bytes(content)
    return f"{kind} of {path.suffix if path.name != 'manifest.json' else 'manifest'}"


def written(store: CheckpointStore, step: int) -> Path:
    with store.write(step) as folder:
        (folder / "policy").mkdir()
        for number in range(2):
            content = hashlib.sha256(f"{step}/{number}".encode()).digest() * 16
            (folder / "policy" / f"{number}.safetensors").write_bytes(content)
        (folder / "loop.json").write_text(json.dumps({"step": step}))
    return store.path_of(step)


def test_h8_no_damaged_checkpoint_is_taken_for_a_whole_one(tmp_path: Path) -> None:
    rng = random.Random(1)
    whole = tmp_path / "whole"
    store = CheckpointStore(whole)
    written(store, 1)
    written(store, 2)
    kinds: Counter[str] = Counter()
    for number in range(MUTATIONS):
        directory = tmp_path / f"damaged-{number}"
        shutil.copytree(whole, directory)
        kinds[mutate(directory / "step_2", rng)] += 1
        damaged = CheckpointStore(directory)
        # Format and step of a manifest may be damaged as well; then it is of another format, or of none.
        with pytest.raises(CheckpointError):
            damaged.load(2)
        try:
            latest = damaged.latest()
        except checkpoint_files.CheckpointFormatError:
            continue
        assert latest is not None
        assert latest.step == 1
        shutil.rmtree(directory)
    assert sum(kinds.values()) == MUTATIONS
    assert len(kinds) > 15, f"not all kinds of damage were done: {kinds}"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("call", ["fsync", "rename", "write"])
def test_a_disk_that_fails_is_a_typed_error_and_leaves_earlier_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    store = CheckpointStore(tmp_path)
    written(store, 1)
    failure = OSError(code, os.strerror(code))

    def fail(*_: object, **__: object) -> None:
        raise failure

    with monkeypatch.context() as broken:
        if call == "write":
            broken.setattr(Path, "write_bytes", fail)
        else:
            broken.setattr(os, call, fail)
        with pytest.raises(CheckpointError, match=os.strerror(code)) as raised:
            written(store, 2)
    assert raised.value.__cause__ is failure, "the first cause is kept"
    again = CheckpointStore(tmp_path)
    latest = again.latest()
    assert latest is not None
    assert latest.step == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_1"], "nothing is left of the other"
    assert written(again, 2).is_dir(), "and the next save works"


def test_what_is_published_was_flushed_first_and_its_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that loses its power keeps what was flushed, not what was written."""
    flushed: set[int] = set()
    unflushed: list[str] = []
    published: list[int] = []
    fsync, rename = os.fsync, os.rename

    def watched_fsync(descriptor: int) -> None:
        flushed.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def watched_rename(source: str | Path, target: str | Path) -> None:
        inside = [path for path in Path(source).rglob("*")] if Path(source).is_dir() else []
        unflushed.extend(str(p) for p in (Path(source), *inside) if p.stat().st_ino not in flushed)
        # A name is in its folder, which has to be flushed once more.
        flushed.discard(Path(target).parent.stat().st_ino)
        published.append(Path(target).parent.stat().st_ino)
        rename(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "rename", watched_rename)
    written(CheckpointStore(tmp_path / "checkpoints"), 1)
    GroupStore(tmp_path / "groups").write(1, [Group(0, (Missing(0, "late"),), oldest=0, newest=0, order=0)])
    assert len(published) == 2
    assert unflushed == []
    assert set(published) <= flushed, "the new name itself is not on disk"


def test_a_folder_that_may_not_be_written_is_a_typed_error(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        # Root may write everywhere; a file in the folder's place refuses it, too.
        place = tmp_path / "file" / "checkpoints"
        (tmp_path / "file").write_text("")
    else:
        place = tmp_path / "checkpoints"
        tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="failed"):
        written(CheckpointStore(place), 1)
    tmp_path.chmod(0o700)


def test_h10_a_publication_is_one_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is done before it leaves what was there; after it the new one is whole."""
    store = CheckpointStore(tmp_path)
    written(store, 1)
    seen: list[list[int]] = []
    rename = os.rename

    def watched(source: object, target: object) -> None:
        seen.append(CheckpointStore(tmp_path).steps())
        rename(source, target)  # type: ignore[call-overload]
        seen.append(CheckpointStore(tmp_path).steps())

    monkeypatch.setattr(checkpointing.os, "rename", watched)
    written(store, 2)
    assert seen == [[1], [1, 2]]
    with pytest.raises(CheckpointCorruptError):
        store.load(3)
