"""Advantages of turns that broke a rule: an invalid tool call, malformed thinking."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rl_gym_bridge.trajectory import Trajectory

from .base import AdvantageError


@dataclass(frozen=True, slots=True)
class MessageOverrides:
    """Advantages that replace the estimator's on the sampled tokens of a turn; ``None`` leaves them.

    Attributes:
        invalid_tool_call: for turns whose tool call was written as text instead of made.
        malformed_thinking: for turns whose thinking tags do not match. A turn with both faults gets
            the lower of the two.

    Raises:
        AdvantageError: a value that is not finite.
    """

    invalid_tool_call: float | None = None
    malformed_thinking: float | None = None

    def __post_init__(self) -> None:
        for name in ("invalid_tool_call", "malformed_thinking"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise AdvantageError(f"the override {name} must be a finite number, got {value}")

    def __bool__(self) -> bool:
        return self.invalid_tool_call is not None or self.malformed_thinking is not None

    def __call__(self, advantages: torch.Tensor, trajectories: Sequence[Trajectory]) -> torch.Tensor:
        """``[N, S]`` advantages with the overrides applied.

        Args:
            advantages: ``[N, S]``; not changed.
            trajectories: N of them, none longer than S tokens.
        """
        changed = advantages.clone()
        for row, trajectory in enumerate(trajectories):
            end = 0
            for turn in trajectory.turns:
                begin = end + len(turn.prompt_token_ids)
                end = begin + len(turn.generation_token_ids)
                wanted = [
                    value
                    for value, broken in (
                        (self.invalid_tool_call, turn.invalid_tool_call),
                        (self.malformed_thinking, turn.malformed_thinking),
                    )
                    if broken and value is not None
                ]
                if wanted:
                    changed[row, begin:end] = min(wanted)
        return changed
