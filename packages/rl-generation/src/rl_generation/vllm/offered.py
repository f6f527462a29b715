"""What the installed vLLM knows by name, read from its files: importing it would take many seconds."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ..failures import GenerationError

if TYPE_CHECKING:
    from .server import VllmServerSettings

_ARGUMENTS = ("engine/arg_utils.py",)
# Newest place first; they moved between releases.
_TOOL_PARSERS = ("tool_parsers/__init__.py", "entrypoints/openai/tool_parsers/__init__.py")
_REASONING_PARSERS = ("reasoning/__init__.py",)


def engine_argument_names() -> frozenset[str] | None:
    """Of vLLM's ``AsyncEngineArgs``; ``None`` where they cannot be read."""
    names = {
        item.target.id
        for tree in _trees(_ARGUMENTS)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    return frozenset(names) or None


def tool_parser_names() -> frozenset[str] | None:
    """Of the parsers of tool calls; ``None`` where they cannot be read."""
    return _registered(_TOOL_PARSERS, "_TOOL_PARSERS_TO_REGISTER")


def reasoning_parser_names() -> frozenset[str] | None:
    """Of the parsers of thinking; ``None`` where they cannot be read."""
    return _registered(_REASONING_PARSERS, "_REASONING_PARSERS_TO_REGISTER")


def unknown_name(name: str, known: Collection[str] | None, *, whole_list: bool) -> str | None:
    """What to say of a name that vLLM does not know, ``None`` if it knows it or that cannot be told.

    Args:
        name: as the user wrote it.
        known: what vLLM knows.
        whole_list: say all that it knows where nothing is similar; else one look-alike at most.
    """
    if known is None or name in known:
        return None
    close = get_close_matches(name, sorted(known), n=1)
    meant = f"did you mean {close[0]}?" if close else ""
    listed = f"it knows {', '.join(sorted(known))}" if whole_list else ""
    return " ".join(part for part in (meant, listed) if part) or "leave it out"


def require_known(name: str, engine_arguments: Collection[str], server: VllmServerSettings | None) -> None:
    """Refuse names that vLLM does not know before it loads anything.

    Args:
        name: of the engine, for the error.
        engine_arguments: names of arguments passed on to vLLM.
        server: of its HTTP server, if it has one.

    Raises:
        GenerationError: there is such a name; says which and what was perhaps meant.
    """
    if engine_arguments:
        for argument in engine_arguments:
            hint = unknown_name(argument, engine_argument_names(), whole_list=False)
            if hint is not None:
                raise GenerationError(
                    f"{name}: engine_arguments has {argument!r}, which this vLLM does not know; {hint}"
                )
    for key, parser, known in () if server is None else _parsers(server, engine_arguments):
        hint = unknown_name(parser, known, whole_list=True)
        if hint is not None:
            raise GenerationError(f"{name}: {key}={parser!r} is not a parser of this vLLM; {hint}")


def _parsers(
    server: VllmServerSettings, engine_arguments: Collection[str]
) -> Iterator[tuple[str, str, frozenset[str] | None]]:
    if server.tool_parser is not None:
        yield "tool_parser", server.tool_parser, tool_parser_names()
    # A plugin brings parsers of its own.
    if server.reasoning_parser is not None and "reasoning_parser_plugin" not in engine_arguments:
        yield "reasoning_parser", server.reasoning_parser, reasoning_parser_names()


def _registered(places: tuple[str, ...], table: str) -> frozenset[str] | None:
    names = {
        key.value
        for tree in _trees(places)
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict)
        if any(isinstance(target, ast.Name) and target.id == table for target in _targets(node))
        for key in node.value.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }
    return frozenset(names) or None


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _trees(places: tuple[str, ...]) -> Iterator[ast.Module]:
    """The first of the files that is there, parsed."""
    for root in _folders():
        for place in places:
            if (root / place).is_file():
                yield _parsed(root / place)
                return


def _folders() -> list[Path]:
    found = find_spec("vllm")
    return [] if found is None else [Path(place) for place in found.submodule_search_locations or ()]


@cache
def _parsed(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])
