"""`python -m tools.lock [--check | --native] [--upgrade PACKAGE …]`, run as `hatch run lock`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.lock.workspace import LockError, Workspace


def main(arguments: list[str] | None = None) -> int:
    """Lock the workspace or check its lock; return 0, or 1 after one message on stderr."""
    parser = argparse.ArgumentParser(prog="hatch run lock", description=__doc__)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--check", action="store_true", help="change nothing; fail when something is stale")
    kind.add_argument(
        "--native",
        action="store_true",
        help="write uv.lock with addresses, for plain `uv sync`; not to be tracked",
    )
    parser.add_argument("--upgrade", nargs="+", default=[], metavar="PACKAGE", help="let these pins move")
    options = parser.parse_args(arguments)
    workspace = Workspace(root=Path(__file__).resolve().parents[2])
    try:
        if options.check:
            workspace.check()
            print("the locks and requirements/ are current")
        elif options.native:
            workspace.write_native()
            print("wrote uv.lock with addresses; do not commit it: `hatch run lock` takes them out again")
        else:
            workspace.write(upgrade=tuple(options.upgrade))
            print("wrote the locks and requirements/")
    except LockError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
