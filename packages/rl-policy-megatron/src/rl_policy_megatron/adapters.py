"""Adapters attached to a model: what is trained, merged, kept as the reference."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .errors import UnsupportedModelError
from .hf_config import ModelShape
from .lora import SITES, Adapter, AdapterMap, LoraSettings, Pair
from .settings import PolicySettings


def own_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters of a model by megatron's names, those of adapters left out."""
    return ((name, weight) for name, weight in model.named_parameters() if ".adapter." not in name)


def _add_adapter(linear: Any, inputs: tuple[Any, ...], output: Any) -> Any:
    added = linear.adapter(inputs[0])
    return output if added is None else (output[0] + added, *output[1:])


class Adapters:
    """The adapters of one model, attached when this is made; the model's own weights are frozen.

    Args:
        model: megatron's model, whole in this process, its weights loaded.
        shape: of the model.
        settings: of the adapters.
        seed: of the initial A; a projection's values depend on it and on the projection's name only.

    Raises:
        UnsupportedModelError: a layer lacks a linear that the targets name.
    """

    @classmethod
    def on(cls, model: Any, shape: ModelShape, settings: PolicySettings) -> Adapters | None:
        """The adapters that a policy's settings ask for, if they do."""
        return None if settings.lora is None else cls(model, shape, settings.lora, settings.seed)

    def __init__(self, model: Any, shape: ModelShape, settings: LoraSettings, seed: int) -> None:
        self.settings = settings
        self._shape = shape
        self._adapters: dict[tuple[int, str], Adapter] = {}
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
                linear.adapter = Adapter(site, shape, settings, linear.weight)
                linear.register_forward_hook(_add_adapter)
                self._adapters[number, site.linear] = linear.adapter
        for name, pair in self._pairs():
            pair.draw(torch.Generator().manual_seed(_seed_of(seed, name)))

    def _pairs(self) -> Iterator[tuple[str, Pair]]:
        """The pairs that are trained, by the Hugging Face name of their projection."""
        for (number, _), adapter in self._adapters.items():
            children: Iterable[tuple[str, Any]] = adapter.named_children()
            for projection, pair in children:
                yield adapter.site.hf_name(number, projection), pair

    @property
    def map(self) -> AdapterMap:
        """The table of the adapters' tensors, for optimizer state and checkpoints."""
        return AdapterMap(self._shape, self.settings, next(pair.lora_A.dtype for _, pair in self._pairs()))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The trained tensors themselves, by saved name (``{projection}.lora_A.weight``)."""
        return {
            f"{name}.{part}.weight": getattr(pair, part).detach()
            for name, pair in self._pairs()
            for part in ("lora_A", "lora_B")
        }

    @torch.no_grad()
    def fill(self, read: Callable[[str], torch.Tensor]) -> None:
        """Take other values for the trained tensors, read by saved name."""
        for name, tensor in self.tensors().items():
            tensor.copy_(read(name))

    @torch.no_grad()
    def merged(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The given base tensors (Hugging Face names), adapters added in float32, in the base's type."""
        pairs = {f"{name}.weight": pair for name, pair in self._pairs()}
        for name, weight in weights:
            pair = pairs.get(name)
            if pair is None:
                yield name, weight
                continue
            added = (pair.lora_B.float() @ pair.lora_A.float()).mul_(self.settings.scale)
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

    def reference_tensors(self) -> dict[str, torch.Tensor] | None:
        """The reference's adapters, named as :meth:`tensors`; None where it is the base."""
        found = {
            f"{adapter.site.hf_name(number, projection)}.{part}.weight": tensor
            for (number, _), adapter in self._adapters.items()
            for projection, pair in adapter.frozen.items()
            for part, tensor in zip(("lora_A", "lora_B"), pair, strict=True)
        }
        return found or None

    def set_reference(self, read: Callable[[str], torch.Tensor] | None) -> None:
        """Take these adapters, read by saved name, as the reference's; None means the base."""
        for (number, _), adapter in self._adapters.items():
            adapter.frozen = {}
            if read is None:
                continue
            for projection, (trained, _) in adapter.pairs().items():
                name = adapter.site.hf_name(number, projection)
                down, up = (
                    read(f"{name}.{part}.weight").to(trained, copy=True) for part in ("lora_A", "lora_B")
                )
                adapter.frozen[projection] = down, up


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}\0{name}".encode()).digest()[:8], "big") >> 1
