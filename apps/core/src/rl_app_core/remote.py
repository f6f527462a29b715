"""The driver's side of a worker: calls with deadlines, and errors that say what failed where."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from rl_actor_envs.runtime import make_actor_runtime_env
from rl_algorithms.protocols import Batch, LossFunction
from rl_generation.protocol import Completion, GenerationRequest
from rl_policy_megatron import OptimizerSettings

from .config.sections import Cluster
from .workers import ColocatedWorker, WorkerSettings


class WorkerError(RuntimeError):
    """A call to a worker failed, timed out, or found the worker dead. The first cause is kept."""


class RemoteWorker:
    """A :class:`~rl_app_core.workers.ColocatedWorker` as a Ray actor, in the environment of its table row.

    Args:
        settings: of the worker.
        cluster: deadlines and resources.

    Raises:
        WorkerError: it did not start within ``cluster.start_timeout_s``.
    """

    def __init__(self, settings: WorkerSettings, cluster: Cluster) -> None:
        import ray

        self._cluster = cluster
        runtime_env = make_actor_runtime_env(ColocatedWorker)
        actor = ray.remote(ColocatedWorker).options(
            num_cpus=1,
            max_restarts=0,
            max_task_retries=0,
            runtime_env={
                "py_executable": runtime_env["py_executable"],
                "env_vars": runtime_env["env_vars"],
            },
        )
        self._actor: Any = actor.remote(settings)
        try:
            self.description: dict[str, Any] = self._call("start", timeout_s=cluster.start_timeout_s)
        except BaseException:
            self._end()
            raise

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """See :class:`rl_generation.protocol.Generation`."""
        return self._call("generate", list(requests))

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

    def __enter__(self) -> RemoteWorker:
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

    def _call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

        if self._actor is None:
            raise WorkerError(f"worker: {method} was called after shutdown")
        deadline = timeout_s if timeout_s is not None else self._cluster.call_timeout_s
        try:
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=deadline)
        except GetTimeoutError as error:
            raise WorkerError(
                f"worker: {method} did not answer within {deadline:g} s; raise cluster.call_timeout_s or "
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


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
