"""The process-wide state that megatron-core needs, shared by all policies of a process.

torch.distributed and megatron's parallel groups exist once per process. The first policy joins what
is there and makes what is not; the last one to be released takes down exactly what was made here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from . import cpu_adapter
from .layout import ParallelLayout
from .mcore import RotaryEmbedding, parallel_state, random_states
from .placement import Placement
from .quiet import quiet_megatron

# A peer that died is noticed at once; this bounds the wait for one that is alive and never comes.
COLLECTIVE_MINUTES = 30

_RANDOM_STATE = "model-parallel-rng"

_holders = 0
_made_process_group = False
_made_parallel_groups = False


def acquire(layout: ParallelLayout | None = None) -> Placement:
    """Make the process ready for one more policy; pair with :func:`release`.

    Where torch.distributed is initialised, the policy lies over its processes, and each of them must
    make the same policy. Else this process is a world of its own.

    Returns:
        This process's groups.

    Raises:
        RuntimeStateError: the world does not fit the layout, or megatron's groups exist already and
            were made for another one.
    """
    global _holders, _made_process_group, _made_parallel_groups
    layout = layout or ParallelLayout()
    layout.data(dist.get_world_size() if dist.is_initialized() else 1)
    cpu_adapter.install()
    try:
        with quiet_megatron():
            if not dist.is_initialized():
                with _gloo_on_loopback():
                    _initialize_process_group()
                _made_process_group = True
            if not parallel_state.is_initialized():
                _initialize_parallel_groups(layout)
                _made_parallel_groups = True
            placement = Placement.current(layout)
    except BaseException:
        cpu_adapter.uninstall()
        if _holders == 0:
            _take_down()
        raise
    _holders += 1
    return placement


def release() -> None:
    """Undo one :func:`acquire`; the last one takes down what was made."""
    global _holders
    if _holders == 0:
        return
    _holders -= 1
    if _holders == 0:
        _take_down()
    cpu_adapter.uninstall()


def _initialize_process_group() -> None:
    # An in-process store: one process has nobody to meet, so no rendezvous port is opened.
    backend = "gloo" if cpu_adapter.active() else "cpu:gloo,cuda:nccl"
    hook = sys.excepthook
    try:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    finally:
        # Torch puts its rank before each line of every later trace, and never takes that back.
        sys.excepthook = hook


def _initialize_parallel_groups(layout: ParallelLayout) -> None:
    # Groups of several processes may span nodes: whoever joined the world chose its interface.
    with _gloo_on_loopback() if dist.get_world_size() == 1 else nullcontext():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.tensor,
            distributed_timeout_minutes=COLLECTIVE_MINUTES,
            create_gloo_process_groups=False,
        )
    if layout.sequence_parallel and not cpu_adapter.active():
        # megatron switches to this state around layers that may drop out; none does.
        states: Any = random_states.get_cuda_rng_tracker()
        if _RANDOM_STATE not in states.get_states():
            states.add(_RANDOM_STATE, 0)


def _take_down() -> None:
    global _made_process_group, _made_parallel_groups
    if _made_parallel_groups:
        groups = set(_parallel_groups())
        parallel_state.destroy_model_parallel()
        # It keeps the tables of 32 models, and with each a group whose threads wake a hundred times a second.
        getattr(RotaryEmbedding.forward, "cache_clear", _nothing)()
        # megatron forgets its groups without ending them, and with them their sockets and threads.
        for group in groups:
            if dist.is_initialized() and group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        _made_parallel_groups = False
    if _made_process_group:
        if dist.is_initialized():
            dist.destroy_process_group()
        _made_process_group = False


def _nothing() -> None:
    """For versions of megatron without that cache."""


def _parallel_groups() -> list[dist.ProcessGroup]:
    known: list[dist.ProcessGroup | None] = getattr(parallel_state, "_global_process_group_list", None) or []
    return [group for group in known if group is not None]


@contextmanager
def _gloo_on_loopback() -> Generator[None]:
    """gloo opens listening sockets even for one process; keep them off the network."""
    name = "GLOO_SOCKET_IFNAME"
    if name in os.environ or sys.platform != "linux":
        yield
        return
    os.environ[name] = "lo"
    try:
        yield
    finally:
        os.environ.pop(name, None)


class RandomStream:
    """A random state of its own, so that neither the policy nor its caller disturbs the other."""

    def __init__(self, seed: int) -> None:
        with self._keeping_outer_state():
            torch.manual_seed(seed)
            self._state = self._current()

    @contextmanager
    def scope(self) -> Generator[None]:
        """Within the scope torch draws from this stream; the outer state is back afterwards."""
        with self._keeping_outer_state():
            self._restore(self._state)
            try:
                yield
            finally:
                self._state = self._current()

    def state(self) -> dict[str, torch.Tensor]:
        """Generator states by device type, as byte tensors."""
        return dict(self._state)

    def set_state(self, state: dict[str, torch.Tensor]) -> None:
        """Continue from what :meth:`state` returned; states of absent devices are ignored."""
        self._state = {**self._state, **{name: value for name, value in state.items() if name in self._state}}

    @contextmanager
    def _keeping_outer_state(self) -> Generator[None]:
        outer = self._current()
        try:
            yield
        finally:
            self._restore(outer)

    @staticmethod
    def _current() -> dict[str, torch.Tensor]:
        state = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    @staticmethod
    def _restore(state: dict[str, torch.Tensor]) -> None:
        torch.set_rng_state(state["cpu"])
        if "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"])
