"""Token-exact rollout engines with weight refit."""

from ._version import __version__
from .protocol import Completion, Generation, GenerationError, GenerationRequest, SamplingParams

__all__ = [
    "Completion",
    "Generation",
    "GenerationError",
    "GenerationRequest",
    "SamplingParams",
    "__version__",
]
