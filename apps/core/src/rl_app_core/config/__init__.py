"""Configuration: validated sections, read once at the edge."""

from .asynchronous import SingleControllerConfig
from .distillation import DistillationConfig
from .errors import ConfigError
from .job import GRPOConfig, JobConfig
from .loading import load_config, to_yaml

__all__ = [
    "ConfigError",
    "DistillationConfig",
    "GRPOConfig",
    "JobConfig",
    "SingleControllerConfig",
    "load_config",
    "to_yaml",
]
