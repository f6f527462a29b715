"""Asynchronous, fault-tolerant reinforcement learning from the command line."""

from ._version import __version__

__all__ = ["__version__"]
