"""What a method must know of a batch before it can learn from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Needs:
    """The numbers that an advantage or a loss reads beside tokens, masks and rewards.

    Attributes:
        prev: log-probabilities under the policy at the start of the step.
        reference: log-probabilities under the frozen reference policy.
        teacher: the teacher's log-probability of each token.
        teacher_topk: how many of the teacher's most likely tokens at each position, with their
            log-probabilities; 0 is none.

    ``a | b`` is what both need.
    """

    prev: bool = False
    reference: bool = False
    teacher: bool = False
    teacher_topk: int = 0

    def __or__(self, other: Needs) -> Needs:
        return Needs(
            prev=self.prev or other.prev,
            reference=self.reference or other.reference,
            teacher=self.teacher or other.teacher,
            teacher_topk=max(self.teacher_topk, other.teacher_topk),
        )

    @property
    def asks_teacher(self) -> bool:
        """Whether a teacher must look at the batch."""
        return self.teacher or self.teacher_topk > 0
