"""The Ray actors that hold the policy, one of them with a rollout engine over the very same weights."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl_algorithms.protocols import Batch, LossFunction
from rl_generation.protocol import Completion, GenerationRequest, RefitSpec
from rl_generation.refit.contract import Bucket, TransportName
from rl_policy_megatron import OptimizerSettings, PolicySettings

from .memory import peak_memory_mb

_STATE_FILE = "worker.json"


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Everything that a worker needs to build itself, in one picklable piece.

    Attributes:
        model_dir: a Hugging Face directory.
        policy: of the policy.
        optimizer: of its first optimizer.
        threads: CPU threads; 0 takes every core that the process may use.
        refit_timeout_s: how long handing over weights waits for the other side.
    """

    model_dir: str
    policy: PolicySettings
    optimizer: OptimizerSettings
    threads: int = 0
    refit_timeout_s: float = 120.0


class PolicyWorker:
    """The policy by itself. It hands its weights to engines elsewhere, bucket by bucket.

    Usable in process; :mod:`rl_app_core.remote` runs it as a Ray actor. Between :meth:`begin` and
    :meth:`end` the weights must not change.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._version = 0

    def start(self) -> dict[str, Any]:
        """Load the model; facts about it for the log: parameters, context, process id.

        Apart from the constructor, because Ray passes on what a method raises, and of a constructor only
        a text.
        """
        # Here and not at the top: the driver imports this module only to name the class.
        from rl_generation.refit.publisher import TensorSource
        from rl_generation.refit.settings import TransportSettings
        from rl_policy_megatron import MegatronPolicy

        settings = self._settings
        torch.set_num_threads(settings.threads or len(os.sched_getaffinity(0)))
        self._policy = MegatronPolicy(settings.model_dir, settings.policy, settings.optimizer)
        self._source = TensorSource(
            self._policy.refit_spec,
            self._policy.stream_weights,
            TransportSettings(timeout_s=settings.refit_timeout_s),
        )
        return {
            "parameters": self._policy.parameter_count,
            "max_context": self._policy.max_context,
            "pid": os.getpid(),
        }

    def weight_version(self) -> int:
        """How many updates have made the present weights."""
        return self._version

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """See :class:`rl_algorithms.protocols.PolicyTrainer`."""
        return self._policy.logprobs(batch)

    def reference_logprobs(self, batch: Batch) -> torch.Tensor:
        """See :class:`rl_algorithms.protocols.PolicyTrainer`."""
        return self._policy.reference_logprobs(batch)

    def train(self, batch: Batch, loss_fn: LossFunction, learning_rate: float) -> dict[str, float]:
        """One update, which makes a new version of the weights."""
        self._policy.prepare_for_training()
        metrics = self._policy.train(batch, loss_fn, learning_rate=learning_rate)
        self._version += 1
        return metrics

    def reset_optimizer(self, optimizer: OptimizerSettings) -> None:
        """Forget the optimizer's moments and start with new settings."""
        self._policy.reset_optimizer(optimizer)

    def keep_reference(self) -> None:
        """Freeze a copy of the present weights as the reference policy."""
        self._policy.keep_reference()

    def begin(self, transport: TransportName) -> RefitSpec:
        """See :class:`rl_generation.refit.contract.WeightSource`."""
        return self._source.begin(transport)

    def next_bucket(self) -> Bucket | None:
        """See :class:`rl_generation.refit.contract.WeightSource`."""
        return self._source.next_bucket()

    def end(self) -> None:
        """See :class:`rl_generation.refit.contract.WeightSource`."""
        self._source.end()

    def save(self, directory: str) -> None:
        """Write policy, optimizer, random state and the weights' version into ``directory``."""
        self._policy.save(Path(directory))
        state = Path(directory) / _STATE_FILE
        with state.open("w", encoding="utf-8") as file:
            json.dump({"weight_version": self._version}, file)
            file.flush()
            os.fsync(file.fileno())

    def load(self, directory: str) -> None:
        """Restore what :meth:`save` wrote."""
        self._policy.load(Path(directory))
        state = json.loads((Path(directory) / _STATE_FILE).read_text(encoding="utf-8"))
        self._version = int(state["weight_version"])

    def peak_memory_mb(self) -> float:
        """Largest resident size of this process so far, in MiB."""
        return peak_memory_mb()

    def shutdown(self) -> None:
        """Release the policy; idempotent."""
        self._policy.shutdown()


class ColocatedWorker(PolicyWorker):
    """Policy and engine in one process, on one copy of the weights: a refit only advances a version."""

    def start(self) -> dict[str, Any]:
        """See :meth:`PolicyWorker.start`."""
        from rl_generation.megatron import MegatronGeneration

        facts = super().start()
        self._engine = MegatronGeneration(
            self._policy.model, vocab_size=self._policy.vocab_size, max_context=self._policy.max_context
        )
        return facts

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """See :class:`rl_generation.protocol.Generation`."""
        self._policy.prepare_for_inference()
        return self._engine.generate(requests)

    def train(self, batch: Batch, loss_fn: LossFunction, learning_rate: float) -> dict[str, float]:
        """One update; the engine samples from the new weights from the next token on."""
        metrics = super().train(batch, loss_fn, learning_rate)
        self._engine.update_weights((), self._version)
        return metrics

    def load(self, directory: str) -> None:
        """Restore what :meth:`PolicyWorker.save` wrote."""
        super().load(directory)
        if self._version > self._engine.weight_version:
            self._engine.update_weights((), self._version)

    def shutdown(self) -> None:
        """Release engine and policy; idempotent."""
        self._engine.shutdown(timeout_s=5.0)
        super().shutdown()
