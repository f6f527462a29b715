"""The report of a check: for people as text, for programs as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..testing.findings import CaseReport
from .rows import UsageError

_RED, _GREEN, _PLAIN = "\x1b[31m", "\x1b[32m", "\x1b[0m"


def report_text(report: CaseReport, *, colours: bool = False) -> str:
    """One rollout: a line, and what is wrong below it."""
    mark = "ok   " if report.passed else "WRONG"
    if colours:
        mark = f"{_GREEN if report.passed else _RED}{mark}{_PLAIN}"
    lines = [f"{mark} {report.name}  ({len(report.findings)} findings, {report.seconds:.1f} s)"]
    for finding in report.wrong:
        lines += [
            f"      {finding.name}",
            f"        expected  {finding.expected}",
            f"        got       {finding.got}",
        ]
    return "\n".join(lines)


def summary(reports: Sequence[CaseReport]) -> str:
    """The last line."""
    wrong = sum(len(report.wrong) for report in reports)
    failed = sum(not report.passed for report in reports)
    seen = sum(len(report.findings) for report in reports)
    if failed:
        return f"{wrong} of {seen} findings are wrong, in {failed} of {len(reports)} checks"
    return f"all {seen} findings of {len(reports)} checks are right"


def write_json(path: Path, reports: Sequence[CaseReport], facts: dict[str, Any]) -> None:
    """Write everything that was found.

    Raises:
        UsageError: the file cannot be written.
    """
    document = {
        **facts,
        "passed": all(report.passed for report in reports),
        "checks": [
            {
                "name": report.name,
                "passed": report.passed,
                "seconds": round(report.seconds, 3),
                "findings": [
                    {
                        "name": finding.name,
                        "passed": finding.passed,
                        "expected": finding.expected,
                        "got": finding.got,
                    }
                    for finding in report.findings
                ],
            }
            for report in reports
        ],
    }
    try:
        path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error
