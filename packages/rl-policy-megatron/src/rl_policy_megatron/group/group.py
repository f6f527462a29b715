"""The driver's side of a policy in Ray actors: one call to all ranks, deadlines, and no process left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from ..checks import checked_path
from ..errors import RuntimeStateError
from ..settings import OptimizerSettings
from .preflight import refuse_misfit
from .rank import PolicyRank
from .ranks import Ranks
from .saving import PendingGroupSave
from .settings import GroupSettings, RankSettings

if TYPE_CHECKING:
    from ..answers import LossFunction
    from ..mapping import WeightSpec
    from ..microbatch import Batch

# Between these two calls the ranks' weights must not change, and their collectives belong to the refit.
_IN_A_REFIT = frozenset(
    {"begin", "next_bucket", "end", "weight_version", "updates", "is_whole", "peak_memory_mb"}
)


class MegatronPolicyGroup:
    """A :class:`~rl_policy_megatron.MegatronPolicy` over the ranks of a world, each in a Ray actor.

    Every call goes to all ranks at once and returns when all have answered. What all ranks give up together
    is raised as :class:`MegatronPolicy` raises it, and the group goes on: a broken batch, a loss function
    that raises, be it on one rank only. Two such failures are a :class:`RankError` and the group goes on as
    well: a loss function that asked for other numbers on one rank than on another, and an exception that
    does not survive pickling. Any other failure is a :class:`RankError`, the first real one, and all ranks
    are ended: one has died or hangs, or they may have lost their lockstep or parts of an update. Calls from
    several threads reach all ranks in one order.

    Args:
        ranks: what they are built from.
        settings: resources and deadlines.
        wait: return when the ranks have started; else :meth:`wait_until_started` has to be called.

    Attributes:
        description: facts about the policy, once it has started: ``parameters``, ``max_context``, and ``pid``
            of rank 0.

    Raises:
        RuntimeStateError: this process has not joined a Ray cluster.
        ModelDirectoryError: config.json is broken.
        UnsupportedModelError: the model cannot be trained, or not in this layout; no rank was started.
        RankError: a rank did not start; names it and the cause. Nothing is left.
        rl_actor_envs.errors.ActorEnvironmentError: the environment of the ranks is not built.
    """

    rank_class: ClassVar[type[PolicyRank]] = PolicyRank

    def __init__(
        self, ranks: RankSettings, settings: GroupSettings | None = None, *, wait: bool = True
    ) -> None:
        import ray

        if not ray.is_initialized():
            raise RuntimeStateError(
                "this process has not joined a Ray cluster; call ray.init first, or use MegatronPolicy, "
                "which needs none"
            )
        self._settings = settings or GroupSettings()
        refuse_misfit(ranks, self._settings)
        self._has_source = ranks.weight_source is not None
        self._refitting = False
        self._streams = 0
        self._saves = 0
        self._saving: PendingGroupSave | None = None
        self.description: dict[str, Any] = {}
        self._ranks = Ranks(self.rank_class, ranks, self._settings)
        if wait:
            self.wait_until_started()

    def wait_until_started(self) -> None:
        """Return when every rank has loaded its model.

        Raises:
            RankError: one did not within ``start_timeout_s``; all are ended then.
        """
        self.description = self._ranks.wait_until_started()[0]

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self._ranks.world

    @property
    def pids(self) -> list[int]:
        """Process numbers of the ranks, on their own machines."""
        return self._ranks.pids

    @property
    def parameter_count(self) -> int:
        """See :attr:`rl_policy_megatron.MegatronPolicy.parameter_count`."""
        return self._fact("parameters")

    @property
    def vocab_size(self) -> int:
        """See :attr:`rl_policy_megatron.MegatronPolicy.vocab_size`."""
        return self._fact("vocab_size")

    @property
    def max_context(self) -> int:
        """See :attr:`rl_policy_megatron.MegatronPolicy.max_context`."""
        return self._fact("max_context")

    def weight_version(self) -> int:
        """How many updates have made the present weights."""
        return self._call("weight_version")

    @property
    def updates(self) -> int:
        """See :attr:`rl_policy_megatron.MegatronPolicy.updates`; asks the ranks."""
        return self._call("updates")

    @property
    def is_whole(self) -> bool:
        """See :attr:`rl_policy_megatron.MegatronPolicy.is_whole`; asks the ranks."""
        return all(self._call_all("is_whole"))

    def peak_memory_mb(self) -> float:
        """Largest resident sizes of the ranks so far, added, in MiB."""
        return sum(self._call_all("peak_memory_mb"))

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """See :meth:`rl_policy_megatron.MegatronPolicy.logprobs`.

        Raises:
            BatchError: the batch breaks its contract.
            RankError: as every other call: names the rank that failed first, and its cause.
        """
        return self._call("logprobs", batch)

    def reference_logprobs(self, batch: Batch) -> torch.Tensor:
        """See :meth:`rl_policy_megatron.MegatronPolicy.reference_logprobs`."""
        return self._call("reference_logprobs", batch)

    def token_logits(self, batch: Batch) -> torch.Tensor:
        """See :meth:`rl_policy_megatron.MegatronPolicy.token_logits`."""
        return self._call("token_logits", batch)

    def topk_logits(self, batch: Batch, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`rl_policy_megatron.MegatronPolicy.topk_logits`."""
        return self._call("topk_logits", batch, k)

    def keep_reference(self) -> None:
        """See :meth:`rl_policy_megatron.MegatronPolicy.keep_reference`."""
        self._call("keep_reference")

    def train(self, batch: Batch, loss_fn: LossFunction, *, learning_rate: float) -> dict[str, float]:
        """See :meth:`rl_policy_megatron.MegatronPolicy.train`; the loss function is sent to the ranks."""
        return self._call("train", batch, loss_fn, learning_rate)

    def gradients(self, batch: Batch, loss_fn: LossFunction) -> dict[str, torch.Tensor]:
        """See :meth:`rl_policy_megatron.MegatronPolicy.gradients`."""
        return self._call("gradients", batch, loss_fn)

    def reset_optimizer(self, settings: OptimizerSettings) -> None:
        """See :meth:`rl_policy_megatron.MegatronPolicy.reset_optimizer`."""
        self._call("reset_optimizer", settings)

    def prepare_for_inference(self) -> None:
        """See :meth:`rl_policy_megatron.MegatronPolicy.prepare_for_inference`."""
        self._call("prepare_for_inference")

    def prepare_for_training(self) -> None:
        """See :meth:`rl_policy_megatron.MegatronPolicy.prepare_for_training`."""
        self._call("prepare_for_training")

    def refit_spec(self) -> tuple[WeightSpec, ...]:
        """See :meth:`rl_policy_megatron.MegatronPolicy.refit_spec`."""
        return self._call("refit_spec")

    def stream_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`rl_policy_megatron.MegatronPolicy.stream_weights`; copies, brought here one by one.

        For looking at them, and for engines in this process; elsewhere a refit is faster.

        Raises:
            RuntimeStateError: the weights changed on the way, or another stream was begun.
        """
        self._streams += 1
        number = self._streams
        self._call("begin_reading", number)
        while (item := self._call("read_weight", number)) is not None:
            yield item

    def begin(self, transport: Any) -> Any:
        """Start a refit: what the source of weights announces. Until :meth:`end` nothing else is computed.

        Raises:
            RuntimeStateError: a refit is under way, or the ranks' settings name no source of weights.
        """
        self._require_source()
        self._refitting, before = True, self._refitting
        if before:
            raise RuntimeStateError("policy: begin was called during a refit; call end first")
        try:
            return self._call("begin", transport)
        except BaseException:
            # Whoever is refused has nothing to end.
            with contextlib.suppress(Exception):
                self.end()
            self._refitting = False
            raise

    def next_bucket(self) -> Any:
        """The next part of the refit; ``None`` after the last.

        Raises:
            RuntimeStateError: no refit is under way, or the ranks' settings name no source of weights.
        """
        self._require_source()
        if not self._refitting:
            raise RuntimeStateError("policy: next_bucket was called outside a refit; call begin first")
        return self._call("next_bucket")

    def end(self) -> None:
        """End a refit; idempotent, also after a failure, which has ended the ranks."""
        if not self._ranks.running:
            return
        self._call("end")
        self._refitting = False

    def export_hf(self, directory: Path | str) -> None:
        """See :meth:`rl_policy_megatron.MegatronPolicy.export_hf`; the ranks must reach the directory."""
        self._call("export_hf", str(_resolved(directory)))

    def save(self, directory: Path | str, notes: Mapping[str, Any] | None = None) -> None:
        """See :meth:`rl_policy_megatron.MegatronPolicy.save`; the ranks must reach the directory.

        Of the notes ``weight_version`` is the group's own.
        """
        self._call("save", str(_resolved(directory)), notes)

    def save_async(self, directory: Path | str, notes: Mapping[str, Any] | None = None) -> PendingGroupSave:
        """See :meth:`rl_policy_megatron.MegatronPolicy.save_async`: the ranks copy now and write later.

        A save that is still under way at :meth:`shutdown` is waited for, ``shutdown_timeout_s`` at most.
        """
        self._saves += 1
        number, target = self._saves, _resolved(directory)
        self._call("save_async", str(target), number, notes)
        self._saving = PendingGroupSave(self._ranks, number, target, self._settings.call_timeout_s)
        return self._saving

    def load(self, directory: Path | str, *, verify: bool | None = None) -> dict[str, Any]:
        """See :meth:`rl_policy_megatron.MegatronPolicy.load`; the ranks must reach the directory.

        Args:
            directory: that was saved into.
            verify: compare the files with their digests; None is the ranks' ``verify_loads``.

        Returns:
            The notes that were saved, without the group's own.
        """
        return self._call("load", str(_resolved(directory)), verify)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After an exception the ranks are ended at once: they may be busy, and nobody waits for them."""
        if kind is None:
            self.shutdown()
        else:
            self._ranks.end("an exception in its block")

    def shutdown(self) -> None:
        """Ask the ranks to release everything, wait a bounded time, then end them; idempotent.

        Raises:
            CheckpointError: the last :meth:`save_async` failed and nobody was told, or was not complete in
                time; all is released, and what it has written does not load.
        """
        saving, self._saving = self._saving, None
        try:
            if saving is not None and self._ranks.running:
                saving.settle(self._settings.shutdown_timeout_s)
        finally:
            self._ranks.shutdown()

    def _require_source(self) -> None:
        if not self._has_source:
            raise RuntimeStateError(
                "policy: there is nobody to hand weights to; give RankSettings a weight_source"
            )

    def _fact(self, name: str) -> int:
        if name not in self.description:
            raise RuntimeStateError(f"policy: {name} is known once wait_until_started has returned")
        return self.description[name]

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._call_all(method, *arguments)[0]

    def _call_all(self, method: str, *arguments: Any) -> list[Any]:
        if self._refitting and self._ranks.running and method not in _IN_A_REFIT:
            raise RuntimeStateError(f"policy: {method} was called during a refit; call end first")
        return self._ranks.call(method, *arguments)


def _resolved(directory: Path | str) -> Path:
    """Whole, since ranks may work in other folders."""
    return checked_path("directory", directory).resolve()
