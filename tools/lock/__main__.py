"""`python -m tools.lock [--check] [--upgrade PACKAGE …]`, run as `hatch run lock`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.lock.workspace import LockError, Workspace


def main(arguments: list[str] | None = None) -> int:
    """Lock the workspace or check its lock; return 0, or 1 after one message on stderr."""
    parser = argparse.ArgumentParser(prog="hatch run lock", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when something is stale")
    parser.add_argument("--upgrade", nargs="+", default=[], metavar="PACKAGE", help="let these pins move")
    options = parser.parse_args(arguments)
    workspace = Workspace(root=Path(__file__).resolve().parents[2])
    try:
        if options.check:
            workspace.check()
            print("uv.lock and requirements/ are current")
        else:
            workspace.write(upgrade=tuple(options.upgrade))
            print("wrote uv.lock and requirements/")
    except LockError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
