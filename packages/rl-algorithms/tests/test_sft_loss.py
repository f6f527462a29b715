from __future__ import annotations

import math
import pickle

import pytest
import torch

from rl_algorithms.batching import build_sft_batch
from rl_algorithms.losses import SFTLoss
from rl_algorithms.metrics import merge_metrics


def test_token_normalised_over_the_whole_batch(tensor_view):
    batch = build_sft_batch([([1] * 4, [0, 1, 1, 1]), ([1, 1], [0, 1])], pad_token_id=0)
    logprobs = torch.tensor([[0.0, -1.0, -2.0, -3.0], [0.0, -6.0, math.nan, math.nan]], requires_grad=True)
    shares = [SFTLoss()(tensor_view(logprobs[[row], : 4 - 2 * row]), batch.select([row])) for row in (0, 1)]
    total = sum(share for share, _ in shares)
    total.backward()
    metrics = merge_metrics([part for _, part in shares])
    assert total.item() == metrics["loss"].value() == metrics["nll"].value() == 3.0
    assert metrics["valid_tokens"].value() == 4
    assert logprobs.grad.tolist() == [[0, -0.25, -0.25, -0.25], [0, -0.25, 0, 0]]
    whole, metrics = SFTLoss()(tensor_view(logprobs), batch)
    assert whole.item() == metrics["nll"].value() == pytest.approx(3.0)


def test_nothing_to_learn_is_zero(tensor_view):
    batch = build_sft_batch([([1, 2], [1, 0])], pad_token_id=0)
    logprobs = torch.full((1, 2), math.nan, requires_grad=True)
    loss, metrics = SFTLoss()(tensor_view(logprobs), batch)
    loss.backward()
    assert loss.item() == 0
    assert logprobs.grad.tolist() == [[0, 0]]
    assert all(math.isfinite(metric.value()) for metric in metrics.values())


def test_pickles():
    assert pickle.loads(pickle.dumps(SFTLoss())) == SFTLoss()
