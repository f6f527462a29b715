"""What vLLM's workers can do beyond vLLM: die with their engine, and take new weights."""

from __future__ import annotations

import os
from typing import Any

from ..refit.manifest import RefitProgress
from ..refit.receive import BucketReader
from ..refit.settings import TransportSettings
from ..refit.wire import bucket_from_json, spec_from_json
from .arguments import OWNER, TRANSPORT
from .parentage import die_with_parent
from .weight_loading import Loading, loading_for


class TakesWeights:
    """Mixed in before a worker class of vLLM; its methods are called by name in every worker of an engine.

    They take and return text and numbers only, because that is what every version of vLLM passes on
    unchanged.
    """

    vllm_config: Any
    model_config: Any
    rank: int

    def __init__(self, vllm_config: Any, *arguments: Any, **named: Any) -> None:
        die_with_parent(vllm_config.additional_config[OWNER])
        super().__init__(vllm_config, *arguments, **named)  # pyrefly: ignore
        self._rl_progress: RefitProgress | None = None
        self._rl_loading: Loading | None = None
        self._rl_reader = BucketReader(TransportSettings(**vllm_config.additional_config[TRANSPORT]))

    def rl_pid(self) -> int:
        """Id of the process that holds this worker's weights."""
        return os.getpid()

    def rl_begin_refit(self, spec: str, version: int) -> None:
        """Open the account; no weight moves.

        Raises:
            RefitError: the announcement is no good, or the model cannot take new weights.
        """
        loading = self._rl_way()
        progress = RefitProgress(f"worker {self.rank}")
        progress.begin(spec_from_json(spec), version)
        loading.begin()
        self._rl_progress = progress

    def rl_load_bucket(self, bucket: str) -> None:
        """Write the tensors of one bucket.

        Raises:
            RefitError: outside a refit, or a tensor is not as announced.
        """
        received = bucket_from_json(bucket)
        with self._rl_account().taking(received), self._rl_reader.reading(received) as tensors:
            self._rl_way().load(tensors)

    def rl_finish_refit(self) -> str:
        """Make the model usable; the digest of what it was given.

        Raises:
            RefitError: something announced never came.
        """
        acknowledgement = self._rl_account().complete()
        self._rl_way().finish()
        self._rl_progress = None
        return acknowledgement.digest

    def rl_abort_refit(self) -> None:
        """End a refit that will not complete; idempotent."""
        if self._rl_progress is not None:
            self._rl_progress = None
            self._rl_way().abort()

    def _rl_account(self) -> RefitProgress:
        return self._rl_progress or RefitProgress(f"worker {self.rank}")

    def _rl_way(self) -> Loading:
        if self._rl_loading is None:
            model = self.get_model()  # type: ignore[attr-defined]
            cpu = next(model.parameters()).device.type == "cpu"
            self._rl_loading = loading_for(model, self.model_config, cpu=cpu)
        return self._rl_loading
