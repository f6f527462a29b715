"""Token-exact rollout engines with weight refit."""

from ._version import __version__

__all__ = ["__version__"]
