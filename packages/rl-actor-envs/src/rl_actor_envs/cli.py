"""The command line ``rl-actor-envs``: build environments, find them, and check where they came from."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence

from .builder import ensure_environment
from .errors import ActorEnvironmentError, BuildError, FingerprintMismatchError
from .fingerprint import check_fingerprint, fingerprint
from .identity import EnvironmentSpec, environment_of, file_digest, python_tag
from .prefetch import prefetch
from .registry import shared_registry
from .rows import Row, only, rows_of_file, rows_of_table
from .workspace import find_workspace, project_of
from .wrappers import write_wrappers

_PROBE = "import sys; print(sys.implementation.name, *sys.version_info[:3])"
_PROBE_TIMEOUT_S = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; return 0, 1 when a build failed or a fingerprint differs, 2 for wrong words."""
    options = _parser().parse_args(arguments)
    try:
        return options.verb(options)
    except (BuildError, FingerprintMismatchError) as error:
        return _fail(error, 1)
    except ActorEnvironmentError as error:
        return _fail(error, 2)


def _prefetch(options: argparse.Namespace) -> int:
    rows = _rows(options)
    if not rows:
        _say(f"nothing to build in stage {options.stage}")
        return 0
    failed = prefetch(
        rows,
        find_workspace(),
        phase=options.phase,
        python=options.python,
        python_tag=_tag(options.python),
        say=_say,
    )
    if failed:
        names = ", ".join(failed)
        return _fail(f"{len(failed)} of {len(rows)} could not be built: {names}", 1)
    return 0


def _driver(options: argparse.Namespace) -> int:
    workspace = find_workspace()
    tag = _tag(options.python) or python_tag()
    lock = file_digest(workspace.path(project_of(()).lock))
    root = os.path.abspath(options.directory)
    spec = EnvironmentSpec("driver", (), lock, tag, workspace.root, root)
    _say(f"driver: building {root}")
    built = ensure_environment(
        spec, workspace, selection=("--only-group", "driver"), phase=options.phase, python=options.python
    )
    _say(f"driver: {'built' if built else 'already built'}")
    return 0


def _path(options: argparse.Namespace) -> int:
    extras = shared_registry().extras_of(options.actor)
    if extras is None:
        raise ActorEnvironmentError(f"actor {options.actor} runs on the driver's interpreter")
    _say(environment_of(options.actor, extras, find_workspace(), python=_tag(options.python)).root)
    return 0


def _fingerprint(options: argparse.Namespace) -> int:
    if options.check:
        check_fingerprint(path=options.check)
        _say(f"{options.check} is the fingerprint of this workspace")
        return 0
    text = fingerprint().to_json()
    if options.write:
        with open(options.write, "w", encoding="utf-8") as file:
            file.write(text)
    else:
        sys.stdout.write(text)
    return 0


def _wrappers(options: argparse.Namespace) -> int:
    tag = _tag(options.python)
    for path in write_wrappers(options.directory, _rows(options), find_workspace(), python_tag=tag):
        _say(path)
    return 0


def _rows(options: argparse.Namespace) -> list[Row]:
    if options.rows is None:
        rows = rows_of_table(stage=options.stage, skip=options.skip)
    elif options.skip:
        raise ActorEnvironmentError("--skip does not go with --rows: the list was written without them")
    else:
        rows = rows_of_file(options.rows, stage=options.stage)
    return only(rows, options.only)


def _tag(python: str | None) -> str | None:
    """The kind of an interpreter, such as ``cpython-3.11.7``."""
    if python is None:
        return None
    try:
        done = subprocess.run(
            [python, "-I", "-S", "-c", _PROBE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ActorEnvironmentError(f"{python} is no Python that runs here: {error}") from error
    name, *version = done.stdout.split()
    return f"{name}-{'.'.join(version)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rl-actor-envs", description=__doc__, allow_abbrev=False)
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def verb(name: str, run: object, summary: str) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        added.set_defaults(verb=run)
        added.add_argument("--python", metavar="PATH", help="interpreter of the environments")
        return added

    build = verb("prefetch", _prefetch, "build every environment that is not there yet")
    wrappers = verb("wrappers", _wrappers, "write a python-<ActorClass> command per environment")
    wrappers.add_argument("directory")
    for chosen in (build, wrappers):
        chosen.add_argument("--rows", metavar="FILE", help="list that table.py wrote; by default the table")
        chosen.add_argument("--stage", default="all", help="all, deps or trtllm")
        chosen.add_argument("--skip", action="append", default=[], metavar="EXTRA")
        chosen.add_argument("--only", action="append", default=[], metavar="ACTOR")
    driver = verb("driver", _driver, "build the driver's own environment")
    driver.add_argument("directory")
    for chosen in (build, driver):
        chosen.add_argument(
            "--phase",
            default="all",
            choices=("dependencies", "all"),
            help="dependencies: third-party packages only, which needs no source",
        )
    path = verb("path", _path, "print where an actor's environment is")
    path.add_argument("actor")
    mark = verb("fingerprint", _fingerprint, "print, write or check the fingerprint of the workspace")
    where = mark.add_mutually_exclusive_group()
    where.add_argument("--write", metavar="FILE")
    where.add_argument("--check", metavar="FILE")
    return parser


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    # A build takes minutes, and its log is read while it grows.
    sys.stdout.flush()


def _fail(reason: object, status: int) -> int:
    sys.stderr.write(f"rl-actor-envs: {reason}\n")
    return status
