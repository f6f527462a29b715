"""Which environment each Ray actor of the stack runs in."""

from ._version import __version__

__all__ = ["__version__"]
