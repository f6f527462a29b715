"""Tensors of every kind, and a source over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch

from rl_generation.protocol import RefitTensor
from rl_generation.refit.contract import TransportName
from rl_generation.refit.publisher import TensorSource
from rl_generation.refit.settings import TransportSettings

Tensors = dict[str, torch.Tensor]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool)


def random_tensors(seed: int, count: int = 12) -> Tensors:
    """Random bits in random shapes, scalars, empty and transposed ones among them; NaNs included."""
    generator = torch.Generator().manual_seed(seed)

    def below(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    tensors: Tensors = {
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "transposed": torch.randn(17, 5, generator=generator).t(),
    }
    for index in range(count):
        dtype = DTYPES[below(len(DTYPES))]
        shape = [below(9) for _ in range(below(4))]
        size = int(torch.Size(shape).numel()) * dtype.itemsize
        bits = torch.randint(2 if dtype == torch.bool else 256, (size,), generator=generator)
        tensors[f"layer.{index}"] = bits.to(torch.uint8).view(dtype).view(shape)
    return tensors


def described(tensors: Tensors) -> list[RefitTensor]:
    """What a policy would announce of them."""
    return [RefitTensor(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether shapes, dtypes and every bit agree."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*flat)


def require_same(received: Tensors, sent: Tensors) -> None:
    """Fail unless all tensors arrived, bit by bit."""
    assert set(received) == set(sent)
    assert [name for name in sent if not same_bits(received[name], sent[name])] == []


@pytest.fixture
def settings() -> TransportSettings:
    """Small buckets."""
    return TransportSettings(bucket_bytes=256, timeout_s=10)


@pytest.fixture
def make_source(settings: TransportSettings) -> Iterator[Callable[..., TensorSource]]:
    """A factory of sources; they are ended afterwards."""
    sources: list[TensorSource] = []

    def make(
        tensors: Tensors,
        stream: Callable[[], Iterable[tuple[str, torch.Tensor]]] | None = None,
        transport: TransportName | None = "shared_memory",
    ) -> TensorSource:
        source = TensorSource(lambda: described(tensors), stream or tensors.items, settings)
        sources.append(source)
        if transport:
            source.begin(transport)
        return source

    yield make
    for source in sources:
        source.end()
        source.close()
