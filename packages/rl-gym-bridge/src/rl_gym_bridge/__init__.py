"""Exact RL trajectories from NeMo Gym and in-process environments."""

from ._version import __version__

__all__ = ["__version__"]
