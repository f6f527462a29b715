"""Where the ranks of a world meet: a store at rank 0, on loopback where all ranks are on one machine."""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import RendezvousError

LOOPBACK = "127.0.0.1"

_LOOK_EVERY_S = 0.02
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Address of the store that the ranks meet at.

    Attributes:
        host: of rank 0.
        port: of its store.
    """

    host: str
    port: int


def serve(host: str, timeout_s: float) -> tuple[Any, Rendezvous]:
    """Open the store at ``host``, on any free port; it lives as long as the first result is kept.

    Raises:
        RendezvousError: the address cannot be bound.
    """
    # Torch's own listener would be reachable on every interface.
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen()
    except OSError as error:
        listener.close()
        raise RendezvousError(
            f"rendezvous: {host} cannot be bound: {error.strerror}; it is the address that Ray gives rank "
            "0's node, check the node's network"
        ) from error
    port = int(listener.getsockname()[1])
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )
    return store, Rendezvous(host, port)


def join(
    rendezvous: Rendezvous,
    rank: int,
    world: int,
    *,
    store: Any = None,
    timeout_s: float,
    collective_timeout_s: float,
) -> None:
    """Become one rank of torch.distributed's world; for a process that belongs to the rank alone.

    Args:
        rendezvous: where.
        rank: of this process.
        world: number of ranks.
        store: the one that this process serves, if it does.
        timeout_s: how long to wait for the other ranks.
        collective_timeout_s: how long any later collective waits for them.

    Raises:
        RendezvousError: names the ranks that did not come in time.
    """
    # It imports megatron, which the driver has no use for.
    from .. import cpu_adapter

    deadline = time.monotonic() + timeout_s
    if rendezvous.host == LOOPBACK and sys.platform == "linux":
        for name in _INTERFACES:
            os.environ.setdefault(name, "lo")
    limit = timedelta(seconds=timeout_s)
    if store is None:
        try:
            store = dist.TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=limit)
        except RuntimeError as error:
            raise RendezvousError(
                f"rendezvous: rank 0's store at {rendezvous.host}:{rendezvous.port} does not answer rank "
                f"{rank} within {timeout_s:g} s; see whether rank 0 runs and no firewall lies between",
                (0,),
            ) from error
    store.set(_key(rank), b"here")
    missing = [other for other in range(world) if other != rank]
    while missing := [other for other in missing if not store.check([_key(other)])]:
        if time.monotonic() >= deadline:
            names = ", ".join(map(str, missing))
            raise RendezvousError(
                f"rendezvous: rank {names} of {world} did not come to {rendezvous.host}:{rendezvous.port} "
                f"within {timeout_s:g} s; see why it did not start, or raise rendezvous_timeout_s",
                tuple(missing),
            )
        time.sleep(_LOOK_EVERY_S)
    dist.init_process_group(
        "gloo" if cpu_adapter.active() else "cpu:gloo,cuda:nccl",
        store=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=collective_timeout_s),
    )


def leave() -> None:
    """Undo :func:`join`; idempotent."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _key(rank: int) -> str:
    return f"arrived/{rank}"
