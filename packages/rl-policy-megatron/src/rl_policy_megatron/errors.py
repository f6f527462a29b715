"""What can go wrong here, by kind. Every message names the component, the input and the remedy."""

from __future__ import annotations


class PolicyError(RuntimeError):
    """Base of everything this package raises on purpose."""


class SettingsError(PolicyError, ValueError):
    """A setting of the wrong type or outside its range, or two that exclude each other; names it."""


class ModelDirectoryError(PolicyError):
    """A model directory that is missing, incomplete, or whose files contradict each other."""


class UnsupportedModelError(PolicyError):
    """A model, or one of its options, that this package does not train."""


class BatchError(PolicyError):
    """A batch that breaks its contract: shapes, lengths, token ids."""


class LossError(PolicyError):
    """A loss function that returned something other than a finite scalar and its metrics."""


class NonFiniteGradientError(PolicyError):
    """The gradient of an update holds NaN or inf; the weights were left as they were."""


class CheckpointError(PolicyError):
    """A checkpoint that cannot be written, or does not belong to this policy."""


class RuntimeStateError(PolicyError):
    """A call that the policy's current state does not allow."""


class PeerError(PolicyError):
    """Another rank of this policy failed, so this one gave up as well; says which and why.

    Attributes:
        rank: the number of the rank that failed; -1 where it is not known.
    """

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class RendezvousError(PolicyError):
    """The ranks of a policy did not all meet in time.

    Attributes:
        missing: numbers of the ranks that did not come, as far as they are known.
    """

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class RankError(PolicyError):
    """A call to the ranks of a policy failed: the first of them to fail, and why.

    Attributes:
        rank: its number; -1 where no rank was asked.
        call: the method that was called.
        answered: whether the rank itself raised the cause, and so lived on. Of several ranks all are ended
            nevertheless, unless each of them answered so before it had begun.
    """

    def __init__(self, message: str, rank: int = -1, call: str = "", *, answered: bool = False) -> None:
        super().__init__(message)
        self.rank = rank
        self.call = call
        self.answered = answered
