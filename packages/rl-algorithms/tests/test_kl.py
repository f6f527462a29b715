from __future__ import annotations

import math

import pytest
import torch

from rl_algorithms.kl import kl_estimate


def estimate(lp, ref, mask=None, **options):
    logprobs = torch.tensor([lp], dtype=torch.float32, requires_grad=True)
    flags = torch.ones(1, len(lp), dtype=torch.bool) if mask is None else torch.tensor([mask])
    found = kl_estimate(logprobs, torch.tensor([ref], dtype=torch.float32), flags, **options)
    found.values.sum().backward()
    return found, logprobs.grad


def test_d7_k3_value_and_gradient():
    found, grad = estimate([-1.0], [-1.5])
    assert found.values.item() == pytest.approx(0.106531, abs=1e-6)
    assert grad.item() == pytest.approx(0.393469, abs=1e-6)


@pytest.mark.parametrize(("kind", "value", "slope"), [("k1", 0.5, 1.0), ("k2", 0.125, 0.5)])
def test_k1_and_k2(kind, value, slope):
    found, grad = estimate([-1.0], [-1.5], kind=kind)
    assert (found.values.item(), grad.item()) == pytest.approx((value, slope))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_d14_far_apart_is_clamped_and_counted(kind):
    found, grad = estimate([-100.0, 0.0, -1.0], [0.0, -100.0, -1.0], kind=kind)
    assert torch.isfinite(found.values).all()
    assert torch.isfinite(grad).all()
    assert found.values.abs().max() <= 10
    assert found.input_clamped.tolist() == [[True, True, False]]
    assert found.output_clamped.tolist() == [[True, True, False]]


def test_d6_what_is_masked_may_hold_anything():
    found, grad = estimate([-1.0, math.nan, math.inf], [-1.5, -math.inf, 0.0], mask=[True, False, False])
    assert found.values[0, 1:].tolist() == [0, 0]
    assert not found.input_clamped.any()
    assert grad.tolist() == [[pytest.approx(0.393469, abs=1e-6), 0, 0]]


def test_k3_is_exact_where_policies_are_close():
    found, _ = estimate([0.0], [1e-4])
    assert found.values.item() == pytest.approx(5e-9, rel=2e-3)


def test_unknown_kind():
    with pytest.raises(ValueError, match="'k4' is unknown"):
        estimate([0.0], [0.0], kind="k4")
