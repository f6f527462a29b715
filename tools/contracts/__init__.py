"""Kinds of import contract that import-linter lacks; the contracts themselves stand in pyproject.toml."""

from tools.contracts.confined import Confined
from tools.contracts.stdlib_only import StdlibOnly

__all__ = ["Confined", "StdlibOnly"]
