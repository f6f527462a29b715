"""A small job on a real NeMo Gym by the command line: vLLM over HTTP, refits, and a resume."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(800)]

STEPS, WARM_START = 2, 4
WORDS = [
    *("run", "-c", "cpu-gym", "algorithm.prompts_per_step=4", "algorithm.group_size=4"),
    *(f"warm_start.steps={WARM_START}", "warm_start.batch_size=8", f"algorithm.steps={STEPS}"),
    f"warm_start.phases=[{{until_step: {WARM_START}, share: 0.9}}]",
    *("data.held_out.size=4", "evaluation.every=2", "checkpointing.every=1", "logging.rollouts_per_step=99"),
    # So few steps earn no reward; an entropy term changes the weights all the same.
    *("algorithm.entropy_coefficient=0.01", "cluster.start_timeout_s=400"),
]


@pytest.fixture(scope="module")
def run(gym_job, tmp_path_factory):
    directory = tmp_path_factory.mktemp("gym") / "run"
    return gym_job(*WORDS, "-o", directory, directory=directory)


def test_gyms_agent_played_every_rollout_and_its_verifier_judged_it(run):
    assert run.summary["steps"] == STEPS
    for step in range(1, STEPS + 1):
        metrics = run.metrics[step]
        assert metrics["failures_infra"] + metrics["failures_data"] == 0
        assert metrics["samples_valid"] == 16
    for rollout in run.rollouts:
        assert rollout["agent"] == "lc_equivalence_rule_simple_agent"
        assert rollout["reward"] == rollout["metrics"]["equivalence_score"]
    assert run.metrics[0]["held_out/equivalence_score"] == run.metrics[0]["held_out/accuracy"]


def test_over_http_too_it_is_on_policy_because_the_engine_is_given_the_weights_before_each_step(run):
    versions = {step: set() for step in range(1, STEPS + 1)}
    for rollout in run.rollouts:
        versions[rollout["step"]] |= set(rollout["weight_versions"])
    assert versions == {step: {WARM_START + step - 1} for step in range(1, STEPS + 1)}
    # An engine with the weights of the step before would be off by far more.
    for step in range(1, STEPS + 1):
        assert run.metrics[step]["logprob_gap_max"] <= 2e-3
        assert run.metrics[step]["logprob_gap_mean"] <= 1e-4
    # Those of step 1 were handed over before it, to be measured.
    assert run.metrics[0]["refit_seconds"] > 0
    assert run.metrics[2]["refit_seconds"] > 0


def test_after_it_nothing_runs_and_gyms_words_are_in_the_run_directory(run):
    assert any("resources_servers" in log.read_text() for log in run.directory.glob("logs/gym/gym-*/gym.log"))
    # The driver's Ray, ranks, replicas; Gym's Ray, servers.
    assert len(run.seen) > 8
    run.assert_nothing_is_left()


def test_rollouts_that_are_repeated_after_a_resume_are_the_same(gym_job, run):
    """Every rollout has a seed of its own, whatever the order in which Gym's requests reach the engine."""
    before = {r["rollout_id"]: r["token_ids"] for r in run.rollouts if r["step"] == STEPS}
    (run.directory / "summary.json").unlink()
    (run.directory / "checkpoints" / f"step_{STEPS}").rename(run.directory / "not-a-checkpoint")
    resumed = gym_job("resume", run.directory, directory=run.directory)
    assert f"resumed    after step {STEPS - 1}" in resumed.process.stdout
    again = {r["rollout_id"]: r["token_ids"] for r in resumed.rollouts if r["step"] == STEPS}
    assert again == before
    resumed.assert_nothing_is_left()
