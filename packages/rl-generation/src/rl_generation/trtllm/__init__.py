"""Rollouts by TensorRT-LLM. Importing this imports neither TensorRT-LLM nor Ray."""

from .availability import require_available
from .engine import TrtllmEngine
from .generation import TrtllmGeneration
from .settings import TrtllmSettings

__all__ = ["TrtllmEngine", "TrtllmGeneration", "TrtllmSettings", "require_available"]
