"""The verdict in an answer of Gym: its reward, the reward's parts, and whether they measure anything."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from ..failures import GymAnswerError, GymInvalidSample, GymRewardError

_INFRA_FAILURES = frozenset(
    {
        "transport_unreachable",
        "transport_peer_drop",
        "transport_timeout",
        "transport_local_resource",
        "agent_request_failed",
        "agent_timeout",
        "judge_failed",
        "provider_unavailable",
        "provider_quota_exhausted",
        "provider_oom_killed",
        "session_lost",
        "session_expired",
        "session_release_failed",
        "cancelled",
        "kill_shaped",
        "shutdown",
        "persistence_failed",
        "cohort_incomplete",
    }
)
# For names of an environment's own, and of other releases.
_INFRA_WORDS = frozenset(
    {
        "infra",
        "infrastructure",
        "timeout",
        "timed",
        "unavailable",
        "unreachable",
        "outage",
        "oom",
        "connection",
    }
)
_INFRA_ENGINE_CODES = frozenset({"server_error", "rate_limit_exceeded", "vector_store_timeout"})
_SUM_TOLERANCE = 1e-6
#: Rewards and parts of them beyond it are a fault of the verifier's.
MAX_ABS_REWARD = 1e6
_NOT_METRICS = frozenset(
    {"reward", "reward_components", "mask_sample", "responses_create_params", "response"}
)


def check_sample_is_valid(answer: Mapping[str, Any], response: Mapping[str, Any]) -> None:
    """Refuse an answer that Gym marks as no measurement, or whose response failed.

    Gym gives such answers the reward 0, which would teach the policy that a broken judge is its own fault.

    Raises:
        GymInvalidSample: quoting what Gym says.
        GymAnswerError: the mark is no boolean.
    """
    error = response.get("error")
    if error is not None:
        code = error.get("code") if isinstance(error, Mapping) else None
        raise GymInvalidSample(
            f"the response ended with the error {error!r}", infra=str(code) in _INFRA_ENGINE_CODES
        )
    if response.get("status") in ("failed", "cancelled"):
        raise GymInvalidSample(f"the response has the status {response['status']!r}", infra=True)
    failure = answer.get("failure_kind") or answer.get("_ng_failure_class")
    masked = [_flag(answer, "mask_sample"), bool(answer.get("_ng_failure_class"))]
    legacy = answer.get("instance_config")
    if isinstance(legacy, Mapping):
        masked.append(_flag(legacy, "mask_sample"))
    if any(masked):
        reason = answer.get("failure_reason") or answer.get("_ng_failure_judge_error")
        said = f" ({str(reason)[:500]})" if reason else ""
        name = str(failure or "")
        raise GymInvalidSample(
            f"Gym marks the sample as unusable: {name or 'it names no failure'}{said}",
            failure_kind=name,
            infra=_is_infra(name),
        )


def read_reward(
    answer: Mapping[str, Any], *, max_abs_reward: float = MAX_ABS_REWARD
) -> tuple[float | None, dict[str, float]]:
    """The reward, ``None`` where the environment gave none, and its parts by name.

    Raises:
        GymRewardError: no reward field, something that is no finite number or beyond ±``max_abs_reward``, or
            parts that do not sum to the reward within 1e-6 of their scale.
    """
    if "reward" not in answer:
        raise GymRewardError("the answer has no reward", remedy="return one from verify, or null for none")
    given = answer.get("reward_components")
    components: Any = {} if given is None else given
    if not isinstance(components, Mapping):
        raise GymRewardError(
            f"reward_components is a {type(components).__name__}, not an object of names and numbers"
        )
    parts = {
        str(name): _bounded(value, f"reward_components[{name!r}]", max_abs_reward)
        for name, value in components.items()
    }
    if answer["reward"] is None:
        if parts:
            raise GymRewardError(f"the reward is null, but it has the components {sorted(parts)}")
        return None, {}
    reward = _bounded(answer["reward"], "reward", max_abs_reward)
    total = math.fsum(parts.values())
    scale = max(1.0, abs(reward), *map(abs, parts.values())) if parts else 1.0
    if parts and abs(total - reward) > _SUM_TOLERANCE * scale:
        raise GymRewardError(f"the reward is {reward!r}, but its components sum to {total!r}")
    return reward, parts


def verifier_metrics(answer: Mapping[str, Any], *, ignore: Collection[str]) -> dict[str, float]:
    """The finite numbers and booleans at the top of the answer, without those that only echo the row."""
    return {
        name: float(value)
        for name, value in answer.items()
        if name not in _NOT_METRICS
        and name not in ignore
        and not name.startswith("_")
        and isinstance(value, (bool, int, float))
        and _fits_float(value)
    }


def _bounded(value: Any, name: str, limit: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise GymRewardError(f"{name} is {value!r}, not a number")
    if not abs(value) <= limit:
        raise GymRewardError(f"{name} is {str(value)[:40]}, not a finite number within ±{limit:g}")
    return float(value)


def _fits_float(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _flag(mapping: Mapping[str, Any], name: str) -> bool:
    value = mapping.get(name)
    if value is not None and not isinstance(value, bool):
        raise GymAnswerError(f"{name} is {value!r}, not true or false")
    return bool(value)


def _is_infra(failure: str) -> bool:
    words = failure.lower().replace(":", "_").replace("-", "_").split("_")
    return failure in _INFRA_FAILURES or not _INFRA_WORDS.isdisjoint(words)
