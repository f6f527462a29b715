"""From keys of the configuration to advantages, losses and loops; and what is refused on the way."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from rl_algorithms.advantages import GDPO, GroupRelative, KLInReward, ReinforcePlusPlus
from rl_algorithms.rewards import LinearScaling, RewardPenalties
from rl_app_core.config import ConfigError, GRPOConfig, load_config
from rl_app_core.grpo import check_settings, loop_settings, method
from rl_app_core.plugins import carry

SMALLEST = ["model.tiny={}", "data.train.dataset_name=basic_arithmetic"]

OWN = '''
from dataclasses import dataclass
import torch
from rl_algorithms.needs import Needs


@dataclass(frozen=True)
class Best:
    """1 for the best of a group."""

    scale: float = 1.0
    needs = Needs()
    uses_rewards = True

    def __call__(self, inputs):
        return self.scale * (inputs.rewards == inputs.rewards.max()).double()


class Lacking:
    pass
'''


def config(*words: str) -> GRPOConfig:
    return load_config(None, [*SMALLEST, *words], model=GRPOConfig)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], GroupRelative()),
        (["algorithm.leave_one_out=true", "algorithm.normalize=false"], GroupRelative(True, False)),
        (["algorithm.advantage=rloo"], GroupRelative(True, False)),
        (["algorithm.advantage=dr_grpo"], GroupRelative(False, False)),
        (["algorithm.advantage=reinforce_plus_plus"], ReinforcePlusPlus()),
        (
            ["algorithm.advantage=reinforce_plus_plus", "algorithm.group_baseline=false"],
            ReinforcePlusPlus(False),
        ),
        (
            ["algorithm.advantage=gdpo", "algorithm.advantage_options={weights: {format: 0.5}}"],
            GDPO({"format": 0.5}),
        ),
        (
            ["algorithm.kl_coefficient=0.1", "algorithm.kl_in=reward", "algorithm.kl_form=k1"],
            KLInReward(GroupRelative(), 0.1, "k1"),
        ),
    ],
)
def test_advantages(words: list[str], wanted: Any) -> None:
    check_settings(config(*words))
    assert method(config(*words)).advantage == wanted


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["algorithm.objective=ppo"], {}),
        (
            ["algorithm.objective=gspo", "algorithm.normalization=sequence"],
            {"sequence_ratio": True, "normalization": "sequence"},
        ),
        (["algorithm.objective=cispo"], {"cispo": True}),
        (["algorithm.objective=reinforce"], {"disable_ppo_ratio": True}),
        (["algorithm.objective=on_policy"], {"force_on_policy_ratio": True}),
        (["algorithm.positive_nll_coefficient=0.1"], {"positive_nll_coefficient": 0.1}),
        (["algorithm.kl_coefficient=0.1"], {"kl_coefficient": 0.1}),
        (["algorithm.kl_coefficient=0.1", "algorithm.kl_in=reward"], {"kl_coefficient": 0.0}),
        (
            [
                "algorithm.importance_correction=seq-mask-tis",
                "algorithm.importance_min=0.5",
                "algorithm.importance_max=2",
            ],
            {"importance_correction": "seq-mask-tis", "importance_min": 0.5, "importance_max": 2.0},
        ),
    ],
)
def test_losses(words: list[str], wanted: dict[str, object]) -> None:
    check_settings(config(*words))
    loss, plain = method(config(*words)).loss, method(config()).loss
    differ = {name for name in type(plain).__slots__ if getattr(loss, name) != getattr(plain, name)}
    assert differ == {name for name, value in wanted.items() if value != getattr(plain, name)}
    assert all(getattr(loss, name) == value for name, value in wanted.items())


def test_the_loop_and_the_rewards() -> None:
    found = loop_settings(
        config(
            "algorithm.dynamic_sampling=true",
            "algorithm.max_generation_rounds=3",
            "algorithm.max_epochs=2",
            "evaluation.stop_at=0.9",
            "rewards.scaling={source_min: -1, source_max: 1}",
            "rewards.penalties.truncated=0.5",
        )
    )
    assert (found.dynamic_sampling, found.max_generation_rounds, found.max_epochs) == (True, 3, 2)
    assert (found.stop_at, found.stop_metric) == (0.9, "accuracy")
    assert found.shaping.scaling == LinearScaling(-1, 1, 0, 1)
    assert found.shaping.penalties == RewardPenalties(truncated=0.5)
    overrides = method(config("algorithm.invalid_tool_call_advantage=-1")).overrides
    assert (overrides.invalid_tool_call, overrides.malformed_thinking) == (-1.0, None)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["algorithm.advantage=gae"], "algorithm.advantage='gae' does not exist"),
        (["algorithm.advantage=dr_gpo"], "did you mean dr_grpo?"),
        (["algorithm.loss=clip_pg"], "did you mean clipped_pg?"),
        (["algorithm.advantage=nowhere:Best"], "no module 'nowhere'"),
        (["algorithm.advantage=own:Bset"], "did you mean Best?"),
        (["algorithm.advantage=own:Lacking"], "lacks needs, uses_rewards, __call__"),
        (["algorithm.advantage=own:Best", "algorithm.advantage_options={size: 1}"], "failed"),
        (["algorithm.advantage_options={a: 1}"], "advantage_options are of gdpo"),
        (["algorithm.advantage=gdpo", "algorithm.advantage_options={a: 1}"], "weights alone"),
        (["algorithm.loss_options={a: 1}"], "loss_options are of a class of your own"),
        (["algorithm.advantage=rloo", "algorithm.normalize=false"], "normalize=false belongs to"),
        (["algorithm.group_baseline=false"], "group_baseline=false belongs to"),
        (["algorithm.kl_in=reward"], "no effect without kl_coefficient"),
        (["algorithm.dynamic_sampling=true", "algorithm.group_size=1"], "group_size 1 has none"),
        (["algorithm.objective=gspo"], "belongs with normalization 'sequence'"),
        (["algorithm.objective=cispo", "algorithm.dual_clip=2"], "no effect with objective=cispo"),
        (["algorithm.objective=on_policy", "algorithm.updates_per_step=2"], "for on-policy"),
        (["rewards.scaling={source_min: 1, source_max: 1}"], "must lie below"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_remedy(
    words: list[str], told: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(ConfigError, match=told.replace("?", r"\?")):
        check_settings(config(*words))


def test_an_advantage_of_ones_own_travels_with_its_module(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Read when Ray is imported for the first time, which may be here.
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    from ray import cloudpickle

    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_method.py").write_text(OWN)
    made = method(config("algorithm.advantage=my_method:Best", "algorithm.advantage_options={scale: 2.0}"))
    assert type(made.advantage).__name__ == "Best"
    carry(made.advantage, made.loss)
    packed = cloudpickle.dumps(made.advantage)
    monkeypatch.delitem(__import__("sys").modules, "my_method")
    (tmp_path / "my_method.py").unlink()
    assert pickle.loads(packed).scale == 2.0
