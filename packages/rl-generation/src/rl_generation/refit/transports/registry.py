"""Both sides of a transport by its name."""

from __future__ import annotations

from ...failures import RefitError
from ..contract import TransportName
from ..settings import TransportSettings
from .base import Receiver, Sender
from .collective import CollectiveReceiver, CollectiveSender
from .cuda_ipc import CudaIpcReceiver, CudaIpcSender
from .object_store import ObjectStoreReceiver, ObjectStoreSender
from .shared_memory import SharedMemoryReceiver, SharedMemorySender


def make_sender(name: TransportName, settings: TransportSettings) -> Sender:
    """The policy's side, unopened.

    Raises:
        RefitError: there is no such transport.
    """
    match name:
        case "shared_memory":
            return SharedMemorySender(settings)
        case "cuda_ipc":
            return CudaIpcSender(settings)
        case "collective":
            return CollectiveSender(settings)
        case "object_store":
            return ObjectStoreSender(settings)
    raise RefitError(f"refit: there is no transport {name!r}")


def make_receiver(name: TransportName, settings: TransportSettings) -> Receiver:
    """The engine's side.

    Raises:
        RefitError: there is no such transport.
    """
    match name:
        case "shared_memory":
            return SharedMemoryReceiver(settings)
        case "cuda_ipc":
            return CudaIpcReceiver(settings)
        case "collective":
            return CollectiveReceiver(settings)
        case "object_store":
            return ObjectStoreReceiver(settings)
    raise RefitError(f"refit: there is no transport {name!r}")
