"""The estimators beyond the group: whole batches, components, tokens, overrides."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rl_algorithms.advantages import (
    GDPO,
    AdvantageError,
    AdvantageInputs,
    Constant,
    GroupRelative,
    KLInReward,
    MessageOverrides,
    OnPolicyDistillation,
    ReinforcePlusPlus,
    gae_advantages,
    grpo_advantages,
)
from rl_algorithms.batching import TrainBatch
from rl_algorithms.losses import ClippedPGLoss, DistillationLoss
from rl_algorithms.method import Method, MethodError
from rl_algorithms.needs import Needs
from rl_gym_bridge.trajectory import StopReason, Trajectory, Turn

NAN = math.nan


def inputs(rewards, tokens=None, groups=None, valid=None, components=None, width=4, **logprobs):
    """N rollouts with so many trained tokens each, at the end of their rows."""
    count = len(rewards)
    tokens = tokens or [1] * count
    mask = torch.arange(width).flip(0).unsqueeze(0) < torch.tensor(tokens).unsqueeze(1)
    valid = torch.tensor(valid or [True] * count)
    batch = TrainBatch.create(
        input_ids=torch.ones(count, width, dtype=torch.int64),
        lengths=torch.full((count,), width),
        token_mask=mask,
        sample_mask=valid,
        advantages=torch.zeros(count),
        generation_logprobs=torch.zeros(count, width),
    ).with_logprobs(**{name: torch.as_tensor(values) for name, values in logprobs.items()})
    return AdvantageInputs(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group_ids=groups or ["g"] * count,
        valid=valid,
        batch=batch,
        components={
            name: torch.tensor(values, dtype=torch.float64) for name, values in (components or {}).items()
        },
    )


def test_reinforce_plus_plus_whitens_over_tokens():
    """Rewards 1, 0 on 3 and 1 tokens: mean 3/4, variance (3·(1/4)² + (3/4)²)/3 = 1/4."""
    found = ReinforcePlusPlus(group_baseline=False)(inputs([1.0, 0.0], tokens=[3, 1]))
    assert found.tolist() == pytest.approx([0.25 / 0.500001, -0.75 / 0.500001], abs=1e-9)


def test_reinforce_plus_plus_with_the_mean_of_the_group():
    """Groups (1, 0) and (5, 5): ±0.5 and 0, 0; one token each: variance 0.5/3."""
    found = ReinforcePlusPlus()(inputs([1.0, 0.0, 5.0, 5.0], groups=["a", "a", "b", "b"]))
    std = math.sqrt(0.5 / 3) + 1e-6
    assert found.tolist() == pytest.approx([0.5 / std, -0.5 / std, 0, 0], abs=1e-12)


def test_reinforce_plus_plus_leaves_out_what_is_not_valid():
    plain = ReinforcePlusPlus(False)(inputs([1.0, 0.0]))
    for junk in (NAN, math.inf, 100.0):
        found = ReinforcePlusPlus(False)(inputs([1.0, 0.0, junk], valid=[True, True, False]))
        assert found.tolist() == [*plain.tolist(), 0.0]
    assert ReinforcePlusPlus(False)(inputs([3.0, 3.0])).tolist() == [0, 0]
    assert ReinforcePlusPlus(False)(inputs([3.0])).tolist() == [0]


def test_gdpo_tells_combinations_apart_that_a_sum_does_not():
    """Both rollouts earn 1 in all, by other components: a sum has no spread at all."""
    components = {"right": [1.0, 0.0, 0.0], "format": [0.0, 1.0, 0.0]}
    given = inputs([1.0, 1.0, 0.0], components=components)
    one = grpo_advantages(torch.tensor([1.0, 0, 0], dtype=torch.float64), ["g"] * 3, given.valid)
    total = one + one[[1, 0, 2]]
    std = float(total.std()) + 1e-6
    assert GDPO()(given).tolist() == pytest.approx([float(v) / std for v in total], abs=1e-9)
    weighted = GDPO({"format": 0.0})(given)
    assert weighted[0] > 0 > weighted[1] == weighted[2]


def test_gdpo_refuses_what_is_missing():
    with pytest.raises(AdvantageError, match="at least two reward components"):
        GDPO()(inputs([1.0, 0.0], components={"right": [1.0, 0.0]}))
    with pytest.raises(AdvantageError, match=r"rollouts \[1\] have no finite component 'format'"):
        GDPO()(inputs([1.0, 0.0], components={"right": [1.0, 0.0], "format": [1.0, NAN]}))
    with pytest.raises(AdvantageError, match=r"weights for \['speed'\]"):
        GDPO({"speed": 1.0})(inputs([1.0, 0.0], components={"right": [1.0, 0], "format": [1.0, 0]}))
    ok = inputs([1.0, 0.0], components={"right": [1.0, NAN], "format": [1.0, NAN]}, valid=[True, False])
    assert GDPO()(ok).tolist() == [0, 0]


def test_opd_is_teacher_minus_student_on_sampled_tokens():
    teacher = torch.tensor([[NAN, -1.0, -0.5, -3.0]])
    student = torch.tensor([[-1.0, NAN, -1.0, -1.0]])
    found = OnPolicyDistillation()(inputs([NAN], tokens=[2], teacher=teacher, prev=student))
    assert found.tolist() == [[0, 0, 0.5, -2.0]]
    assert OnPolicyDistillation.needs == Needs(prev=True, teacher=True)
    with pytest.raises(AdvantageError, match="without the teacher's"):
        OnPolicyDistillation()(inputs([0.0]))


def test_constant_needs_no_reward():
    assert Constant()(inputs([NAN, 3.0], valid=[True, False])).tolist() == [1, 0]
    assert not Constant.uses_rewards


def test_gae_by_hand():
    """γ 0.5, λ 0.5, values 1, 2 and a reward of 4 at the end: δ = (0.5·2 − 1, 4 − 2) = (0, 2)."""
    advantages, returns = gae_advantages(
        torch.tensor([4.0]),
        torch.tensor([[9.0, 1.0, 2.0, 9.0]]),
        torch.tensor([[False, True, True, False]]),
        gamma=0.5,
        lam=0.5,
    )
    assert advantages.tolist() == [[0, 0.5, 2, 0]]
    assert returns.tolist() == [[0, 1.5, 4, 0]]


def test_gae_steps_over_what_the_environment_says():
    """Between two turns no time passes, whatever stands there."""
    turn = gae_advantages(
        torch.tensor([[0.0, 1.0, 3.0]]), torch.tensor([[0.5, 1.0, 2.0]]), torch.ones(1, 3).bool(), lam=0.9
    )
    gap = torch.tensor([[True, True, False, False, True]])
    rewards = torch.tensor([[0.0, 1.0, NAN, 7.0, 3.0]])
    values = torch.tensor([[0.5, 1.0, math.inf, NAN, 2.0]])
    with_gap = gae_advantages(rewards, values, gap, lam=0.9)
    for short, long in zip(turn, with_gap, strict=True):
        assert long[gap].tolist() == short[0].tolist()
        assert long[~gap].tolist() == [0, 0]


def test_gae_with_lambda_one_is_return_minus_value():
    rewards, values = torch.randn(3, 6), torch.randn(3, 6)
    mask = torch.rand(3, 6) < 0.7
    advantages, returns = gae_advantages(rewards, values, mask)
    to_go = (rewards.double() * mask).flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(returns, to_go * mask)
    torch.testing.assert_close(advantages, (to_go - values) * mask)
    assert gae_advantages(torch.zeros(0), torch.zeros(0, 4), torch.zeros(0, 4).bool())[0].shape == (0, 4)
    assert gae_advantages(torch.ones(2), torch.ones(2, 3), torch.zeros(2, 3).bool())[0].abs().sum() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [({"gamma": 1.1}, "gamma and lam"), ({"lam": -0.1}, "gamma and lam")],
)
def test_gae_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        gae_advantages(torch.zeros(1), torch.zeros(1, 2), torch.ones(1, 2).bool(), **options)
    with pytest.raises(ValueError, match="rewards must be"):
        gae_advantages(torch.zeros(3), torch.zeros(1, 2), torch.ones(1, 2).bool())


def test_a_kl_in_the_reward_is_summed_over_the_rollout():
    """k1 of lp −1 and ref −1.5 is 0.5 a token: two tokens cost 0.1·1.0, prompt tokens nothing."""
    prev, reference = torch.full((2, 4), -1.0), torch.full((2, 4), -1.5)
    given = inputs([1.0, 1.0], tokens=[2, 1], prev=prev, reference=reference)
    found = KLInReward(GroupRelative(normalize=False), 0.1)(given)
    assert found.tolist() == pytest.approx([-0.025, 0.025])
    assert KLInReward(GroupRelative(), 0.1).needs == Needs(prev=True, reference=True)
    with pytest.raises(AdvantageError, match="reads no rewards"):
        KLInReward(Constant(), 0.1)
    with pytest.raises(AdvantageError, match="coefficient >= 0"):
        KLInReward(GroupRelative(), -1.0)
    with pytest.raises(AdvantageError, match="log-probabilities of policy and reference"):
        KLInReward(GroupRelative(), 0.1)(inputs([1.0, 0.0]))


def test_a_kl_in_the_reward_is_paid_by_rollouts_that_a_filter_keeps_from_training():
    """All four are alike: none is better than another, whichever of them is trained."""
    prev, reference = torch.full((4, 4), -1.0), torch.full((4, 4), -1.5)
    given = inputs([1.0] * 4, tokens=[2] * 4, prev=prev, reference=reference)
    filtered = replace(given.batch, sample_mask=torch.tensor([True, True, True, False]))
    found = KLInReward(GroupRelative(normalize=False), 0.1)(replace(given, batch=filtered))
    assert found.tolist() == pytest.approx([0.0] * 4)


def rollout(*turns):
    return Trajectory(turns, 1.0, StopReason.STOP, group_id="g", rollout_id="g/0")


def test_overrides_touch_sampled_tokens_of_the_broken_turn_alone():
    good = Turn((1, 1), (2,), (-1.0,))
    call = Turn((1,), (2, 2), (-1.0,) * 2, invalid_tool_call=True)
    thought = Turn((1,), (2,), (-1.0,), malformed_thinking=True)
    both = Turn((), (2,), (-1.0,), invalid_tool_call=True, malformed_thinking=True)
    given = torch.full((1, 9), 0.5)
    overrides = MessageOverrides(invalid_tool_call=-1.0, malformed_thinking=-2.0)
    found = overrides(given, [rollout(good, call, thought, both)])
    assert found.tolist() == [[0.5, 0.5, 0.5, 0.5, -1, -1, 0.5, -2, -2]]
    assert given.tolist() == [[0.5] * 9], "the given advantages stay as they are"
    only = MessageOverrides(malformed_thinking=0.0)(given, [rollout(good, call, thought, both)])
    assert only.tolist() == [[0.5] * 7 + [0, 0]]
    assert not MessageOverrides()
    assert MessageOverrides(invalid_tool_call=0.0), "0 is an override, not none"
    with pytest.raises(AdvantageError, match="malformed_thinking must be a finite number"):
        MessageOverrides(malformed_thinking=NAN)


def test_a_method_without_its_teacher_is_refused():
    with pytest.raises(MethodError, match="learns from a teacher, and none was given"):
        Method(Constant(), DistillationLoss())
    with pytest.raises(MethodError, match="advantage_clip must be above 0"):
        Method(GroupRelative(), ClippedPGLoss(), advantage_clip=0.0)
    assert Method(GroupRelative(), ClippedPGLoss(kl_coefficient=0.1)).needs == Needs(True, True)


@pytest.mark.parametrize(
    "estimator",
    [GroupRelative(), GroupRelative(True, False), ReinforcePlusPlus(), ReinforcePlusPlus(False), GDPO()],
)
def test_order_does_not_matter_and_everything_is_finite(estimator):
    generator = torch.Generator().manual_seed(3)
    count = 24
    rewards = torch.randn(count, generator=generator).double()
    rewards[5] = 1e4
    rewards[6] = -1e4
    valid = torch.rand(count, generator=generator) < 0.8
    rewards[~valid] = NAN
    groups = [f"g{i % 5}" for i in range(count - 1)] + ["alone"]
    tokens = torch.randint(1, 5, (count,), generator=generator)
    parts = {"a": rewards * 2, "b": rewards.sin()}

    def of(order):
        given = inputs(
            rewards[order].tolist(),
            tokens=tokens[order].tolist(),
            groups=[groups[i] for i in order],
            valid=valid[order].tolist(),
            components={name: values[order].tolist() for name, values in parts.items()},
        )
        return estimator(given)

    order = torch.randperm(count, generator=generator).tolist()
    plain = of(list(range(count)))
    torch.testing.assert_close(of(order), plain[order], rtol=1e-9, atol=1e-12)
    assert torch.isfinite(plain).all()
    assert not plain[~valid].any()
    assert plain[valid].abs().sum() > 0
