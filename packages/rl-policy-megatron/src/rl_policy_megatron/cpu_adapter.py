"""What megatron-core needs to run without CUDA: the only place that changes anything outside this package.

megatron-core takes a CUDA device for granted in six ways, and each is answered by the narrowest
means that exists:

1. It asks ``torch.cuda`` for the current device, to put buffers there, and to synchronise; experts
   copy their token counts on a stream of their own. Without CUDA these functions can only raise;
   while the adapter is installed they name the CPU, wait for nothing and give a stream that is
   always empty, so no call that worked before behaves differently.
2. It writes the literal ``device="cuda"`` in schedules and optimizers, and calls ``Tensor.cuda`` on
   the weights that two pipeline stages share. A torch function mode, the mechanism of
   ``torch.set_default_device``, turns both into the CPU inside :func:`device_scope`.
3. Its mixed-precision optimizer recognises parameters by type names such as
   ``torch.cuda.BFloat16Tensor``. The same mode answers with that spelling.
4. It keeps random states of CUDA devices: sequence parallelism switches to one of them around
   layers that may drop out, activation checkpointing saves and restores them. Nothing here drops
   out, so on the CPU there is one state, torch's own, and nothing to switch to.
5. It hands the token counts of experts to torch.distributed as numbers, but only when it has copied
   them from a CUDA device. Those that lie on the CPU already become numbers here.
6. It writes gated activations and rotary embeddings out in many operations, and has fused ones for CUDA
   only. ``MLP.forward`` and attention's ``apply_rotary_pos_emb`` are answered by :mod:`.cpu_layers`:
   the same numbers up to rounding, in fewer passes through memory.

A model's forward pass needs only the first, and gains by the last, so generation runs without any scope.
With CUDA present nothing here does anything. :func:`install` counts its callers, and the last
:func:`uninstall` puts the original functions back.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .cpu_layers import mlp_forward, rotary
from .mcore import MLP, attention_layers, random_states, token_dispatcher

_CPU = torch.device("cpu")
_installs = 0
_originals: list[tuple[Any, str, Any]] = []


def active() -> bool:
    """Whether this machine needs the adapter."""
    return not torch.cuda.is_available()


def device() -> torch.device:
    """Where models live: this process's CUDA device, or the CPU."""
    return _CPU if active() else torch.device("cuda", torch.cuda.current_device())


class _HostStream:
    """A queue of work that is done when it is given: what a CPU has in place of a CUDA stream."""

    def wait_stream(self, stream: object) -> None:
        """Nothing to wait for."""

    def record_event(self) -> _HostStream:
        """An event that has happened: it is only ever synchronised with."""
        return self

    def synchronize(self) -> None:
        """Nothing to wait for."""


class _HostRandomStates:
    """The CPU's one random state, in place of megatron's table of CUDA states by name."""

    def is_initialized(self) -> bool:
        return True

    def get_states(self) -> dict[str, torch.Tensor]:
        return {}

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """No states but torch's own, which others keep."""

    @contextmanager
    def fork(self, name: str = "") -> Generator[None]:
        """Within the scope, torch's own state, as outside."""
        yield


def _host_random_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_host_random_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _host_counts(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def install() -> None:
    """Answer questions about CUDA devices for the CPU; no effect where CUDA exists."""
    global _installs
    if not active():
        return
    _installs += 1
    if _installs > 1:
        return
    answers: tuple[tuple[Any, str, Any], ...] = (
        (torch.cuda, "current_device", lambda: _CPU),
        (torch.cuda, "synchronize", lambda device=None: None),
        (torch.cuda, "Stream", _HostStream),
        (torch.cuda, "current_stream", lambda device=None: _HostStream()),
        (torch.cuda, "stream", lambda stream: nullcontext()),
        (random_states, "_CUDA_RNG_STATE_TRACKER", _HostRandomStates()),
        (random_states, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True),
        (random_states, "_get_cuda_rng_state", _host_random_state),
        (random_states, "_set_cuda_rng_state", _set_host_random_state),
        (token_dispatcher, "maybe_move_tensor_to_cpu", _host_counts),
        (MLP, "forward", mlp_forward(MLP.forward)),
        (attention_layers, "apply_rotary_pos_emb", rotary(attention_layers.apply_rotary_pos_emb)),
    )
    for owner, name, answer in answers:
        _originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, answer)


def uninstall() -> None:
    """Undo one :func:`install`."""
    global _installs
    if _installs == 0:
        return
    _installs -= 1
    if _installs == 0:
        for owner, name, original in _originals:
            setattr(owner, name, original)
        _originals.clear()


class _CudaMeansCpu(TorchFunctionMode):
    """Carries out on the CPU what is asked of CUDA through torch's functions."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return str(func(*args)).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.cuda:
            return args[0]
        if kwargs and _names_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        return func(*args, **(kwargs or {}))


def _names_cuda(device: Any) -> bool:
    # A bare number is an index of CUDA devices.
    return device is not None and (isinstance(device, int) or torch.device(device).type == "cuda")


@contextmanager
def device_scope() -> Generator[None]:
    """Around megatron's schedules, gradient buffers and optimizers; no effect where CUDA exists."""
    if not active():
        yield
        return
    # A loss function may score with another policy, so a scope can begin where one was suspended.
    with torch._C._EnableTorchFunction(), _CudaMeansCpu():
        yield


@contextmanager
def outside_device_scope() -> Generator[None]:
    """Around the model's own arithmetic within a :func:`device_scope`, which it need not pay for."""
    with torch._C.DisableTorchFunction() if active() else nullcontext():
        yield
