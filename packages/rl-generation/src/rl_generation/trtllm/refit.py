"""New weights for TensorRT-LLM's workers: compared with the checkpoint, moved in buckets, finalised."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..failures import RefitError
from ..protocol import RefitSpec
from ..refit.checkpoint import spec_of_checkpoint
from ..refit.contract import Bucket, RefitAck
from ..refit.manifest import TIED_HEAD, RefitProgress, require_fit
from ..refit.settings import TransportSettings
from .faults import classified
from .handles import handles_of

# Old checkpoints carry tables that no engine loads.
_TABLES = "rotary_emb.inv_freq"


class WeightLoader:
    """The account and the calls of refits into one engine. It does not stop sampling; its owner does.

    Args:
        llm: an ``AsyncLLM`` that is set up.
        devices: UUIDs of the workers' GPUs; each gets the whole bucket and keeps its own part.
        folder: of the checkpoint.
        head_is_tied: whether its output layer may be left out.
        component: name that errors begin with.
        version: of the weights that are loaded; ``None`` if they are not to be sampled from.
        transport: of the policy's side.
        timeout_s: for one bucket, and for the end.
    """

    def __init__(
        self,
        llm: Any,
        *,
        devices: Sequence[str],
        folder: Path,
        head_is_tied: bool,
        component: str,
        version: int | None,
        transport: TransportSettings,
        timeout_s: float,
    ) -> None:
        self._llm = llm
        self._devices = tuple(devices)
        self._folder = folder
        self._head_is_tied = head_is_tied
        self._component = component
        self._transport = transport
        self._timeout_s = timeout_s
        self._progress = RefitProgress(component, version)
        self._unfit = version is None
        self._awaited: set[str] = set()
        self._loading = asyncio.Lock()

    @property
    def version(self) -> int | None:
        """Of the last weights that were whole; ``None`` before the first."""
        return self._progress.version

    @property
    def stale(self) -> bool:
        """Whether nothing may be sampled before a refit completes."""
        return self._unfit or self._progress.stale

    @property
    def running(self) -> bool:
        """Whether a refit was begun and neither finished nor aborted."""
        return self._progress.target is not None

    def check(self, spec: RefitSpec) -> None:
        """Compare an announcement with the checkpoint. The engine converts floating dtypes as it loads.

        Raises:
            RefitError: it does not fit; nothing has moved.
        """
        expected = spec_of_checkpoint(self._folder).tensors
        optional = {tensor.name for tensor in expected if tensor.name.endswith(_TABLES)}
        if self._head_is_tied:
            optional |= TIED_HEAD
        require_fit(spec, expected, component=self._component, optional=optional, cast=True)

    def begin(self, spec: RefitSpec, version: int) -> None:
        """Open the account.

        Raises:
            RefitError: the announcement does not fit, the version does not grow, or a refit is running.
        """
        self.check(spec)
        self._progress.begin(spec, version)
        self._awaited = {tensor.name for tensor in spec.tensors}

    async def load(self, bucket: Bucket) -> None:
        """Have every worker load one bucket.

        Raises:
            RefitError: a worker could not, or not in time; the weights are a mixture.
            EngineDeadError: a worker is gone.
        """
        handles = handles_of(bucket, self._transport)
        # One after another: nobody says that the engine takes two at once.
        async with self._loading:
            with self._progress.taking(bucket):
                await self._update("load a bucket", dict.fromkeys(self._devices, handles))
        self._awaited -= {place.name for place in bucket.tensors}

    async def finish(self) -> RefitAck:
        """Have every worker finalise what it loaded, which drops the cached prefixes of the old weights.

        Raises:
            RefitError: a tensor never came, or a worker could not finalise; the engine is stale.
            EngineDeadError: a worker is gone.
        """
        try:
            # Nothing is finalised that is not whole.
            if not self._awaited:
                await self._update("finish a refit", None)
            ack = self._progress.complete()
        except BaseException:
            self._progress.abort()
            raise
        self._unfit = False
        return ack

    def abort(self) -> None:
        """Close the account; the engine is stale if a weight moved. Idempotent."""
        self._progress.abort()

    async def _update(self, action: str, handles: Any) -> None:
        with classified(self._component, action, RefitError):
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._llm.update_weights(handles)
            except TimeoutError as error:
                raise RefitError(
                    f"{self._component}: could not {action} within {self._timeout_s:g} s"
                ) from error
