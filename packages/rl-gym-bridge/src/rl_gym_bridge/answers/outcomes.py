"""From what an agent answered, or the error in its place, to how a rollout ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..client import Answer
from ..config import NemoGymConfig
from ..failures import GymConfigError, GymError, kind_of
from ..penalties import PenaltyTaker
from ..postprocess import postprocess_nemo_gym_result
from ..requests import RolloutRequest, RolloutResult
from ..trajectory import RolloutFailure, Trajectory

#: Token fields of an answer's items, and where their text goes.
_TEXTS = {"prompt_token_ids": "prompt_str", "generation_token_ids": "generation_str"}


class OutcomeMaker:
    """Turns answers into results, by the run's settings.

    Args:
        config: of the bridge.
    """

    def __init__(self, config: NemoGymConfig) -> None:
        self._config = config
        self._penalties = PenaltyTaker(config.penalties, config.effort_levels)
        self._tokenizer: Any | None = None

    def set_tokenizer(self, tokenizer: Any | None) -> None:
        """Show tokens as text in the answers of results from now on; ``None`` does not.

        Raises:
            GymConfigError: it has no ``decode``.
        """
        if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
            raise GymConfigError(
                f"a {type(tokenizer).__name__} has no decode()",
                component="tokenizer",
                remedy="give a tokenizer",
            )
        self._tokenizer = tokenizer

    def result(self, request: RolloutRequest, answer: Answer) -> RolloutResult:
        """The sample in an answer with penalties taken, or why there is none in it. Raises nothing."""
        outcome: Trajectory | RolloutFailure
        try:
            outcome = self._trajectory(request, answer.value)
        except Exception as error:
            outcome = failure_of(request, error)
        return RolloutResult(
            request=request,
            outcome=outcome,
            answer=self._shown(answer.value),
            attempts=answer.attempts,
            seconds=answer.seconds,
        )

    def _trajectory(self, request: RolloutRequest, answer: Mapping[str, Any]) -> Trajectory:
        config = self._config
        trajectory = postprocess_nemo_gym_result(
            answer,
            group_id=request.group_id,
            rollout_id=request.rollout_id,
            agent=request.agent,
            on_discontinuity=config.on_discontinuity,
            invalid_tool_call_patterns=config.invalid_tool_call_patterns,
            thinking_tags=config.thinking_tags,
            require_routed_experts=config.require_routed_experts,
            routed_experts_dtype=config.routed_experts_dtype,
            # Gym echoes the row.
            ignore_metrics=request.body.keys(),
        )
        return self._penalties.taken(trajectory, request.effort)

    def _shown(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        """The answer with the text of its tokens beside them; the original is not changed."""
        response = answer.get("response")
        items = response.get("output") if isinstance(response, Mapping) else None
        if self._tokenizer is None or not isinstance(response, Mapping) or not isinstance(items, list):
            return answer
        shown = [self._with_text(item) if isinstance(item, Mapping) else item for item in items]
        return {**answer, "response": {**response, "output": shown}}

    def _with_text(self, item: Mapping[str, Any]) -> Mapping[str, Any]:
        assert self._tokenizer is not None
        texts = {}
        for field, name in _TEXTS.items():
            if isinstance(item.get(field), list):
                try:
                    texts[name] = self._tokenizer.decode(item[field])
                except Exception as error:
                    # For people only: a sample is not lost because its text cannot be shown.
                    texts[name] = f"(not decoded: {type(error).__name__}: {error})"
        return {**item, **texts} if texts else item


def failed(request: RolloutRequest, error: GymError) -> RolloutResult:
    """The result of a rollout that got no answer."""
    return RolloutResult(
        request=request,
        outcome=failure_of(request, error),
        attempts=error.attempts,
        seconds=error.elapsed_s,
    )


def failure_of(request: RolloutRequest, error: Exception) -> RolloutFailure:
    """The failure that an error means; what nobody classified is DATA."""
    return RolloutFailure(
        group_id=request.group_id,
        rollout_id=request.rollout_id,
        agent=request.agent,
        kind=kind_of(error),
        error=f"{type(error).__name__}: {error}",
    )
