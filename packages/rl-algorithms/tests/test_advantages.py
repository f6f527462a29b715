from __future__ import annotations

import math

import pytest
import torch

from rl_algorithms.advantages import dr_grpo_advantages, grpo_advantages, rloo_advantages

THIRD = -1 / 3 / (math.sqrt(1 / 3) + 1e-6)


def advantages(rewards, function=grpo_advantages, groups=None, valid=None, dtype=torch.float64, **options):
    tensor = torch.tensor(rewards, dtype=dtype)
    groups = groups or ["g"] * len(rewards)
    flags = torch.ones(len(rewards), dtype=torch.bool) if valid is None else torch.tensor(valid)
    return function(tensor, groups, flags, **options)


def test_c1_leave_one_out_does_not_divide_by_epsilon():
    found = advantages([1, 0, 0, 0], leave_one_out=True)
    assert found.tolist() == pytest.approx([1, THIRD, THIRD, THIRD], abs=1e-9)
    assert found[1].item() == pytest.approx(-0.577349, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_c1_spread_that_is_only_rounding_is_no_spread(dtype):
    """0.1 + 0.2 and 0.3 differ by rounding: without a tolerance the last member would get 6e5."""
    equal = [0.1 + 0.2, 0.3, 0.3]
    if dtype == torch.float32:
        equal = [0.3, 0.3 * (1 + 1.2e-7), 0.3]
    found = advantages([*equal, 1.0], dtype=dtype, leave_one_out=True)
    assert found[3].item() == pytest.approx(0.7, abs=1e-5)
    assert advantages(equal, dtype=dtype).tolist() == [0, 0, 0]
    assert advantages([0.1] * 7, dtype=dtype).tolist() == [0] * 7


def test_c1_a_large_common_offset_does_not_matter():
    """Centred differences: E[x²] − E[x]² would lose every digit here."""
    offset = 1e8
    for options in ({}, {"leave_one_out": True}, {"leave_one_out": True, "normalize": False}):
        plain = advantages([1, 0, 0.5, 0.25], **options)
        shifted = advantages([offset + 1, offset, offset + 0.5, offset + 0.25], **options)
        assert shifted.tolist() == pytest.approx(plain.tolist(), abs=1e-6)


def test_c3_mean_is_of_the_whole_group():
    assert advantages([1, 0, 0, 0], dr_grpo_advantages).tolist() == [0.75, -0.25, -0.25, -0.25]
    assert advantages([1, 0, 0, 0], normalize=False).tolist() == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("function", [grpo_advantages, rloo_advantages, dr_grpo_advantages])
def test_c4_what_an_invalid_row_is_paid_does_not_matter(function):
    found = [advantages([1.0, 0.0, r], function, valid=[True, True, False]) for r in (1.0, 100.0, math.nan)]
    assert found[0].tolist() == found[1].tolist() == found[2].tolist()
    assert found[0].tolist() == [*advantages([1.0, 0.0], function).tolist(), 0]


def test_c5_a_sample_without_tokens_is_not_in_the_baseline():
    assert advantages([1, 0], dr_grpo_advantages, valid=[True, False]).tolist() == [0, 0]


@pytest.mark.parametrize("function", [grpo_advantages, rloo_advantages, dr_grpo_advantages])
def test_c7_group_of_one_gets_zero(function):
    assert advantages([1.0], function).tolist() == [0]
    assert advantages([1.0], leave_one_out=True).tolist() == [0]
    assert advantages([], function).tolist() == []


def test_group_of_two_leave_one_out_has_no_std_to_divide_by():
    assert advantages([1, 0], leave_one_out=True).tolist() == [1, -1]


def test_c8_reference_values():
    rewards = [1, 1, 1, 0, 0, 0, 0, 0]
    assert advantages(rewards, rloo_advantages).tolist() == pytest.approx(
        [0.714286] * 3 + [-0.428571] * 5, abs=1e-6
    )
    assert advantages(rewards).tolist() == pytest.approx([1.207614] * 3 + [-0.724567] * 5, abs=2e-6)


def test_groups_are_known_by_id_in_any_order():
    rewards = [1.0, 0.0, 0.5, 2.0, 2.5, 7.0, 1.0]
    groups = ["a", "a", "a", "b", "b", "c", "a"]
    valid = [True, True, True, True, True, True, False]
    plain = advantages(rewards, groups=groups, valid=valid)
    order = [5, 3, 0, 6, 4, 2, 1]
    shuffled = advantages(
        [rewards[i] for i in order], groups=[groups[i] for i in order], valid=[valid[i] for i in order]
    )
    assert shuffled.tolist() == pytest.approx([plain[i].item() for i in order], abs=1e-12)
    half = 0.25 / (math.sqrt(0.125) + 1e-6)
    assert plain[3:].tolist() == pytest.approx([-half, half, 0, 0], abs=1e-12)


def test_keeps_dtype():
    assert advantages([1, 0], dtype=torch.float32).dtype == torch.float32


def test_refuses_what_does_not_belong_together():
    with pytest.raises(ValueError, match="not finite"):
        advantages([1.0, math.nan])
    with pytest.raises(ValueError, match="2 rewards need"):
        advantages([1.0, 0.0], groups=["a"])
    with pytest.raises(ValueError, match="floating-point"):
        advantages([1, 0], dtype=torch.int64)
