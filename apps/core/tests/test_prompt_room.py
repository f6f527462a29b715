"""Prompts that leave no room for a whole answer are refused before anything starts."""

from __future__ import annotations

import pytest

from rl_app_core.config import ConfigError, GRPOConfig, load_config
from rl_app_core.problems import load_problems
from rl_app_core.prompt_room import check_prompts

SMALLEST = [
    "model.tiny={}",
    "data.train.dataset_name=basic_arithmetic",
    "data.train.size=50",
    "generation.engine=vllm",
]


def check(*words: str) -> None:
    config = load_config(None, [*SMALLEST, *words], model=GRPOConfig)
    check_prompts(config, load_problems(config.data, config.environment.name), 1024)


def test_an_answer_that_would_be_cut_off_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError) as caught:
        check("generation.vllm.max_model_len=40")
    message = str(caught.value)
    assert message.startswith("generation.vllm.max_model_len=40: the prompt of row ")
    prompt = int(message.partition(" has ")[2].split()[0])
    assert "generation.max_new_tokens=32" in message
    assert f"a context of {prompt + 32} tokens" in message
    check(f"generation.vllm.max_model_len={prompt + 32}")
    with pytest.raises(ConfigError):
        check(f"generation.vllm.max_model_len={prompt + 31}")


def test_a6_a_prompt_that_does_not_fit_is_refused_before_training_with_its_row() -> None:
    """A6: by the model's own context too, and never by a crash at some step."""
    with pytest.raises(ConfigError, match=r"model\.tiny\.context=1024: the prompt of row .*=1020 its"):
        check("generation.max_new_tokens=1020")


def test_where_there_is_room_for_every_byte_no_tokenizer_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("rl_app_core.prompt_room._conversation")
    check("model.tiny.context=4096", "generation.vllm.max_model_len=4096")
