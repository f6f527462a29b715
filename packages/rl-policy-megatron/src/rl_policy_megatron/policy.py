"""The policy: one megatron-core model that scores, learns, and is saved, in one process or over several."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from . import cpu_adapter, runtime
from .adapters import Adapters, own_weights
from .agreement import agreed
from .answers import LossFunction
from .checkpoint import ADAPTERS, REFERENCE, WEIGHTS, Origin, SavedFile, read_checkpoint
from .checks import Rate, check, given
from .errors import RuntimeStateError
from .export import publish_together
from .hf_config import read_model_shape
from .mapping import WeightMap, WeightSpec
from .microbatch import Batch
from .model import PolicyModel, build_model, load_weights
from .optimizer import PolicyOptimizer, wrap_for_training
from .saver import PendingSave, Saver
from .schedule import Schedule
from .settings import OptimizerSettings, PolicySettings, Recompute
from .sharding import TensorTable, WeightShards
from .snapshot import Snapshot
from .tensor_files import digest
from .totals import Totals


class MegatronPolicy:
    """A language model trained with megatron-core, on this process's GPU or on the CPU.

    Several policies can live in one process. A policy is not safe for use from several threads.

    Where torch.distributed is initialised with several processes, the model lies over them as
    ``settings.layout`` says: each of them makes the policy and calls the same methods in the same
    order, each time with the same, whole batch. What a method returns is complete and the same on
    every rank. If a method fails on one rank, it raises on all: :class:`PeerError` on the others.

    Args:
        model_directory: in Hugging Face format: config.json and safetensors; ``llama``, ``qwen2``,
            ``qwen3`` and ``qwen3_moe``, with tied or untied embeddings.
        settings: how it computes.
        optimizer: how it learns.

    Raises:
        ModelDirectoryError: the directory is incomplete or contradicts itself.
        UnsupportedModelError: the model is of a type, or uses an option, that is not supported, or the
            layout cannot split it, or what the adapters belong to is missing.
        RuntimeStateError: the layout does not fit the number of processes.
    """

    def __init__(
        self,
        model_directory: Path | str,
        settings: PolicySettings | None = None,
        optimizer: OptimizerSettings | None = None,
    ) -> None:
        self.settings = given(settings, PolicySettings, "settings")
        optimizer = given(optimizer, OptimizerSettings, "optimizer")
        self.model_directory = Path(model_directory)
        shape = read_model_shape(self.model_directory)
        self._weight_map = WeightMap(shape)
        self._dtype: torch.dtype = getattr(torch, self.settings.dtype)
        self._closed = True
        self.settings.check_fit(shape)
        if shape.experts is not None:
            cpu_adapter.check_experts(self.settings.layout.tensor)
        self._placement = placement = runtime.acquire(self.settings.layout)
        try:
            self._model = self._built(self.settings.recompute)
            self._shards = WeightShards(self._weight_map, own_weights(self._model), placement)
            with agreed(placement.world):
                load_weights(self._model, self._weight_map, self._shards, self.model_directory)
                self._adapters = Adapters.on(self._model, shape, self.settings)
            self._trained_table: TensorTable = self._shards if self._adapters is None else self._adapters.map
            self._wrapped = wrap_for_training(self._model)
            self._optimizer = PolicyOptimizer(self._wrapped, optimizer, placement)
            self._schedule = self._scheduled(self._model)
            # Data-parallel ranks have other rows, so they draw other numbers.
            self._random = runtime.RandomStream((self.settings.seed + placement.data.rank) % 2**63)
        except BaseException:
            runtime.release()
            raise
        self._reference: PolicyModel | None = None
        self._saver = Saver(placement.world)
        self._base_digest: str | None = None
        self._closed = False

    @property
    def model(self) -> PolicyModel:
        """megatron's GPTModel, in evaluation mode between calls; an engine may generate with it."""
        self._require_open()
        return self._model

    @property
    def parameter_count(self) -> int:
        """Number of weights; tied embeddings count once."""
        self._require_open()
        trained = () if self._adapters is None else self._adapters.map.specs.values()
        return sum(math.prod(spec.shape) for spec in (*self._shards.specs, *trained))

    @property
    def vocab_size(self) -> int:
        """Number of real tokens; the model's own vocabulary may be padded beyond it."""
        return self._weight_map.shape.vocabulary

    @property
    def max_context(self) -> int:
        """Longest sequence, in tokens, that the model's positions were made for."""
        return self._weight_map.shape.max_positions

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """``[B, S]`` float32 log-probabilities, on the CPU, under the current weights and the temperature.

        Entry ``[b, i]`` scores token ``i`` of row ``b`` given the tokens before it; column 0 and
        padding are 0.

        Raises:
            BatchError: the batch breaks its contract.
        """
        self._require_open()
        return self._schedule.logprobs(batch)

    def reference_logprobs(self, batch: Batch) -> torch.Tensor:
        """As :meth:`logprobs`, under the weights that :meth:`keep_reference` froze.

        With adapters there is always a reference, at first the base itself; it shares the policy's weights.

        Raises:
            BatchError: the batch breaks its contract.
            RuntimeStateError: no reference is kept.
        """
        self._require_open()
        if self._adapters is not None:
            with self._adapters.reference():
                return self._schedule.logprobs(batch)
        if self._reference is None:
            raise RuntimeStateError("no reference weights are kept; call keep_reference() before training")
        return self._scheduled(self._reference).logprobs(batch)

    def keep_reference(self) -> None:
        """Freeze a copy of the current weights for :meth:`reference_logprobs`; replaces an earlier one.

        With adapters only these are copied, and not even they while they add nothing.
        """
        self._require_open()
        if self._adapters is not None:
            self._adapters.keep_reference()
            return
        reference = self._built()
        own = dict(own_weights(self._model))
        with torch.no_grad():
            for name, weight in reference.named_parameters():
                weight.copy_(own[name])
        self._reference = reference.requires_grad_(False)

    def topk_logits(self, batch: Batch, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The ``k`` most likely tokens at each place of :meth:`logprobs`, most likely first.

        Returns:
            ``[B, S, k]`` float32 logits on the CPU, tempered and normalised, which makes them
            log-probabilities over the whole vocabulary; and ``[B, S, k]`` int64 token ids. Both are 0 in
            column 0 and at padding.

        Raises:
            BatchError: the batch breaks its contract.
            LossError: ``k`` is out of range.
        """
        self._require_open()
        return self._schedule.topk(batch, k)

    def token_logits(self, batch: Batch) -> torch.Tensor:
        """``[B, S, V]`` float32 logits on the CPU, untempered; ``[b, i]`` predicts token ``i + 1``.

        Entries at padding are 0. Holds all logits at once: for comparisons, not for training.

        Raises:
            BatchError: the batch breaks its contract.
        """
        self._require_open()
        return self._schedule.token_logits(batch)

    def train(self, batch: Batch, loss_fn: LossFunction, *, learning_rate: float) -> dict[str, float]:
        """One optimizer update over the whole batch.

        Losses and gradients of micro-batches are added, because each loss is its share of the
        global loss. A batch that predicts no token changes nothing. Whatever happens, the mode, the
        random state of the process and the gradients are left as they were.

        Returns:
            The loss function's merged metrics, ``loss``, and ``grad_norm`` before clipping.

        Raises:
            BatchError: the batch breaks its contract.
            LossError: the loss function, or what it returned, breaks its contract.
            PeerError: the loss function failed on another rank.
            NonFiniteGradientError: the gradient is not finite; the weights were not changed.
        """
        self._require_open()
        check("learning_rate", learning_rate, Rate)
        with self._accumulated(batch, loss_fn) as totals:
            grad_norm = self._optimizer.step(learning_rate) if bool((batch.lengths > 1).any()) else 0.0
        return {**totals.numbers(), "loss": totals.loss, "grad_norm": grad_norm}

    def gradients(self, batch: Batch, loss_fn: LossFunction) -> dict[str, torch.Tensor]:
        """The float32 gradient that :meth:`train` would use, unclipped, by HF name, on the CPU.

        For comparisons: nothing is updated.

        Raises:
            BatchError: the batch breaks its contract.
            LossError: the loss function, or what it returned, breaks its contract.
        """
        self._require_open()
        with self._accumulated(batch, loss_fn):
            return self._optimizer.gradients(self._trained_table)

    def reset_optimizer(self, settings: OptimizerSettings) -> None:
        """Start the optimizer afresh, without moments, under new settings; weights stay."""
        self._require_open()
        self._optimizer = PolicyOptimizer(self._wrapped, settings, self._placement)

    def prepare_for_inference(self) -> None:
        """Give back the memory that training left cached, for an engine on the same device."""
        self._require_open()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def prepare_for_training(self) -> None:
        """Give back the memory that generation left cached, before training on the same device."""
        self.prepare_for_inference()

    def refit_spec(self) -> tuple[WeightSpec, ...]:
        """What :meth:`stream_weights` yields, in its order."""
        self._require_open()
        return self._shards.specs

    def stream_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """HF names and tensors, in the policy's type and on its device; a tied head is not repeated.

        Adapters are merged into what they belong to. Tensors may share memory with the model: read
        them before the next update, never write. Over several processes one tensor at a time is
        gathered, so every rank must iterate to the end.
        """
        weights = self._hf_weights(self.model)
        yield from weights if self._adapters is None else self._adapters.merged(weights)

    def export_hf(self, directory: Path | str) -> None:
        """Write a Hugging Face model directory: weights, config.json, and the source's tokenizer files.

        Of several ranks the first writes.

        Raises:
            CheckpointError: the directory exists and is not empty.
        """
        self._require_open()
        weights, world = self.stream_weights(), self._placement.world
        publish_together(Path(directory), self.model_directory, weights, self._dtype, world)

    def save(self, directory: Path | str) -> None:
        """Write weights, optimizer, reference and random state into an empty or new directory.

        What a killed save left in the directory is replaced. With adapters these are written in place
        of the weights, and a digest of the base.

        Raises:
            CheckpointError: the directory is not empty or cannot be written; or an earlier
                :meth:`save_async` failed and nobody was told yet.
        """
        self.save_async(directory).wait()

    def save_async(self, directory: Path | str) -> PendingSave:
        """As :meth:`save`, but only copy the state; a thread writes it while training goes on.

        What is saved is the state at this call. One save at a time: the next one, :meth:`load` and
        :meth:`shutdown` wait for it. Memory: one more copy of what is saved, until it is written.

        Raises:
            CheckpointError: the directory is not empty or cannot be made; or an earlier save failed
                and nobody was told yet.
        """
        self._require_open()
        optimizer = self._optimizer
        return self._saver.start(
            Path(directory), self._saved_files, self._origin(), optimizer.steps, optimizer.settings
        )

    def load(self, directory: Path | str) -> None:
        """Become what :meth:`save` wrote, optimizer settings and reference included.

        Raises:
            CheckpointError: incomplete, broken, or of another model or type, the policy being
                unchanged; or an earlier :meth:`save_async` failed and nobody was told yet.
        """
        self._require_open()
        self._saver.settle()
        adapters, origin = self._adapters, self._origin()
        with agreed(self._placement.world):
            saved = read_checkpoint(Path(directory), origin)
            weights = {spec.name: spec for spec in self.refit_spec()}
            saved.check(weights, None if adapters is None else adapters.map.specs)
        reference = saved.groups.get(REFERENCE)
        self.reset_optimizer(saved.optimizer_settings)
        with agreed(self._placement.world):
            if adapters is None:
                self._fill(self._model, saved.groups[WEIGHTS].read)
            else:
                adapters.fill(saved.groups[ADAPTERS].read)
                adapters.set_reference(None if reference is None else reference.read)
            self._snapshot().continue_from(saved)
        self._reference = None
        if adapters is None and reference is not None:
            self._set_reference(reference.read)

    def shutdown(self) -> None:
        """Release memory and, with the last policy, what was set up for the process; idempotent.

        Raises:
            CheckpointError: the last :meth:`save_async` failed and nobody was told; all is released.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._saver.close()
        finally:
            self._release()

    def _release(self) -> None:
        del self._model, self._wrapped, self._optimizer, self._schedule
        # These hold on to the groups, and with them to sockets.
        del self._placement, self._shards, self._trained_table
        self._reference = None
        if torch.cuda.is_available():
            # Gradient hooks and parameters refer to each other: only the collector frees them now.
            gc.collect()
            torch.cuda.empty_cache()
        runtime.release()

    def __enter__(self) -> MegatronPolicy:
        return self

    def __exit__(self, *_: Any) -> None:
        self.shutdown()

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeStateError("this policy was shut down; make a new one")

    @contextmanager
    def _accumulated(self, batch: Batch, loss_fn: LossFunction) -> Generator[Totals]:
        """The whole batch's gradient is in the buffers, which are empty otherwise, within the scope."""
        try:
            with self._random.scope():
                totals = self._schedule.accumulate(self._wrapped, batch, loss_fn)
            yield totals
        finally:
            self._optimizer.zero_grad()

    def _origin(self) -> Origin:
        """What this policy's checkpoints belong to."""
        if self._adapters is not None and self._base_digest is None:
            self._base_digest = digest(self._hf_weights(self._model))
        return Origin(self._weight_map.shape, self.settings.dtype, self.settings.lora, self._base_digest)

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            self._placement, self._shards, self._trained_table, self._optimizer, self._random, self._adapters
        )

    def _saved_files(self) -> list[SavedFile]:
        reference = None if self._reference is None else own_weights(self._reference)
        return self._snapshot().files(own_weights(self._model), reference)

    def _set_reference(self, read: Callable[[str], torch.Tensor]) -> None:
        reference = self._built()
        with agreed(self._placement.world):
            self._fill(reference, read)
        self._reference = reference.requires_grad_(False)

    def _hf_weights(self, model: PolicyModel) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's own weights, without adapters."""
        return self._shards.gather((name, weight.detach()) for name, weight in own_weights(model))

    def _fill(self, model: PolicyModel, read: Callable[[str], torch.Tensor]) -> None:
        self._shards.fill(dict(own_weights(model)), read, "the saved weights")

    def _built(self, recompute: Recompute = "none") -> PolicyModel:
        """A model as this policy's, its weights uninitialised."""
        return build_model(self._weight_map.shape, self._dtype, recompute, self._placement)

    def _scheduled(self, model: PolicyModel) -> Schedule:
        return Schedule(model, self.settings, self.vocab_size, self._placement)
