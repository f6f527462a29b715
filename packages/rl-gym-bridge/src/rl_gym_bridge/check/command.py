"""The command ``check``: start Gym, run the rows, report, end Gym."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from ..failures import GymError
from ..testing.findings import CaseReport, Finding
from ..testing.gym_run import GymRun
from ..testing.gym_settings import POLICY_CONFIG
from ..testing.model_server import ScriptedModelServer
from .report import report_text, summary, write_json
from .rollouts import check_rows
from .rows import CheckedRow, UsageError, read_rows

OK, FINDINGS, USAGE = 0, 1, 2

_EPILOG = """\
A row may say what the model answers, in a field that is not sent to Gym:

  "check": {"accepted": ["\\\\boxed{4}"], "rejected": ["\\\\boxed{5}"],
            "expect": {"accepted": {"reward": 1.0}, "rejected": {"reward": 0.0}}}

Without it a generic answer is given, and only the contract is checked. Relative configuration files are
looked for here first, then in the installed Gym. A judge's model server uses ${policy_base_url} and the
name of --judge-model.

exit codes: 0 all is right, 1 something is wrong, 2 the check could not be made
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``check``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument(
        "config", nargs="+", metavar="CONFIG", help="Gym configuration of the environment and its agent"
    )
    parser.add_argument("rows", type=Path, metavar="ROWS.jsonl", help="rows to run")
    parser.add_argument("--gym-python", metavar="PATH", help="interpreter with Gym; else RL_GYM_PYTHON")
    parser.add_argument("--scripts", type=Path, metavar="FILE", help="JSON of scripts by line or row_id")
    parser.add_argument("--agent", metavar="NAME", help="agent of rows that name none")
    parser.add_argument("--model", metavar="NAME", default="scripted-policy", help="name of the policy")
    parser.add_argument("--judge-model", metavar="NAME", default="scripted-judge", help="name of the judge")
    parser.add_argument("--limit", type=_positive_int, metavar="N", help="run the first N rows only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found")
    for name, default, what in (
        ("start", 300.0, "Gym may take to start"),
        ("rollout", 120.0, "a rollout may take"),
    ):
        parser.add_argument(
            f"--{name}-timeout", type=_seconds, metavar="S", default=default, help=f"seconds that {what}"
        )
    parser.set_defaults(run=run_check)


def run_check(
    arguments: argparse.Namespace,
    *,
    gym_run: Callable[..., GymRun] = GymRun,
    out: TextIO | None = None,
    err: TextIO | None = None,
) -> int:
    """Make the check; returns the exit code.

    Args:
        arguments: parsed by :func:`add_arguments`.
        gym_run: makes the Gym.
        out: for the report, by default the standard output.
        err: for what keeps the check from being made, by default the standard error.
    """
    out, err = out or sys.stdout, err or sys.stderr
    try:
        return _run(arguments, gym_run, out, err)
    except (UsageError, GymError) as error:
        print(f"rl-gym-bridge check: {error}", file=err)
        return USAGE


def _run(arguments: argparse.Namespace, gym_run: Callable[..., GymRun], out: TextIO, err: TextIO) -> int:
    rows = read_rows(arguments.rows, arguments.scripts, arguments.limit)
    if arguments.json and not arguments.json.absolute().parent.is_dir():
        raise UsageError(f"{arguments.json} cannot be written: there is no such folder")
    reports: list[CaseReport] = []
    facts: dict[str, Any] = {"rows": str(arguments.rows), "config": arguments.config}

    def tell(report: CaseReport) -> None:
        reports.append(report)
        print(report_text(report, colours=out.isatty()), file=out, flush=True)

    usable = [row for row in rows if not row.problem]
    for row in rows:
        if row.problem:
            tell(_faulty(row))
    if usable:
        gym = gym_run(
            {"config_paths": _config_paths(arguments.config)},
            server=ScriptedModelServer(model=arguments.model, judge_model=arguments.judge_model),
            python=arguments.gym_python,
            start_timeout_s=arguments.start_timeout,
            rollout_timeout_s=arguments.rollout_timeout,
        )
        print(f"starting Gym {gym.version} …", file=err, flush=True)
        with gym:
            facts |= {"gym": gym.version, "start_s": round(gym.start_s, 1)}
            print(f"Gym is ready after {gym.start_s:.1f} s", file=err, flush=True)
            for report in check_rows(gym, usable, arguments.agent):
                tell(report)
    print(summary(reports), file=out, flush=True)
    if arguments.json:
        write_json(arguments.json, reports, facts)
    return OK if all(report.passed for report in reports) else FINDINGS


def _config_paths(given: list[str]) -> list[str]:
    """The policy's model server comes first, unless the caller brings one, so that theirs may change it."""
    own_model = any("responses_api_models" in Path(path).parts for path in given)
    return [*([] if own_model else [POLICY_CONFIG]), *given]


def _faulty(row: CheckedRow) -> CaseReport:
    return CaseReport(f"line {row.line}", (Finding("the row is valid", False, "a row", row.problem),))


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return value
