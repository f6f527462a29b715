"""Training loops on protocols, each readable from top to bottom."""

from .collect import DynamicSamplingError
from .settings import LoopSettings
from .sft import SFTResult, SFTSettings, run_sft
from .state import HeldOut, LoopError, LoopResult, StepReport
from .sync import run_sync

__all__ = [
    "DynamicSamplingError",
    "HeldOut",
    "LoopError",
    "LoopResult",
    "LoopSettings",
    "SFTResult",
    "SFTSettings",
    "StepReport",
    "run_sft",
    "run_sync",
]
