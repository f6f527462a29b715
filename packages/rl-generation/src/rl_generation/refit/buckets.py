"""Tensors in flat buffers: where each begins, how a stream fills one, how it is read without a copy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from ..failures import RefitError
from ..protocol import RefitSpec, RefitTensor
from .contract import TensorPlace

ALIGNMENT = 64
"""Bytes. Every tensor begins at a multiple of it, which suits every dtype and a processor's cache lines."""


def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name without the prefix, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype that :func:`dtype_name` named.

    Raises:
        RefitError: torch has no such dtype.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise RefitError(f"refit: {name!r} is no dtype of this torch {torch.__version__}")
    return found


def announced(place: TensorPlace) -> RefitTensor:
    """What a place says about its tensor, as an announcement would say it."""
    return RefitTensor(place.name, tuple(place.shape), dtype_of(place.dtype))


def tensor_bytes(tensor: RefitTensor) -> int:
    """Size of the tensor's numbers, in bytes."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def total_bytes(spec: RefitSpec) -> int:
    """Size of all announced numbers, in bytes."""
    return sum(tensor_bytes(tensor) for tensor in spec.tensors)


def aligned(offset: int) -> int:
    """The next multiple of :data:`ALIGNMENT`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the buffers of one refit have to hold, in bytes.

    Attributes:
        bucket: of several tensors.
        largest: of a tensor that travels alone, being larger than a bucket; 0 if there is none.
    """

    bucket: int
    largest: int = 0

    @property
    def any(self) -> int:
        """Of a buffer that holds every bucket."""
        return max(self.bucket, self.largest)


def capacity_for(spec: RefitSpec, bucket_bytes: int) -> Capacity:
    """What this refit needs: buckets of ``bucket_bytes``, or of less where that is enough; never of 0."""
    sizes = [tensor_bytes(tensor) for tensor in spec.tensors]
    bucket = max(ALIGNMENT, min(bucket_bytes, sum(map(aligned, sizes))))
    largest = max(sizes, default=0)
    return Capacity(bucket, largest if largest > bucket else 0)


def view(buffer: torch.Tensor, place: TensorPlace) -> torch.Tensor:
    """The tensor at ``place``, sharing memory with ``buffer``.

    Args:
        buffer: ``[nbytes]`` uint8, contiguous.
        place: within it.

    Raises:
        RefitError: the place is not aligned, or reaches beyond the buffer.
    """
    tensor = announced(place)
    size = tensor_bytes(tensor)
    if min(tensor.shape, default=0) < 0 or place.offset < 0 or place.offset % ALIGNMENT:
        raise RefitError(
            f"refit: {place.name}: shape {tensor.shape} at byte {place.offset} cannot be; expected sizes ≥ 0 "
            f"at a multiple of {ALIGNMENT}"
        )
    if place.offset + size > buffer.numel():
        raise RefitError(
            f"refit: {place.name}: bytes {place.offset} to {place.offset + size} lie outside a bucket of "
            f"{buffer.numel()} bytes"
        )
    return buffer[place.offset : place.offset + size].view(tensor.dtype).view(tensor.shape)


@dataclass(frozen=True, slots=True)
class Filled:
    """What :meth:`BucketFiller.fill` put into a buffer: the places, and how many bytes they span."""

    places: tuple[TensorPlace, ...]
    nbytes: int


class BucketFiller:
    """Copies a stream of tensors into one buffer after another, each tensor as soon as it comes.

    A tensor that no longer fits waits for the next buffer, so nothing but it is kept in memory.

    Args:
        stream: names and dense tensors of any layout in memory, on any device.
    """

    def __init__(self, stream: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._stream: Iterator[tuple[str, torch.Tensor]] = iter(stream)
        self._waiting: tuple[str, torch.Tensor] | None = None

    @torch.no_grad()
    def fill(self, buffer: torch.Tensor) -> Filled | None:
        """Fill ``buffer`` as far as the next tensors go; ``None`` when the stream has ended.

        Args:
            buffer: ``[capacity]`` uint8, contiguous, writable.

        Raises:
            RefitError: a tensor is not dense, or larger than an empty buffer.
        """
        places: list[TensorPlace] = []
        end = 0
        while (entry := self._next()) is not None:
            name, tensor = entry
            start = aligned(end)
            size = tensor.numel() * tensor.element_size()
            if start + size > buffer.numel():
                if not places:
                    raise RefitError(
                        f"refit: {name}: {size} bytes are more than a bucket's {buffer.numel()}; the "
                        "announcement and the stream disagree"
                    )
                self._waiting = entry
                break
            place = TensorPlace(name, tuple(tensor.shape), dtype_name(tensor.dtype), start)
            view(buffer, place).copy_(tensor)
            places.append(place)
            end = start + size
        return Filled(tuple(places), end) if places else None

    @torch.no_grad()
    def next_size(self) -> int | None:
        """Bytes of the tensor that comes next, ``None`` when the stream has ended.

        Raises:
            RefitError: the tensor is not dense.
        """
        entry = self._waiting = self._next()
        return None if entry is None else entry[1].numel() * entry[1].element_size()

    def _next(self) -> tuple[str, torch.Tensor] | None:
        if self._waiting is not None:
            entry, self._waiting = self._waiting, None
            return entry
        entry = next(self._stream, None)
        if entry is not None and entry[1].layout != torch.strided:
            raise RefitError(f"refit: {entry[0]}: {entry[1].layout} tensors cannot be moved; expected dense")
        return entry
