"""What the applications share: configuration, composition, run directories, command line."""

from ._version import __version__

__all__ = ["__version__"]
