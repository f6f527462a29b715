"""Rollouts by vLLM. Importing this imports neither vLLM nor Ray."""

from .engine import VllmEngine
from .settings import VllmSettings
from .sync_engine import VllmSyncEngine
from .worker import VllmCpuWorker, VllmWorker

__all__ = ["VllmCpuWorker", "VllmEngine", "VllmSettings", "VllmSyncEngine", "VllmWorker"]
