"""The methods that docs/write-an-algorithm.md writes, in a real job: their files lie beside the user."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ONE_DIGIT = (
    "{min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1, operators: ['+'], "
    "allow_parentheses: false, allow_negation: false}"
)
GUIDE = Path(__file__).resolve().parents[2] / "docs" / "write-an-algorithm.md"


def test_an_advantage_and_a_loss_of_ones_own_train(grpo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("best_of_group", "quadratic"):
        (source,) = re.findall(rf"```python\n# {name}.py\n(.*?)```", GUIDE.read_text(), re.DOTALL)
        (tmp_path / f"{name}.py").write_text(source)
    directory = tmp_path / "run"
    run = grpo(
        *("run", "-o", directory, "algorithm.advantage=best_of_group:BestOfGroup"),
        *("algorithm.advantage_options={scale: 0.5}", "algorithm.loss=quadratic:QuadraticPull"),
        *("algorithm.steps=2", "algorithm.prompts_per_step=16", "algorithm.updates_per_step=2"),
        # One digit each: after so few demonstrations about every tenth answer is right, whatever the
        # processor rounds, so that many groups have a best answer.
        *(f"data.train.options={ONE_DIGIT}", "data.held_out.size=8"),
        *("warm_start.steps=60", "warm_start.phases=[{until_step: 60, share: 0.5}]"),
        *("evaluation.samples=4", "evaluation.pass_at=[1, 4]"),
        directory=directory,
    )
    assert {rollout["advantage"] for rollout in run.rollouts} <= {0.0, 0.5}
    assert run.metrics[1]["zero_spread_groups"] < 16, "no group has a best answer, so nothing is learnt"
    assert run.metrics[2]["pull"] > 0, "the second update is off policy"
    assert run.metrics[2]["updates"] == 2
    for step in (0, 2):
        held_out = run.metrics[step]
        assert 0 <= held_out["held_out/pass@1"] <= held_out["held_out/pass@4"] <= 1
