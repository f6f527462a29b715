"""Configuration: validated sections, read once at the edge."""

from .distillation import DistillationConfig
from .errors import ConfigError
from .job import GRPOConfig, JobConfig
from .loading import load_config, to_yaml

__all__ = ["ConfigError", "DistillationConfig", "GRPOConfig", "JobConfig", "load_config", "to_yaml"]
