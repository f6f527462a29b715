"""Imports modules and writes down what that changed. Run by `importing.py` in a fresh interpreter."""

from __future__ import annotations

import contextlib
import importlib
import json
import locale
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any


def state() -> dict[str, Any]:
    """Return everything comparable about this process that an import has no business changing."""
    found: dict[str, Any] = {
        **{f"environment variable {name}": value for name, value in os.environ.items()},
        **{f"file {file}": file.stat().st_mtime_ns for file in Path.cwd().rglob("*")},
        **{f"thread {thread.name}": True for thread in threading.enumerate()},
        **{f"handler of {number.name}": signal.getsignal(number) for number in signal.Signals},
        **{f"child process {child}": True for child in children()},
        "working folder": Path.cwd(),
        "sys.path": tuple(sys.path),
        "sys.excepthook": sys.excepthook,
        "sys.meta_path": tuple(sys.meta_path),
        "standard streams": (sys.stdin, sys.stdout, sys.stderr),
        "recursion limit": sys.getrecursionlimit(),
        "locale": locale.setlocale(locale.LC_ALL),
        "warning filters": tuple(map(str, warnings.filters)),
        "root logger": (logging.root.level, tuple(map(str, logging.root.handlers))),
        "random state": hash(random.getstate()),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        found |= {
            "torch default dtype": torch.get_default_dtype(),
            "torch threads": torch.get_num_threads(),
            "torch seed": torch.initial_seed(),
            "torch gradient mode": torch.is_grad_enabled(),
            "torch deterministic mode": torch.are_deterministic_algorithms_enabled(),
            **{f"torch.cuda.{name}": id(value) for name, value in vars(torch.cuda).items()},
        }
    return found


def children() -> list[str]:
    """Return the ids of this process's children (Linux)."""
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return one line for each entry that appeared, vanished or changed."""
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return [f"{name}: {before.get(name)!r} -> {after.get(name)!r}"[:300] for name in names]


@contextlib.contextmanager
def silence() -> Generator[None]:
    """Drop what is written to the standard streams, by native code too."""
    streams = (sys.stdout, sys.stderr)
    kept = [os.dup(stream.fileno()) for stream in streams]
    with open(os.devnull, "w") as nowhere:
        for stream in streams:
            stream.flush()
            os.dup2(nowhere.fileno(), stream.fileno())
        try:
            yield
        finally:
            for stream, descriptor in zip(streams, kept, strict=True):
                stream.flush()
                os.dup2(descriptor, stream.fileno())
                os.close(descriptor)


def main(order: dict[str, Any]) -> None:
    """Import `before`, then `modules`; write loaded names and changes to the file `report`."""
    with silence():
        for name in order["before"]:
            # Some modules cannot be imported by name once more; those that matter come with their parents.
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    changes: list[str] = []
    loaded_before, before = set(sys.modules), state()
    for name in order["modules"]:
        importlib.import_module(name)
        after = state()
        changes += [f"{name}: {line}" for line in differences(before, after)]
        before = after
    new = [name for name in sys.modules if name not in loaded_before]
    ours = {*order["own"], *sys.stdlib_module_names}
    report = {
        "loaded": sorted({name.partition(".")[0] for name in new}),
        "third_party": [name for name in new if name.partition(".")[0] not in ours],
        "changes": changes,
    }
    Path(order["report"]).write_text(json.dumps(report))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
