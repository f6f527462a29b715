"""Which release the double stands for, and what the contract says of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

RELEASE = os.environ.get("TRTLLM_DOUBLE_RELEASE", "1.2.1")
CONTRACT: dict[str, Any] = json.loads(
    (Path(__file__).parents[3] / "contract.json").read_text(encoding="utf-8")
)


def _key(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split(".")[:2])


def has(since: str, until: str | None = None) -> bool:
    """Whether this release lies between two others."""
    return _key(since) <= _key(RELEASE) and (until is None or _key(RELEASE) <= _key(until))


def allowed(path: str) -> set[str]:
    """Argument or field names that the contract knows for ``path`` in this release."""
    (entry,) = [e for e in CONTRACT["callables"] + CONTRACT["fields"] if e["path"] == path]
    names = {*entry.get("parameters", ()), *entry.get("names", ())}
    names |= {name for name, since in entry.get("newer", {}).items() if has(since)}
    names |= {name for name, until in entry.get("older", {}).items() if has("0.0", until)}
    if "fields_of" in entry:
        names |= allowed(entry["fields_of"])
    return names


def refuse_unknown(path: str, given: dict[str, Any]) -> None:
    """Fail as loudly as possible on what is not in the contract."""
    if unknown := set(given) - allowed(path):
        raise TypeError(f"double of TensorRT-LLM {RELEASE}: {path} does not take {sorted(unknown)}")
