"""Double of ``tensorrt_llm.sampling_params``: the fields that the contract writes down."""

from __future__ import annotations

from dataclasses import field, make_dataclass
from enum import StrEnum
from typing import Any

from ._double.release import allowed, has

_PATH = "tensorrt_llm.SamplingParams"
_DEFAULTS: dict[str, Any] = {
    "max_tokens": 32,
    "include_stop_str_in_output": False,
    "detokenize": True,
    "logprobs_simple_format": False,
}

if has("1.3"):

    class LogprobMode(StrEnum):
        """Which distribution log-probabilities are of."""

        RAW = "raw"
        PROCESSED = "processed"

    _DEFAULTS["logprobs_mode"] = LogprobMode.RAW


def _check(self: Any) -> None:
    if self.top_p is not None and not 0 <= self.top_p <= 1:
        raise ValueError(f"require 0 <= top_p <= 1, got top_p={self.top_p}")
    if self.top_k is not None and self.top_k < 0:
        raise ValueError(f"require top_k >= 0, got top_k={self.top_k}")
    if self.temperature is not None and self.temperature < 0:
        raise ValueError(f"require temperature >= 0, got temperature={self.temperature}")


def _is_greedy(self: Any) -> bool:
    unset = self.temperature is None and self.top_p is None and self.top_k is None
    return unset or self.top_k == 1 or self.top_p == 0 or self.temperature == 0


SamplingParams = make_dataclass(
    "SamplingParams",
    [(name, Any, field(default=_DEFAULTS.get(name))) for name in sorted(allowed(_PATH))],
    namespace={"__post_init__": _check, "is_greedy": property(_is_greedy)},
    kw_only=True,
)
SamplingParams.__module__ = __name__
