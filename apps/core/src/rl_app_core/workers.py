"""What the policy's ranks are to a run: the source of its weights, or the engine itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rl_generation.protocol import Completion, GenerationRequest
from rl_generation.refit.contract import WeightSource
from rl_policy_megatron.group import PolicyRank
from rl_policy_megatron.group.rendezvous import Rendezvous

if TYPE_CHECKING:
    from rl_policy_megatron.microbatch import Batch
    from rl_policy_megatron.schedule import LossFunction


def tensor_source(
    spec: Callable[[], Iterable[Any]],
    stream: Callable[[], Iterator[tuple[str, torch.Tensor]]],
    *,
    timeout_s: float,
) -> WeightSource:
    """Rank 0's side of refits: hands its tensors to engines elsewhere, bucket by bucket.

    Args:
        spec: name, shape and dtype of all that ``stream`` yields.
        stream: names in HF layout and tensors.
        timeout_s: how long handing over weights waits for the other side.
    """
    # Here and not at the top: the driver imports this module only to name what is in it.
    from rl_generation.refit.publisher import TensorSource
    from rl_generation.refit.settings import TransportSettings

    return TensorSource(spec, stream, TransportSettings(timeout_s=timeout_s))


class ColocatedWorker(PolicyRank):
    """Policy and engine in one process, on one copy of the weights: a refit only advances a version.

    Usable in process; :mod:`rl_app_core.remote` runs it as a Ray actor.
    """

    def start(self, rendezvous: Rendezvous | None = None) -> dict[str, Any]:
        """See :meth:`~rl_policy_megatron.group.PolicyRank.start`."""
        from rl_generation.megatron import MegatronGeneration

        facts = super().start(rendezvous)
        policy = self.policy
        self._engine = MegatronGeneration(
            policy.model, vocab_size=policy.vocab_size, max_context=policy.max_context
        )
        return facts

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """See :class:`rl_generation.protocol.Generation`."""
        self.policy.prepare_for_inference()
        return self._engine.generate(requests)

    def train(self, batch: Batch, loss_fn: LossFunction, learning_rate: float) -> dict[str, float] | None:
        """One update; the engine samples from the new weights from the next token on."""
        metrics = super().train(batch, loss_fn, learning_rate)
        self._engine.update_weights((), self.weight_version())
        return metrics

    def load(self, directory: str, verify: bool | None = None) -> dict[str, Any] | None:
        """Restore what :meth:`~rl_policy_megatron.group.PolicyRank.save` wrote."""
        notes = super().load(directory, verify)
        if self.weight_version() > self._engine.weight_version:
            self._engine.update_weights((), self.weight_version())
        return notes

    def shutdown(self) -> None:
        """Release engine and policy; idempotent."""
        self._engine.shutdown(timeout_s=5.0)
        super().shutdown()
