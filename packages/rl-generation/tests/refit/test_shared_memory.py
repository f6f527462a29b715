"""Segments of shared memory: private, bounded, and gone with their owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rl_generation.failures import RefitError
from rl_generation.refit.contract import Bucket, TensorPlace
from rl_generation.refit.publisher import TensorSource
from rl_generation.refit.receive import BucketReader
from rl_generation.refit.settings import TransportSettings
from rl_generation.refit.transports import segments
from rl_generation.refit.transports.segments import PREFIX, Segment, map_segment, shared_folder, sweep

PLACE = TensorPlace("w", (4,), "float32", 0)
NAME = PREFIX + "0" * 16


@pytest.fixture
def published(make_source: Callable[..., TensorSource]) -> Bucket:
    """A bucket whose segment is there until the test ends."""
    bucket = make_source({"w": torch.ones(4)}).next_bucket()
    assert bucket is not None
    return bucket


def read(bucket: Bucket, settings: TransportSettings) -> torch.Tensor:
    """The only tensor of a bucket."""
    ((_, tensor),) = BucketReader(settings).tensors(bucket)
    return tensor


def test_a_segment_is_this_users_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        segment = Segment(100, str(tmp_path))
    finally:
        os.umask(before)
    assert os.stat(segment.path).st_mode & 0o777 == 0o600
    segment.close()
    segment.close()
    assert not os.path.exists(segment.path)


def test_what_a_reader_writes_stays_with_the_reader(published: Bucket, settings: TransportSettings) -> None:
    read(published, settings).fill_(7)
    assert read(published, settings).tolist() == [1.0] * 4


def test_reading_copies_nothing(published: Bucket, settings: TransportSettings) -> None:
    tensor = read(published, settings)
    with open(published.location["path"], "r+b") as file:
        file.write(torch.full((4,), 9.0).numpy().tobytes())
    assert tensor.tolist() == [9.0] * 4


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.replace(PREFIX, "other-"),
        lambda path: path + ".bak",
        lambda path: os.path.join(os.path.dirname(path), "..", os.path.basename(path)),
        lambda path: os.path.join(os.path.dirname(path), "folder", os.path.basename(path)),
        lambda path: "/proc/self/mem",
        lambda path: os.path.basename(path),
    ],
)
def test_a_path_elsewhere_is_refused(
    published: Bucket, settings: TransportSettings, spoil: Callable[[str], str]
) -> None:
    location = {**published.location, "path": spoil(published.location["path"])}
    with pytest.raises(RefitError, match=r"is no segment in .*; refused"):
        read(replace(published, location=location), settings)


@pytest.mark.parametrize("location", [None, "path", {}, {"path": NAME}, {"path": NAME, "offset": "no"}])
def test_a_location_of_another_kind_is_refused(
    published: Bucket, settings: TransportSettings, location: object
) -> None:
    with pytest.raises(RefitError, match="is no place in shared memory"):
        read(replace(published, location=location), settings)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(bytes(4096))
    target.chmod(0o600)
    (tmp_path / NAME).symlink_to(target)
    with pytest.raises(RefitError, match=r"cannot be opened: .*; refused"):
        map_segment(str(tmp_path / NAME), 0, 16, str(tmp_path))


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
def test_a_file_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / NAME).write_bytes(bytes(4096))
    (tmp_path / NAME).chmod(mode)
    with pytest.raises(RefitError, match=r"expected a plain file of user .* alone; refused"):
        map_segment(str(tmp_path / NAME), 0, 16, str(tmp_path))


def test_a_file_of_another_user_is_refused(
    published: Bucket, settings: TransportSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = os.geteuid() + 1
    monkeypatch.setattr(segments.os, "geteuid", lambda: other)
    with pytest.raises(RefitError, match="expected a plain file of user"):
        read(published, settings)


def test_a_fifo_is_refused_without_waiting_for_its_other_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / NAME, 0o600)
    with pytest.raises(RefitError, match="expected a plain file"):
        map_segment(str(tmp_path / NAME), 0, 16, str(tmp_path))


def test_a_segment_that_is_gone_is_said_to_be(published: Bucket, settings: TransportSettings) -> None:
    os.unlink(published.location["path"])
    with pytest.raises(RefitError, match="is gone; its owner ended the refit, died, or runs on another node"):
        read(published, settings)
    assert not os.path.exists(published.location["path"])


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 1 << 20), (4096, 4097), (1 << 20, 16), (64, 16), (0, -1)])
def test_a_bucket_that_is_not_in_the_file_is_refused(
    published: Bucket, settings: TransportSettings, offset: int, nbytes: int
) -> None:
    assert os.stat(published.location["path"]).st_size == 8192
    location = {**published.location, "offset": offset}
    with pytest.raises(RefitError, match="holds 8192 bytes; a bucket of"):
        read(replace(published, location=location, nbytes=nbytes), settings)


def test_a_place_outside_the_bucket_is_refused_before_any_tensor_is_given(
    published: Bucket, settings: TransportSettings
) -> None:
    bucket = replace(published, tensors=(PLACE, TensorPlace("v", (4,), "float32", 64)))
    with pytest.raises(RefitError, match="v: bytes 64 to 80 lie outside a bucket of 16"):
        BucketReader(settings).tensors(bucket)


def test_a_full_folder_is_an_error_and_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(segments.os, "posix_fallocate", full)
    with pytest.raises(RefitError, match=r"no room for 100 bytes: No space left.* --shm-size"):
        Segment(100, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_machine_without_shared_memory_uses_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SYSTEM_FOLDER", str(tmp_path / "none"))
    monkeypatch.setattr(segments.tempfile, "gettempdir", lambda: str(tmp_path))
    assert shared_folder() == str(tmp_path)
    monkeypatch.setattr(segments, "SYSTEM_FOLDER", str(tmp_path / "set"))
    (tmp_path / "set").mkdir()
    assert shared_folder() == str(tmp_path / "set")
    assert shared_folder(str(tmp_path / "asked")) == str(tmp_path / "asked")


# What an owner does, without torch, which takes seconds to import.
OWNER = """
import fcntl, os, sys, time
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
fcntl.flock(descriptor, fcntl.LOCK_EX)
os.write(descriptor, bytes([3]) * 4096)
print(flush=True)
time.sleep(60)
"""


@pytest.mark.faults
def test_what_a_killed_owner_left_is_swept_by_the_next_and_the_living_keep_theirs(
    tmp_path: Path, make_source: Callable[..., TensorSource], settings: TransportSettings
) -> None:
    path = str(tmp_path / NAME)
    owner = subprocess.Popen([sys.executable, "-S", "-c", OWNER, path], stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline()
        living = make_source({"w": torch.ones(4)})
        bucket = living.next_bucket()
        assert bucket is not None
        assert os.path.exists(path)
        assert sweep(str(tmp_path)) == []
        # Of a reader's view nothing changes when the owner dies.
        view = map_segment(path, 0, 4096, str(tmp_path))
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait(10)
        assert os.path.exists(path)
        other = make_source({"w": torch.zeros(4)})
        assert not os.path.exists(path)
        assert view.eq(3).all()
        assert read(bucket, settings).tolist() == [1.0] * 4
        other.end()
    finally:
        owner.kill()
        owner.communicate(timeout=10)


def test_a_sweep_leaves_what_is_not_ours(tmp_path: Path) -> None:
    for name in ("other", PREFIX + "short", NAME + "0"):
        (tmp_path / name).write_text("kept")
    (tmp_path / NAME).mkdir()
    before = sorted(tmp_path.iterdir())
    assert sweep(str(tmp_path)) == []
    assert sorted(tmp_path.iterdir()) == before
    assert sweep(str(tmp_path / "missing")) == []


def test_a_new_segment_that_a_sweep_took_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = segments.fcntl.flock
    swept: list[str] = []

    def flock(descriptor: int, operation: int) -> None:
        if not swept:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            os.unlink(path)
            swept.append(path)
        real(descriptor, operation)

    monkeypatch.setattr(segments.fcntl, "flock", flock)
    segment = Segment(100, str(tmp_path))
    assert segment.path not in swept
    assert os.path.exists(segment.path)
    segment.close()
