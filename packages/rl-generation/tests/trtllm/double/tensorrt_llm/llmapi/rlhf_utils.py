"""Double of ``tensorrt_llm.llmapi.rlhf_utils``: how a worker takes weights."""

from __future__ import annotations

from typing import Any

from .._double.quirks import QUIRKS
from .._double.release import has


class WorkerExtension:
    """Mixed into a worker, which has ``device_id``, ``device_uuid``, ``model`` and ``prefixes``."""

    device_id: Any
    device_uuid: str
    model: Any
    prefixes: Any
    half_loaded: bool

    def update_weights(self, ipc_handles: dict[str, Any] | None = None) -> None:
        """Load a bucket, or with ``None`` finalise."""
        if ipc_handles is None:
            if QUIRKS.finalise_failure is not None:
                raise QUIRKS.finalise_failure
            self.prefixes.reset()
            self.half_loaded = False
            return
        if self.device_uuid not in ipc_handles:
            raise ValueError(f"Device UUID {self.device_uuid} not found in ipc_handles")
        if QUIRKS.load_failure is not None:
            raise QUIRKS.load_failure
        self.half_loaded = True
        weights = {}
        for name, (function, arguments) in ipc_handles[self.device_uuid]:
            arguments = list(arguments)
            arguments[6] = self.device_id
            weights[name] = function(*arguments)
        mine = self.model.state_dict()
        for name, tensor in weights.items():
            mine[name].copy_(tensor)

    if has("1.3"):

        def reset_prefix_cache(self) -> None:
            """Forget cached prefixes."""
            self.prefixes.reset()
