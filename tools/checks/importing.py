"""What importing a package does to the interpreter: which modules it loads, and what else it changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

_PROBE = Path(__file__).with_name("import_probe.py")
_TIMEOUT_S = 240.0


def loaded_by(modules: Sequence[str], *, search: Sequence[Path] = ()) -> frozenset[str]:
    """Return the top-level names that importing `modules` in a fresh interpreter adds to `sys.modules`.

    `search` goes in front of the module search path. Raises RuntimeError with the traceback when an import
    fails.
    """
    return frozenset(_probe(modules, [], search, [])["loaded"])


def changed_by(modules: Sequence[str], *, own: Sequence[str], search: Sequence[Path] = ()) -> list[str]:
    """Import `modules` in an empty working and home folder; return one line for each change of other state.

    A line starts with the module whose import made the change (or first imported what did). What third-party
    packages do when imported is not held against the importer: they are found in a first process and imported
    before the comparison in a second one. `own` names the top-level packages that are not third-party;
    `search` and errors are those of `loaded_by`.
    """
    third_party = _probe(modules, [], search, own)["third_party"]
    return _probe(modules, third_party, search, own)["changes"]


def _probe(
    modules: Sequence[str], before: Sequence[str], search: Sequence[Path], own: Sequence[str]
) -> dict[str, list[str]]:
    with TemporaryDirectory() as folder:
        home, report = Path(folder, "home"), Path(folder, "report.json")
        home.mkdir()
        order = {"modules": [*modules], "before": [*before], "own": [*own], "report": str(report)}
        environment = {
            **os.environ,
            "HOME": str(home),
            "TMPDIR": str(home),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(map(str, search)),
        }
        done = subprocess.run(
            [sys.executable, str(_PROBE), json.dumps(order)],
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
        if done.returncode:
            raise RuntimeError(f"importing {', '.join(modules)} failed:\n{done.stderr}")
        found = json.loads(report.read_text())
        if done.stdout or done.stderr:
            found["changes"].append(f"wrote output: {(done.stdout + done.stderr)[:200]!r}")
        return found
