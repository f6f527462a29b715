"""The settings of the bridge, and their separation from Gym's own."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from .answers.text import INVALID_TOOL_CALL_PATTERNS, THINKING_TAGS
from .failures import GymConfigError
from .retry import RetryPolicy
from .routed_experts import TYPE_CODES
from .settings.addresses import checked_base_urls
from .settings.history_flags import refuse_dropped_thinking
from .settings.reader import as_mapping, plain, read_fields, suggestion

logger = logging.getLogger(__name__)

#: The run's environment section and the key in it that is about Gym.
SECTION = "env.nemo_gym"
_KEY = "nemo_gym"
#: What whoever starts Gym says, and no key of the section.
_ARGUMENTS = frozenset(
    {"model_name", "base_urls", "gym_config", "require_routed_experts", "use_fastokens", "token_capture"}
)
#: Keys of the bridge that Gym reads, too.
_SHARED = frozenset({"num_gpu_nodes"})
#: How alike a key of Gym's and one of ours may be before somebody is asked.
_NEAR_MISS = 0.82


@dataclass(frozen=True, slots=True)
class DeferredBaseUrls:
    """Addresses that are reserved for model servers which still load.

    Attributes:
        urls: the reserved base URLs, ``http://host:port/v1``; at least one.
        ready_timeout_s: how long the first rollout may wait until all of them answer.
    """

    urls: tuple[str, ...]
    ready_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "urls", checked_base_urls(self.urls, "DeferredBaseUrls.urls"))
        if not self.urls:
            raise GymConfigError(
                "no address is reserved",
                component="DeferredBaseUrls.urls",
                remedy="use [] where there is no server",
            )
        _check(
            _positive(self.ready_timeout_s),
            "DeferredBaseUrls.ready_timeout_s",
            self.ready_timeout_s,
            _SECONDS,
        )


@dataclass(frozen=True, slots=True)
class EffortLevel:
    """How hard a share of the rows asks the policy to think.

    Attributes:
        name: what rows call it in their field ``effort``.
        share: probability with which a row that names no level gets it.
        instruction: appended to the system message of the prompt, if not empty.
        chat_template_kwargs: given to the model's chat template.
        max_output_tokens: upper bound on the sampled tokens per model call, ``None`` for the run's own.
        token_budget: sampled tokens of a rollout that cost nothing.
        token_penalty: taken from the reward for each sampled token above ``token_budget``.
    """

    name: str
    share: float = 0.0
    instruction: str = ""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_output_tokens: int | None = None
    token_budget: int = 0
    token_penalty: float = 0.0

    def __post_init__(self) -> None:
        _check(bool(self.name.strip()), "name", self.name, "not empty")
        _check(0 <= self.share <= 1, "share", self.share, "a probability from 0 to 1")
        limit = self.max_output_tokens
        _check(
            limit is None or limit >= 1, "max_output_tokens", limit, "at least 1, or null for the run's own"
        )
        _check(self.token_budget >= 0, "token_budget", self.token_budget, "at least 0")
        _check(_not_negative(self.token_penalty), "token_penalty", self.token_penalty, "a finite number >= 0")
        refuse_dropped_thinking(self.chat_template_kwargs, "chat_template_kwargs")


@dataclass(frozen=True, slots=True)
class RewardPenalties:
    """What is taken from a rollout's reward, each ≥ 0, once per turn in which it happens.

    Attributes:
        invalid_tool_call: a tool call written as text instead of made.
        malformed_thinking: thinking tags that do not match, or that stand in the answer.
    """

    invalid_tool_call: float = 0.0
    malformed_thinking: float = 0.0

    def __post_init__(self) -> None:
        for name in ("invalid_tool_call", "malformed_thinking"):
            _check(_not_negative(getattr(self, name)), name, getattr(self, name), "a finite number >= 0")


@dataclass(frozen=True, slots=True)
class NemoGymConfig:
    """Everything that the bridge needs to start Gym and to run rollouts with it.

    Attributes:
        model_name: name under which the policy is served.
        base_urls: OpenAI-compatible servers of the policy; empty where there is none.
        gym_config: Gym's own settings, forwarded untouched.
        require_routed_experts: whether answers must carry the experts that the router chose (router replay).
        routed_experts_dtype: integer type of those, by name.
        use_fastokens: whether the policy uses the fast tokenizer; kept for ``NemoGym.settings``, no more.
        token_capture: settings of token capture; kept for ``NemoGym.settings``, no more.
        num_gpu_nodes: nodes with GPUs that Gym itself uses; with 0 the actor may run anywhere.
        python: interpreter that has ``nemo_gym``; ``None`` finds one (see ``rl_gym_bridge.interpreter``).
        invalid_tool_call_patterns: text in an answer that shows a tool call which was not made.
        thinking_tags: opening and closing tag of the policy's thinking.
        on_discontinuity: what happens to a rollout whose prompts do not extend each other: it fails, or
            the turns that hold are kept.
        penalties: taken from the reward.
        effort_levels: by which rows may ask for more or less thinking.
        retry: how often a request is tried.
        max_concurrency: rollouts at the agents at the same time.
        transport: HTTP library; ``auto`` takes aiohttp where it is installed and concurrency is high.
        start_timeout_s: how long Gym may take to become ready.
        rollout_timeout_s: how long one attempt of a rollout may take.
        shutdown_timeout_s: how long Gym may take to end before it is killed.
        work_dir: folder of logs and of Gym's own output; ``None`` makes one.
        search_folder: where Gym looks for configuration files and servers before its own; ``None`` is the
            working folder of the process that starts it, which in an actor need not be the trainer's.

    Raises:
        GymConfigError: a value out of its range, or two that contradict each other; names them.
    """

    model_name: str
    base_urls: tuple[str, ...] | DeferredBaseUrls = ()
    gym_config: Mapping[str, Any] = field(default_factory=dict)
    require_routed_experts: bool = False
    routed_experts_dtype: str = "int16"
    use_fastokens: bool = False
    token_capture: Mapping[str, Any] | None = None
    num_gpu_nodes: int = 0
    python: str | None = None
    invalid_tool_call_patterns: tuple[str, ...] = INVALID_TOOL_CALL_PATTERNS
    thinking_tags: tuple[str, str] = THINKING_TAGS
    on_discontinuity: Literal["fail", "keep_prefix"] = "fail"
    penalties: RewardPenalties = field(default_factory=RewardPenalties)
    effort_levels: tuple[EffortLevel, ...] = ()
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    max_concurrency: int = 1024
    transport: Literal["auto", "httpx", "aiohttp"] = "auto"
    start_timeout_s: float = 900.0
    rollout_timeout_s: float = 3600.0
    shutdown_timeout_s: float = 30.0
    work_dir: str | None = None
    search_folder: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.base_urls, DeferredBaseUrls):
            object.__setattr__(self, "base_urls", checked_base_urls(self.base_urls))
        _check(
            isinstance(self.model_name, str) and bool(self.model_name.strip()),
            "model_name",
            self.model_name,
            "the name under which the policy is served",
        )
        dtype = self.routed_experts_dtype
        _check(dtype in TYPE_CODES, "routed_experts_dtype", dtype, f"one of {', '.join(TYPE_CODES)}")
        _check(self.num_gpu_nodes >= 0, "num_gpu_nodes", self.num_gpu_nodes, "at least 0")
        _check(self.max_concurrency >= 1, "max_concurrency", self.max_concurrency, "at least 1")
        for name in ("start_timeout_s", "rollout_timeout_s", "shutdown_timeout_s"):
            _check(_positive(getattr(self, name)), name, getattr(self, name), _SECONDS)
        for name in ("python", "work_dir", "search_folder"):
            value = getattr(self, name)
            _check(value is None or bool(value.strip()), name, value, "a path, or null to find one")
        for pattern in self.invalid_tool_call_patterns:
            _check(bool(pattern), "invalid_tool_call_patterns", pattern, "made of texts that are not empty")
        opening, closing = self.thinking_tags
        _check(
            bool(opening) and bool(closing),
            "thinking_tags",
            self.thinking_tags,
            "two texts that are not empty",
        )
        _check(opening != closing, "thinking_tags", self.thinking_tags, "two different texts")
        self._check_efforts()
        refuse_dropped_thinking(self.gym_config, SECTION)

    def _check_efforts(self) -> None:
        names = [level.name for level in self.effort_levels]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise GymConfigError(
                    f"levels {names.index(name)} and {index} are both called {name!r}",
                    component="effort_levels",
                    remedy="give each level a name of its own",
                )
        total = math.fsum(level.share for level in self.effort_levels)
        _check(
            total <= 1 + 1e-9,
            "effort_levels",
            {level.name: level.share for level in self.effort_levels},
            f"levels whose shares are at most 1 in sum, not {total:g}",
        )


def build_nemo_gym_config(
    env_config: Mapping[str, Any],
    *,
    base_urls: Sequence[str] | DeferredBaseUrls,
    model_name: str,
    enable_router_replay: bool,
    use_fastokens: bool,
    token_capture: Mapping[str, Any] | None = None,
) -> NemoGymConfig:
    """Separate the bridge's settings in ``env_config["nemo_gym"]`` from Gym's own.

    A key that names a field of :class:`NemoGymConfig` becomes that field. Everything else is forwarded to Gym
    as it is, in a deep copy; ``num_gpu_nodes``, which both read, is forwarded, too. The caller's mapping is
    not changed. A key that is almost one of the bridge's is forwarded with a warning.

    Args:
        env_config: the environment section of a run, with the key ``nemo_gym``.
        base_urls: OpenAI-compatible servers of the policy: ``[]`` where there is none, or
            :class:`DeferredBaseUrls` where they are reserved and still load.
        model_name: name under which they serve the policy.
        enable_router_replay: whether answers must carry the router's choices.
        use_fastokens: kept as it is.
        token_capture: kept as it is.

    Raises:
        GymConfigError: no such key, a value of another type or outside its range, an entry of ``base_urls``
            that is ``None`` or no address, or a setting that drops earlier thinking; says what to write
            instead.
    """
    section = as_mapping(as_mapping(env_config, "env").get(_KEY), SECTION)
    known = {entry.name for entry in fields(NemoGymConfig)} - _ARGUMENTS
    ours = read_fields(NemoGymConfig, {key: value for key, value in section.items() if key in known}, SECTION)
    forwarded = {key: plain(value) for key, value in section.items() if key not in known or key in _SHARED}
    _warn_of_near_misses([key for key in forwarded if key not in known], sorted(known))
    given = read_fields(
        NemoGymConfig,
        {
            "model_name": model_name,
            "require_routed_experts": enable_router_replay,
            "use_fastokens": use_fastokens,
            "token_capture": token_capture,
        },
        "argument",
    )
    urls = base_urls if isinstance(base_urls, DeferredBaseUrls) else checked_base_urls(base_urls)
    return NemoGymConfig(base_urls=urls, gym_config=forwarded, **ours, **given)


def _warn_of_near_misses(forwarded: Sequence[str], known: Sequence[str]) -> None:
    for key in forwarded:
        close = suggestion(key, known, cutoff=_NEAR_MISS)
        if close:
            logger.warning("%s.%s is no setting of the bridge%s and is forwarded to Gym", SECTION, key, close)
        elif key in _ARGUMENTS:
            logger.warning(
                "%s.%s is forwarded to Gym; the bridge takes it from whoever starts it", SECTION, key
            )


_SECONDS = "a finite number of seconds above 0"


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _not_negative(value: float) -> bool:
    return math.isfinite(value) and value >= 0


def _check(holds: bool, name: str, value: Any, wanted: str) -> None:
    if not holds:
        raise GymConfigError(f"it is {value!r}", component=name, remedy=f"it has to be {wanted}")
