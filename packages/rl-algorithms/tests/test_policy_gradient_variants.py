"""GSPO, CISPO, masked sequences, positive examples and preferences, by their numbers."""

from __future__ import annotations

import math

import pytest
import torch

from rl_algorithms.batching import BatchError
from rl_algorithms.losses import ClippedPGLoss, DPOLoss, LossError
from rl_algorithms.losses.importance import importance_weights

from .test_clipped_pg import make_batch, run

__all__ = ["run"]


def test_d10_gspo_has_the_geometric_mean_of_the_sequence(run):
    """100 tokens of log-ratio 0.012: 1.012072, not their product 3.320117; tool tokens are left out."""
    mask = [[True] * 100 + [False] * 20]
    logprobs = torch.full((1, 120), -1.0)
    logprobs[0, 100:] = 5.0
    batch = make_batch(mask, advantages=[1.0], prev=-1.012)
    loss, gradient, metrics = run(
        ClippedPGLoss(sequence_ratio=True, normalization="sequence"), logprobs, batch
    )
    assert metrics["ratio_mean"] == pytest.approx(1.012072, abs=1e-5)
    assert loss == pytest.approx(-1.012072, abs=1e-5)
    assert gradient[0, :100].tolist() == pytest.approx([-1.012072 / 100] * 100, rel=1e-4)
    assert not gradient[0, 100:].any()


def test_gspo_clips_whole_sequences(run):
    """Log-ratios 1.0 and −0.2: mean 0.4, ratio 1.4918 above 1.2: the whole sequence has no gradient."""
    logprobs = torch.tensor([[-1.0, -1.2]])
    batch = make_batch([[True, True]], advantages=[1.0], prev=torch.tensor([[-2.0, -1.0]]))
    loss, gradient, metrics = run(
        ClippedPGLoss(sequence_ratio=True, normalization="sequence"), logprobs, batch
    )
    assert loss == pytest.approx(-1.2)
    assert not gradient.any()
    assert metrics["clipped_share"] == 1.0


def test_cispo_keeps_the_gradient_of_clipped_tokens(run):
    """Ratio e clipped to 1.28: −A·1.28·lp with gradient −1.28, where PPO has none."""
    batch = make_batch([[True]], advantages=[1.0], prev=-2.0)
    loss, gradient, _ = run(ClippedPGLoss(cispo=True, clip_high=0.28), -1.0, batch)
    assert loss == pytest.approx(1.28)
    assert gradient.tolist() == [[pytest.approx(-1.28)]]
    assert not run(ClippedPGLoss(clip_high=0.28), -1.0, batch)[1].any()


def test_seq_mask_tis_drops_sequences_and_keeps_tokens_of_the_rest():
    """Row 0: ratios 4 and 1/4, geometric mean 1: kept raw. Row 1: 4 and 1, mean 2: dropped whole."""
    prev = torch.tensor([[math.log(4), -math.log(4), 0.0], [math.log(4), 0.0, math.inf]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    found = importance_weights(prev, torch.zeros(2, 3), mask, kind="seq-mask-tis", minimum=0.5, maximum=1.9)
    assert found.values.tolist() == [[pytest.approx(4), pytest.approx(0.25), 0], [0, 0, 0]]
    assert found.truncated.tolist() == [[False] * 3, [True, True, False]]
    threes = torch.full((1, 3), math.log(1.5))
    kept = importance_weights(
        threes, torch.zeros(1, 3), torch.ones(1, 3).bool(), kind="seq-mask-tis", minimum=0.5, maximum=1.9
    )
    assert kept.values.tolist() == [[pytest.approx(1.5)] * 3], "the mean, not the product 3.4"
    assert found.non_finite.tolist() == [[False] * 3, [False, False, True]]


def test_positive_examples_are_divided_by_their_own_tokens(run):
    """Three tokens with A = 1, one with A = −1, lp −2: NLL 2 over 3 tokens, however the batch is cut."""
    batch = make_batch([[True] * 3, [True, False, False]], advantages=[1.0, -1.0], prev=-2.0)
    plain = run(ClippedPGLoss(), -2.0, batch)
    whole = run(ClippedPGLoss(positive_nll_coefficient=0.5), -2.0, batch)
    parts = run(ClippedPGLoss(positive_nll_coefficient=0.5), -2.0, batch, micro_batches=[[0], [1]])
    assert whole[0] - plain[0] == pytest.approx(0.5 * 2.0)
    assert parts[0] == pytest.approx(whole[0])
    assert (whole[1] - plain[1]).tolist() == [[pytest.approx(-0.5 / 3)] * 3, [0, 0, 0]]
    assert whole[2]["positive_nll"] == parts[2]["positive_nll"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_ratio": True}, "belongs with normalization 'sequence'"),
        ({"sequence_ratio": True, "cispo": True, "normalization": "sequence"}, "choose one"),
        ({"sequence_ratio": True, "force_on_policy_ratio": True}, "does without"),
        ({"cispo": True, "disable_ppo_ratio": True}, "does without"),
        ({"cispo": True, "dual_clip": 3.0}, "no effect with cispo"),
        ({"importance_correction": "seq-mask-tis", "importance_max": 2.0}, "needs importance_min"),
        (
            {
                "importance_correction": "seq-mask-tis",
                "importance_max": 2.0,
                "importance_min": 0.5,
                "sequence_ratio": True,
                "normalization": "sequence",
            },
            "keeps weights of tokens",
        ),
        ({"positive_nll_coefficient": -1.0}, "positive_nll_coefficient must be"),
    ],
)
def test_variants_that_cannot_be_meant_are_refused(options, message):
    with pytest.raises(LossError, match=message):
        ClippedPGLoss(**options)


def preferences():
    """Two pairs of answers of 2 and 1 tokens; margins of 0.5 and −0.25 for the chosen ones."""
    mask = [[False, True, True], [False, True, False], [False, True, True], [False, True, False]]
    prev = torch.tensor([[9.0, -1, -1], [9, -2, 9], [9, -1, -1], [9, -2, 9]])
    reference = torch.tensor([[9.0, -1.25, -1.25], [9, -2, 9], [9, -1, -0.75], [9, -2, 9]])
    return make_batch(mask, advantages=[0.0] * 4, prev=prev, reference=reference), prev


def dpo_by_hand(logprobs, reference, beta):
    total = 0.0
    for chosen, rejected in ((0, 1), (2, 3)):
        margin = [
            (logprobs[row] - reference[row])[1 : 3 if row % 2 == 0 else 2].sum() for row in (chosen, rejected)
        ]
        total = total - torch.nn.functional.logsigmoid(beta * (margin[0] - margin[1]))
    return total / 2


@pytest.mark.parametrize("micro_batches", [None, [[0], [1, 2], [3]], [[3, 0], [2, 1]]])
def test_dpo_is_exact_however_pairs_are_cut(run, micro_batches):
    batch, prev = preferences()
    loss_fn = DPOLoss(beta=0.5)
    prepared = loss_fn.prepare(batch, [(0, 1), (2, 3)])
    loss, gradient, metrics = run(loss_fn, prev, prepared, micro_batches=micro_batches)
    leaf = prev.clone().requires_grad_()
    want = dpo_by_hand(leaf, batch.reference_logprobs, 0.5)
    want.backward()
    assert loss == pytest.approx(want.item(), rel=1e-6)
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-5, atol=1e-8)
    assert metrics["preferred"] == 0.5


def test_dpo_refuses_broken_pairs(run):
    batch, _ = preferences()
    for pairs in ([(0, 1)], [(0, 1), (2, 1)], [(0, 1), (2, 3), (0, 2)]):
        with pytest.raises(LossError, match="each belongs to"):
            DPOLoss().prepare(batch, pairs)
    with pytest.raises(LossError, match="was not scored"):
        DPOLoss().prepare(make_batch([[False, True]] * 2, advantages=[0.0, 0.0]), [(0, 1)])
    for beta in (0.0, -1.0, math.inf):
        with pytest.raises(LossError, match="beta"):
            DPOLoss(beta)


def test_dpo_is_finite_at_extremes(run):
    mask = [[False, True], [False, True]]
    for gap in (1e4, -1e4):
        prev = torch.tensor([[0.0, -abs(gap) if gap < 0 else 0.0], [0.0, 0.0 if gap < 0 else -gap]])
        batch = make_batch(mask, advantages=[0.0, 0.0], prev=prev, reference=0.0)
        loss, gradient, _ = run(DPOLoss(1.0), prev, DPOLoss(1.0).prepare(batch, [(0, 1)]))
        assert math.isfinite(loss)
        assert torch.isfinite(gradient).all()
        assert (loss > 16) == (gap < 0)


@pytest.mark.parametrize("margin", [-16.0, -12.0, -3.0, 0.0, 5.0])
def test_dpo_says_its_own_value_as_far_as_its_weight_can_hold_it(run, margin):
    mask = [[False, True], [False, True]]
    prev = torch.tensor([[0.0, -20.0], [0.0, -20.0 - margin]])
    batch = make_batch(mask, advantages=[0.0, 0.0], prev=prev, reference=torch.tensor([[0.0, -20.0]] * 2))
    loss, _, _ = run(DPOLoss(1.0), prev, DPOLoss(1.0).prepare(batch, [(0, 1)]))
    assert loss == pytest.approx(math.log1p(math.exp(-margin)), rel=0.03)


def test_cispo_counts_what_is_clipped_on_either_side_whatever_the_advantage(run):
    mask = [[False, True, True, True, True]] * 2
    prev = torch.full((2, 5), -1.0)
    now = prev + torch.tensor([0.0, 0.5, -0.5, 0.1, 0.0]).log1p().nan_to_num()
    batch = make_batch(mask, advantages=[1.0, -1.0], prev=prev)
    _, _, metrics = run(ClippedPGLoss(clip_low=0.2, clip_high=0.2, cispo=True), now, batch)
    assert metrics["clipped_share"] == 4 / 8


def test_a_batch_with_a_teacher_of_another_shape_is_refused():
    batch, _ = preferences()
    with pytest.raises(BatchError, match="teacher_topk_logprobs"):
        batch.with_teacher_topk(torch.zeros(4, 3, 2), torch.zeros(4, 3, 5, dtype=torch.int64))
