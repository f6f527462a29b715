"""Configuration: validated sections, read once at the edge."""

from .errors import ConfigError
from .job import GRPOConfig, JobConfig
from .loading import load_config, to_yaml

__all__ = ["ConfigError", "GRPOConfig", "JobConfig", "load_config", "to_yaml"]
