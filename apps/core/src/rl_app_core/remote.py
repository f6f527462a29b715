"""The driver's side of a worker: calls with deadlines, and errors that say what failed where."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import torch

from rl_actor_envs.runtime import make_actor_runtime_env
from rl_algorithms.protocols import Batch, LossFunction
from rl_generation.protocol import Completion, GenerationRequest, RefitSpec
from rl_generation.refit.contract import Bucket, TransportName
from rl_policy_megatron import OptimizerSettings

from .config.sections import Cluster
from .memory import huge_page_variables
from .workers import ColocatedWorker, PolicyWorker, WorkerSettings


class WorkerError(RuntimeError):
    """A call to a worker failed, timed out, or found the worker dead. The first cause is kept."""


class RemotePolicy:
    """A :class:`~rl_app_core.workers.PolicyWorker` as a Ray actor, and the source of its weights.

    It runs in the environment that the table names for :class:`~rl_app_core.workers.ColocatedWorker`, which
    holds all that the policy needs.

    Args:
        settings: of the worker.
        cluster: deadlines and resources.
        num_gpus: that it asks Ray for, where others do as well.
        wait: return when it has started; else :meth:`wait_until_started` has to be called.

    Raises:
        WorkerError: it did not start within ``cluster.start_timeout_s``.
    """

    worker_class: ClassVar[type[PolicyWorker]] = PolicyWorker

    def __init__(
        self, settings: WorkerSettings, cluster: Cluster, *, num_gpus: float = 0.0, wait: bool = True
    ) -> None:
        import ray

        self._cluster = cluster
        runtime_env = make_actor_runtime_env(ColocatedWorker, env_vars=huge_page_variables())
        actor: Any = ray.remote(self.worker_class).options(
            num_cpus=1,
            num_gpus=num_gpus,
            max_restarts=0,
            max_task_retries=0,
            runtime_env={
                "py_executable": runtime_env["py_executable"],
                "env_vars": runtime_env["env_vars"],
            },
        )
        self._actor: Any = actor.remote(settings)
        self._starting: Any = self._ask("start")
        self.description: dict[str, Any] = {}
        if wait:
            self.wait_until_started()

    def wait_until_started(self) -> None:
        """Return when it has loaded its model; ``description`` holds facts about it from then on.

        Raises:
            WorkerError: it did not within ``cluster.start_timeout_s``; it is ended then.
        """
        try:
            self.description = self._result("start", self._starting, self._cluster.start_timeout_s)
        except BaseException:
            self._end()
            raise

    def weight_version(self) -> int:
        """How many updates have made the present weights."""
        return self._call("weight_version")

    def begin(self, transport: TransportName) -> RefitSpec:
        """See :class:`rl_generation.refit.contract.WeightSource`."""
        return self._call("begin", transport)

    def next_bucket(self) -> Bucket | None:
        """See :class:`rl_generation.refit.contract.WeightSource`."""
        return self._call("next_bucket")

    def end(self) -> None:
        """See :class:`rl_generation.refit.contract.WeightSource`."""
        self._call("end")

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """See :class:`rl_algorithms.protocols.PolicyTrainer`."""
        return self._call("logprobs", batch)

    def reference_logprobs(self, batch: Batch) -> torch.Tensor:
        """See :class:`rl_algorithms.protocols.PolicyTrainer`."""
        return self._call("reference_logprobs", batch)

    def train(self, batch: Batch, loss_fn: LossFunction, *, learning_rate: float) -> dict[str, float]:
        """See :class:`rl_algorithms.protocols.PolicyTrainer`."""
        return self._call("train", batch, loss_fn, learning_rate)

    def reset_optimizer(self, optimizer: OptimizerSettings) -> None:
        """Forget the optimizer's moments and start with new settings."""
        self._call("reset_optimizer", optimizer)

    def keep_reference(self) -> None:
        """Freeze a copy of the present weights as the reference policy."""
        self._call("keep_reference")

    def save(self, directory: Path) -> None:
        """See :class:`rl_algorithms.protocols.PolicyTrainer`."""
        self._call("save", str(directory.resolve()))

    def load(self, directory: Path) -> None:
        """See :class:`rl_algorithms.protocols.PolicyTrainer`."""
        self._call("load", str(directory.resolve()))

    def peak_memory_mb(self) -> float:
        """Largest resident size of the worker so far, in MiB."""
        return self._call("peak_memory_mb")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After an exception the worker is ended at once: it may be busy, and nobody waits for it."""
        if kind is None:
            self.shutdown()
        else:
            self._end()

    def shutdown(self) -> None:
        """Ask the worker to release everything, wait a bounded time, then end it; idempotent."""
        if self._actor is None:
            return
        import ray

        try:
            # It may be dead or busy; either way it is ended.
            with contextlib.suppress(Exception):
                ray.get(self._actor.shutdown.remote(), timeout=self._cluster.shutdown_timeout_s)
        finally:
            self._end()

    def _end(self) -> None:
        import ray

        actor, self._actor = self._actor, None
        if actor is None:
            return
        # Ray may be gone already, and the actor with it.
        with contextlib.suppress(Exception):
            ray.kill(actor)

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._result(method, self._ask(method, *arguments), self._cluster.call_timeout_s)

    def _ask(self, method: str, *arguments: Any) -> Any:
        if self._actor is None:
            raise WorkerError(f"worker: {method} was called after shutdown")
        return getattr(self._actor, method).remote(*arguments)

    def _result(self, method: str, answer: Any, timeout_s: float) -> Any:
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

        try:
            return ray.get(answer, timeout=timeout_s)
        except GetTimeoutError as error:
            raise WorkerError(
                f"worker: {method} did not answer within {timeout_s:g} s; raise cluster.call_timeout_s or "
                "cluster.start_timeout_s if the model is large"
            ) from error
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            raise WorkerError(f"worker: {method} failed: {type(cause).__name__}: {cause}") from cause
        except RayActorError as error:
            raise WorkerError(
                f"worker: it died during {method}: {_first_line(error)} (killed, or out of memory?)"
            ) from error
        except RayError as error:
            reason = f"{type(error).__name__}: {_first_line(error)}"
            raise WorkerError(f"worker: {method} was lost: {reason}") from error


class RemoteWorker(RemotePolicy):
    """The same with the engine that shares the policy's weights."""

    worker_class: ClassVar[type[PolicyWorker]] = ColocatedWorker

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """See :class:`rl_generation.protocol.Generation`."""
        return self._call("generate", list(requests))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
