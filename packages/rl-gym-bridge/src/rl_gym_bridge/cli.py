"""The command line ``rl-gym-bridge``."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ._version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    # A supervisor's signal must end Gym as the keyboard's does.
    before = signal.signal(signal.SIGTERM, _interrupted)
    try:
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        sys.stderr.write("rl-gym-bridge: interrupted\n")
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser() -> argparse.ArgumentParser:
    from .check.command import add_arguments

    parser = argparse.ArgumentParser(
        prog="rl-gym-bridge", description="Everything between NeMo Gym environments and an RL trainer."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_arguments(
        commands.add_parser(
            "check",
            help="check an environment through real Gym services",
            description="Run rows of an environment through real Gym services with a scripted model, and see "
            "that the environment keeps the contract that trainers rely on.",
        )
    )
    return parser


def _interrupted(signum: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt
