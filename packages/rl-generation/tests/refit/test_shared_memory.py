"""Segments of shared memory: of one user, opened by place and key, and gone with their owner."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_generation.failures import RefitError, UnavailableBackendError
from rl_generation.refit.buckets import Capacity, Filled
from rl_generation.refit.contract import Bucket, TensorPlace
from rl_generation.refit.publisher import TensorSource
from rl_generation.refit.receive import BucketReader
from rl_generation.refit.settings import TransportSettings
from rl_generation.refit.transports import pages, segments
from rl_generation.refit.transports.segments import Segment, SegmentView, page_aligned
from rl_generation.refit.transports.shared_memory import SharedMemoryReceiver, SharedMemorySender

from .conftest import described

PLACE = TensorPlace("w", (4,), "float32", 0)
PAGE = page_aligned(1)


@pytest.fixture
def published(make_source: Callable[..., TensorSource]) -> Bucket:
    """A bucket that can be read until the test ends."""
    bucket = make_source({"w": torch.ones(4)}).next_bucket()
    assert bucket is not None
    return bucket


def read(bucket: Bucket, settings: TransportSettings) -> torch.Tensor:
    """The only tensor of a bucket."""
    ((_, tensor),) = BucketReader(settings).tensors(bucket)
    return tensor


def elsewhere(bucket: Bucket, **location: Any) -> Bucket:
    """The same bucket at another place."""
    return replace(bucket, location={**bucket.location, **location})


def segments_mapped() -> int:
    """How many mappings of segments this process has."""
    with open("/proc/self/maps", encoding="ascii") as file:
        return sum(f"/memfd:{segments.NAME}" in line for line in file)


def test_a_segment_is_this_users_alone_whatever_the_umask(open_segments: Callable[[], int]) -> None:
    before, open_before = os.umask(0), open_segments()
    try:
        segment = Segment(100)
    finally:
        os.umask(before)
    assert os.stat(segment.place).st_mode & 0o777 == 0o600
    assert open_segments() == open_before + 1
    segment.close()
    segment.close()
    assert open_segments() == open_before


def test_a_segment_that_nobody_closes_goes_with_its_owner(open_segments: Callable[[], int]) -> None:
    before = open_segments()
    segment = Segment(100)
    assert open_segments() == before + 1
    del segment
    gc.collect()
    assert open_segments() == before


def test_no_child_inherits_a_segment(published: Bucket) -> None:
    descriptor = int(os.path.basename(published.location["place"]))
    assert not os.get_inheritable(descriptor)


def test_reading_copies_nothing(published: Bucket, settings: TransportSettings) -> None:
    tensor = read(published, settings)
    with open(published.location["place"], "r+b") as file:
        file.seek(segments.HEADER + published.location["offset"])
        file.write(torch.full((4,), 9.0).numpy().tobytes())
    assert tensor.tolist() == [9.0] * 4


@pytest.mark.parametrize("kept_bytes", [0, 1 << 20])
@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("writes", ["on the way", "at the end", "and fails"])
def test_what_a_reader_writes_stays_with_it_and_is_gone_the_next_time(
    published: Bucket, monkeypatch: pytest.MonkeyPatch, kept_bytes: int, told: bool, writes: str
) -> None:
    """Also where the kernel does not tell which pages were written to, and if the failure is kept."""
    if not told:
        monkeypatch.setattr(pages.os, "preadv", lambda *_: 0)
    reader, kept = BucketReader(TransportSettings(kept_bytes=kept_bytes)), []

    def load(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        taken = weights if writes == "on the way" else list(weights)
        for _, tensor in taken:
            assert tensor.tolist() == [1.0] * 4
            tensor.fill_(7)
            if writes == "and fails":
                raise OSError("no room")

    for _ in range(2):
        try:
            with reader.reading(published) as weights:
                load(weights)
        except OSError as error:
            kept.append(error)
    assert len(kept) == (2 if writes == "and fails" else 0)
    ((_, tensor),) = SharedMemoryReceiver(TransportSettings()).tensors(published)
    assert tensor.tolist() == [1.0] * 4


def test_pages_are_looked_at_only_if_one_was_given(
    published: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that touches no new memory costs a reader nothing."""
    looked: list[int] = []
    monkeypatch.setattr(segments, "drop_private_pages", lambda *_: looked.append(1))
    # The last two are of a system that does not count.
    faults = iter([5, 5, 5, 6, 0, 0])
    monkeypatch.setattr(segments, "page_faults", lambda: next(faults))
    receiver = SharedMemoryReceiver(TransportSettings())
    for expected in ([], [1], [1, 1]):
        assert len(list(receiver.tensors(published))) == 1
        receiver.done()
        receiver.done()
        assert looked == expected


def test_a_first_write_is_a_page_fault_and_a_read_is_none() -> None:
    segment = Segment(PAGE)
    view = SegmentView(segment.place, segment.inode, 0, PAGE)
    part = view.part(0, PAGE)
    part.sum()
    gc.disable()
    try:
        counts = [pages.page_faults() for _ in range(3)]
        part[5] = 1
        counts.append(pages.page_faults())
    finally:
        gc.enable()
    assert counts[3] > counts[2]
    segment.close()


def test_a_reader_maps_a_segment_once_for_all_refits_and_a_large_one_by_parts() -> None:
    tensors = {name: torch.full((2048,), float(number)) for number, name in enumerate("abcde")}
    for kept_bytes, mappings in ((1 << 20, 1), (0, 0)):
        settings = TransportSettings(bucket_bytes=8192, kept_bytes=kept_bytes)
        source = TensorSource(lambda: described(tensors), tensors.items, settings)
        reader, inodes = BucketReader(settings), set()
        gc.collect()
        before = segments_mapped()
        for _ in range(3):
            source.begin("shared_memory")
            while (bucket := source.next_bucket()) is not None:
                inodes.add(bucket.location["inode"])
                with reader.reading(bucket) as received:
                    for name, tensor in received:
                        assert torch.equal(tensor, tensors[name])
                tensor = None
            source.end()
        gc.collect()
        # The key and the buffer, in the reader, and all of it in the policy.
        assert segments_mapped() - before == 3 * mappings
        assert len(inodes) == (1 if kept_bytes else 3)
        source.close()
        reader.close()
        gc.collect()
        assert segments_mapped() == before


def test_memory_of_another_size_replaces_what_was_kept(open_segments: Callable[[], int]) -> None:
    before = open_segments()
    sender = SharedMemorySender(TransportSettings())
    for capacity in (100, 100, 5000):
        sender.open(Capacity(capacity))
        assert sender.buffer(1).numel() == capacity
        assert open_segments() == before + 1
        sender.rest()
        with pytest.raises(RefitError, match="used before it was opened"):
            sender.buffer(1)
    sender.close()
    assert open_segments() == before


def test_what_is_published_stays_until_it_is_freed_and_a_large_one_has_a_place_of_its_own() -> None:
    """Four buckets and one larger tensor; only when the first is freed is there room for another."""
    sender = SharedMemorySender(TransportSettings())
    sender.open(Capacity(bucket=16, largest=3 * PAGE))
    receiver = SharedMemoryReceiver(TransportSettings())
    large = TensorPlace("w", (3 * PAGE // 4,), "float32", 0)
    held: list[tuple[float, Bucket]] = []

    def publish(number: float, place: TensorPlace, nbytes: int) -> None:
        buffer = sender.buffer(nbytes)
        assert buffer.numel() == nbytes
        buffer.view(torch.float32).fill_(number)
        held.append((number, sender.publish(Filled((place,), nbytes))))

    for number in range(4):
        assert sender.room(16)
        publish(number, PLACE, 16)
    assert not sender.room(16)
    assert sender.room(17)
    publish(9, large, 3 * PAGE)
    assert not sender.room(17)
    for number in range(4, 9):
        for expected, bucket in held:
            ((_, tensor),) = receiver.tensors(bucket)
            assert tensor.eq(expected).all()
        sender.free()
        (_, bucket), *held = held
        assert sender.room(17) == (bucket.nbytes > 16)
        publish(number, PLACE, 16) if bucket.nbytes == 16 else publish(number, large, 3 * PAGE)
    assert {(bucket.nbytes, bucket.window) for _, bucket in held} == {(16, 2), (3 * PAGE, 1)}
    assert os.stat(held[0][1].location["place"]).st_size == (1 + 4 + 3) * PAGE
    sender.close()


def test_one_slot_is_enough_for_one_bucket() -> None:
    sender = SharedMemorySender(TransportSettings(), slots=1)
    sender.open(Capacity(16))
    sender.buffer(16)
    assert os.stat(sender.publish(Filled((PLACE,), 16)).location["place"]).st_size == 2 * PAGE
    sender.close()


@pytest.mark.parametrize("kept_bytes", [0, 1 << 20])
@pytest.mark.parametrize("mapped_before", [True, False])
def test_a_bucket_of_a_refit_that_has_ended_is_gone_while_its_memory_serves_the_next(
    kept_bytes: int, mapped_before: bool
) -> None:
    settings = TransportSettings(kept_bytes=kept_bytes)
    tensors = {"w": torch.ones(4)}
    source = TensorSource(lambda: described(tensors), tensors.items, settings)
    reader = BucketReader(settings)
    source.begin("shared_memory")
    earlier = source.next_bucket()
    assert earlier is not None
    if mapped_before:
        list(reader.tensors(earlier))
    source.end()
    with pytest.raises(RefitError, match="is gone"):
        reader.tensors(earlier)
    source.begin("shared_memory")
    with pytest.raises(RefitError, match="is gone"):
        reader.tensors(earlier)
    assert source.next_bucket() is not None
    source.end()
    source.close()


@pytest.mark.parametrize(
    "place", ["/dev/shm/w", "/proc/self/mem", "/proc/self/fd/3", "/proc/1/fd/../mem", "proc/1/fd/3", "3", ""]
)
def test_a_path_elsewhere_is_refused(published: Bucket, settings: TransportSettings, place: str) -> None:
    with pytest.raises(RefitError, match="is no place of shared memory; refused"):
        read(elsewhere(published, place=place), settings)


@pytest.mark.parametrize("location", [None, "path", {}, {"place": "p"}])
def test_a_location_of_another_kind_is_refused(
    published: Bucket, settings: TransportSettings, location: object
) -> None:
    with pytest.raises(RefitError, match="is no place in shared memory"):
        read(replace(published, location=location), settings)
    with pytest.raises(RefitError, match="is no place in shared memory"):
        read(elsewhere(published, offset="no"), settings)


def own(descriptor: int) -> tuple[str, int]:
    """Place and inode of something that this process has open."""
    return f"/proc/{os.getpid()}/fd/{descriptor}", os.fstat(descriptor).st_ino


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
def test_memory_that_others_can_reach_is_refused(mode: int) -> None:
    segment = Segment(16)
    os.chmod(segment.place, mode)
    with pytest.raises(RefitError, match=r"expected memory of user .* alone; refused"):
        SegmentView(segment.place, segment.inode, 0, 16)


def test_memory_of_another_user_is_refused(
    published: Bucket, settings: TransportSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = os.geteuid() + 1
    monkeypatch.setattr(segments.os, "geteuid", lambda: other)
    with pytest.raises(RefitError, match="expected memory of user"):
        read(published, settings)


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(bytes(2 * PAGE))
    (tmp_path / "w").chmod(0o600)
    with (
        open(tmp_path / "w", "rb") as file,
        pytest.raises(RefitError, match="is not shared memory of a refit; refused"),
    ):
        SegmentView(*own(file.fileno()), 0, 16)


def test_a_pipe_is_refused_without_being_opened() -> None:
    reading, writing = os.pipe()
    with pytest.raises(RefitError, match="expected memory of user"):
        SegmentView(*own(writing), 0, 16)
    os.close(reading)
    os.close(writing)


def test_what_others_have_open_there_now_is_refused(published: Bucket, settings: TransportSettings) -> None:
    with pytest.raises(RefitError, match="something else is open there now"):
        read(elsewhere(published, inode=published.location["inode"] + 1), settings)


def test_a_key_that_was_not_told_is_refused(published: Bucket, settings: TransportSettings) -> None:
    with pytest.raises(RefitError, match="its owner has ended that refit"):
        read(elsewhere(published, key="0" * 32), settings)


@pytest.mark.parametrize("kept_bytes", [0, 1 << 20])
@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, 1 << 20), (PAGE, 4 * PAGE), (1 << 20, 16), (64, 16), (0, -1)]
)
def test_a_bucket_that_is_not_in_the_segment_is_refused(
    published: Bucket, kept_bytes: int, offset: int, nbytes: int
) -> None:
    receiver = SharedMemoryReceiver(TransportSettings(kept_bytes=kept_bytes))
    lies = replace(elsewhere(published, offset=offset), nbytes=nbytes)
    for _ in range(2):
        with pytest.raises(RefitError, match=f"holds {4 * PAGE} bytes; a bucket of {nbytes} at {offset}"):
            receiver.tensors(lies)
        # The second time it is mapped.
        list(receiver.tensors(published))


def test_a_place_outside_the_bucket_is_refused_before_any_tensor_is_given(
    published: Bucket, settings: TransportSettings
) -> None:
    bucket = replace(published, tensors=(PLACE, TensorPlace("v", (4,), "float32", 64)))
    with pytest.raises(RefitError, match="v: bytes 64 to 80 lie outside a bucket of 16"):
        BucketReader(settings).tensors(bucket)


def test_no_room_is_an_error_with_its_remedy_and_no_signal(
    open_segments: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(segments.os, "posix_fallocate", full)
    before = open_segments()
    with pytest.raises(RefitError, match=r"no room for 100 bytes .*: No space left.* lower bucket_bytes"):
        Segment(100)
    assert open_segments() == before


def test_a_system_without_such_memory_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(segments.os, "memfd_create")
    with pytest.raises(UnavailableBackendError, match=r"needs Linux.*choose the transport object_store"):
        Segment(100)


def test_an_owner_whose_memory_cannot_be_opened_is_told_why(
    published: Bucket, settings: TransportSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> os.stat_result:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(segments.os, "stat", refuse)
    with pytest.raises(RefitError, match="Permission denied; policy and engine have to run as the same user"):
        read(published, settings)


# An owner in a process of its own.
OWNER = """
import json, sys, torch
from rl_generation.refit.transports.segments import Segment
segment = Segment(4096)
segment.buffer.fill_(3)
print(json.dumps([segment.place, segment.inode, segment.renew()]), flush=True)
sys.stdin.read()
"""


@pytest.mark.faults
def test_of_a_killed_owner_readers_keep_what_they_mapped_and_nothing_else_is_left(
    settings: TransportSettings,
) -> None:
    pipe = subprocess.PIPE
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=pipe, stdout=pipe, text=True)
    try:
        assert owner.stdout is not None
        place, inode, key = json.loads(owner.stdout.readline())
        location = {"place": place, "inode": inode, "key": key, "offset": 0}
        bucket = Bucket("shared_memory", location, 4096, (TensorPlace("w", (4096,), "uint8", 0),))
        tensor = read(bucket, settings)
        assert tensor.eq(3).all()
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait(10)
        assert tensor.eq(3).all()
        with pytest.raises(RefitError, match="is gone; its owner died, or runs on another node"):
            read(bucket, settings)
    finally:
        owner.kill()
        owner.communicate(timeout=10)
