"""GRPO and relatives as pure functions, losses and training loops on protocols."""

from ._version import __version__

__all__ = ["__version__"]
