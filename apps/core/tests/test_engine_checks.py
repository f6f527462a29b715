"""What an engine would refuse is refused before it starts, by the keys that a user can set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rl_app_core import engine_checks, engine_plan
from rl_app_core.config import ConfigError, GRPOConfig, load_config
from rl_app_core.config.loading import known_paths
from rl_app_core.engine_plan import check_engine
from rl_generation.trtllm.settings import OWN_ARGUMENTS as TRTLLM_ARGUMENTS
from rl_generation.vllm import offered
from rl_generation.vllm.settings import OWN_ARGUMENTS as VLLM_ARGUMENTS

SMALLEST = ["model.tiny={}", "data.train.dataset_name=basic_arithmetic", "generation.engine=vllm"]
SERVED = "generation.server.enabled=true"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's build for CPUs, as far as anybody looks."""
    monkeypatch.setenv("RL_ACTOR_ENVS_SYSTEM", "1")
    monkeypatch.setattr(engine_plan, "find_spec", str)
    monkeypatch.setattr(engine_plan, "is_cpu_build", lambda: True)
    monkeypatch.setattr(engine_plan, "require_available", lambda: None)
    monkeypatch.setattr(offered, "_folders", lambda: [])


def check(*words: str) -> None:
    check_engine(load_config(None, [*SMALLEST, *words], model=GRPOConfig))


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check(*words)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def vllms_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A vLLM that is never imported, as its files tell of it."""
    files = {
        "engine/arg_utils.py": "class EngineArgs:\n    seed: int = 0\n    block_size: int = 0\n",
        "tool_parsers/__init__.py": "_TOOL_PARSERS_TO_REGISTER = {'hermes': ('a', 'B'), 'mistral': ()}\n",
        "reasoning/__init__.py": "_REASONING_PARSERS_TO_REGISTER = {'qwen3': ('a', 'B')}\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(offered, "_folders", lambda: [tmp_path])


@pytest.mark.parametrize(
    ("words", "begins", "told"),
    [
        ({"generation.server.host": "0.0.0.0"}, "generation.server.host=0.0.0.0", "server.token_variable"),
        (
            {"generation.server.host": "0.0.0.0", "generation.server.token_variable": "SECRET_OF_A_TEST"},
            "generation.server.host=0.0.0.0",
            "set generation.server.advertised_host",
        ),
        ({"generation.server.token_variable": "UNSET"}, "generation.server.token_variable=UNSET", "not set"),
        ({"generation.vllm.device": "cuda"}, "generation.vllm.device=cuda", "built for cpu"),
        ({"generation.temperature": "0.001"}, "generation.temperature=0.001", "at least 0.01"),
        (
            {"generation.vllm.engine_arguments": "{speculative_config: {}}"},
            "generation.vllm.engine_arguments has 'speculative_config'",
            "could not score",
        ),
        (
            {"generation.engine": "trtllm", "generation.trtllm.engine_arguments": "{backend: x}"},
            "generation.trtllm.engine_arguments has 'backend'",
            "not free",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_remedy_names_keys_that_a_user_can_set(
    words: dict[str, str], begins: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_A_TEST", "secret")
    message = refused(SERVED, *(f"{key}={value}" for key, value in words.items()))
    assert message.startswith(begins)
    assert told in message


@pytest.mark.parametrize(
    ("engine", "name"),
    [("vllm", name) for name in VLLM_ARGUMENTS] + [("trtllm", name) for name in TRTLLM_ARGUMENTS],
)
def test_an_argument_that_has_a_key_of_its_own_is_told_that_key(engine: str, name: str) -> None:
    words = [f"generation.engine={engine}", f"generation.{engine}.engine_arguments={{{name}: 1}}"]
    message = refused(*words)
    assert message.startswith(f"generation.{engine}.engine_arguments has {name!r}; ")
    remedy = message.partition("; ")[2]
    if remedy.startswith("set "):
        keys = remedy.removeprefix("set ").removesuffix(" instead").split(" and ")
        assert set(keys) <= set(known_paths()), remedy
    else:
        assert remedy == "a run decides it itself; leave it out"
    if name == "seed":
        assert remedy == "set seed instead"


def test_a_name_that_vllm_does_not_know_is_refused_with_what_was_meant(vllms_files: None) -> None:
    argument = refused("generation.vllm.engine_arguments={blocksize: 32}")
    assert argument.startswith("generation.vllm.engine_arguments: 'blocksize' is no argument")
    assert "did you mean block_size?" in argument
    check("generation.vllm.engine_arguments={block_size: 32}")

    tool = refused(SERVED, "generation.server.tool_parser=hermez")
    assert tool.startswith("generation.server.tool_parser=hermez: ")
    assert "did you mean hermes? it knows hermes, mistral" in tool
    thinking = refused(SERVED, "generation.server.reasoning_parser=x")
    assert thinking.startswith("generation.server.reasoning_parser=x: ")
    assert "it knows qwen3" in thinking
    check(SERVED, "generation.server.tool_parser=hermes", "generation.server.reasoning_parser=qwen3")
    # Nobody serves, nobody reads it.
    check("generation.server.tool_parser=hermez")


def test_without_vllms_files_names_are_left_to_its_start() -> None:
    check(SERVED, "generation.server.tool_parser=x", "generation.vllm.engine_arguments={blocksize: 32}")


def test_a_cache_too_small_for_one_request_is_refused_with_the_least_size() -> None:
    message = refused("generation.vllm.kv_cache_bytes=1000")
    # 1024 tokens are 8 blocks of 128, vLLM keeps one; a token is 2 layers of a key and a value of 32 floats.
    least = 9 * 128 * 2 * 2 * 32 * 4
    assert message.startswith("generation.vllm.kv_cache_bytes: 1000 is too small")
    assert f"at least {least}" in message
    assert refused(f"generation.vllm.kv_cache_bytes={least - 1}")
    check(f"generation.vllm.kv_cache_bytes={least}")
    check(f"generation.vllm.kv_cache_bytes={2 * least // 9}", "generation.vllm.max_model_len=128")


def test_the_default_cache_is_refused_too_where_a_models_context_is_long(tmp_path: Path) -> None:
    config: dict[str, Any] = dict(
        num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2, hidden_size=896
    )
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 32768}))
    words = [f"model.path={tmp_path}", "model.tiny=null"]
    message = refused(*words)
    assert "268435456, the default on a CPU, is too small for one request of 32768 tokens" in message
    assert (
        f"at least {(32768 + 128) * 2 * 24 * 2 * 64 * 4}, or lower generation.vllm.max_model_len" in message
    )
    check(*words, "generation.vllm.max_model_len=4096")
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "max_position_embeddings": 32768, "layer_types": ["linear_attention"]})
    )
    check(*words)


def test_a_parser_is_looked_up_for_vllm_only() -> None:
    engine_checks.check_names(load_config(None, [*SMALLEST, "generation.engine=megatron"], model=GRPOConfig))
