"""Tensors in flat buffers."""

from __future__ import annotations

import pytest
import torch

from rl_generation.failures import RefitError
from rl_generation.protocol import RefitSpec
from rl_generation.refit.buckets import (
    ALIGNMENT,
    BucketFiller,
    Capacity,
    Filled,
    capacity_for,
    dtype_of,
    view,
)
from rl_generation.refit.contract import TensorPlace

from .conftest import Tensors, described, random_tensors, require_same, same_bits


def fill_all(tensors: Tensors, capacity: int) -> list[tuple[torch.Tensor, Filled]]:
    """Buckets of a whole stream, each in a buffer of its own."""
    filler = BucketFiller(tensors.items())
    buckets = []
    while (filled := filler.fill(buffer := torch.empty(capacity, dtype=torch.uint8))) is not None:
        buckets.append((buffer, filled))
    return buckets


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("bucket_bytes", [1, 300, 1 << 20])
def test_tensors_of_any_kind_come_back_to_the_bit(seed: int, bucket_bytes: int) -> None:
    tensors = random_tensors(seed)
    spec = RefitSpec(tuple(described(tensors)))
    capacity = capacity_for(spec, bucket_bytes).any
    buckets = fill_all(tensors, capacity)
    require_same({p.name: view(buffer, p) for buffer, filled in buckets for p in filled.places}, tensors)
    for _, filled in buckets:
        assert filled.nbytes <= capacity
        assert all(place.offset % ALIGNMENT == 0 for place in filled.places)


def test_buckets_are_bounded_and_a_larger_tensor_travels_alone() -> None:
    tensors = {"a": torch.zeros(20), "large": torch.ones(1000), "b": torch.zeros(20), "c": torch.zeros(20)}
    capacity = capacity_for(RefitSpec(tuple(described(tensors))), 256)
    assert capacity == Capacity(bucket=256, largest=4000)
    names = [[p.name for p in filled.places] for _, filled in fill_all(tensors, capacity.any)]
    assert names == [["a"], ["large"], ["b", "c"]]


@pytest.mark.parametrize(
    ("tensors", "bucket_bytes", "expected"),
    [
        ({"a": torch.zeros(4)}, 1 << 30, Capacity(64)),
        ({"a": torch.zeros(17), "b": torch.zeros(1)}, 1 << 30, Capacity(192)),
        ({"a": torch.zeros(17), "b": torch.zeros(1)}, 100, Capacity(100)),
        ({"a": torch.zeros(25)}, 100, Capacity(100)),
        ({"a": torch.zeros(26)}, 100, Capacity(100, 104)),
        ({"a": torch.zeros(100)}, 100, Capacity(100, 400)),
        ({"a": torch.empty(0)}, 100, Capacity(ALIGNMENT)),
    ],
)
def test_a_buffer_is_no_larger_than_it_must_be(
    tensors: Tensors, bucket_bytes: int, expected: Capacity
) -> None:
    assert capacity_for(RefitSpec(tuple(described(tensors))), bucket_bytes) == expected


def test_a_view_shares_the_buffers_memory() -> None:
    buffer = torch.zeros(192, dtype=torch.uint8)
    view(buffer, TensorPlace("a", (2, 4), "float32", 64)).fill_(1.0)
    assert same_bits(buffer[64:96].view(torch.float32), torch.ones(8))
    assert not buffer[:64].any()
    assert not buffer[96:].any()


def test_parameters_that_require_gradients_are_read_as_numbers() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    ((buffer, filled),) = fill_all({"w": weight}, 64)
    assert not view(buffer, filled.places[0]).requires_grad


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (TensorPlace("w", (17,), "float32", 0), r"w: bytes 0 to 68 lie outside a bucket of 64 bytes"),
        (TensorPlace("w", (4,), "float32", 64), r"w: bytes 64 to 80 lie outside"),
        (TensorPlace("w", (4,), "float32", 4), r"w: .* at byte 4 cannot be; .* multiple of 64"),
        (TensorPlace("w", (4,), "float32", -64), r"w: .* at byte -64 cannot be"),
        (TensorPlace("w", (-4, -4), "float32", 0), r"w: shape \(-4, -4\)"),
        (TensorPlace("w", (4,), "float33", 0), r"'float33' is no dtype"),
        (TensorPlace("w", (4,), "nn", 0), r"'nn' is no dtype"),
    ],
)
def test_a_place_that_cannot_be_is_refused(place: TensorPlace, message: str) -> None:
    with pytest.raises(RefitError, match=message):
        view(torch.zeros(64, dtype=torch.uint8), place)


def test_the_size_of_what_comes_next_is_known_before_it_is_packed() -> None:
    filler = BucketFiller({"a": torch.zeros(4), "b": torch.zeros(30), "c": torch.zeros(2)}.items())
    assert [filler.next_size(), filler.next_size()] == [16, 16]
    filled = filler.fill(torch.empty(100, dtype=torch.uint8))
    assert filled is not None
    assert [place.name for place in filled.places] == ["a"]
    assert filler.next_size() == 120
    filled = filler.fill(torch.empty(200, dtype=torch.uint8))
    assert filled is not None
    assert [place.name for place in filled.places] == ["b", "c"]
    assert filler.next_size() is None
    assert filler.fill(torch.empty(200, dtype=torch.uint8)) is None


def test_a_tensor_that_is_not_dense_is_refused() -> None:
    with pytest.raises(RefitError, match=r"w: torch\.sparse_coo tensors cannot be moved"):
        fill_all({"w": torch.eye(3).to_sparse()}, 64)


def test_a_stream_with_a_larger_tensor_than_announced_is_refused() -> None:
    with pytest.raises(RefitError, match=r"w: 400 bytes are more than a bucket's 64"):
        fill_all({"w": torch.zeros(100)}, 64)


def test_dtypes_are_found_by_name() -> None:
    assert dtype_of("bfloat16") is torch.bfloat16
