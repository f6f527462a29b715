"""Settings that nothing reads are refused when the configuration is read, with the key that reads them."""

from __future__ import annotations

import pytest

from rl_app_core.config import ConfigError, DistillationConfig, GRPOConfig, load_config
from rl_app_core.grpo import check_settings

TINY = ["model.tiny={}", "data.train.dataset_name=basic_arithmetic"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["loss=mine:Loss", "objective=gspo"], "objective=gspo has no effect with loss=mine:Loss"),
        (["loss=mine:Loss", "kl_coefficient=0.1"], "kl_coefficient=0.1 has no effect"),
        (["loss=mine:Loss", "entropy_coefficient=0.1"], "entropy_coefficient=0.1 has no effect"),
        (["loss=mine:Loss", "dual_clip=2"], "dual_clip=2.0 has no effect"),
        (["loss=mine:Loss", "importance_max=3"], "importance_max=3.0 has no effect"),
        (["objective=reinforce", "clip_low=0.1"], "clip_low=0.1 has no effect with objective=reinforce"),
        (["objective=on_policy", "clip_high=0.1"], "clip_high=0.1 has no effect"),
        (["kl_form=k1"], "kl_form=k1 has no effect without kl_coefficient"),
        (["max_generation_rounds=3"], "max_generation_rounds=3 has no effect without dynamic_sampling"),
    ],
)
def test_of_the_algorithm(words, said):
    with pytest.raises(ConfigError, match=said):
        load_config(None, [*TINY, *(f"algorithm.{word}" for word in words)], model=GRPOConfig)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rewards.overlong_penalty=2"], "overlong_penalty=2 has no effect without overlong_buffer"),
        (["rewards.overlong_buffer=4", "rewards.overlong_penalty=0"], "overlong_buffer=4 has no effect"),
        (["checkpointing.keep_best=1", "checkpointing.every=7"], "a multiple of evaluation.every"),
    ],
)
def test_of_other_sections(words, said):
    with pytest.raises(ConfigError, match=said):
        load_config(None, [*TINY, *words], model=GRPOConfig)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["objective=opd", "divergence=forward"], "divergence=forward has no effect with objective=opd"),
        (["clip_low=0.1"], "clip_low=0.1 has no effect with objective=topk"),
        (["forward_weight=0.3"], "forward_weight=0.3 has no effect with divergence=reverse"),
    ],
)
def test_of_distillation(words, said):
    given = [*TINY, "teacher.recipe=cpu", *(f"algorithm.{word}" for word in words)]
    with pytest.raises(ConfigError, match=said):
        load_config(None, given, model=DistillationConfig)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["algorithm.objective=gspo"], "objective=gspo belongs with normalization 'sequence'"),
        (["algorithm.objective=on_policy", "algorithm.dual_clip=3"], "no effect with objective=on_policy"),
        (["algorithm.objective=reinforce", "algorithm.updates_per_step=2"], "would not be corrected"),
        (["algorithm.group_size=1"], "algorithm: group_size 1 with GroupRelative"),
        (
            [
                "algorithm.importance_correction=icepop",
                "algorithm.importance_min=1.1",
                "algorithm.importance_max=3",
            ],
            "leave 1 out",
        ),
        (["rewards.scaling={source_min: 1, source_max: 0}"], "rewards: source_min"),
        (
            ["rewards.scaling={source_min: 0, source_max: 1, target_min: 2, target_max: 2}"],
            "rewards: target_min and target_max are both 2",
        ),
    ],
)
def test_combinations_are_refused_in_the_words_of_the_configuration(words, said):
    config = load_config(None, [*TINY, *words], model=GRPOConfig)
    with pytest.raises(ConfigError, match=said):
        check_settings(config)
