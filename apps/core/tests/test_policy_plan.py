"""From the configuration to the policy's ranks, without starting any."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from rl_actor_envs.table import ACTOR_ENVIRONMENTS
from rl_app_core import preflight
from rl_app_core.config import ConfigError, GRPOConfig, load_config
from rl_app_core.config.policy import Peft
from rl_app_core.policy_plan import (
    check_adapters,
    check_layout,
    policy_settings,
    policy_warnings,
    rank_settings,
)
from rl_app_core.remote import RemoteWorker, group_settings
from rl_policy_megatron import ParallelLayout, PolicySettings
from rl_policy_megatron.group import MegatronPolicyGroup
from rl_policy_megatron.lora import LoraSettings

SMALLEST = ["model.tiny={}", "data.train.dataset_name=basic_arithmetic"]
APART = "generation.engine=vllm"


def config(*words):
    return load_config(None, [*SMALLEST, *words], model=GRPOConfig)


def test_the_defaults_are_one_process_and_what_the_policy_itself_defaults_to():
    ranks = rank_settings(config(), Path("model"))
    assert ranks.world == 1
    assert ranks.policy == PolicySettings(micro_batch_size=64)
    assert Path(ranks.model_directory).is_absolute()


def test_every_setting_reaches_the_policy():
    settings = policy_settings(
        config(
            *("policy.precision=bfloat16", "policy.micro_batch_tokens=99"),
            *("policy.packing=true", "policy.recompute=full", "generation.temperature=0.5", "seed=3"),
            "policy.peft={rank: 4, alpha: 9, targets: [q_proj, up_proj]}",
        )
    )
    assert settings == PolicySettings(
        dtype="bfloat16",
        micro_batch_tokens=99,
        packing=True,
        recompute="full",
        temperature=0.5,
        seed=3,
        lora=LoraSettings(4, 9.0, ("q_proj", "up_proj")),
    )
    assert policy_settings(config("policy.micro_batch_size=7")) == PolicySettings(micro_batch_size=7)


def test_adapters_have_the_defaults_of_the_package():
    lora = Peft()
    assert LoraSettings(lora.rank, lora.alpha, lora.targets) == LoraSettings()


def test_a_layout_becomes_that_many_ranks():
    words = "policy.parallel={tensor: 2, pipeline: 3, data: 4, expert: 2, sequence_parallel: true}"
    ranks = rank_settings(config(APART, words), Path("model"))
    assert ranks.world == 24
    assert ranks.policy.layout == ParallelLayout(2, 3, 2, True)
    assert ranks.policy.layout.data(ranks.world) == 4


def test_who_is_missing_at_the_start_is_told_before_the_drivers_patience_ends():
    found = config("cluster.start_timeout_s=40", "cluster.call_timeout_s=7", "cluster.threads=3")
    ranks, group = rank_settings(found, Path("model")), group_settings(found.cluster, num_gpus=0.5)
    assert ranks.rendezvous_timeout_s < group.start_timeout_s == 40
    assert (ranks.collective_timeout_s, group.call_timeout_s, ranks.threads) == (7, 7, 3)
    assert group.num_gpus == 0.5


def test_what_ranks_are_built_from_can_be_sent_to_them():
    ranks = rank_settings(config(APART, "policy.parallel.data=2", "policy.peft={}"), Path("model"))
    again = pickle.loads(pickle.dumps(ranks))
    assert (again.policy, again.optimizer, again.world) == (ranks.policy, ranks.optimizer, 2)
    assert again.weight_source.func is ranks.weight_source.func
    assert again.weight_source.keywords == ranks.weight_source.keywords


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["policy.parallel.tensor=2"], "num_key_value_heads is 1, which policy.parallel.tensor = 2"),
        (["policy.parallel.pipeline=3"], "num_hidden_layers is 2, which policy.parallel.pipeline = 3"),
        (["policy.parallel={data: 2, expert: 2}"], "no experts"),
    ],
)
def test_a_layout_that_cannot_split_the_model_is_refused_before_anything_starts(words, told):
    with pytest.raises(ConfigError, match=r"^policy\.parallel: ") as caught:
        check_layout(config(APART, *words))
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


MIXTURE = {
    **{"model_type": "qwen3_moe", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300},
    **{
        "max_position_embeddings": 64,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
}


def test_adapters_for_experts_are_refused_before_anything_starts_and_those_of_attention_are_not(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))

    def adapted(peft):
        words = [f"model.path={tmp_path}", "data.train.dataset_name=x", f"policy.peft={peft}"]
        return load_config(None, words, model=GRPOConfig)

    for wrong in ("{}", "{targets: [q_proj, up_proj]}"):
        with pytest.raises(
            ConfigError, match=r"^policy\.peft: policy\.peft\.targets names .*up_proj"
        ) as caught:
            check_adapters(adapted(wrong))
        assert "set policy.peft.targets to some of q_proj, k_proj, v_proj, o_proj" in str(caught.value)
        assert "\n" not in str(caught.value)
    check_adapters(adapted("{targets: [q_proj, o_proj]}"))
    check_adapters(config("policy.peft={}"))


def test_adapters_on_random_weights_are_warned_of_with_what_to_do():
    (warning,) = policy_warnings(config("policy.peft={}"))
    for part in (
        "model.tiny are random",
        "grpo export-hf RUN_DIR DIR",
        "model.path=DIR",
        "warm_start.steps=0",
    ):
        assert part in warning
    assert policy_warnings(config()) == ()
    words = ["model.path=somewhere", "data.train.dataset_name=x", "policy.peft={}"]
    assert policy_warnings(load_config(None, words, model=GRPOConfig)) == ()


def test_the_policys_actors_have_environments():
    for name, group in ((preflight.COLOCATED, RemoteWorker), (preflight.APART, MegatronPolicyGroup)):
        assert f"{group.rank_class.__module__}.{group.rank_class.__qualname__}" == name
        assert ACTOR_ENVIRONMENTS[name] == ["mcore"]
