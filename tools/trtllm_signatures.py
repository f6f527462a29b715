"""Compare what ``rl_generation.trtllm`` calls of TensorRT-LLM with the package that is installed.

    python -m tools.trtllm_signatures [--contract FILE]

The contract is ``packages/rl-generation/tests/trtllm/contract.json``. Exit code 0: everything that is called
is there; 1: something is not, each named; 2: the package is not installed, or cannot be imported here.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

CONTRACT = Path(__file__).parents[1] / "packages/rl-generation/tests/trtllm/contract.json"

Entry = Mapping[str, Any]


def find(path: str) -> Any:
    """The object of a dotted path, wherever the modules end and the attributes begin.

    Raises:
        AttributeError, ImportError: there is none.
    """
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError as error:
            if error.name is None or not path.startswith(error.name):
                raise
            continue
        for name in parts[end:]:
            # A class that became an actor hides what it was.
            metadata = getattr(found, "__ray_metadata__", None)
            found = getattr(metadata.modified_class if metadata is not None else found, name)
        return found
    raise ModuleNotFoundError(f"no module of {path}")


def find_first(entry: Entry) -> Any:
    """The object of an entry, which may have moved between releases.

    Raises:
        AttributeError, ImportError: it is at none of its places.
    """
    try:
        return find(entry["path"])
    except (AttributeError, ImportError):
        if "or" not in entry:
            raise
        return find(entry["or"])


def field_names(kind: Any) -> set[str]:
    """Names of a dataclass's or a pydantic model's fields."""
    if dataclasses.is_dataclass(kind):
        return {item.name for item in dataclasses.fields(kind)}
    return set(getattr(kind, "model_fields", ()))


def compare(contract: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """What is wrong, and what newer or older releases have and this one has not."""
    wrong: list[str] = []
    absent: list[str] = []
    for check, entries in (
        (_compare_callable, contract["callables"]),
        (_compare_fields, contract["fields"]),
        (_compare_values, contract["values"]),
    ):
        for entry in entries:
            try:
                found = find_first(entry)
            except (AttributeError, ImportError) as error:
                (absent if entry.get("optional") else wrong).append(f"{entry['path']}: {error}")
                continue
            check(entry, found, wrong, absent)
    return wrong, absent


def _compare_callable(entry: Entry, found: Any, wrong: list[str], absent: list[str]) -> None:
    path = entry["path"]
    if entry.get("coroutine", False) != inspect.iscoroutinefunction(found):
        wrong.append(f"{path}: is {'no' if entry.get('coroutine') else 'a'} coroutine function")
    accepted = field_names(found) if inspect.isclass(found) else set()
    parameters: Iterable[inspect.Parameter] = ()
    if not accepted:
        parameters = [p for p in inspect.signature(found).parameters.values() if p.name != "self"]
        accepted = {p.name for p in parameters}
    catches = any(p.kind is p.VAR_KEYWORD for p in parameters)
    passed = set(entry["parameters"])
    forwards = catches and entry.get("forwards", False)
    wrong += [f"{path}: takes no {name!r}" for name in sorted(passed - accepted) if not forwards]
    if "fields_of" in entry and not catches:
        wrong.append(f"{path}: passes no further arguments on to {entry['fields_of']}")
    absent += [
        f"{path}: takes no {name!r}" for name in sorted(entry.get("newer", {})) if name not in accepted
    ]
    for parameter in parameters:
        required = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        )
        if required and parameter.name not in passed:
            wrong.append(f"{path}: wants {parameter.name!r}, which is never passed")


def _compare_fields(entry: Entry, found: Any, wrong: list[str], absent: list[str]) -> None:
    path, known = entry["path"], field_names(found)
    wrong += [f"{path}: has no field {name!r}" for name in entry["names"] if name not in known]
    sometimes = {**entry.get("newer", {}), **entry.get("older", {})}
    absent += [f"{path}: has no field {name!r}" for name in sorted(sometimes) if name not in known]


def _compare_values(entry: Entry, found: Any, wrong: list[str], absent: list[str]) -> None:
    path = entry["path"]
    if not (inspect.isclass(found) and issubclass(found, Enum)):
        wrong.append(f"{path}: is no enumeration")
        return
    values = {member.value for member in found}
    wrong += [f"{path}: has no value {value!r}" for value in entry.get("has", ()) if value not in values]
    names = set(found.__members__)
    wrong += [f"{path}: has no member {name!r}" for name in entry.get("names", ()) if name not in names]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what differs; see the module for the exit code."""
    parser = argparse.ArgumentParser(prog="trtllm_signatures", description=__doc__)
    parser.add_argument("--contract", type=Path, default=CONTRACT)
    contract = json.loads(parser.parse_args(arguments).contract.read_text(encoding="utf-8"))
    package = contract["package"]
    if importlib.util.find_spec(package) is None:
        print(f"{package} is not installed here: nothing was compared")
        return 2
    try:
        module = importlib.import_module(package)
    except (ImportError, OSError, RuntimeError) as error:
        print(f"{package} cannot be imported here ({type(error).__name__}: {error}): nothing was compared")
        return 2
    double = " (the double)" if getattr(module, "IS_A_DOUBLE", False) else ""
    print(f"{package} {getattr(module, '__version__', 'of an unknown release')}{double}")
    wrong, absent = compare(contract)
    for line in absent:
        print(f"done without: {line}")
    for line in wrong:
        print(f"WRONG: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
