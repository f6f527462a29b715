"""Several GPUs, on one node or many: the policy broadcasts, and every engine process takes part.

NCCL where there are GPUs, gloo on the CPU. A group of the policy (rank 0) and ``receivers`` members is formed
for each refit, beside whatever groups the processes have, over a store at ``host``.

Nobody is authenticated: whoever reaches the store can list its keys, take a member's place and read the
weights. So ``host`` is loopback unless ``trusted_network`` of
:class:`~rl_generation.refit.settings.TransportSettings` says that nobody else reaches it. NCCL also opens
sockets of its own, on the interfaces that ``NCCL_SOCKET_IFNAME`` names.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from ...failures import RefitError, UnavailableBackendError
from ..background import in_background, result_of
from ..buckets import Capacity, Filled
from ..contract import Bucket, TransportName
from ..settings import TransportSettings
from .base import require_transport, tensors_in

NAME: TransportName = "collective"

GroupBackend = Literal["gloo", "nccl"]

_MEMBERS = "members"
_POLL_S = 0.005
_LEAVING_S = 10.0


class CollectiveSender:
    """See :class:`~rl_generation.refit.transports.base.Sender`."""

    slots = 1

    def __init__(self, settings: TransportSettings) -> None:
        self._settings = settings
        self._size = settings.receivers + 1
        self._backend: GroupBackend = "gloo"
        self._store: Any = None
        self._name = ""
        self._group: Any = None
        self._buffer: torch.Tensor | None = None
        self._sent = 0
        self._broadcast: Future[None] | None = None
        self._closing = threading.Event()

    def open(self, capacity: Capacity) -> None:
        """Get a buffer and open the store; members join with the first bucket.

        Raises:
            UnavailableBackendError: torch has neither gloo nor a GPU with NCCL.
            RefitError: the address cannot be bound.
        """
        self.close()
        self._backend = best_backend()
        self._store = _serve_store(self._settings)
        self._name = secrets.token_hex(8)
        self._buffer = torch.empty(capacity.any, dtype=torch.uint8, device=_device(self._backend))
        self._sent = 0
        self._closing = threading.Event()

    def room(self, nbytes: int) -> bool:
        """Never: the only buffer may have to be waited for."""
        return False

    def buffer(self, nbytes: int) -> torch.Tensor:
        """The only one, once the last broadcast is through.

        Raises:
            RefitError: a member died, or did not join within the deadline.
        """
        if self._buffer is None:
            raise RefitError("refit: the collective was used before it was opened")
        pending, self._broadcast = self._broadcast, None
        if pending is not None:
            result_of(pending, 2 * self._settings.timeout_s, "a broadcast of weights")
        return self._buffer

    def publish(self, filled: Filled) -> Bucket:
        """Number the bucket; its bytes move when it is sent."""
        location = {
            "host": self._settings.host,
            "port": self._store.port,
            "group": self._name,
            "backend": self._backend,
            "size": self._size,
            "number": self._sent,
        }
        self._sent += 1
        return Bucket(NAME, location, filled.nbytes, filled.places)

    def send(self, bucket: Bucket) -> None:
        """Start the broadcast, for whose members this call does not wait."""
        self._broadcast = in_background(lambda: self._send(bucket.nbytes), "refit-broadcast")

    def free(self) -> None:
        """Nothing depends on it: the end of the broadcast counts."""

    def rest(self) -> None:
        """Nothing stays."""
        self.close()

    def close(self) -> None:
        """Leave the group and close the store; idempotent. A broadcast that is under way is given up."""
        self._closing.set()
        pending, self._broadcast = self._broadcast, None
        _leave(self._group)
        if pending is not None:
            # A thread within torch must not outlive the interpreter; it was just told to stop.
            with contextlib.suppress(TimeoutError):
                pending.exception(_LEAVING_S)
        _leave(self._group)
        self._buffer, self._group, self._store = None, None, None

    def _send(self, nbytes: int) -> None:
        buffer = self._buffer
        assert buffer is not None
        if self._group is None:
            self._await_members()
            keys = _keys_of(self._store, self._name)
            self._group = _join(self._backend, keys, 0, self._size, self._settings)
        _broadcast(self._group, buffer[:nbytes], self._settings, f"{self._size - 1} receivers")

    def _await_members(self) -> None:
        # Torch would wait as well, but could not be stopped.
        keys = _keys_of(self._store, self._name)
        deadline = time.monotonic() + self._settings.timeout_s
        while (joined := keys.add(_MEMBERS, 0)) < self._size - 1:
            if time.monotonic() > deadline:
                raise RefitError(
                    f"refit: {joined} of {self._size - 1} members joined a collective within "
                    f"{self._settings.timeout_s:g} s; is each engine process counted in receivers, and was "
                    "each given the bucket?"
                )
            if self._closing.wait(_POLL_S):
                raise RefitError("refit: a collective was closed before its members joined")


class CollectiveReceiver:
    """See :class:`~rl_generation.refit.transports.base.Receiver`."""

    def __init__(self, settings: TransportSettings) -> None:
        self._settings = settings
        self._address: tuple[str, int, str] | None = None
        self._store: Any = None
        self._group: Any = None
        self._received = 0

    def tensors(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """Take part in the broadcast; views of a buffer of this bucket's own.

        Raises:
            UnavailableBackendError: the group needs a GPU, and there is none.
            RefitError: this member missed a bucket, the group is full, or the policy is silent.
        """
        require_transport(bucket, NAME)
        try:
            host, port = str(bucket.location["host"]), int(bucket.location["port"])
            name = str(bucket.location["group"])
            backend, size = str(bucket.location["backend"]), int(bucket.location["size"])
            number = int(bucket.location["number"])
        except (KeyError, TypeError, ValueError) as error:
            raise RefitError(f"refit: {bucket.location!r} is no place in a collective") from error
        if (host, port, name) != self._address:
            self.close()
            self._enter((host, port, name), require_backend(backend), size)
        if number != self._received:
            raise RefitError(
                f"refit: bucket {number} of a collective came; expected {self._received}; a member must take "
                "every bucket in turn"
            )
        self._received += 1
        buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=_device(backend))
        _broadcast(self._group, buffer, self._settings, f"the policy at {host}:{port}")
        return tensors_in(buffer, bucket)

    def done(self) -> None:
        """Nothing is left to do."""

    def close(self) -> None:
        """Leave the group; idempotent."""
        group, self._group, self._address = self._group, None, None
        _leave(group)
        self._store = None

    def _enter(self, address: tuple[str, int, str], backend: GroupBackend, size: int) -> None:
        host, port, name = address
        timeout = timedelta(seconds=self._settings.timeout_s)
        try:
            store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
        except RuntimeError as error:
            raise RefitError(f"refit: the policy's store at {host}:{port} does not answer") from error
        shared = _keys_of(store, name)
        rank = shared.add(_MEMBERS, 1)
        if rank >= size:
            raise RefitError(
                f"refit: member {rank} of a collective for {size - 1}; set receivers to the number of "
                "processes that load weights"
            )
        self._group = _join(backend, shared, rank, size, self._settings)
        self._store, self._address, self._received = store, address, 0


def best_backend() -> GroupBackend:
    """NCCL if this process has a GPU, else gloo.

    Raises:
        UnavailableBackendError: torch has neither.
    """
    if torch.cuda.is_available() and dist.is_available() and dist.is_nccl_available():
        return "nccl"
    return require_backend("gloo")


def require_backend(name: str) -> GroupBackend:
    """The backend of that name, if it works here.

    Raises:
        UnavailableBackendError: saying what is missing.
    """
    if not dist.is_available():
        raise UnavailableBackendError("refit: this torch is built without torch.distributed")
    if name == "gloo" and dist.is_gloo_available():
        return "gloo"
    if name == "nccl" and dist.is_nccl_available() and torch.cuda.is_available():
        return "nccl"
    raise UnavailableBackendError(
        f"refit: the collective uses {name!r}, which does not work here (NCCL built in: "
        f"{dist.is_nccl_available()}, GPU: {torch.cuda.is_available()}); choose another transport"
    )


def _device(backend: str) -> str:
    return "cuda" if backend == "nccl" else "cpu"


def _serve_store(settings: TransportSettings) -> Any:
    # The store itself would listen on every interface.
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((settings.host, 0))
        listener.listen()
        port = listener.getsockname()[1]
    except OSError as error:
        listener.close()
        raise RefitError(
            f"refit: {settings.host} cannot be bound: {error.strerror}; set host to this machine's address"
        ) from error
    return dist.TCPStore(
        settings.host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=settings.timeout_s),
        master_listen_fd=listener.detach(),
    )


def _keys_of(store: Any, name: str) -> Any:
    # Keeps a member that comes late, to a port that another refit has by now, out of that one's group. It is
    # no secret: the store lists its keys to whoever asks.
    return dist.PrefixStore(f"refit-{name}", store)


def _join(backend: str, keys: Any, rank: int, size: int, settings: TransportSettings) -> Any:
    timeout = timedelta(seconds=settings.timeout_s)
    try:
        if backend == "nccl":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            return dist.ProcessGroupNCCL(keys, rank, size, nccl)
        # Torch's stubs do not know the options of gloo.
        gloo = vars(dist.ProcessGroupGloo)["_Options"]()
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=settings.host)]
        gloo._timeout = timeout
        return dist.ProcessGroupGloo(keys, rank, size, gloo)
    except RuntimeError as error:
        raise RefitError(
            f"refit: member {rank} of a collective of {size} found not all others within "
            f"{settings.timeout_s:g} s; do they run, and reach each other?"
        ) from error


def _broadcast(group: Any, buffer: torch.Tensor, settings: TransportSettings, other: str) -> None:
    if not buffer.numel():
        return
    options = dist.BroadcastOptions()
    options.rootRank = 0
    try:
        group.broadcast([buffer], options).wait(timedelta(seconds=settings.timeout_s))
        if buffer.is_cuda:
            torch.cuda.synchronize(buffer.device)
    except RuntimeError as error:
        raise RefitError(
            f"refit: a broadcast of {buffer.numel()} bytes with {other} failed or took more than "
            f"{settings.timeout_s:g} s: {(str(error).splitlines() or [''])[0]}"
        ) from error


def _leave(group: Any) -> None:
    if group is not None:
        # A group whose other side is gone cannot be left in order.
        with contextlib.suppress(RuntimeError):
            group.abort()
