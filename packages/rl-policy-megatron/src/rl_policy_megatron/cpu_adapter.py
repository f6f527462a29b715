"""What megatron-core needs to run without CUDA: the only place that changes anything outside this package.

megatron-core takes a CUDA device for granted in three ways, and each is answered by the narrowest
means that exists:

1. It asks ``torch.cuda`` for the current device, to put buffers there, and to synchronise; experts
   copy their token counts on a stream of their own. Without CUDA these functions can only raise;
   while the adapter is installed they name the CPU, wait for nothing and give a stream that is
   always empty, so no call that worked before behaves differently.
2. It writes the literal ``device="cuda"`` in schedules and optimizers. A torch function mode, the
   mechanism of ``torch.set_default_device``, turns it into the CPU inside :func:`device_scope`.
3. Its mixed-precision optimizer recognises parameters by type names such as
   ``torch.cuda.BFloat16Tensor``. The same mode answers with that spelling.

A model's forward pass needs only the first, so generation runs without any scope. With CUDA present
nothing here does anything. :func:`install` counts its callers, and the last :func:`uninstall` puts
the original functions back.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_installs = 0
_originals: dict[str, Callable[..., Any]] = {}


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


def install() -> None:
    """Answer ``torch.cuda``'s device questions for the CPU; no effect where CUDA exists."""
    global _installs
    if not active():
        return
    _installs += 1
    if _installs > 1:
        return
    answers: dict[str, Callable[..., Any]] = {
        "current_device": lambda: _CPU,
        "synchronize": lambda device=None: None,
        "Stream": _HostStream,
        "current_stream": lambda device=None: _HostStream(),
        "stream": lambda stream: nullcontext(),
    }
    for name, answer in answers.items():
        _originals[name] = getattr(torch.cuda, name)
        setattr(torch.cuda, name, answer)


def uninstall() -> None:
    """Undo one :func:`install`."""
    global _installs
    if _installs == 0:
        return
    _installs -= 1
    if _installs == 0:
        for name, original in _originals.items():
            setattr(torch.cuda, name, original)
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
