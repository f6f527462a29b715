"""A run with a Gym is refused before anything starts, or is told to Gym exactly as it was written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_app_core import engine_plan
from rl_app_core.config import ConfigError, GRPOConfig, load_config, to_yaml
from rl_app_core.engine_plan import plan_engines
from rl_app_core.gym_plan import plan_gym
from rl_app_core.preflight import prepare

GYM = ["environment.gym.config_paths=[model.yaml,mine.yaml]", "environment.gym.agent=adder"]
SMALLEST = [
    *("model.tiny={}", "data.train.dataset_name=basic_arithmetic", "data.train.size=40"),
    *("data.held_out.size=4", "algorithm.prompts_per_step=4", "generation.engine=vllm"),
]


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """vLLM's build for CPUs, as far as anybody looks."""
    monkeypatch.setenv("RL_ACTOR_ENVS_SYSTEM", "1")
    monkeypatch.setattr(engine_plan, "find_spec", lambda name: name)
    monkeypatch.setattr(engine_plan, "is_cpu_build", lambda: True)


@pytest.fixture(autouse=True)
def gym_python(monkeypatch, tmp_path):
    """An interpreter that says it has Gym."""
    folder = tmp_path / "gym" / "bin"
    folder.mkdir(parents=True)
    facts = {"python": [3, 12, 1], "version": "0.4.0", "prefix": str(folder.parent), "found": True}
    (folder / "python").write_text(f"#!/bin/sh\necho '{json.dumps({**facts, 'checkout': False})}'\n")
    (folder / "gym").write_text("#!/bin/sh\n")
    for name in ("python", "gym"):
        (folder / name).chmod(0o755)
    monkeypatch.setenv("RL_GYM_PYTHON", str(folder.parent))
    return folder / "python"


def config(*words):
    return load_config(None, [*SMALLEST, *words], model=GRPOConfig)


def refused(*words) -> str:
    with pytest.raises(ConfigError) as caught:
        prepare(config(*words))
    message = str(caught.value)
    assert "\n" not in message
    return message


def rows(folder, change=None, **more):
    """A file of rows that the Gym's agent plays, all with one change."""
    path = folder / "rows.jsonl"
    change = change or {}
    lines = [
        {
            "responses_create_params": {"input": f"say {number}", **change.get("params", {})},
            "agent_ref": {"name": "adder"},
            **{name: value for name, value in change.items() if name != "params"},
            "number": number,
            **more,
        }
        for number in range(20)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ["data.train.dataset_name=null", f"data.train.path={path}"]


def test_gym_is_told_what_was_written_and_what_only_the_run_knows(gym_python, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [
        "environment.gym.settings={mcqa: {x: [1]}, retry: {infra_attempts: 2}}",
        *("environment.gym.rollout_timeout_s=30", "environment.gym.max_concurrency=8"),
        *("generation.temperature=0.7", "generation.max_new_tokens=9", "environment.gym.step_timeout_s=60"),
    ]
    plan = prepare(config(*GYM, *words)).gym
    assert plan is not None
    assert plan.section == {
        **{"mcqa": {"x": [1]}, "retry": {"infra_attempts": 2}, "config_paths": ["model.yaml", "mine.yaml"]},
        **{"python": str(gym_python), "search_folder": str(tmp_path), "num_gpu_nodes": 0},
        **{"max_concurrency": 8, "start_timeout_s": 900.0, "rollout_timeout_s": 30.0},
        "shutdown_timeout_s": 30.0,
    }
    assert plan.model_name == "policy"
    sampling, greedy = plan.sampling, plan.greedy
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens) == (0.7, 1.0, 9)
    assert (greedy.temperature, greedy.top_p, greedy.max_new_tokens) == (0.0, 1.0, 9)
    assert (sampling.seeded, greedy.seeded) == (True, False)
    assert list(plan.agents) == ["adder"]
    assert plan.step_timeout_s == 60


def test_a_folder_a_place_for_logs_and_an_interpreter_are_told_too(gym_python, tmp_path, monkeypatch):
    monkeypatch.delenv("RL_GYM_PYTHON")
    words = [f"environment.gym.{key}={tmp_path}/{key}" for key in ("folder", "work_dir")]
    plan = prepare(config(*GYM, *words, f"environment.gym.python={gym_python}")).gym
    assert plan is not None
    assert plan.section["search_folder"] == f"{tmp_path}/folder"
    assert plan.section["work_dir"] == f"{tmp_path}/work_dir"
    assert plan.section["python"] == str(gym_python)


def test_the_engines_server_needs_no_switch_and_its_token_goes_to_gym_and_to_no_file(monkeypatch):
    monkeypatch.setenv("ENGINE_TOKEN", "s3cret")
    wanted = config(*GYM, "generation.server.token_variable=ENGINE_TOKEN")
    assert not wanted.generation.server.enabled
    engines = plan_engines(wanted, Path("model"))
    assert engines is not None
    assert engines.listen is not None
    assert engines.listen.token == "s3cret"
    assert engines.server is not None
    plan = prepare(wanted).gym
    assert plan is not None
    assert plan.section["policy_api_key"] == "s3cret"
    assert "s3cret" not in to_yaml(wanted)
    assert "policy_api_key" in refused(
        *GYM,
        "generation.server.token_variable=ENGINE_TOKEN",
        "environment.gym.settings={policy_api_key: other}",
    )


def test_the_resolved_configuration_reads_back_as_itself(tmp_path):
    wanted = config(*GYM, "environment.gym.settings={a: {b: [1, null]}}")
    (tmp_path / "config.yaml").write_text(to_yaml(wanted))
    assert load_config(tmp_path / "config.yaml", model=GRPOConfig) == wanted


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["generation.engine=megatron"],
            ["generation.engine=megatron serves none", "use generation.engine=vllm"],
        ),
        (["environment.name=final_number"], ["environment.gym.agent", "leave one of the two out"]),
        (["environment.gym.agent=null"], ["generated problems name no agent", "environment.gym.agent"]),
        (["environment.gym.config_paths=[]"], ["environment.gym.config_paths"]),
        (["environment.gym.settings={python: x}"], ["set environment.gym.python instead"]),
        (["environment.gym.settings={search_folder: x}"], ["set environment.gym.folder instead"]),
        (["environment.gym.settings={policy_base_url: x}"], ["'policy_base_url' is the run's to say"]),
        (["environment.gym.settings={retry: {infra_attempts: x}}"], ["environment.gym.settings.retry"]),
        (["environment.gym.step_timeout_s=10"], ["step_timeout_s=10 is less than rollout_timeout_s=3600"]),
        (["environment.gym.python=/nowhere/python"], ["environment.gym.python", "/nowhere/python"]),
        (["environment.gym.pyhton=x"], ["did you mean environment.gym.python?"]),
        (["data.train.fields={answer: x}"], ["answer of a generated row is made already"]),
        (["data.train.fields={expected: '{formula}'}"], ["data.train.fields.expected", "'formula'"]),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_remedy(words, told):
    message = refused(*GYM, *words)
    for part in told:
        assert part in message


def test_without_an_interpreter_nothing_begins(monkeypatch):
    monkeypatch.delenv("RL_GYM_PYTHON")
    message = refused(*GYM)
    assert message.startswith("environment.gym.python: ")
    assert "RL_GYM_PYTHON=GYM" in message


def test_rows_without_an_agent_are_refused_unless_one_is_named_for_them(tmp_path):
    file = rows(tmp_path, {"agent_ref": None})
    assert prepare(config(*GYM, *file)).gym is not None
    message = refused(*GYM, *file, "environment.gym.agent=null")
    assert "rows.jsonl:1: agent_ref: it is missing" in message
    assert "environment.gym.agent" in message


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"params": {"metadata": {"extra_body": '{"seed": 1}'}}}, "sets seed to 1"),
        ({"params": {"tools": [{"type": "function", "name": "f"}]}}, "set generation.server.tool_parser"),
    ],
)
def test_a_row_that_no_agent_could_be_sent_is_refused(change, told, tmp_path):
    assert told in refused(*GYM, *rows(tmp_path, change))


def pictures(folder, url):
    """A file of rows that show a picture and ask about it."""
    image = {"type": "input_image", "image_url": url}
    contents = [[image, {"type": "input_text", "text": f"q{number}"}] for number in range(20)]
    path = folder / "rows.jsonl"
    path.write_text(
        "".join(
            json.dumps({"responses_create_params": {"input": [{"role": "user", "content": content}]}}) + "\n"
            for content in contents
        )
    )
    return ["data.train.dataset_name=null", f"data.train.path={path}"]


def test_rows_of_more_than_text_are_gyms_to_play(tmp_path):
    prepared = prepare(config(*GYM, *pictures(tmp_path, "data:image/png;base64,AAAA")))
    problems = prepared.problems
    assert len({row.row_id for row in (*problems.train, *problems.held_out)}) >= 16
    assert prepared.environments == {}
    # Nobody fetches what a row points to.
    assert "image_url" in refused(*GYM, *pictures(tmp_path, "/x"))


def test_generated_rows_have_the_fields_that_a_verifier_reads():
    prepared = prepare(config(*GYM, "data.train.fields={expected_answer: '{answer}', task: 'q: {question}'}"))
    for row in prepared.problems.train:
        assert row.agent == "adder"
        assert row.verifier["expected_answer"] == row.verifier["answer"]
        assert row.verifier["task"].startswith("q: ")


def test_a_warm_start_cannot_show_tools_as_an_agent_would(tmp_path, monkeypatch):
    # Whether this vLLM has the parser is not asked here.
    monkeypatch.setattr(engine_plan, "check_names", lambda config: None)
    file = rows(tmp_path, {"params": {"tools": [{"type": "function", "name": "f"}]}}, answer="1")
    words = [*GYM, *file, "generation.server.tool_parser=hermes"]
    assert prepare(config(*words)).gym is not None
    phases = ["warm_start.steps=1", "warm_start.phases=[{until_step: 1, share: 0.5}]"]
    assert "which its agent shows in a way of its own" in refused(*words, *phases)


def test_the_plan_is_made_of_rows_too():
    prepared = prepare(config(*GYM))
    again = plan_gym(prepared.config, prepared.problems)
    assert again == prepared.gym
