"""The asynchronous default job, as a user starts it, and what its run directory says of it."""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# Half of the recipe's: by then it has learnt.
STEPS, PROMPTS, GROUP = 15, 32, 8


@pytest.fixture(scope="module")
def run(single_controller, tmp_path_factory):
    directory = tmp_path_factory.mktemp("async") / "run"
    return single_controller("run", "-o", directory, f"algorithm.steps={STEPS}", directory=directory)


@pytest.fixture(scope="module")
def trained(run):
    return [json.loads(line) for line in (run.directory / "trained.jsonl").read_text().splitlines()]


def test_it_learns_what_the_synchronous_job_learns(run):
    assert run.summary["steps"] == STEPS
    assert run.summary["held_out_before"] <= 0.30
    assert run.summary["held_out_after"] >= 0.85


def test_each_row_was_trained_once_and_none_was_too_old(trained):
    assert [line["step"] for line in trained] == list(range(1, STEPS + 1))
    positions = [group["position"] for line in trained for group in line["groups"]]
    assert positions == list(range(STEPS * PROMPTS)), "in order, without a gap"
    assert all(group["samples"] == GROUP for line in trained for group in line["groups"])
    ages = {line["step"] - 1 - group["oldest"] for line in trained for group in line["groups"]}
    assert ages == {0, 1}, "rollouts ran ahead, and no further than they may"


def test_its_numbers_say_how_old_the_groups_were(run, trained):
    for line in trained:
        ages = [line["step"] - 1 - group["oldest"] for group in line["groups"]]
        metrics = run.metrics[line["step"]]
        assert metrics["staleness_max"] == max(ages)
        assert metrics["staleness_mean"] == pytest.approx(sum(ages) / len(ages))
        assert (
            metrics["stragglers"] == metrics["controller/timeouts"] == metrics["controller/stale_rows"] == 0
        )


def test_the_checkpoint_holds_the_controller(run, trained):
    state = json.loads((run.directory / "checkpoints" / f"step_{STEPS}" / "controller.json").read_text())
    assert state["version"] == STEPS
    assert state["trained"] == {"below": STEPS * PROMPTS, "beyond": []}
    assert state["histories"] == []


def test_resuming_what_is_done_does_nothing(single_controller, run):
    again = single_controller("resume", run.directory, directory=run.directory)
    assert "is done" in again.process.stdout
