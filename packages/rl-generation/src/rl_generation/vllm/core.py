"""One engine's life: started, sampling, paused, between two versions, asleep, dead or closed."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ..failures import (
    BusyError,
    DeadlineError,
    EngineDeadError,
    GenerationError,
    InfraError,
    RefitError,
    UnavailableBackendError,
)
from ..fleet.replica import ReplicaFacts
from ..fleet.threads import in_thread
from ..protocol import Completion, GenerationRequest, RefitSpec, SamplingParams
from ..refit.contract import Bucket, RefitAck
from ..refit.wire import bucket_to_json
from .arguments import check_prompt
from .engine_state import EngineState
from .faults import causes, converted
from .prompt_scores import PromptScores
from .relay import RelayedBucket, needs_relay
from .settings import VllmSettings
from .trouble import guarded

_FIRST = GenerationRequest((0,), SamplingParams(max_new_tokens=1, temperature=0.0))


class EngineCore(EngineState):
    """Everything about an engine that is not vLLM's. All on one event loop.

    Args:
        settings: of the engine.
        driver: vLLM's.
    """

    async def start(self, *, stale: bool = False) -> ReplicaFacts:
        """Load the checkpoint.

        Raises:
            GenerationError: the settings do not fit the checkpoint or the machine.
            InfraError: the process ended, or was not up in time.
        """
        try:
            self._facts = facts = await self._driver.launch()
        except Exception as error:
            await self._driver.close(self._settings.control_timeout_s)
            raise _start_failure(error, self._settings) from error
        self._driver.when_dead(self._died)
        try:
            await self._within(
                self._driver.note_version(self.weight_version),
                "noting the version",
                self._settings.control_timeout_s,
            )
            # A model that vLLM loads but cannot compute is found out here and not by the first request.
            await self._within(
                self._driver.sample([_FIRST], self._version_now),
                "sampling a first token",
                self._settings.start_timeout_s,
            )
        except GenerationError as error:
            await self._driver.close(self._settings.control_timeout_s)
            raise _start_failure(error, self._settings) from error
        if stale or self._settings.load_format == "dummy":
            self._weights.forget()
            self._grow_stale(f"its weights are of version {self.weight_version}, which is old")
        return ReplicaFacts(facts.max_context, facts.vocab_size, self.weight_version, facts.pid)

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Completions in the order of the requests.

        Raises:
            ContextOverflowError: a prompt leaves no room.
            InvalidRequestError: a request that could not be scored.
            StaleWeightsError: before a refit completed.
            EngineDeadError: the process is gone, perhaps while it sampled.
            DeadlineError: no answer in time; the requests are ended inside the engine.
        """
        self._require_awake("generating")
        if not requests:
            return []
        completions = await guarded(
            self._driver.sample(requests, self._version_now),
            (self._dead, self._stale),
            component=self._name,
            what=f"sampling {len(requests)} requests",
            timeout_s=self._settings.request_timeout_s,
        )
        return completions

    async def score(self, token_ids: tuple[int, ...], top: int = 0) -> PromptScores:
        """Natural-log probability of each token but the first, given those before it, at temperature 1.

        Args:
            token_ids: at least one; shorter than the context.
            top: how many of the most likely tokens at each place, at most the engine's ``max_logprobs``.

        Raises:
            GenerationError: as :meth:`generate`.
        """
        self._require_awake("scoring")
        facts = self._require_started()
        check_prompt(
            token_ids, max_context=facts.max_context, vocab_size=facts.vocab_size, component=self._name
        )
        return await guarded(
            self._driver.score(token_ids, top),
            (self._dead, self._stale),
            component=self._name,
            what="scoring a prompt",
            timeout_s=self._settings.request_timeout_s,
        )

    async def probe(self) -> None:
        """Sample one token for real, with stale weights too; only a sign of life where sampling is held.

        Raises:
            GenerationError: it fails, or takes longer than ``probe_timeout_s``.
        """
        self._require_started()
        held = self._paused or self._asleep or self._weights.arriving
        if held:
            work: Coroutine[Any, Any, Any] = self._driver.call_workers("rl_pid")
        else:
            work = self._driver.sample([_FIRST], self._version_now)
        await self._within(work, "a probe", self._settings.probe_timeout_s)

    def require_fit(self, spec: RefitSpec) -> None:
        """Compare an announcement with the checkpoint.

        Raises:
            RefitError: it does not fit; names the tensor.
        """
        self._weights.require_fit(spec, tied=self._require_started().tied)

    async def begin_refit(self, spec: RefitSpec, version: int) -> None:
        """See :class:`~rl_generation.refit.contract.RefitTarget`."""
        self.require_fit(spec)
        if self._asleep:
            raise RefitError(f"{self._name}: asleep; call wake() before a refit")
        async with self._control:
            announcement = self._weights.begin(spec, version)
            try:
                await self._hold_or(RefitError)
                # Not before: a mixture of experts is laid out anew here.
                await self._workers("rl_begin_refit", announcement, version)
            except BaseException:
                self._weights.abort()
                with contextlib.suppress(GenerationError):
                    await self._workers("rl_abort_refit")
                await self._let_go_anyway()
                raise

    async def load_bucket(self, bucket: Bucket) -> None:
        """See :class:`~rl_generation.refit.contract.RefitTarget`."""
        self._require_started()
        with contextlib.ExitStack() as scope:
            async with self._control:
                scope.enter_context(self._weights.taking(bucket))
            # Workers take one call after another: the next bucket waits there and not here.
            async with self._within_reach(bucket) as near:
                await self._workers("rl_load_bucket", bucket_to_json(near), calls=bucket.window)

    async def finish_refit(self) -> RefitAck:
        """See :class:`~rl_generation.refit.contract.RefitTarget`."""
        self._require_started()
        async with self._control:
            version = self._weights.require_arriving("finish_refit")
            try:
                control_s, refit_s = self._settings.control_timeout_s, self._settings.refit_timeout_s
                # At once: nothing is sampled before all have ended, or never if one fails.
                digests, *_ = await asyncio.gather(
                    self._workers("rl_finish_refit"),
                    self._within(self._driver.drop_caches(), "dropping caches", refit_s),
                    self._within(self._driver.note_version(version), "noting the version", control_s),
                )
                acknowledgement = self._weights.complete(digests)
            except BaseException as error:
                await self._fall_stale(f"its refit to version {version} failed: {causes(error)}")
                raise
            self._stale.clear()
            await self._release()
            self._tell()
            return acknowledgement

    async def abort_refit(self) -> None:
        """See :class:`~rl_generation.refit.contract.RefitTarget`."""
        self._require_started()
        async with self._control:
            if not self._weights.arriving:
                return
            if self._weights.abort():
                await self._fall_stale("a refit ended before all weights had come")
            else:
                await self._workers("rl_abort_refit")
                await self._release()

    async def pause(self) -> None:
        """Stop sampling; requests in flight keep what they have, or end first where they cannot.

        Raises:
            BusyError: that took longer than ``control_timeout_s``; sampling goes on.
        """
        self._require_started()
        async with self._control:
            try:
                await self._hold_or(BusyError)
            except BaseException:
                await self._let_go_anyway()
                raise
            self._paused = True

    async def resume(self) -> None:
        """Undo :meth:`pause`; during a refit sampling goes on after it."""
        self._require_started()
        async with self._control:
            self._paused = False
            await self._release()

    async def sleep(self) -> None:
        """Give memory back.

        Raises:
            BusyError: requests are in flight, over HTTP too, or a refit is.
        """
        self._require_started()
        async with self._control:
            if self._asleep:
                return
            if self._weights.arriving or self._driver.in_flight():
                raise BusyError(
                    f"{self._name}: cannot sleep while a generation or a refit is in flight; wait for it to "
                    "return first"
                )
            await self._within(self._driver.sleep(), "sleep", self._settings.control_timeout_s)
            self._asleep = True
        self._tell()

    async def wake(self) -> None:
        """Undo :meth:`sleep`."""
        self._require_started()
        async with self._control:
            if not self._asleep:
                return
            await self._within(self._driver.wake(), "wake", self._settings.control_timeout_s)
            self._asleep = False
            if self._paused:
                await self._hold()
        self._tell()

    async def health(self) -> dict[str, Any]:
        """Facts for the log; asks no process."""
        return {
            "name": self._name,
            "state": self._state(),
            "weight_version": self.weight_version,
            "pid": self._facts.pid if self._facts is not None else None,
            "actor_pid": os.getpid(),
            "in_flight": self._driver.in_flight(),
            **self._driver.counters(),
        }

    async def shutdown(self, timeout_s: float) -> None:
        """End all processes within ``timeout_s``; idempotent."""
        self._closed = True
        self._dead.report(EngineDeadError, f"{self._name}: used after shutdown(); build a new engine")
        self._tell()
        await self._driver.close(timeout_s)

    @asynccontextmanager
    async def _within_reach(self, bucket: Bucket) -> AsyncGenerator[Bucket]:
        """The scope in which the engine's own processes can open the bucket, perhaps by way of a copy."""
        if not needs_relay(bucket):
            yield bucket
            return
        copy = RelayedBucket(bucket, self._settings.transport)
        what, timeout_s = "taking a bucket out of Ray's store", self._settings.refit_timeout_s
        try:
            # Both may take long, and this loop also serves and watches.
            made = in_thread(copy.make, f"{self._name}: {what}", 2 * timeout_s)
            yield await self._refitting(made, what)
        finally:
            copy.close()

    def _version_now(self) -> int:
        return self.weight_version

    async def _hold_or(self, kind: type[InfraError]) -> None:
        """Hold, or say by another failure than silence that it took too long: this engine answers."""
        try:
            await self._hold()
        except DeadlineError as error:
            raise kind(
                f"{error}; requests in flight end first where no token could name its weights; raise "
                "control_timeout_s, or bound their tokens"
            ) from error

    async def _fall_stale(self, reason: str) -> None:
        """A refit failed half way: nothing goes on with a mixture of weights."""
        self._weights.abort()
        self._grow_stale(reason)
        with contextlib.suppress(GenerationError):
            await self._workers("rl_abort_refit")
        with contextlib.suppress(GenerationError):
            await self._within(self._driver.abort_all(), "ending requests", self._settings.control_timeout_s)
        await self._let_go_anyway()


def _start_failure(error: Exception, settings: VllmSettings) -> GenerationError:
    failure = converted(error, settings.name, "the start")
    # There is no request yet that could be at fault.
    kind = type(failure) if isinstance(failure, InfraError | UnavailableBackendError) else GenerationError
    said = failure if failure is error else f"{causes(error)}; the log has what vLLM said before"
    return kind(f"{settings.name}: cannot start on {settings.model_dir}: {said}")
