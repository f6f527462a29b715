"""A thread that packs ahead: as far as there is room, in order, and gone when nobody wants it any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rl_generation.failures import RefitError
from rl_generation.refit.buckets import BucketFiller, Capacity, Filled
from rl_generation.refit.contract import Bucket
from rl_generation.refit.packer import Packer
from rl_generation.refit.transports.slots import LARGE, Slots

CAPACITY = Capacity(bucket=64, largest=256)


class Sender:
    """A double of a transport with three buffers and a large one; keeps which bucket lies where."""

    slots = 3

    def __init__(self, window: int) -> None:
        self.window = window
        self.used = Slots(self.slots, CAPACITY.bucket)
        self.contents: dict[int, str] = {}
        self.packed: list[str] = []
        self._slot = 0

    def open(self, capacity: Capacity) -> None: ...

    def room(self, nbytes: int) -> bool:
        return self.used.room(nbytes)

    def buffer(self, nbytes: int) -> torch.Tensor:
        self._slot = self.used.take(nbytes)
        return torch.empty(max(nbytes, CAPACITY.bucket), dtype=torch.uint8)

    def publish(self, filled: Filled) -> Bucket:
        name = filled.places[0].name
        self.contents[self._slot] = name
        self.packed.append(name)
        window = 1 if self._slot == LARGE else self.window
        return Bucket("shared_memory", self._slot, filled.nbytes, filled.places, window=window)

    def send(self, bucket: Bucket) -> None: ...

    def free(self) -> None:
        self.used.free()

    def rest(self) -> None: ...

    def close(self) -> None: ...


def tensors(sizes: list[int]) -> list[tuple[str, torch.Tensor]]:
    return [(str(number), torch.zeros(size, dtype=torch.uint8)) for number, size in enumerate(sizes)]


def started(sender: Sender, stream: Any) -> Packer:
    return Packer(sender, BucketFiller(stream), lambda work: work(), "policy")


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(
    "sizes",
    [
        [64] * 12,
        [256, *[64] * 5, 256],
        [256, 256, 256],
        [64, 256, 64, 256, 256, 64, 64, 64, 64, 256, 200],
        [],
    ],
)
def test_all_come_in_order_and_none_is_overwritten_within_its_window(sizes: list[int], window: int) -> None:
    sender = Sender(window)
    packer = started(sender, tensors(sizes))
    given: list[Bucket] = []
    loading: list[Bucket] = []
    while (bucket := packer.take(10)) is not None:
        given.append(bucket)
        loading.append(bucket)
        # Whatever can be packed has been packed now.
        time.sleep(0.005)
        for held in loading:
            assert sender.contents[held.location] == held.tensors[0].name
        loading = loading[len(loading) - (bucket.window - 1) :]
    assert [bucket.tensors[0].name for bucket in given] == [str(number) for number in range(len(sizes))]
    packer.stop(10)


@pytest.mark.parametrize(("window", "ahead"), [(1, 2), (2, 1)])
def test_it_packs_as_far_as_there_is_room(window: int, ahead: int) -> None:
    sender = Sender(window)
    packer = started(sender, tensors([64] * 9))
    wait_for(lambda: len(sender.packed) == 3)
    for number in range(1, 5):
        assert packer.take(10) is not None
        # From the second call on, what is out of the window makes room.
        wait_for(lambda number=number: len(sender.packed) == max(3, number + ahead))
        time.sleep(0.01)
        assert len(sender.packed) == max(3, number + ahead)
    packer.stop(10)


def test_what_was_packed_before_a_failure_still_comes() -> None:
    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors([64, 64, 64])
        raise OSError("the disk is gone")

    sender = Sender(1)
    packer = started(sender, stream())
    names = [bucket.tensors[0].name for bucket in (packer.take(10), packer.take(10)) if bucket]
    assert names == ["0", "1"]
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            packer.take(10)
    packer.stop(10)


def test_a_stop_ends_a_thread_that_waits_for_room() -> None:
    before = threading.active_count()
    packer = started(Sender(1), tensors([64] * 9))
    wait_for(lambda: threading.active_count() == before + 1)
    packer.stop(10)
    assert threading.active_count() == before
    packer.stop(10)


def test_a_stream_that_hangs_is_said_to() -> None:
    released = threading.Event()

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        released.wait(30)
        yield from tensors([64])

    packer = started(Sender(1), stream())
    with pytest.raises(RefitError, match=r"policy: packing a bucket did not end within 0\.1 s"):
        packer.take(0.1)
    with pytest.raises(TimeoutError, match=r"did not end within 0\.1 s"):
        packer.stop(0.1)
    released.set()
    packer.stop(10)


def test_slots_are_given_back_in_order_and_used_again_at_once() -> None:
    slots = Slots(2, 100)
    assert [slots.take(100), slots.take(101), slots.take(1)] == [0, LARGE, 1]
    assert not slots.room(100)
    assert not slots.room(101)
    slots.free()
    assert slots.room(100)
    assert not slots.room(101)
    slots.free()
    assert slots.room(101)
    assert slots.take(5) == 0
    for _ in range(3):
        slots.free()
    assert [slots.take(5), slots.take(5)] == [0, 1]
