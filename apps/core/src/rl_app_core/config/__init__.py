"""Configuration: validated sections, read once at the edge."""

from .errors import ConfigError
from .loading import load_config, to_yaml
from .sections import RunConfig

__all__ = ["ConfigError", "RunConfig", "load_config", "to_yaml"]
