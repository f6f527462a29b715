"""One rank of a policy, made to be a Ray actor; usable in process as well."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..errors import CheckpointError, RuntimeStateError
from ..refusals import is_agreed, is_own, marked
from ..settings import OptimizerSettings
from .lockstep import FollowingSide, LeadingSide, RefitSide
from .portable import portable
from .processes import ProcessPlace
from .rendezvous import LOOPBACK, Rendezvous, join, leave, serve
from .reports import SaveOutcome, Standing
from .settings import RankSettings

if TYPE_CHECKING:
    from ..answers import LossFunction
    from ..mapping import WeightSpec
    from ..microbatch import Batch
    from ..policy import MegatronPolicy
    from ..saver import PendingSave

_VERSION = "weight_version"
_Answer = TypeVar("_Answer")


class PolicyRank:
    """A :class:`~rl_policy_megatron.MegatronPolicy` that takes part in a world of ranks.

    All ranks get the same calls with the same arguments in the same order. Their answers are equal, so only
    rank 0 sends them; those of the others are ``None``. Nothing but :meth:`start` builds anything, because
    Ray passes on what a method raises, and of a constructor only a text.

    Args:
        settings: of all ranks.
        rank: number of this one, in ``[0, settings.world)``.
    """

    def __init__(self, settings: RankSettings, rank: int = 0) -> None:
        self._settings = settings
        self._rank = rank
        self._version = 0
        self._store: Any = None
        self._joined = False
        self._made: MegatronPolicy | None = None
        self._spec: tuple[WeightSpec, ...] | None = None
        self._refit: RefitSide | None = None
        self._reading: tuple[int, int, Iterator[tuple[str, torch.Tensor]]] = 0, 0, iter(())
        # By the driver's number of the call.
        self._failed: dict[int, tuple[bool, bool]] = {}
        self._saves: dict[int, PendingSave] = {}

    def perform(self, number: int, method: str, *arguments: Any) -> Any:
        """One of the methods below, called by the driver under a number that none had before."""
        try:
            return getattr(self, method)(*arguments)
        except Exception as error:
            # Alone there is nobody to agree with.
            self._failed[number] = self._settings.world == 1 or is_agreed(error), is_own(error)
            if (sent := portable(error, method)) is error:
                raise
            raise sent from error

    def standing(self, number: int) -> Standing:
        """What became of this rank in a call that failed."""
        made = self._made
        agreed, own = self._failed.pop(number, (None, True))
        return Standing(agreed, made is None or made.is_whole, self._version, own)

    def settle(self) -> ProcessPlace:
        """Lead a process group, so that all that this process starts can be found; where it is."""
        return ProcessPlace.settle()

    def host(self, *places: ProcessPlace) -> Rendezvous:
        """Open the rendezvous; on loopback if all ranks' ``places`` are on one machine.

        Raises:
            RendezvousError: the address of this node cannot be bound.
        """
        host = LOOPBACK if len({place.machine for place in places}) == 1 else _node_address()
        self._store, rendezvous = serve(host, self._settings.rendezvous_timeout_s)
        return rendezvous

    def start(self, rendezvous: Rendezvous | None = None) -> dict[str, Any]:
        """Meet the other ranks, and load the model.

        Returns:
            Facts: ``parameters``, ``max_context``, ``vocab_size``, ``pid``.

        Raises:
            RendezvousError: names the ranks that did not come.
            PolicyError: of the model.
        """
        # The driver imports this module only to name the class.
        from ..policy import MegatronPolicy

        settings = self._settings
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(settings.threads or max(1, cores // settings.world))
        if rendezvous is not None:
            join(
                rendezvous,
                self._rank,
                settings.world,
                store=self._store,
                timeout_s=settings.rendezvous_timeout_s,
                collective_timeout_s=settings.collective_timeout_s,
            )
            self._joined = True
        policy = MegatronPolicy(settings.model_directory, settings.policy, settings.optimizer)
        self._made = policy
        if self._rank:
            self._refit = FollowingSide(policy.stream_weights, settings.refit_timeout_s)
        elif settings.weight_source is not None:
            self._refit = LeadingSide(settings.weight_source, self._announced, policy.stream_weights)
        return {
            "parameters": policy.parameter_count,
            "max_context": policy.max_context,
            "vocab_size": policy.vocab_size,
            "pid": os.getpid(),
        }

    def weight_version(self) -> int:
        """How many updates have made the present weights."""
        return self._version

    def updates(self) -> int:
        """See :attr:`rl_policy_megatron.MegatronPolicy.updates`."""
        return self.policy.updates

    def is_whole(self) -> bool:
        """See :attr:`rl_policy_megatron.MegatronPolicy.is_whole`."""
        return self.policy.is_whole

    def peak_memory_mb(self) -> float:
        """Largest resident size of this process so far, in MiB."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def logprobs(self, batch: Batch) -> torch.Tensor | None:
        """See :meth:`rl_policy_megatron.MegatronPolicy.logprobs`."""
        return self._led(self.policy.logprobs(batch))

    def reference_logprobs(self, batch: Batch) -> torch.Tensor | None:
        """See :meth:`rl_policy_megatron.MegatronPolicy.reference_logprobs`."""
        return self._led(self.policy.reference_logprobs(batch))

    def topk_logits(self, batch: Batch, k: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See :meth:`rl_policy_megatron.MegatronPolicy.topk_logits`."""
        return self._led(self.policy.topk_logits(batch, k))

    def token_logits(self, batch: Batch) -> torch.Tensor | None:
        """See :meth:`rl_policy_megatron.MegatronPolicy.token_logits`."""
        return self._led(self.policy.token_logits(batch))

    def keep_reference(self) -> None:
        """See :meth:`rl_policy_megatron.MegatronPolicy.keep_reference`."""
        self.policy.keep_reference()

    def train(self, batch: Batch, loss_fn: LossFunction, learning_rate: float) -> dict[str, float] | None:
        """One update, which makes a new version of the weights."""
        self.policy.prepare_for_training()
        metrics = self.policy.train(batch, loss_fn, learning_rate=learning_rate)
        self._version += 1
        return self._led(metrics)

    def gradients(self, batch: Batch, loss_fn: LossFunction) -> dict[str, torch.Tensor] | None:
        """See :meth:`rl_policy_megatron.MegatronPolicy.gradients`."""
        return self._led(self.policy.gradients(batch, loss_fn))

    def reset_optimizer(self, optimizer: OptimizerSettings) -> None:
        """See :meth:`rl_policy_megatron.MegatronPolicy.reset_optimizer`."""
        self.policy.reset_optimizer(optimizer)

    def prepare_for_inference(self) -> None:
        """See :meth:`rl_policy_megatron.MegatronPolicy.prepare_for_inference`."""
        self.policy.prepare_for_inference()

    def prepare_for_training(self) -> None:
        """See :meth:`rl_policy_megatron.MegatronPolicy.prepare_for_training`."""
        self.policy.prepare_for_training()

    def refit_spec(self) -> tuple[WeightSpec, ...] | None:
        """See :meth:`rl_policy_megatron.MegatronPolicy.refit_spec`."""
        return self._led(self._announced())

    def begin_reading(self, number: int) -> None:
        """Start to hand the weights to the driver, one at each :meth:`read_weight` of the same number."""
        self._reading = number, self._version, self.policy.stream_weights()

    def read_weight(self, number: int) -> tuple[str, torch.Tensor] | None:
        """The next name and tensor, copied; ``None`` after the last.

        Raises:
            RuntimeStateError: another stream was begun, or the weights are others than when it began.
        """
        latest, version, stream = self._reading
        if latest != number:
            raise marked(
                RuntimeStateError(
                    "stream_weights: another one was begun before this was at its end; read one at a time"
                )
            )
        if version != self._version:
            raise marked(
                RuntimeStateError(
                    f"stream_weights: it began with version {version} of the weights and they are of version "
                    f"{self._version} now; read to the end before the next update or load"
                )
            )
        item = next(stream, None)
        return None if item is None else self._led((item[0], item[1].to("cpu", copy=True)))

    def begin(self, transport: Any) -> Any:
        """Start a refit; until its end the weights must not change.

        Raises:
            RuntimeStateError: the settings name no source of weights.
        """
        # On all ranks, and before any of them starts to stream: asking takes collectives as well.
        self._announced()
        return self._refitting.begin(transport)

    def next_bucket(self) -> Any:
        """The next part of the refit; ``None`` after the last."""
        return self._refitting.next_bucket()

    def end(self) -> None:
        """End a refit; idempotent, also after a failure in between."""
        if self._refit is not None:
            self._refit.end()

    def export_hf(self, directory: str) -> None:
        """See :meth:`rl_policy_megatron.MegatronPolicy.export_hf`."""
        self.policy.export_hf(Path(directory))

    def save(self, directory: str, notes: Mapping[str, Any] | None = None) -> None:
        """Write the policy's state, the weights' version and ``notes`` into ``directory``."""
        self.policy.save(Path(directory), {**(notes or {}), _VERSION: self._version})

    def save_async(self, directory: str, number: int, notes: Mapping[str, Any] | None = None) -> None:
        """As :meth:`save`, in the background; :meth:`saved` tells how far it is."""
        told = {**(notes or {}), _VERSION: self._version}
        self._saves[number] = self.policy.save_async(Path(directory), told)

    def saved(self, number: int) -> SaveOutcome:
        """How far the save of this number is; once it has ended, it is told once."""
        pending = self._saves[number]
        if not pending.done:
            return SaveOutcome(ended=False)
        try:
            pending.wait()
        except CheckpointError as error:
            return SaveOutcome(True, str(error), not is_own(error))
        return SaveOutcome(ended=True)

    def load(self, directory: str, verify: bool | None = None) -> dict[str, Any] | None:
        """Restore what :meth:`save` wrote; a version that is not there is the number of updates.

        Args:
            directory: that was saved into.
            verify: compare the files with their digests; None is the settings' ``verify_loads``.

        Returns:
            The notes that were saved, the version apart.
        """
        policy = self.policy
        checked = self._settings.verify_loads if verify is None else verify
        notes = policy.load(Path(directory), verify=checked)
        self._version = int(notes.pop(_VERSION, policy.updates))
        return self._led(notes)

    def shutdown(self) -> None:
        """Release the policy and leave the world; idempotent."""
        made, self._made = self._made, None
        if made is not None:
            made.shutdown()
        if self._joined:
            self._joined = False
            leave()
        self._store = None

    @property
    def policy(self) -> MegatronPolicy:
        """This rank's part of the policy.

        Raises:
            RuntimeStateError: it is not started, or was shut down.
        """
        if self._made is None:
            raise RuntimeStateError(
                f"rank {self._rank}: it was not started, or was shut down; start a new one"
            )
        return self._made

    @property
    def _refitting(self) -> RefitSide:
        if self._refit is None:
            raise RuntimeStateError(
                f"rank {self._rank}: it has nobody to hand weights to; give RankSettings a weight_source"
            )
        return self._refit

    def _announced(self) -> tuple[WeightSpec, ...]:
        if self._spec is None:
            self._spec = self.policy.refit_spec()
        return self._spec

    def _led(self, answer: _Answer) -> _Answer | None:
        return answer if self._rank == 0 else None


def _node_address() -> str:
    import ray

    return ray.util.get_node_ip_address()
