"""Installs NeMo Gym for a checkout: one environment with a Python of its own, for many of its servers."""

from .install import gym_python, install_gym
from .interpreters import NoPythonError, base_python

__all__ = ["NoPythonError", "base_python", "gym_python", "install_gym"]
