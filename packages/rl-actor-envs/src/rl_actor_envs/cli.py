"""The command line: builds environments and tells about them."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .errors import ActorEnvironmentError, RowsError, UnknownActorError

if TYPE_CHECKING:
    import argparse


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns 0, 1 (a build failed, a mismatch) or 2 (wrong words)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A build must not fail because the log's encoding lacks a character.
            stream.reconfigure(errors="backslashreplace")
    options = _parser().parse_args(arguments)
    try:
        return options.verb(options)
    except (RowsError, UnknownActorError) as error:
        sys.stderr.write(f"rl-actor-envs: {error}\n")
        return 2
    except ActorEnvironmentError as error:
        sys.stderr.write(f"rl-actor-envs: {error}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    import argparse

    from .builder import PHASES

    parser = argparse.ArgumentParser(
        prog="rl-actor-envs", description="The environments that Ray actors run in."
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    prefetch = verbs.add_parser("prefetch", help="build every environment of the table")
    prefetch.set_defaults(verb=_prefetch)
    prefetch.add_argument("--rows", metavar="FILE", help="rows as table.py prints them; - is standard input")
    prefetch.add_argument("--stage", default="all", help="all, deps or trtllm")
    prefetch.add_argument("--skip", action="append", default=[], metavar="EXTRA", help="not with this extra")
    prefetch.add_argument("--only", action="append", default=[], metavar="ACTOR", help="of this actor")

    driver = verbs.add_parser("driver", help="build the environment that the commands themselves run in")
    driver.set_defaults(verb=_driver)
    driver.add_argument("directory")
    for parser_of_builds in (prefetch, driver):
        parser_of_builds.add_argument(
            "--phase",
            choices=PHASES,
            default="all",
            help="third-party packages, the workspace's own, or both",
        )

    path = verbs.add_parser("path", help="print the root directory of an actor's environment")
    path.set_defaults(verb=_path)
    path.add_argument("actor")

    fingerprint = verbs.add_parser(
        "fingerprint", help="print, write or check what environments are made from"
    )
    fingerprint.set_defaults(verb=_fingerprint)
    act = fingerprint.add_mutually_exclusive_group()
    act.add_argument("--write", metavar="FILE")
    act.add_argument("--check", metavar="FILE")

    wrappers = verbs.add_parser("wrappers", help="write a python-CLASS command for every environment")
    wrappers.set_defaults(verb=_wrappers)
    wrappers.add_argument("directory")
    wrappers.add_argument("--rows", metavar="FILE", help="rows as table.py prints them; - is standard input")
    return parser


def _prefetch(options: argparse.Namespace) -> int:
    from .prefetch import prefetch
    from .rows import chosen_extras
    from .workspace import find_workspace

    table = chosen_extras(options.rows, stage=options.stage, skip=options.skip, only=options.only)
    if not table:
        skipped = f" without {', '.join(options.skip)}" if options.skip else ""
        sys.stdout.write(f"nothing to build: there is no environment of stage {options.stage}{skipped}\n")
        return 0
    return 1 if prefetch(table, find_workspace(), options.phase) else 0


def _driver(options: argparse.Namespace) -> int:
    from .prefetch import prefetch_driver
    from .workspace import find_workspace

    return 0 if prefetch_driver(options.directory, find_workspace(), options.phase) else 1


def _path(options: argparse.Namespace) -> int:
    from .runtime import environment_of

    environment = environment_of(options.actor)
    sys.stdout.write(f"{sys.prefix if environment is None else environment.root}\n")
    return 0


def _fingerprint(options: argparse.Namespace) -> int:
    from .fingerprint import check_fingerprint, fingerprint, write_fingerprint

    if options.write is not None:
        write_fingerprint(options.write)
    elif options.check is not None:
        check_fingerprint(options.check)
        sys.stdout.write(f"{options.check} is the fingerprint of what is here\n")
    else:
        sys.stdout.write(fingerprint().to_json())
    return 0


def _wrappers(options: argparse.Namespace) -> int:
    from .rows import chosen_extras
    from .workspace import find_workspace
    from .wrappers import write_wrappers

    for path in write_wrappers(options.directory, chosen_extras(options.rows), find_workspace()):
        sys.stdout.write(f"{path}\n")
    return 0
