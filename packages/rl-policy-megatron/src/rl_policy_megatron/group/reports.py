"""What a rank reports of itself to the driver."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a rank stands after a call that failed.

    Attributes:
        agreed: whether all ranks gave the call up together; None if it was never begun here.
        whole: whether the policy is as it was before, or as after a whole update.
        version: of the weights.
        own: whether this rank itself failed, and did not only hear of another; of each its own.
    """

    agreed: bool | None
    whole: bool
    version: int
    own: bool = field(default=True, compare=False)

    @property
    def unharmed(self) -> bool:
        """Whether this rank may be called again, if all others stand where it stands."""
        return self.whole and self.agreed is not False


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """How far a save of one rank is.

    Attributes:
        ended: well or not.
        failure: what went wrong.
        follows: whether that is only that another rank failed.
    """

    ended: bool
    failure: str | None = None
    follows: bool = False
