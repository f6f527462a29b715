"""Trains a language-model policy with megatron-core, on CPUs and GPUs."""

from ._version import __version__

__all__ = ["__version__"]
