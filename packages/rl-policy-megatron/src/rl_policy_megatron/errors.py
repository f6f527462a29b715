"""What can go wrong here, by kind. Every message names the component, the input and the remedy."""

from __future__ import annotations


class PolicyError(RuntimeError):
    """Base of everything this package raises on purpose."""


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
