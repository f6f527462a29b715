"""A method: everything that tells one algorithm from another, as one value."""

from __future__ import annotations

from dataclasses import dataclass, field

from .advantages.base import AdvantageEstimator
from .advantages.messages import MessageOverrides
from .needs import Needs
from .protocols import PolicyLoss, Teacher


class MethodError(ValueError):
    """Parts of a method that do not go together; names them and the remedy."""


@dataclass(frozen=True, slots=True)
class Method:
    """How a trainer turns judged rollouts into updates. The loop knows nothing else of an algorithm.

    Attributes:
        advantage: what each rollout, or each of its tokens, is worth.
        loss: what is minimised.
        overrides: advantages of turns that broke a rule, in place of what ``advantage`` gave them.
        advantage_clip: bound on the absolute advantage, before the overrides; ``None`` is off.
        teacher: who is asked where ``advantage`` or ``loss`` needs a teacher.

    Raises:
        MethodError: a teacher is needed and missing, or a bound that is not positive.
    """

    advantage: AdvantageEstimator
    loss: PolicyLoss
    overrides: MessageOverrides = field(default_factory=MessageOverrides)
    advantage_clip: float | None = None
    teacher: Teacher | None = None

    def __post_init__(self) -> None:
        if not hasattr(self.loss, "needs") or hasattr(self.loss, "prepare"):
            raise MethodError(
                f"{type(self.loss).__name__} is no loss for rollouts but for demonstrations or pairs; "
                "give it to a policy's train() with a batch of them"
            )
        if self.needs.asks_teacher and self.teacher is None:
            raise MethodError(
                f"{type(self.advantage).__name__} with {type(self.loss).__name__} learns from a teacher, and "
                "none was given"
            )
        if self.advantage_clip is not None and not self.advantage_clip > 0:
            raise MethodError(
                f"advantage_clip must be above 0, or None for no bound; got {self.advantage_clip}"
            )

    @property
    def needs(self) -> Needs:
        """What advantage and loss need together."""
        return self.advantage.needs | self.loss.needs
