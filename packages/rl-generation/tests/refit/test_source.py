"""The policy's side, and what it does about a stream that does not keep its word."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from rl_generation.failures import RefitError
from rl_generation.protocol import RefitTensor
from rl_generation.refit.contract import Bucket
from rl_generation.refit.publisher import TensorSource
from rl_generation.refit.receive import BucketReader
from rl_generation.refit.settings import TransportSettings

from .conftest import Tensors, described, random_tensors, require_same

Stream = Iterator[tuple[str, torch.Tensor]]
MakeSource = Callable[..., TensorSource]

THREE: Tensors = {name: torch.full((40,), float(n)) for n, name in enumerate("abc")}


def drain(source: TensorSource) -> list[Bucket]:
    """All buckets, none of them read."""
    buckets = []
    while (bucket := source.next_bucket()) is not None:
        buckets.append(bucket)
    return buckets


def test_after_an_end_nothing_published_can_be_read_and_after_close_nothing_is_left(
    make_source: MakeSource, settings: TransportSettings
) -> None:
    source = make_source(THREE)
    buckets = drain(source)
    assert len(buckets) == 3
    source.end()
    source.end()
    for bucket in buckets:
        with pytest.raises(RefitError, match="is gone; its owner has ended that refit"):
            BucketReader(settings).tensors(bucket)
    source.close()
    source.close()
    with pytest.raises(RefitError, match="is gone"):
        BucketReader(settings).tensors(buckets[0])


def test_a_source_serves_one_refit_after_another(
    make_source: MakeSource, settings: TransportSettings
) -> None:
    tensors = random_tensors(0)
    source = make_source(tensors, transport=None)
    reader = BucketReader(settings)
    for _ in range(3):
        source.begin("shared_memory")
        received: Tensors = {}
        while (bucket := source.next_bucket()) is not None:
            received |= {name: tensor.clone() for name, tensor in reader.tensors(bucket)}
        assert source.next_bucket() is None
        source.end()
        require_same(received, tensors)
        tensors["scalar"] = tensors["scalar"] + 1


def test_a_policy_describes_itself_once(settings: TransportSettings) -> None:
    asked: list[int] = []

    def spec() -> list[RefitTensor]:
        asked.append(1)
        return described(THREE)

    source = TensorSource(spec, THREE.items, settings)
    for _ in range(2):
        assert [tensor.name for tensor in source.begin("shared_memory").tensors] == ["a", "b", "c"]
        source.end()
    assert len(asked) == 1


def test_a_bucket_stays_as_it_is_while_the_next_is_packed(
    make_source: MakeSource, settings: TransportSettings
) -> None:
    packed = threading.Semaphore(0)

    def stream() -> Stream:
        for name, tensor in THREE.items():
            yield name, tensor
            packed.release()

    source = make_source(THREE, stream)
    first = source.next_bucket()
    assert first is not None
    assert packed.acquire(timeout=10)
    # The second tensor is in its place now or soon; the third has to wait for the next call.
    assert packed.acquire(timeout=10)
    ((name, tensor),) = BucketReader(settings).tensors(first)
    assert (name, tensor.tolist()) == ("a", [0.0] * 40)


def test_a_failing_stream_is_named_with_its_cause(make_source: MakeSource) -> None:
    def stream() -> Stream:
        yield "a", THREE["a"]
        raise OSError("the disk is gone")

    source = make_source(THREE, stream)
    with pytest.raises(RefitError, match=r"2 tensors to come, the next being b: OSError: the disk") as caught:
        drain(source)
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(RefitError, match="this refit has failed"):
        source.next_bucket()
    source.end()
    source.begin("shared_memory")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"b": None}, r"policy: b never came"),
        ({"d": torch.zeros(1)}, r"policy: d: not announced"),
        ({"b": torch.zeros(41)}, r"policy: b: shape \(41,\); expected \(40,\)"),
        ({"b": torch.zeros(40).bfloat16()}, r"policy: b: dtype bfloat16; expected float32"),
        ({"b": torch.zeros(1000)}, r"policy: b: shape \(1000,\)"),
    ],
)
def test_a_stream_that_breaks_its_announcement_is_found_out(
    make_source: MakeSource, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    streamed = {name: tensor for name, tensor in {**THREE, **changes}.items() if tensor is not None}
    with pytest.raises(RefitError, match=message):
        drain(make_source(THREE, streamed.items))


def test_a_tensor_that_comes_twice_is_found_out(make_source: MakeSource) -> None:
    with pytest.raises(RefitError, match=r"policy: a: came twice"):
        drain(make_source(THREE, lambda: [*THREE.items(), ("a", THREE["a"])]))


def test_calls_out_of_order_are_refused(make_source: MakeSource) -> None:
    source = make_source(THREE, transport=None)
    with pytest.raises(RefitError, match="outside a refit; call begin first"):
        source.next_bucket()
    source.end()
    source.begin("shared_memory")
    with pytest.raises(RefitError, match="during a refit; call end first"):
        source.begin("shared_memory")
    with pytest.raises(RefitError, match="announced without a tensor"):
        make_source({}, transport=None).begin("shared_memory")


def test_a_hanging_stream_has_a_deadline_and_what_it_writes_yet_reaches_no_later_refit() -> None:
    released, written = threading.Event(), threading.Event()
    late = {name: torch.full_like(tensor, -1.0) for name, tensor in THREE.items()}

    def hanging() -> Stream:
        for name, tensor in late.items():
            yield name, tensor
            released.wait(30)
        written.set()

    streams = iter([hanging, THREE.items])
    settings = TransportSettings(timeout_s=0.5)
    source = TensorSource(lambda: described(THREE), lambda: next(streams)(), settings)
    source.begin("shared_memory")
    start = time.monotonic()
    with pytest.raises(RefitError, match=r"packing a bucket did not end within 0\.5 s"):
        source.next_bucket()
    with pytest.raises(RefitError, match="the stream of weights hangs"):
        source.end()
    assert time.monotonic() - start < 5
    source.begin("shared_memory")
    bucket = source.next_bucket()
    assert bucket is not None
    released.set()
    assert written.wait(10)
    received = {name: tensor.clone() for name, tensor in BucketReader(settings).tensors(bucket)}
    require_same(received, THREE)
    source.end()
    source.close()


def test_no_room_is_said_with_its_remedy_and_another_refit_can_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    source = TensorSource(lambda: described(THREE), THREE.items, TransportSettings())
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(RefitError, match=r"no room for \d+ bytes of shared memory: .*lower bucket_bytes"):
            source.begin("shared_memory")
    source.end()
    source.begin("shared_memory")
    assert len(drain(source)) == 1
    source.end()
    source.close()
