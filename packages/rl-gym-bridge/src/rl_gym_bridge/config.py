"""The settings of the bridge, and their separation from Gym's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .retry import RetryPolicy


@dataclass(frozen=True, slots=True)
class DeferredBaseUrls:
    """Addresses that are reserved for model servers which still load.

    Attributes:
        urls: the reserved base URLs, ``http://host:port/v1``; at least one.
        ready_timeout_s: how long the first rollout may wait until all of them answer.
    """

    urls: tuple[str, ...]
    ready_timeout_s: float = 600.0


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


@dataclass(frozen=True, slots=True)
class RewardPenalties:
    """What is taken from a rollout's reward, each ≥ 0, once per turn in which it happens.

    Attributes:
        invalid_tool_call: a tool call written as text instead of made.
        malformed_thinking: thinking tags that do not match, or that stand in the answer.
    """

    invalid_tool_call: float = 0.0
    malformed_thinking: float = 0.0


@dataclass(frozen=True, slots=True)
class NemoGymConfig:
    """Everything that the bridge needs to start Gym and to run rollouts with it.

    Attributes:
        model_name: name under which the policy is served.
        base_urls: OpenAI-compatible servers of the policy; empty where there is none.
        gym_config: Gym's own settings, forwarded untouched.
        require_routed_experts: whether answers must carry the experts that the router chose (router replay).
        routed_experts_dtype: integer type of those, by name.
        use_fastokens: tokenise with the fast tokenizer where Gym does so.
        token_capture: settings of token capture, forwarded to the actor.
        num_gpu_nodes: nodes with GPUs that Gym itself uses; with 0 the actor may run anywhere.
        python: interpreter that has ``nemo_gym``; ``None`` finds one (see ``rl_gym_bridge.interpreter``).
        invalid_tool_call_patterns: text in an answer that shows a tool call which was not made.
        thinking_tags: opening and closing tag of the policy's thinking.
        on_discontinuity: what happens to a rollout whose prompts do not extend each other: it fails, or the turns
            that hold are kept.
        penalties: taken from the reward.
        effort_levels: by which rows may ask for more or less thinking.
        retry: how often a request is tried.
        max_concurrency: rollouts at the agents at the same time.
        transport: HTTP library; ``auto`` takes aiohttp where it is installed and concurrency is high.
        start_timeout_s: how long Gym may take to become ready.
        rollout_timeout_s: how long one attempt of a rollout may take.
        shutdown_timeout_s: how long Gym may take to end before it is killed.
        work_dir: folder of logs and of Gym's own output; ``None`` makes one.
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
    invalid_tool_call_patterns: tuple[str, ...] = (
        "<tool_call>",
        "</tool_call>",
        "<function_call>",
        "</function_call>",
    )
    thinking_tags: tuple[str, str] = ("<think>", "</think>")
    on_discontinuity: Literal["fail", "keep_prefix"] = "fail"
    penalties: RewardPenalties = RewardPenalties()
    effort_levels: tuple[EffortLevel, ...] = ()
    retry: RetryPolicy = RetryPolicy()
    max_concurrency: int = 1024
    transport: Literal["auto", "httpx", "aiohttp"] = "auto"
    start_timeout_s: float = 900.0
    rollout_timeout_s: float = 3600.0
    shutdown_timeout_s: float = 30.0
    work_dir: str | None = None
