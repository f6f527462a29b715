"""Same GPU: the policy packs into device memory, and engines on that GPU open it by its handle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ...failures import RefitError, UnavailableBackendError
from ..buckets import Capacity, Filled
from ..contract import Bucket, TransportName
from ..settings import TransportSettings
from .base import require_transport, tensors_in
from .slots import LARGE, Slots

NAME: TransportName = "cuda_ipc"

# In the order of torch.UntypedStorage._share_cuda_, whose first item, the device's number, means something
# in the sender's process only.
_HANDLE = (
    "handle",
    "size",
    "offset",
    "counter_handle",
    "counter_offset",
    "event_handle",
    "event_sync",
)


class CudaIpcSender:
    """See :class:`~rl_generation.refit.transports.base.Sender`."""

    slots = 2

    def __init__(self, settings: TransportSettings) -> None:
        self._buffers: dict[int, torch.Tensor] = {}
        self._used = Slots(0, 0)
        self._slot = 0

    def open(self, capacity: Capacity) -> None:
        """Get two buffers on the current device, and one for a tensor that is alone.

        Raises:
            UnavailableBackendError: there is no CUDA device.
            RefitError: it has no room.
        """
        require_cuda()
        sizes = {**dict.fromkeys(range(self.slots), capacity.bucket), LARGE: capacity.largest}
        try:
            self._buffers = {
                slot: torch.empty(size, dtype=torch.uint8, device="cuda") for slot, size in sizes.items()
            }
        except torch.OutOfMemoryError as error:
            raise RefitError(
                f"refit: the GPU has no room for {sum(sizes.values())} bytes of buckets; lower bucket_bytes"
            ) from error
        self._used = Slots(self.slots, capacity.bucket)

    def room(self, nbytes: int) -> bool:
        """Whether a buffer is free."""
        return self._used.room(nbytes)

    def buffer(self, nbytes: int) -> torch.Tensor:
        """A free one."""
        if not self._buffers:
            raise RefitError("refit: CUDA IPC was used before it was opened")
        self._slot = self._used.take(nbytes)
        buffer = self._buffers[self._slot]
        return buffer[:nbytes] if self._slot == LARGE else buffer

    def publish(self, filled: Filled) -> Bucket:
        """Wait until the bytes are there, and make a handle of the buffer that was filled last."""
        buffer = self._buffers[self._slot]
        torch.cuda.synchronize(buffer.device)
        properties = torch.cuda.get_device_properties(buffer.device)
        location = describe(str(properties.uuid), buffer.untyped_storage()._share_cuda_())
        return Bucket(NAME, location, filled.nbytes, filled.places)

    def send(self, bucket: Bucket) -> None:
        """Nothing is left to do."""

    def free(self) -> None:
        """Its buffer can be packed again."""
        self._used.free()

    def rest(self) -> None:
        """Nothing stays."""
        self.close()

    def close(self) -> None:
        """Let go of the buffers; idempotent. Engines that have them open keep them alive."""
        self._buffers = {}


class CudaIpcReceiver:
    """See :class:`~rl_generation.refit.transports.base.Receiver`."""

    def __init__(self, settings: TransportSettings) -> None:
        self._device: int | None = None

    def tensors(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of the policy's device memory.

        Raises:
            UnavailableBackendError: there is no CUDA device.
            RefitError: the buffer is on a GPU that this process does not see.
        """
        require_transport(bucket, NAME)
        require_cuda()
        count = torch.cuda.device_count()
        uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]
        device, handle = locate(bucket.location, uuids)
        storage = torch.UntypedStorage._new_shared_cuda(device, *handle)
        buffer = torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}").set_(storage)
        self._device = device
        return tensors_in(buffer, bucket)

    def done(self) -> None:
        """Wait for all work on them."""
        device, self._device = self._device, None
        if device is not None:
            torch.cuda.synchronize(device)

    def close(self) -> None:
        """Nothing is held."""


def describe(gpu: str, shared: Sequence[Any]) -> dict[str, Any]:
    """A location of plain values from the GPU's UUID and what torch says of shared storage."""
    values = [value.hex() if isinstance(value, bytes) else value for value in shared[1:]]
    return {"gpu": gpu, **dict(zip(_HANDLE, values, strict=True))}


def locate(location: Mapping[str, Any], uuids: Sequence[str]) -> tuple[int, list[Any]]:
    """This process's number of the GPU, and the handle as torch wants it.

    Args:
        location: what :func:`describe` made.
        uuids: of the GPUs that this process sees, in its order.

    Raises:
        RefitError: the GPU is not among them, or this is no such location.
    """
    try:
        gpu = location["gpu"]
        items = [(key, location[key]) for key in _HANDLE]
        handle = [bytes.fromhex(value) if key.endswith("handle") else value for key, value in items]
    except (KeyError, TypeError, ValueError) as error:
        raise RefitError(f"refit: {location!r} is no place in a GPU's memory") from error
    if gpu not in uuids:
        raise RefitError(
            f"refit: the weights are on GPU {gpu}, and this process sees {', '.join(uuids) or 'none'}; "
            "place both on one GPU or choose the collective transport"
        )
    return list(uuids).index(gpu), handle


def require_cuda() -> None:
    """Refuse a machine without a GPU.

    Raises:
        UnavailableBackendError: saying what is missing.
    """
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        reason = "no CUDA device is visible" if built else f"torch {torch.__version__} is built without CUDA"
        raise UnavailableBackendError(
            f"refit: CUDA IPC needs a GPU that policy and engine share, and {reason}; choose shared_memory"
        )
