"""Training loops on protocols, each readable from top to bottom."""

from .settings import GRPOSettings
from .sft import SFTResult, SFTSettings, run_sft
from .state import HeldOut, LoopError, LoopResult, StepReport
from .synchronous import run_grpo

__all__ = [
    "GRPOSettings",
    "HeldOut",
    "LoopError",
    "LoopResult",
    "SFTResult",
    "SFTSettings",
    "StepReport",
    "run_grpo",
    "run_sft",
]
