"""From the configuration to engines, without any being here."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import pytest

from rl_actor_envs.table import ACTOR_ENVIRONMENTS
from rl_app_core import engine_plan
from rl_app_core.config import ConfigError, GRPOConfig, load_config
from rl_app_core.engine_plan import check_engine, plan_engines

SMALLEST = ["model.tiny={}", "data.train.dataset_name=basic_arithmetic"]


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """vLLM's build for CPUs, as far as anybody looks."""
    monkeypatch.setenv("RL_ACTOR_ENVS_SYSTEM", "1")
    monkeypatch.setattr(engine_plan, "find_spec", lambda name: name)
    monkeypatch.setattr(engine_plan, "is_cpu_build", lambda: True)
    monkeypatch.setattr(engine_plan, "require_available", lambda: None)


def config(*words):
    return load_config(None, [*SMALLEST, *words], model=GRPOConfig)


def plan(*words):
    return plan_engines(config(*words), Path("model"))


def refused(*words) -> str:
    with pytest.raises(ConfigError) as caught:
        check_engine(config(*words))
    return str(caught.value)


def test_the_engine_in_the_policys_process_needs_no_plan():
    assert plan() is None
    check_engine(config())


def test_replicas_differ_in_name_and_number_only():
    found = plan("generation.engine=vllm", "generation.vllm.replicas=3", "seed=5")
    assert found.actor == "rl_generation.vllm.worker.VllmCpuWorker"
    assert (found.num_gpus, found.policy_gpus, found.listen, found.server) == (0, 0, None, None)
    assert [(s.name, s.replica) for s in found.settings] == [("vllm-0", 0), ("vllm-1", 1), ("vllm-2", 2)]
    assert len({dataclasses.replace(s, name="", replica=0, engine_arguments=()) for s in found.settings}) == 1
    assert found.settings[0].seed == 5
    assert Path(found.settings[0].model_dir).is_absolute()


def test_every_setting_reaches_vllm():
    words = {
        "tensor_parallel_size": 2,
        "dtype": "float32",
        "max_model_len": 99,
        "kv_cache_bytes": 12345,
        "max_num_seqs": 7,
        "prefix_cache": False,
        "cpu_threads": 3,
        "engine_arguments": {"block_size": 32},
    }
    given = [f"generation.vllm.{name}={value}" for name, value in words.items()]
    (settings,) = plan("generation.engine=vllm", *given, "cluster.start_timeout_s=77").settings
    assert {name: getattr(settings, name) for name in words} == words
    assert settings.start_timeout_s == 77


def test_every_setting_reaches_tensorrt_llm():
    words = {"max_batch": 7, "gpu_memory_fraction": 0.5, "prefix_cache": False}
    given = [f"generation.trtllm.{name}={value}" for name, value in words.items()]
    found = plan(
        "generation.engine=trtllm",
        *given,
        "generation.trtllm.tensor_parallel_size=2",
        "generation.trtllm.engine_arguments={a: 1}",
        "policy.precision=bfloat16",
        "seed=9",
    )
    (settings,) = found.settings
    assert (settings.seed, settings.replica) == (9, 0)
    assert found.actor == "rl_generation.trtllm.worker.TrtllmWorker"
    assert {name: getattr(settings, name) for name in words} == words
    assert (settings.tensor_parallel, settings.llm_arguments, settings.dtype) == (2, {"a": 1}, "bfloat16")
    assert settings.max_context == 1024


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_engine_computes_in_the_policys_type_whatever_the_checkpoints_is(precision):
    (settings,) = plan("generation.engine=vllm", f"policy.precision={precision}").settings
    assert settings.dtype == precision


def test_on_gpus_the_policy_has_one_of_its_own(monkeypatch):
    monkeypatch.setattr(engine_plan, "is_cpu_build", lambda: False)
    found = plan("generation.engine=vllm", "generation.vllm.tensor_parallel_size=2")
    assert found.actor == "rl_generation.vllm.worker.VllmWorker"
    assert (found.num_gpus, found.policy_gpus) == (2, 1)


def test_every_actor_that_can_be_planned_has_an_environment():
    assert {*engine_plan._VLLM.values(), engine_plan._TRTLLM} < ACTOR_ENVIRONMENTS.keys()


def test_f6_a_server_samples_from_what_the_policy_scores_or_greedily():
    found = plan(
        "generation.engine=vllm",
        "generation.server={enabled: true, ports: [8000, 8010], tool_parser: hermes}",
        "generation.temperature=0.6",
    )
    assert (found.listen.host, found.listen.port_range, found.listen.token) == (
        "127.0.0.1",
        (8000, 8010),
        None,
    )
    contract = found.server.contract
    assert [(p.temperature, p.top_p, p.top_k) for p in contract.profiles] == [(0.6, 1.0, 0), (0.0, 1.0, 0)]
    assert (contract.model, contract.max_new_tokens, found.server.tool_parser) == ("policy", 32, "hermes")


def test_a_token_comes_from_the_environment_and_stands_in_no_text(monkeypatch):
    words = ["generation.engine=vllm", "generation.server={enabled: true, token_variable: SERVER_TOKEN}"]
    assert "token_variable=SERVER_TOKEN: it is not set" in refused(*words)
    monkeypatch.setenv("SERVER_TOKEN", "secret-of-the-test")
    listen = plan(*words, "generation.server.host=0.0.0.0", "generation.server.advertised_host=here").listen
    assert listen.token == "secret-of-the-test"
    assert "secret-of-the-test" not in repr(plan(*words))
    monkeypatch.setenv("SERVER_TOKEN", "secret-of-the-test\n")
    message = refused(*words)
    assert message.startswith("generation.server.token_variable=SERVER_TOKEN: the server's token begins or")
    assert "\n" not in message
    assert "secret" not in message


def test_an_environment_that_is_not_built_is_told_with_the_command_that_builds_it(monkeypatch, tmp_path):
    monkeypatch.delenv("RL_ACTOR_ENVS_SYSTEM")
    monkeypatch.setenv("RL_ACTOR_ENVS_DIR", str(tmp_path))
    message = refused("generation.engine=vllm", "generation.vllm.device=cpu")
    assert "prefetch --only rl_generation.vllm.worker.VllmCpuWorker" in message


def test_what_actors_are_made_from_can_be_sent_to_them():
    found = plan("generation.engine=vllm", "generation.server.enabled=true")
    for part in (*found.settings, found.listen, found.server):
        assert pickle.loads(pickle.dumps(part)) == part
