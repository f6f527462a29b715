"""A bucket in the form in which TensorRT-LLM's workers take weights: one handle for each tensor.

A handle is a function and its arguments; the worker puts its own device in place of the seventh and calls it.
The functions that torch makes of CUDA tensors have their device there. Ours opens a bucket, whichever way its
bytes came, and puts copies on the worker's device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..failures import RefitError
from ..refit.contract import Bucket, TransportName
from ..refit.receive import BucketReader
from ..refit.settings import TransportSettings

TRANSPORTS: frozenset[TransportName] = frozenset({"cuda_ipc", "object_store", "shared_memory"})
"""Those that a worker can open without having joined anything before."""

Handle = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]

_DEVICE_PLACE = 6


class BucketOnDevice:
    """One bucket in one worker's process: opened by the first tensor that is taken.

    Sent to a worker in one message with all handles of its bucket, so that they share it.

    Args:
        bucket: as published.
        settings: of the policy's side.
    """

    def __init__(self, bucket: Bucket, settings: TransportSettings) -> None:
        self._bucket = bucket
        self._settings = settings
        self._tensors: dict[str, torch.Tensor] | None = None

    def take(self, name: str, device: torch.device) -> torch.Tensor:
        """The tensor of that name, once.

        Raises:
            RefitError: the bytes cannot be reached, or there is no such tensor left.
        """
        if self._tensors is None:
            self._tensors = self._open(device)
        try:
            return self._tensors.pop(name)
        except KeyError as error:
            raise RefitError(f"TensorRT-LLM: the bucket has no tensor {name!r} left to take") from error

    def _open(self, device: torch.device) -> dict[str, torch.Tensor]:
        reader = BucketReader(self._settings)
        try:
            with reader.reading(self._bucket) as tensors:
                # Copies, because the engine keeps all of them until it has loaded the last one.
                opened = {name: tensor.to(device, copy=True, non_blocking=False) for name, tensor in tensors}
        finally:
            reader.close()
        return opened


def handles_of(bucket: Bucket, settings: TransportSettings) -> list[tuple[str, Handle]]:
    """Names and handles of one bucket's tensors.

    Raises:
        RefitError: workers cannot open what came this way.
    """
    if bucket.transport not in TRANSPORTS:
        raise RefitError(
            f"TensorRT-LLM: its workers cannot open a bucket sent by {bucket.transport}; choose one of "
            f"{', '.join(sorted(TRANSPORTS))}"
        )
    shared = BucketOnDevice(bucket, settings)
    unused = (None,) * (_DEVICE_PLACE - 2)
    return [(place.name, (take_tensor, (shared, place.name, *unused, None))) for place in bucket.tensors]


def take_tensor(
    shared: BucketOnDevice, name: str, _2: None, _3: None, _4: None, _5: None, device: int | str
) -> torch.Tensor:
    """What a worker calls: the tensor on its device.

    Args:
        shared: the bucket.
        name: of the tensor.
        device: index of the worker's GPU, or a device's name.

    Raises:
        RefitError: see :meth:`BucketOnDevice.take`.
    """
    return shared.take(name, torch.device(device if isinstance(device, str) else f"cuda:{device}"))
