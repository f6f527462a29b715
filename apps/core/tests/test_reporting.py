from __future__ import annotations

import io

import pytest
from rich.console import Console

from rl_app_core.reporting import RunReporter


def shown(total: int, every: int, *, completed: int = 0, seconds_per_step: float = 0.0) -> list[str]:
    output = io.StringIO()
    now = [0.0]
    with RunReporter(Console(file=output, width=200), clock=lambda: now[0]) as reporter:
        reporter.begin_phase("grpo", total, completed=completed)
        for step in range(completed + 1, total + 1):
            now[0] += seconds_per_step
            measured = bool(every) and (step % every == 0 or step == total)
            reporter.advance("grpo", step, {"reward": step / total}, measured=measured)
    return output.getvalue().splitlines()


@pytest.mark.parametrize("total", [1, 5, 30, 360, 5000])
def test_off_a_terminal_a_short_phase_says_little_without_measurements(total):
    assert 1 <= len(shown(total, 0)) <= 6


@pytest.mark.parametrize(("total", "every"), [(30, 1), (360, 5), (5000, 10), (100_000, 1000)])
def test_every_measurement_is_shown(total, every):
    steps = [int(line.split()[1].partition("/")[0]) for line in shown(total, every)]
    assert set(range(every, total + 1, every)) <= set(steps)
    assert len(steps) <= total // every + 6


@pytest.mark.parametrize("seconds", [0.1, 7.0, 45.0])
def test_a_long_phase_is_never_silent_for_long(seconds):
    steps = [int(line.split()[1].partition("/")[0]) for line in shown(4000, 0, seconds_per_step=seconds)]
    longest = max(later - earlier for earlier, later in zip([0, *steps], steps, strict=False))
    assert longest * seconds <= 30 + seconds


def test_the_default_job_shows_every_measurement():
    assert [line.split()[1] for line in shown(30, 5)] == [f"{step}/30" for step in range(5, 31, 5)]


def test_the_last_measurement_is_always_shown():
    assert shown(1000, 999)[-1].split()[1] == "1000/1000"


def test_a_resumed_phase_counts_from_where_it_is():
    assert [line.split()[1] for line in shown(30, 5, completed=20)] == ["25/30", "30/30"]


def test_markup_in_a_text_is_text():
    output = io.StringIO()
    RunReporter(Console(file=output, width=200)).line("[bold]path[/bold] /tmp/[x]")
    assert output.getvalue() == "[bold]path[/bold] /tmp/[x]\n"


def test_on_a_terminal_there_is_a_bar_and_measurements_stay():
    output = io.StringIO()
    with RunReporter(Console(file=output, width=120, force_terminal=True)) as reporter:
        reporter.begin_phase("grpo", 30)
        for step in range(1, 31):
            reporter.advance("grpo", step, {"reward": 0.5}, measured=step % 15 == 0)
    text = output.getvalue()
    assert "15/30" in text
    assert "━" in text
