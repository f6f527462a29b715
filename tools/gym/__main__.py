"""`python -m tools.gym install [--python PATH]`: Gym for this checkout; prints its interpreter."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rl_actor_envs.errors import ActorEnvironmentError

from .install import install_gym
from .interpreters import VARIABLE, NoPythonError, base_python

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str] | None = None) -> int:
    """Run one command; 0 when Gym is installed, 1 when it could not be."""
    parser = argparse.ArgumentParser(prog="python -m tools.gym", description=__doc__)
    commands = parser.add_subparsers(required=True)
    install = commands.add_parser("install", help="install NeMo Gym for this checkout")
    install.add_argument(
        "--python", help=f"interpreter to make it with; by default {VARIABLE}, or one that is found"
    )
    chosen = parser.parse_args(arguments)
    began = time.monotonic()
    try:
        base = base_python(chosen.python)
        print(f"installing NeMo Gym with {base} …", file=sys.stderr)
        interpreter, built = install_gym(ROOT, base)
    except (ActorEnvironmentError, NoPythonError) as error:
        print(error, file=sys.stderr)
        return 1
    done = f"installed in {time.monotonic() - began:.0f} s" if built else "was installed before"
    print(f"NeMo Gym {done}", file=sys.stderr)
    print(interpreter)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
