"""Adapters attached to a model: what is trained, merged, kept as the reference."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .adapter_layers import Adapter
from .adapter_map import AdapterMap, parameter_name
from .errors import UnsupportedModelError
from .hf_config import ModelShape
from .lora import SITES, LoraSettings
from .placement import Placement
from .settings import PolicySettings

# Of a pair, in their order.
PARTS = ("lora_A", "lora_B")


def own_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters of a model by megatron's names, those of adapters left out."""
    return ((name, weight) for name, weight in model.named_parameters() if ".adapter." not in name)


def _add_adapter(linear: Any, inputs: tuple[Any, ...], output: Any) -> Any:
    added = linear.adapter(inputs[0])
    return output if added is None else (output[0] + added, *output[1:])


class Adapters:
    """The adapters of one model, attached when this is made; the model's own weights are frozen.

    What is asked for here is asked for on all ranks, which have parts of the model.

    Args:
        model: megatron's model, or this rank's part of it, its weights loaded.
        shape: of the whole model.
        settings: of the adapters.
        seed: of the initial A; a projection's values depend on it and on the projection's name only.
        placement: this process's groups; by default a world of its own.

    Raises:
        UnsupportedModelError: a layer lacks a linear that the targets name.
    """

    @classmethod
    def on(
        cls, model: Any, shape: ModelShape, settings: PolicySettings, placement: Placement
    ) -> Adapters | None:
        """The adapters that a policy's settings ask for, if they do."""
        if settings.lora is None:
            return None
        return cls(model, shape, settings.lora, settings.seed, placement)

    def __init__(
        self,
        model: Any,
        shape: ModelShape,
        settings: LoraSettings,
        seed: int,
        placement: Placement | None = None,
    ) -> None:
        self.settings = settings
        placement = placement or Placement()
        # By their place in this part of the model.
        self._adapters: dict[tuple[int, str], Adapter] = {}
        self._first = placement.pipeline.rank * (shape.layers // placement.pipeline.size)
        model.requires_grad_(False)
        for number, layer in enumerate(model.decoder.layers):
            for site in SITES:
                if not set(site.projections) & set(settings.targets):
                    continue
                try:
                    linear: Any = layer.get_submodule(site.linear)
                except AttributeError as error:
                    raise UnsupportedModelError(
                        f"layer {number} of this {shape.model_type} model has no {site.linear}, which "
                        f"adapters on {', '.join(site.projections)} need; leave these out of lora.targets"
                    ) from error
                linear.adapter = Adapter(site, shape, settings, placement, linear.weight)
                linear.register_forward_hook(_add_adapter)
                self._adapters[number, site.linear] = linear.adapter
        dtype = next(tensor.dtype for _, tensor in self._local())
        #: The table of the adapters' tensors, for optimizer state and checkpoints
        self.map = AdapterMap(shape, settings, dtype, placement)
        for (number, _), adapter in self._adapters.items():
            children: Iterable[tuple[str, Any]] = adapter.named_children()
            for projection, pair in children:
                name = adapter.site.hf_name(self._first + number, projection)
                pair.draw(torch.Generator().manual_seed(_seed_of(seed, name)))

    def _local(self, *, frozen: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's tensors by megatron's names: those that are trained, or the reference's."""
        for (number, linear), adapter in self._adapters.items():
            pairs = adapter.frozen if frozen else adapter.pairs()
            for projection, pair in pairs.items():
                for part, tensor in zip(PARTS, pair, strict=True):
                    yield parameter_name(number, linear, projection, part), tensor.detach()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The trained tensors by saved name (``{projection}.lora_A.weight``), whole; to be read only."""
        return dict(self.map.gather(self._local()))

    def stage_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Of :meth:`tensors`, those that this pipeline stage saves."""
        return self.map.gather_stage(self._local())

    @torch.no_grad()
    def fill(self, read: Callable[[str], torch.Tensor]) -> None:
        """Take other values for the trained tensors, read by saved name; without collectives."""
        self.map.fill(dict(self._local()), read, "the saved adapters")

    @torch.no_grad()
    def merged(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The given base tensors (Hugging Face names), adapters added in float32, in the base's type."""
        local = dict(self._local())
        for name, weight in weights:
            names = [f"{name.removesuffix('.weight')}.{part}.weight" for part in PARTS]
            if not all(part in self.map.specs for part in names):
                yield name, weight
                continue
            down, up = (self.map.whole(part, local).float() for part in names)
            added = (up @ down).mul_(self.settings.scale)
            yield name, added.add_(weight).to(weight.dtype)

    @contextmanager
    def reference(self) -> Generator[None]:
        """Within the scope the model computes with the reference's adapters, by default with none."""
        for adapter in self._adapters.values():
            adapter.uses_frozen = True
        try:
            yield
        finally:
            for adapter in self._adapters.values():
                adapter.uses_frozen = False

    def keep_reference(self) -> None:
        """Freeze the present adapters as the reference's: the base itself as long as they add nothing."""
        tensors = self.tensors()
        adds = any(bool(tensor.any()) for name, tensor in tensors.items() if ".lora_B." in name)
        self.set_reference(tensors.__getitem__ if adds else None)

    def stage_reference(self) -> Iterator[tuple[str, torch.Tensor]] | None:
        """The reference's adapters as :meth:`stage_tensors`; None where the reference is the base."""
        if not any(adapter.frozen for adapter in self._adapters.values()):
            return None
        return self.map.gather_stage(self._local(frozen=True))

    def set_reference(self, read: Callable[[str], torch.Tensor] | None) -> None:
        """Take these adapters, read by saved name, as the reference's; None means the base."""
        for (number, _), adapter in self._adapters.items():
            adapter.frozen = {}
            if read is None:
                continue
            for projection, (trained, _) in adapter.pairs().items():
                name = adapter.site.hf_name(self._first + number, projection)
                down, up = (
                    self.map.cut(f"{name}.{part}.weight", read).to(trained, copy=True) for part in PARTS
                )
                adapter.frozen[projection] = down, up


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}\0{name}".encode()).digest()[:8], "big") >> 1
