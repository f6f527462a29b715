"""The policy: one megatron-core model that scores, learns, and is saved, in one process or over several.

What it consists of is in :mod:`.parts`, how that gets to disk and back in :mod:`.persistence`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .answers import GRAD_NORM, LOSS, LossFunction
from .checks import LearningRate, check, checked_path, given
from .errors import RuntimeStateError
from .mapping import WeightSpec
from .microbatch import Batch
from .model import PolicyModel
from .parts import PolicyParts
from .persistence import Persistence
from .refusals import alike
from .saver import PendingSave
from .settings import OptimizerSettings, PolicySettings
from .totals import Totals


class MegatronPolicy:
    """A language model trained with megatron-core, on this process's GPU or on the CPU.

    Several policies can live in one process. A policy is not safe for use from several threads. A loss
    function may score with its own policy; what would change or save the policy is refused there.

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
        SettingsError: ``settings`` or ``optimizer`` is something else than its class.
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
        self.model_directory = checked_path("model_directory", model_directory)
        self._made: PolicyParts | None = None
        self._training = False
        parts = PolicyParts(self.model_directory, self.settings, optimizer)
        self._persistence = Persistence(parts, self.model_directory)
        self._made = parts
        self._shape = parts.shape

    @property
    def model(self) -> PolicyModel:
        """megatron's GPTModel, in evaluation mode between calls; an engine may generate with it."""
        return self._parts.model

    @property
    def parameter_count(self) -> int:
        """Number of weights; tied embeddings count once."""
        return self._parts.count

    @property
    def vocab_size(self) -> int:
        """Number of real tokens; the model's own vocabulary may be padded beyond it."""
        return self._shape.vocabulary

    @property
    def max_context(self) -> int:
        """Longest sequence, in tokens, that the model's positions were made for."""
        return self._shape.max_positions

    @property
    def updates(self) -> int:
        """Number of updates that the optimizer has made, those before a load included."""
        return self._parts.optimizer.steps

    @property
    def is_whole(self) -> bool:
        """Whether weights and optimizer are there and fit each other.

        Not after an update or a load failed half-way: such a policy only loads, and a whole checkpoint makes
        it whole again. One that was shut down never is.
        """
        return self._made is not None and not self._made.torn_by

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """``[B, S]`` float32 log-probabilities, on the CPU, under the current weights and the temperature.

        Entry ``[b, i]`` scores token ``i`` of row ``b`` given the tokens before it; column 0 and
        padding are 0.

        Raises:
            BatchError: the batch breaks its contract.
        """
        return self._parts.schedule.logprobs(batch)

    def reference_logprobs(self, batch: Batch) -> torch.Tensor:
        """As :meth:`logprobs`, under the weights that :meth:`keep_reference` froze.

        With adapters there is always a reference, at first the base itself; it shares the policy's weights.

        Raises:
            BatchError: the batch breaks its contract.
            RuntimeStateError: no reference is kept.
        """
        with self._parts.reference() as schedule:
            return schedule.logprobs(batch)

    def keep_reference(self) -> None:
        """Freeze a copy of the current weights for :meth:`reference_logprobs`; replaces an earlier one.

        With adapters only these are copied, and not even they while they add nothing.
        """
        self._parts.keep_reference()

    def topk_logits(self, batch: Batch, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The ``k`` most likely tokens at each place of :meth:`logprobs`, most likely first.

        Returns:
            ``[B, S, k]`` float32 logits on the CPU, tempered and normalised, which makes them
            log-probabilities over the whole vocabulary; and ``[B, S, k]`` int64 token ids. Both are 0 in
            column 0 and at padding.

        Raises:
            BatchError: the batch breaks its contract.
            LossError: ``k`` is no integer between 1 and :attr:`vocab_size`.
        """
        return self._parts.schedule.topk(batch, k)

    def token_logits(self, batch: Batch) -> torch.Tensor:
        """``[B, S, V]`` float32 logits on the CPU, untempered; ``[b, i]`` predicts token ``i + 1``.

        Entries at padding are 0. Holds all logits at once: for comparisons, not for training.

        Raises:
            BatchError: the batch breaks its contract.
        """
        return self._parts.schedule.token_logits(batch)

    def train(self, batch: Batch, loss_fn: LossFunction, *, learning_rate: float) -> dict[str, float]:
        """One optimizer update over the whole batch.

        Losses and gradients of micro-batches are added, because each loss is its share of the
        global loss. A batch that predicts no token changes nothing. Whatever happens, the mode, the
        random state of the process and the gradients are left as they were.

        Args:
            batch: all rows of the update.
            loss_fn: called once per micro-batch; none of its metrics may be named
                ``grad_norm``, and in place of one named ``loss`` the sum of the losses is reported.
            learning_rate: in [0, 1000).

        Returns:
            The loss function's merged metrics, ``loss``, and ``grad_norm`` before clipping.

        Raises:
            BatchError: the batch breaks its contract.
            LossError: the loss function, or what it returned, breaks its contract.
            PeerError: the loss function failed on another rank.
            SettingsError: the learning rate is none.
            NonFiniteGradientError: the gradient is not finite; the weights were not changed.
        """
        parts = self._parts
        with alike():
            check("learning_rate", learning_rate, LearningRate)
        with self._accumulated(batch, loss_fn) as totals:
            grad_norm = 0.0
            if bool((batch.lengths > 1).any()):
                grad_norm = parts.optimizer.prepare()
                with parts.changing("an update"):
                    parts.optimizer.step(learning_rate, grad_norm)
        return {**totals.numbers(), LOSS: totals.loss, GRAD_NORM: grad_norm}

    def gradients(self, batch: Batch, loss_fn: LossFunction) -> dict[str, torch.Tensor]:
        """The float32 gradient that :meth:`train` would use, unclipped, by HF name, on the CPU.

        For comparisons: nothing is updated.

        Raises:
            BatchError: the batch breaks its contract.
            LossError: the loss function, or what it returned, breaks its contract.
        """
        parts = self._parts
        with self._accumulated(batch, loss_fn):
            return parts.optimizer.gradients(parts.table)

    def reset_optimizer(self, settings: OptimizerSettings) -> None:
        """Start the optimizer afresh, without moments, under new settings; weights stay."""
        self._require_idle()
        parts = self._parts
        with alike():
            check("the optimizer's settings", settings, OptimizerSettings)
        parts.reset_optimizer(settings)

    def prepare_for_inference(self) -> None:
        """Give back the memory that training left cached, for an engine on the same device."""
        _ = self._parts
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def prepare_for_training(self) -> None:
        """Give back the memory that generation left cached, before training on the same device."""
        self.prepare_for_inference()

    def refit_spec(self) -> tuple[WeightSpec, ...]:
        """What :meth:`stream_weights` yields, in its order."""
        return self._parts.shards.specs

    def stream_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """HF names and tensors, in the policy's type and on its device; a tied head is not repeated.

        Adapters are merged into what they belong to. Tensors may share memory with the model: read
        them before the next update, never write. Over several processes one tensor at a time is
        gathered, so every rank must iterate to the end.
        """
        yield from self._parts.hf_weights()

    def export_hf(self, directory: Path | str) -> None:
        """Write a Hugging Face model directory: weights, config.json, and the source's tokenizer files.

        Of several ranks the first writes.

        Raises:
            CheckpointError: the directory exists and is not empty, or cannot be written.
        """
        _ = self._parts
        self._persistence.export(_directory(directory))

    def save(self, directory: Path | str, notes: Mapping[str, Any] | None = None) -> None:
        """Write weights, optimizer, reference and random state into an empty or new directory.

        What a killed save left in the directory is replaced. With adapters these are written in place
        of the weights, and a digest of the base. ``notes``, anything that JSON can hold, come back from
        :meth:`load`.

        Raises:
            CheckpointError: the directory is not empty or cannot be written; or an earlier
                :meth:`save_async` failed and nobody was told yet.
        """
        self.save_async(directory, notes).wait()

    def save_async(self, directory: Path | str, notes: Mapping[str, Any] | None = None) -> PendingSave:
        """As :meth:`save`, but only copy the state; a thread writes it while training goes on.

        What is saved is the state at this call. One save at a time: the next one, :meth:`load` and
        :meth:`shutdown` wait for it. Memory: one more copy of what is saved, until it is written.

        Raises:
            CheckpointError: the directory is not empty or cannot be made; or an earlier save failed
                and nobody was told yet.
        """
        self._require_idle()
        _ = self._parts
        return self._persistence.save_async(_directory(directory), notes or {})

    def load(self, directory: Path | str, *, verify: bool = True) -> dict[str, Any]:
        """Become what :meth:`save` wrote, optimizer settings and reference included.

        Args:
            directory: that was saved into.
            verify: read all files once and compare them with the digests that were saved with them;
                for callers who have just done as much it is work done twice.

        Returns:
            The notes that were saved.

        Raises:
            CheckpointError: incomplete, damaged, or of another model or type, the policy being
                unchanged; or an earlier :meth:`save_async` failed and nobody was told yet.
        """
        self._require_idle()
        self._require_open()
        return self._persistence.load(_directory(directory), verify=verify)

    def shutdown(self) -> None:
        """Release memory and, with the last policy, what was set up for the process; idempotent.

        Raises:
            CheckpointError: the last :meth:`save_async` failed and nobody was told; all is released.
            RuntimeStateError: it was called by a loss function; nothing is released.
        """
        self._require_idle()
        parts, self._made = self._made, None
        if parts is None:
            return
        try:
            self._persistence.close()
        finally:
            del self._persistence
            parts.release()

    def __enter__(self) -> MegatronPolicy:
        return self

    def __exit__(self, *_: Any) -> None:
        self.shutdown()

    @property
    def _parts(self) -> PolicyParts:
        """The parts, which are there and fit each other."""
        parts = self._require_open()
        if parts.torn_by:
            raise RuntimeStateError(
                f"{parts.torn_by} failed half-way and left weights and optimizer that do not fit; load a "
                "checkpoint, or make a new policy"
            )
        return parts

    def _require_open(self) -> PolicyParts:
        if self._made is None:
            raise RuntimeStateError("this policy was shut down; make a new one")
        return self._made

    def _require_idle(self) -> None:
        if self._training:
            raise RuntimeStateError(
                "train() or gradients() of this policy is under way: its loss function may score with "
                "it, and neither train, save, load nor shut it down; do that between updates"
            )

    @contextmanager
    def _accumulated(self, batch: Batch, loss_fn: LossFunction) -> Generator[Totals]:
        """The whole batch's gradient is in the buffers, which are empty otherwise, within the scope."""
        self._require_idle()
        parts = self._parts
        self._training = True
        try:
            with parts.random.scope():
                totals = parts.schedule.accumulate(parts.wrapped, batch, loss_fn)
            yield totals
        finally:
            self._training = False
            parts.optimizer.zero_grad()


def _directory(given_by_caller: Path | str) -> Path:
    with alike():
        return checked_path("directory", given_by_caller)
