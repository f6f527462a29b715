"""What one policy is made of in this process: model, optimizer, random stream, reference, their tables."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from . import cpu_adapter, runtime
from .adapters import Adapters, own_weights
from .agreement import agreed
from .disposal import forget_groups
from .errors import RuntimeStateError
from .fit import fitting_shape
from .mapping import WeightMap
from .model import PolicyModel, build_model, load_weights
from .optimizer import PolicyOptimizer, wrap_for_training
from .refusals import alike
from .schedule import Schedule
from .settings import OptimizerSettings, PolicySettings, Recompute
from .sharding import TensorTable, WeightShards
from .tensor_files import digest


class PolicyParts:
    """The parts of a policy, built from a model directory. What several ranks do together, all must call.

    Args:
        model_directory: in Hugging Face format.
        settings: how the policy computes.
        optimizer: how it learns.

    Attributes:
        placement: this process's groups.
        shape: of the model.
        model: megatron's, as this rank holds it.
        shards: how the model's own weights lie over the ranks.
        adapters: what is trained in place of the weights, if anything is.
        table: how what is trained lies over the ranks.
        optimizer: of what is trained.
        schedule: of the model.
        random: the stream that loss functions draw from.

    Raises:
        ModelDirectoryError, UnsupportedModelError, RuntimeStateError: as ``MegatronPolicy`` does.
    """

    def __init__(self, model_directory: Path, settings: PolicySettings, optimizer: OptimizerSettings) -> None:
        self.settings = settings
        self.shape = shape = fitting_shape(model_directory, settings, cuda=not cpu_adapter.active())
        weight_map = WeightMap(shape)
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        self.placement = placement = runtime.acquire(settings.layout)
        try:
            self.model = self._built(settings.recompute)
            self.shards = WeightShards(weight_map, own_weights(self.model), placement)
            with agreed(placement.world):
                load_weights(self.model, weight_map, self.shards, model_directory)
                self.adapters = Adapters.on(self.model, shape, settings, placement)
            self.table: TensorTable = self.shards if self.adapters is None else self.adapters.map
            self.wrapped = wrap_for_training(self.model)
            self.optimizer = PolicyOptimizer(self.wrapped, optimizer, placement)
            self.schedule = self._scheduled(self.model)
            # Data-parallel ranks have other rows, so they draw other numbers.
            self.random = runtime.RandomStream((settings.seed + placement.data.rank) % 2**63)
        except BaseException:
            runtime.release()
            raise
        self._reference: PolicyModel | None = None
        self._base_digest: str | None = None
        self._torn_by = ""

    @property
    def count(self) -> int:
        """Number of weights; tied embeddings count once."""
        trained = () if self.adapters is None else self.adapters.map.specs.values()
        return sum(math.prod(spec.shape) for spec in (*self.shards.specs, *trained))

    @property
    def torn_by(self) -> str:
        """What failed while it changed weights or optimizer, so that they may no longer fit; or nothing."""
        return self._torn_by

    @contextmanager
    def changing(self, by: str) -> Generator[None]:
        """Around a change of weights or optimizer: if it fails, nothing but a load makes the policy whole."""
        self._torn_by = by
        yield
        self._torn_by = ""

    def reset_optimizer(self, settings: OptimizerSettings) -> None:
        """A new optimizer, without moments."""
        self.optimizer = PolicyOptimizer(self.wrapped, settings, self.placement)

    @contextmanager
    def reference(self) -> Generator[Schedule]:
        """The schedule of the reference.

        Raises:
            RuntimeStateError: none is kept.
        """
        if self.adapters is not None:
            with self.adapters.reference():
                yield self.schedule
            return
        if self._reference is None:
            with alike():
                raise RuntimeStateError(
                    "no reference weights are kept; call keep_reference() before training"
                )
        yield self._scheduled(self._reference)

    def keep_reference(self) -> None:
        """Freeze what is trained as the reference."""
        if self.adapters is not None:
            self.adapters.keep_reference()
            return
        reference = self._built()
        own = dict(own_weights(self.model))
        with torch.no_grad():
            for name, weight in reference.named_parameters():
                weight.copy_(own[name])
        self._reference = reference.requires_grad_(False)

    def set_reference(self, read: Callable[[str], torch.Tensor] | None) -> None:
        """Take another reference, read by saved name; None is none, or with adapters the base."""
        if self.adapters is not None:
            with agreed(self.placement.world):
                self.adapters.set_reference(read)
            return
        self._reference = None
        if read is not None:
            reference = self._built()
            with agreed(self.placement.world):
                self._fill(reference, read)
            self._reference = reference.requires_grad_(False)

    @property
    def reference_weights(self) -> Iterator[tuple[str, torch.Tensor]] | None:
        """Those of the reference's own model, by megatron's names, if it has one."""
        return None if self._reference is None else own_weights(self._reference)

    def set_trained(self, read: Callable[[str], torch.Tensor]) -> None:
        """Take other values for what is trained, read by saved name; without collectives."""
        if self.adapters is None:
            self._fill(self.model, read)
        else:
            self.adapters.fill(read)

    def own_hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's own weights by Hugging Face's names, whole, without adapters."""
        return self.shards.gather((name, weight.detach()) for name, weight in own_weights(self.model))

    def hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As :meth:`own_hf_weights`, with adapters merged into what they belong to."""
        weights = self.own_hf_weights()
        return weights if self.adapters is None else self.adapters.merged(weights)

    @property
    def base_digest(self) -> str | None:
        """Of the weights under the adapters, where there are any."""
        if self.adapters is not None and self._base_digest is None:
            self._base_digest = digest(self.own_hf_weights())
        return self._base_digest

    def release(self) -> None:
        """Let go of memory and of what was set up for the process; the parts are gone afterwards."""
        # Whoever still holds this, as a stream of weights does, must not hold the groups and their sockets.
        forget_groups(self.wrapped)
        if self._reference is not None:
            forget_groups(self._reference)
        self.__dict__.clear()
        if torch.cuda.is_available():
            # Gradient hooks and parameters refer to each other: only the collector frees them now.
            gc.collect()
            torch.cuda.empty_cache()
        runtime.release()

    def _built(self, recompute: Recompute = "none") -> PolicyModel:
        """A model as this policy's, its weights uninitialised."""
        return build_model(self.shape, self.dtype, recompute, self.placement)

    def _scheduled(self, model: PolicyModel) -> Schedule:
        shape = self.shape
        return Schedule(model, self.settings, shape.vocabulary, self.placement, shape.max_positions)

    def _fill(self, model: PolicyModel, read: Callable[[str], torch.Tensor]) -> None:
        self.shards.fill(dict(own_weights(model)), read, "the saved weights")
