"""Trains a language-model policy with megatron-core, on CPUs and GPUs.

Importing this package imports neither megatron nor ray; :class:`MegatronPolicy` does, when used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._version import __version__
from .errors import (
    BatchError,
    CheckpointError,
    LossError,
    ModelDirectoryError,
    NonFiniteGradientError,
    PeerError,
    PolicyError,
    RuntimeStateError,
    SettingsError,
    UnsupportedModelError,
)
from .layout import ParallelLayout
from .lora import LoraSettings
from .settings import OptimizerSettings, PolicySettings

if TYPE_CHECKING:
    from .policy import MegatronPolicy

__all__ = [
    "BatchError",
    "CheckpointError",
    "LoraSettings",
    "LossError",
    "MegatronPolicy",
    "ModelDirectoryError",
    "NonFiniteGradientError",
    "OptimizerSettings",
    "ParallelLayout",
    "PeerError",
    "PolicyError",
    "PolicySettings",
    "RuntimeStateError",
    "SettingsError",
    "UnsupportedModelError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "MegatronPolicy":
        from .policy import MegatronPolicy

        return MegatronPolicy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
