"""Losses: picklable settings that are called with a view of the model's output and a batch."""

from .clipped_pg import ClippedPGLoss
from .distillation import DistillationLoss
from .dpo import DPOLoss
from .normalization import LossError
from .sft import SFTLoss

__all__ = ["ClippedPGLoss", "DPOLoss", "DistillationLoss", "LossError", "SFTLoss"]
