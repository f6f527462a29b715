"""The one error of configuration, and the hints it carries."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from .synonyms import synonym


class ConfigError(ValueError):
    """A setting that cannot be used. The message is one line: the key, the fault and the remedy."""


_LEAST_LIKENESS = 0.5


def closest_path(unknown: str, known: Iterable[str]) -> str | None:
    """The known dotted path that ``unknown`` was most likely meant to be, or ``None``.

    The same last name elsewhere in the tree wins over a similar spelling: a setting put one level
    too high or too low is the commonest slip. Next come the names that other stacks use.
    """
    paths = list(known)
    parent, _, leaf = unknown.rpartition(".")
    same_leaf = [path for path in paths if path.rpartition(".")[2] == leaf]
    below = [path for path in same_leaf if path.startswith(f"{parent}.")]
    if below:
        return min(below, key=lambda path: (len(path), path))
    called = synonym(unknown)
    if called in paths:
        return called
    if same_leaf:
        return min(same_leaf, key=lambda path: (-_likeness(unknown, path), len(path), path))
    siblings = [path for path in paths if path.rpartition(".")[0] == parent]
    close = difflib.get_close_matches(unknown, siblings, n=1, cutoff=0.7) or difflib.get_close_matches(
        unknown, paths, n=1, cutoff=0.7
    )
    # A long name of a section makes any two of its short keys look alike.
    if close and _likeness(leaf, close[0].rpartition(".")[2]) > _LEAST_LIKENESS:
        return close[0]
    leaves = {path.rpartition(".")[2]: path for path in paths}
    near = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.7)
    return leaves[near[0]] if near else None


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
