"""Settings refuse what cannot be meant."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from rl_policy_megatron import (
    LoraSettings,
    MegatronPolicy,
    OptimizerSettings,
    ParallelLayout,
    PolicyError,
    PolicySettings,
    SettingsError,
)
from rl_policy_megatron.checks import check_fields
from rl_policy_megatron.group import GroupSettings, RankSettings

# Class, field, wrong value, what it must be.
WRONG: list[tuple[type, str, Any, str]] = [
    (PolicySettings, "dtype", "float16", "'float32' or 'bfloat16'"),
    (PolicySettings, "dtype", None, "'float32' or 'bfloat16'"),
    (PolicySettings, "micro_batch_size", 0, "an integer >= 1"),
    (PolicySettings, "micro_batch_size", 2.5, "an integer >= 1"),
    (PolicySettings, "micro_batch_size", True, "an integer >= 1"),
    (PolicySettings, "micro_batch_size", "4", "an integer >= 1"),
    (PolicySettings, "micro_batch_size", None, "an integer >= 1"),
    (PolicySettings, "micro_batch_tokens", 0, "an integer >= 1 or None"),
    (PolicySettings, "micro_batch_tokens", 8.0, "an integer >= 1 or None"),
    (PolicySettings, "packing", 1, "True or False"),
    (PolicySettings, "packing", "yes", "True or False"),
    (PolicySettings, "recompute", True, "'none' or 'full'"),
    (PolicySettings, "logprob_chunk_tokens", 0, "an integer >= 1"),
    (PolicySettings, "temperature", 0.0, "a finite number > 0"),
    (PolicySettings, "temperature", math.nan, "a finite number > 0"),
    (PolicySettings, "temperature", math.inf, "a finite number > 0"),
    (PolicySettings, "temperature", True, "a finite number > 0"),
    (PolicySettings, "temperature", "1", "a finite number > 0"),
    (PolicySettings, "seed", -1, "an integer in [0, 9223372036854775808)"),
    (PolicySettings, "seed", 2**63, "an integer in [0, 9223372036854775808)"),
    (PolicySettings, "seed", 0.5, "an integer in [0, 9223372036854775808)"),
    (PolicySettings, "lora", {}, "LoraSettings or None"),
    (PolicySettings, "lora", LoraSettings, "LoraSettings or None"),
    (PolicySettings, "layout", {}, "ParallelLayout"),
    (PolicySettings, "layout", None, "ParallelLayout"),
    (OptimizerSettings, "betas", (0.9, 1.0), "a tuple of 2, each of it a finite number in [0, 1)"),
    (OptimizerSettings, "betas", (0.9,), "a tuple of 2"),
    (OptimizerSettings, "betas", 0.9, "a tuple of 2"),
    (OptimizerSettings, "betas", [0.9, 0.95], "a tuple of 2"),
    (OptimizerSettings, "betas", (0.9, "0.95"), "a tuple of 2"),
    (OptimizerSettings, "eps", 0.0, "a finite number > 0"),
    (OptimizerSettings, "weight_decay", -0.1, "a finite number >= 0"),
    (OptimizerSettings, "weight_decay", math.nan, "a finite number >= 0"),
    (OptimizerSettings, "grad_clip", -1.0, "a finite number >= 0"),
    (OptimizerSettings, "grad_clip", None, "a finite number >= 0"),
    (ParallelLayout, "tensor", 0, "an integer >= 1"),
    (ParallelLayout, "pipeline", 1.0, "an integer >= 1"),
    (ParallelLayout, "expert", "2", "an integer >= 1"),
    (ParallelLayout, "sequence_parallel", 0, "True or False"),
    (LoraSettings, "rank", True, "an integer >= 1"),
    (LoraSettings, "alpha", "32", "a finite number > 0"),
    (LoraSettings, "targets", "q_proj", "a tuple, each of it a string"),
    (LoraSettings, "targets", ("q_proj", 3), "a tuple, each of it a string"),
    (LoraSettings, "dropout", None, "a finite number"),
    (GroupSettings, "num_gpus", -1.0, "a finite number >= 0"),
    (GroupSettings, "grace_s", 0, "a finite number > 0"),
    (GroupSettings, "call_timeout_s", math.inf, "a finite number > 0"),
    (GroupSettings, "env_vars", "OMP_NUM_THREADS=1", "Mapping"),
]


@pytest.mark.parametrize(("kind", "field", "value", "wanted"), WRONG)
def test_a_wrong_value_is_told_with_its_field_and_what_it_must_be(
    kind: type, field: str, value: Any, wanted: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        kind(**{field: value})
    message = str(caught.value)
    assert message.startswith(f"{kind.__name__}.{field} must be {wanted}")
    assert message.endswith(f", got {value!r}")
    assert isinstance(caught.value, PolicyError)
    assert isinstance(caught.value, ValueError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == message


def test_every_field_of_every_settings_is_checked() -> None:
    class Nothing:
        pass

    for kind in (
        PolicySettings,
        OptimizerSettings,
        ParallelLayout,
        LoraSettings,
        GroupSettings,
        RankSettings,
    ):
        for field in kind.__dataclass_fields__:
            given = {"model_directory": "somewhere"} if kind is RankSettings else {}
            with pytest.raises(SettingsError, match=rf"{kind.__name__}\.{field} must be"):
                kind(**{**given, field: Nothing()})


def test_what_can_be_meant_is_accepted() -> None:
    PolicySettings(temperature=2, seed=2**63 - 1, micro_batch_tokens=None, lora=LoraSettings(alpha=9))
    OptimizerSettings(betas=(0, 0.5), grad_clip=0)
    check_fields(PolicySettings())


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(SettingsError, match="got a dict ") as caught:
        PolicySettings(lora={"rank": list(range(500))})
    assert len(str(caught.value)) < 250


def test_rows_and_tokens_per_pass_exclude_each_other() -> None:
    with pytest.raises(SettingsError, match="micro_batch_size=7 would have no effect beside"):
        PolicySettings(micro_batch_size=7, micro_batch_tokens=64)


def test_a_policy_is_given_settings_and_nothing_like_them(model_of: Callable[..., Any]) -> None:
    directory = model_of("llama")[0]
    for wrong in ({}, PolicySettings, OptimizerSettings(), "float32"):
        with pytest.raises(SettingsError, match="settings must be PolicySettings, got"):
            MegatronPolicy(directory, wrong)
    for wrong in ({}, 1e-3, PolicySettings()):
        with pytest.raises(SettingsError, match="optimizer must be OptimizerSettings, got"):
            MegatronPolicy(directory, None, wrong)


@pytest.mark.parametrize("rate", [-1e-3, math.nan, math.inf, "1e-3", None, True])
def test_a_learning_rate_is_a_number(
    rate: Any,
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
) -> None:
    with pytest.raises(SettingsError, match=r"learning_rate must be a finite number in \[0, 1000.0\), got"):
        policy_of("llama").train(rows_of([4]), token_mean_loss, learning_rate=rate)


def test_an_optimizer_is_reset_with_its_settings_only(policy_of: Callable[..., Any]) -> None:
    with pytest.raises(SettingsError, match="the optimizer's settings must be OptimizerSettings"):
        policy_of("llama").reset_optimizer({"eps": 1e-8})
