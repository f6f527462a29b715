"""Chunked log-probabilities against the plain computation on whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rl_policy_megatron.linear_logprobs as linear_logprobs_module
from rl_policy_megatron.linear_logprobs import linear_logprobs, linear_topk

N, H, V, K = 11, 6, 17, 3


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(N, H, requires_grad=True)
    weight = torch.randn(V, H, requires_grad=True)
    return hidden, weight, torch.randint(0, V, (N, K))


def _plain(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = (hidden @ weight.t() / temperature).log_softmax(-1)
    return log_p.gather(1, ids), -(log_p.exp() * log_p).sum(-1)


def _gradients(compute: Any, uses: str) -> list[torch.Tensor]:
    hidden, weight, ids = _inputs()
    logprobs, entropy = compute(hidden, weight, ids)
    torch.manual_seed(1)
    weights = torch.randn(N, K), torch.randn(N)
    loss = 0.0
    if "logprobs" in uses:
        loss = loss + (logprobs * weights[0]).sum()
    if "entropy" in uses:
        loss = loss + (entropy * weights[1]).sum()
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [hidden.grad, weight.grad]


@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("uses", ["logprobs", "entropy", "logprobs and entropy"])
def test_values_and_gradients_equal_the_plain_computation(
    chunk_tokens: int, temperature: float, uses: str
) -> None:
    hidden, weight, ids = _inputs()
    ours = linear_logprobs(hidden, weight, ids, temperature=temperature, chunk_tokens=chunk_tokens)
    torch.testing.assert_close(ours, _plain(hidden, weight, ids, temperature), rtol=1e-5, atol=1e-5)

    def chunked(*inputs: torch.Tensor) -> Any:
        return linear_logprobs(*inputs, temperature=temperature, chunk_tokens=chunk_tokens)

    found = _gradients(chunked, uses)
    expected = _gradients(lambda *inputs: _plain(*inputs, temperature), uses)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize(("chunks_worth", "kept"), [(0, 1), (2, 2), (3, 3), (100, 3)])
def test_logits_that_are_kept_change_no_number(
    with_entropy: bool, chunks_worth: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last chunk of three always, others as far as there is room; used up, they are computed anew."""
    hidden, weight, ids = _inputs()
    expected = _gradients(lambda *inputs: _plain(*inputs, 0.6), "logprobs")
    monkeypatch.setattr(linear_logprobs_module, "_KEPT_BYTES", chunks_worth * 4 * V * 4)
    logprobs, _ = linear_logprobs(
        hidden, weight, ids, temperature=0.6, chunk_tokens=4, with_entropy=with_entropy
    )
    function: Any = logprobs.grad_fn
    assert len(function.kept) == kept
    torch.manual_seed(1)
    loss = (logprobs * torch.randn(N, K)).sum()
    for _ in range(2):
        found = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
        torch.testing.assert_close(list(found), expected, rtol=1e-4, atol=1e-5)
        assert not function.kept


def test_frozen_weight_gets_no_gradient() -> None:
    hidden, weight, ids = _inputs()
    logprobs, _ = linear_logprobs(hidden, weight.detach(), ids, temperature=1.0, chunk_tokens=4)
    logprobs.sum().backward()
    assert hidden.grad is not None


def test_large_logits_stay_finite() -> None:
    hidden = torch.tensor([[1000.0, -1000.0]])
    logprobs, entropy = linear_logprobs(
        hidden, torch.eye(2), torch.tensor([[0, 1]]), temperature=1.0, chunk_tokens=1
    )
    torch.testing.assert_close(logprobs, torch.tensor([[0.0, -2000.0]]))
    torch.testing.assert_close(entropy, torch.tensor([0.0]))


def test_no_tokens_is_no_special_case() -> None:
    weight = torch.randn(V, H, requires_grad=True)
    logprobs, entropy = linear_logprobs(
        torch.zeros(0, H), weight, torch.zeros(0, 1, dtype=torch.int64), temperature=1.0, chunk_tokens=4
    )
    (logprobs.sum() + entropy.sum()).backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_topk_is_in_order_and_independent_of_chunks() -> None:
    hidden, weight, _ = _inputs()
    expected = (hidden @ weight.t()).topk(5, dim=-1).indices
    assert torch.equal(linear_topk(hidden, weight, 5, chunk_tokens=3), expected)


def test_d5_temperature_reference_value() -> None:
    """D5: logits [2, 1, 0], T = 0.6, token 0 → −0.202573; without the temperature −0.407606."""
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    first = torch.tensor([[0]])
    logprobs, _ = linear_logprobs(logits, torch.eye(3), first, temperature=0.6, chunk_tokens=8)
    assert float(logprobs) == pytest.approx(-0.202573, abs=1e-6)
    untempered, _ = linear_logprobs(logits, torch.eye(3), first, temperature=1.0, chunk_tokens=8)
    assert float(untempered) == pytest.approx(-0.407606, abs=1e-6)
