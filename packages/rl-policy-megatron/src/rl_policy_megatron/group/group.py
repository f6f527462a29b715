"""The driver's side of a policy in Ray actors: one call to all ranks, deadlines, and no process left."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from ..errors import RankError, RuntimeStateError
from ..settings import OptimizerSettings
from .answers import answers_of
from .processes import ProcessPlace, end_all
from .rank import PolicyRank
from .settings import GroupSettings, RankSettings

if TYPE_CHECKING:
    from ..mapping import WeightSpec
    from ..microbatch import Batch
    from ..schedule import LossFunction

# Between these two calls the ranks' weights must not change, and their collectives belong to the refit.
_IN_A_REFIT = frozenset({"begin", "next_bucket", "end", "weight_version", "peak_memory_mb"})


class MegatronPolicyGroup:
    """A :class:`~rl_policy_megatron.MegatronPolicy` over the ranks of a world, each in a Ray actor.

    Every call goes to all ranks at once and returns when all have answered. If one fails, the first real
    failure is raised and, in a world of several ranks, all are ended: they may have lost their lockstep. A
    single rank that only raised an error works on. Calls from several threads reach all ranks in one order.

    Args:
        ranks: what they are built from.
        settings: resources and deadlines.
        wait: return when the ranks have started; else :meth:`wait_until_started` has to be called.

    Attributes:
        description: facts about the policy, once it has started: ``parameters``, ``max_context``, and ``pid``
            of rank 0.

    Raises:
        RuntimeStateError: this process has not joined a Ray cluster.
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
        self._world = ranks.world
        self._lock = threading.Lock()
        self._refitting = False
        self._closed_by = "shutdown"
        self._places: list[ProcessPlace | None] = [None] * ranks.world
        self.description: dict[str, Any] = {}
        self._actors: list[Any] = []
        self._settling: list[Any] = []
        actor = self._actor_class()
        try:
            for rank in range(ranks.world):
                self._actors.append(actor.remote(ranks, rank))
            self._settling = [each.settle.remote() for each in self._actors]
            meeting = self._actors[0].host.remote(*self._settling) if ranks.world > 1 else None
            self._starting = [each.start.remote(meeting) for each in self._actors]
        except BaseException:
            self._end()
            raise
        if wait:
            self.wait_until_started()

    def wait_until_started(self) -> None:
        """Return when every rank has loaded its model.

        Raises:
            RankError: one did not within ``start_timeout_s``; all are ended then.
        """
        try:
            limit = self._settings.start_timeout_s
            self._places = self._answers("starting its process", self._settling, limit, "start_timeout_s")
            self.description = self._answers("start", self._starting, limit, "start_timeout_s")[0]
        except BaseException:
            self._closed_by = "a failed start"
            self._end()
            raise

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self._world

    @property
    def pids(self) -> list[int]:
        """Process numbers of the ranks, on their own machines."""
        return [place.pid for place in self._places if place is not None]

    def weight_version(self) -> int:
        """How many updates have made the present weights."""
        return self._call("weight_version")

    def peak_memory_mb(self) -> float:
        """Largest resident sizes of the ranks so far, added, in MiB."""
        return sum(self._call_all("peak_memory_mb"))

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """See :meth:`rl_policy_megatron.MegatronPolicy.logprobs`.

        Raises:
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

    def begin(self, transport: Any) -> Any:
        """Start a refit: what the source of weights announces. Until :meth:`end` nothing else is computed.

        Raises:
            RuntimeStateError: a refit is under way.
        """
        self._refitting, before = True, self._refitting
        if before:
            raise RuntimeStateError("policy: begin was called during a refit; call end first")
        return self._call("begin", transport)

    def next_bucket(self) -> Any:
        """The next part of the refit; ``None`` after the last."""
        return self._call("next_bucket")

    def end(self) -> None:
        """End a refit; idempotent, also after a failure, which has ended the ranks."""
        if not self._actors:
            return
        self._call("end")
        self._refitting = False

    def export_hf(self, directory: Path | str) -> None:
        """See :meth:`rl_policy_megatron.MegatronPolicy.export_hf`; the ranks must reach the directory."""
        self._call("export_hf", str(Path(directory).resolve()))

    def save(self, directory: Path | str) -> None:
        """See :meth:`rl_policy_megatron.MegatronPolicy.save`; the ranks must reach the directory."""
        self._call("save", str(Path(directory).resolve()))

    def load(self, directory: Path | str) -> None:
        """See :meth:`rl_policy_megatron.MegatronPolicy.load`; the ranks must reach the directory."""
        self._call("load", str(Path(directory).resolve()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After an exception the ranks are ended at once: they may be busy, and nobody waits for them."""
        if kind is None:
            self.shutdown()
        else:
            self._end()

    def shutdown(self) -> None:
        """Ask the ranks to release everything, wait a bounded time, then end them; idempotent."""
        try:
            if self._actors:
                # They may be dead or busy; either way they are ended.
                with contextlib.suppress(Exception):
                    asked = [actor.shutdown.remote() for actor in self._actors]
                    self._answers("shutdown", asked, self._settings.shutdown_timeout_s, "shutdown_timeout_s")
        finally:
            self._end()

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._call_all(method, *arguments)[0]

    def _call_all(self, method: str, *arguments: Any) -> list[Any]:
        with self._lock:
            asked = self._ask(method, *arguments)
        try:
            return self._answers(method, asked, self._settings.call_timeout_s, "call_timeout_s")
        except RankError as error:
            if self._world > 1 or not error.answered:
                self._closed_by = f"a failure of {method}"
                self._end()
            raise

    def _ask(self, method: str, *arguments: Any) -> list[Any]:
        import ray

        if not self._actors:
            raise RankError(
                f"policy: {method} was called after {self._closed_by}; start a new one", call=method
            )
        if self._refitting and method not in _IN_A_REFIT:
            raise RuntimeStateError(f"policy: {method} was called during a refit; call end first")
        # Written down once, however many ranks read it.
        given = arguments if self._world == 1 else [ray.put(argument) for argument in arguments]
        return [getattr(actor, method).remote(*given) for actor in self._actors]

    def _answers(self, call: str, asked: list[Any], timeout_s: float, limit: str) -> list[Any]:
        return answers_of(
            call, asked, self._places, timeout_s=timeout_s, grace_s=self._settings.grace_s, limit=limit
        )

    def _actor_class(self) -> Any:
        import ray

        from rl_actor_envs.runtime import make_actor_runtime_env

        settings = self._settings
        runtime_env = make_actor_runtime_env(
            settings.environment or self.rank_class, env_vars=dict(settings.env_vars)
        )
        actor: Any = ray.remote(self.rank_class)
        return actor.options(
            num_cpus=settings.num_cpus,
            num_gpus=settings.num_gpus,
            max_restarts=0,
            max_task_retries=0,
            runtime_env=dict(runtime_env),
        )

    def _end(self) -> None:
        """End every rank and all that it has started; idempotent, never raises."""
        import ray

        actors: list[Any] = self._actors
        if not actors:
            return
        self._actors = []
        places = self._known_places()
        for actor in actors:
            # Ray may be gone already, and the actor with it.
            with contextlib.suppress(Exception):
                ray.kill(actor, no_restart=True)
        end_all(places, self._settings.kill_timeout_s)

    def _known_places(self) -> list[ProcessPlace]:
        import ray

        known = [place for place in self._places if place is not None]
        if not known:
            # It never came to waiting for them.
            for settling in self._settling:
                with contextlib.suppress(Exception):
                    known.append(ray.get(settling, timeout=0.01))
        return known
