from __future__ import annotations

import math
import pickle

import pytest
import torch

from rl_algorithms.batching import TrainBatch
from rl_algorithms.losses import ClippedPGLoss, LossError
from rl_algorithms.metrics import merge_metrics


def make_batch(mask, *, advantages, prev=None, generation=None, reference=None, samples=None):
    """A batch of rows that are all as wide as ``mask``; numbers stand for whole ``[B, S]`` tensors."""
    token_mask = torch.tensor(mask, dtype=torch.bool)

    def full(value):
        if value is None or isinstance(value, torch.Tensor):
            return value
        return torch.full(token_mask.shape, float(value))

    return TrainBatch.create(
        input_ids=torch.ones(token_mask.shape, dtype=torch.int64),
        lengths=torch.full((len(token_mask),), token_mask.shape[1]),
        token_mask=token_mask,
        sample_mask=torch.tensor(samples if samples is not None else [True] * len(token_mask)),
        advantages=torch.as_tensor(advantages, dtype=torch.float32),
        generation_logprobs=full(-1.0 if generation is None else generation),
        prev_logprobs=full(prev),
        reference_logprobs=full(reference),
    )


@pytest.fixture
def run(tensor_view):
    """``loss, gradient, {metric: value}`` of a loss on log-probabilities."""

    def call(loss_fn, logprobs, batch, entropies=None, micro_batches=None):
        if not isinstance(logprobs, torch.Tensor):
            logprobs = torch.full(batch.input_ids.shape, float(logprobs))
        leaf = logprobs.clone().requires_grad_()
        total, parts = torch.zeros(()), []
        for rows in micro_batches or [list(range(len(batch)))]:
            view = tensor_view(leaf[rows], None if entropies is None else entropies[rows])
            share, metrics = loss_fn(view, batch.select(rows))
            total = total + share
            parts.append(metrics)
        total.backward()
        return total.item(), leaf.grad, {name: m.value() for name, m in merge_metrics(parts).items()}

    return call


def log(value):
    return math.log(value)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.25, 2.0, -2.5, -2.5),
        (1.5, 2.0, -2.6, 0.0),
        (0.5, 2.0, -1.0, -1.0),
        (0.5, -2.0, 1.6, 0.0),
        (1.5, -2.0, 3.0, 3.0),
        (4.0, -2.0, 8.0, 8.0),
    ],
)
def test_clip_is_asymmetric_and_one_sided(run, ratio, advantage, loss, slope):
    batch = make_batch([[0, 1]], advantages=[advantage], prev=-1.0)
    found, grad, metrics = run(ClippedPGLoss(clip_low=0.2, clip_high=0.3), -1.0 + log(ratio), batch)
    assert found == pytest.approx(loss, abs=1e-5)
    assert grad.tolist() == [[0, pytest.approx(slope, abs=1e-5)]]
    assert metrics["clipped_share"] == (1.0 if slope == 0 else 0.0)
    assert metrics["ratio_max"] == metrics["ratio_min"] == pytest.approx(ratio, abs=1e-5)


def test_dual_clip_bounds_only_negative_advantages(run):
    for advantage, ratio, loss in [(-2.0, 4.0, 6.0), (-2.0, 2.0, 4.0), (2.0, 0.1, -0.2)]:
        batch = make_batch([[0, 1]], advantages=[advantage], prev=-1.0)
        found, grad, metrics = run(ClippedPGLoss(dual_clip=3.0), -1.0 + log(ratio), batch)
        assert found == pytest.approx(loss, abs=1e-5)
        assert (grad[0, 1].item() == 0) == (ratio == 4.0)
        assert metrics["clipped_share"] == (ratio == 4.0)


def test_d11_ratio_is_against_the_start_of_the_step(run):
    batch = make_batch([[0, 1]], advantages=[1.0], prev=-1.5)
    assert run(ClippedPGLoss(clip_high=9.0), -1.0, batch)[2]["ratio_mean"] == pytest.approx(
        1.648721, abs=1e-6
    )


def test_reinforce_and_forced_on_policy(run):
    batch = make_batch([[0, 1]], advantages=[2.0], prev=-1.5)
    found, grad, metrics = run(ClippedPGLoss(disable_ppo_ratio=True), -1.0, batch)
    assert (found, grad[0, 1].item()) == (2.0, -2.0)
    assert "clipped_share" not in metrics
    unscored = make_batch([[0, 1]], advantages=[2.0])
    found, grad, metrics = run(ClippedPGLoss(force_on_policy_ratio=True), -1.0, unscored)
    assert (found, grad[0, 1].item(), metrics["ratio_mean"]) == (-2.0, -2.0, 1.0)


def test_d2_token_mean_is_over_the_whole_batch(run):
    """10 tokens of loss 1 and 2 tokens of loss 4, each its own micro-batch: 1.5, not 2.5."""
    mask = [[0] + [1] * 10, [0] + [1] * 2 + [0] * 8]
    batch = make_batch(mask, advantages=[-1.0, -4.0], prev=-1.0)
    whole = run(ClippedPGLoss(), -1.0, batch)
    split = run(ClippedPGLoss(), -1.0, batch, micro_batches=[[0], [1]])
    assert whole[0] == split[0] == pytest.approx(1.5)
    assert torch.allclose(whole[1], split[1], rtol=1e-6)
    assert whole[2] == pytest.approx(split[2])


@pytest.mark.parametrize(
    ("normalization", "length", "want"), [("token", None, 1.5), ("sequence", None, 2.5), ("constant", 3, 3.0)]
)
def test_normalizations(run, normalization, length, want):
    mask = [[0] + [1] * 10, [0] + [1] * 2 + [0] * 8, [0] * 11]
    batch = make_batch(mask, advantages=[-1.0, -4.0, -9.0], prev=-1.0)
    loss = ClippedPGLoss(normalization=normalization, constant_length=length)
    whole = run(loss, -1.0, batch)
    assert whole[0] == pytest.approx(want)
    split = run(loss, -1.0, batch, micro_batches=[[2], [0], [1]])
    assert split[0] == pytest.approx(want)
    assert torch.allclose(whole[1], split[1], rtol=1e-6)


def test_d3_kl_and_entropy_terms_do_not_depend_on_micro_batches(run):
    torch.manual_seed(0)
    mask = (torch.rand(32, 9) < 0.6).tolist()
    batch = make_batch(
        mask,
        advantages=torch.randn(32),
        prev=-torch.rand(32, 9),
        generation=-torch.rand(32, 9),
        reference=-torch.rand(32, 9),
    )
    logprobs, entropies = -torch.rand(32, 9), torch.rand(32, 9)
    loss = ClippedPGLoss(
        kl_coefficient=0.3, entropy_coefficient=0.1, importance_correction="tis", importance_max=1.2
    )
    whole = run(loss, logprobs, batch, entropies)
    split = run(loss, logprobs, batch, entropies, micro_batches=[[row] for row in range(32)])
    assert split[0] == pytest.approx(whole[0], rel=1e-6)
    assert torch.allclose(split[1], whole[1], rtol=1e-6, atol=1e-9)
    assert split[2] == pytest.approx(whole[2], rel=1e-6)


def test_d4_a_micro_batch_without_a_valid_sample_dilutes_nothing(run):
    batch = make_batch([[0, 1, 1], [0, 1, 1]], advantages=[-2.0, -7.0], prev=-1.0, samples=[True, False])
    for normalization in ("token", "sequence"):
        loss = ClippedPGLoss(normalization=normalization)
        found, grad, metrics = run(loss, -1.0, batch, micro_batches=[[0], [1]])
        assert found == metrics["loss"] == 2.0
        assert grad.tolist() == [[0, 1, 1], [0, 0, 0]]
        assert (metrics["valid_tokens"], metrics["valid_samples"]) == (2, 1)
        assert metrics["ratio_mean"] == 1.0


def test_fully_masked_batch_is_zero_and_finite(run):
    batch = make_batch(
        [[0, 1], [0, 0]], advantages=[1.0, 1.0], prev=math.nan, reference=math.inf, samples=[False, True]
    )
    for options in ({}, {"normalization": "sequence"}, {"normalization": "constant", "constant_length": 5}):
        loss = ClippedPGLoss(
            kl_coefficient=0.1,
            entropy_coefficient=0.1,
            importance_correction="tis",
            importance_max=2.0,
            **options,
        )
        found, grad, metrics = run(loss, math.nan, batch, torch.full((2, 2), math.nan))
        assert found == 0
        assert grad.tolist() == [[0, 0], [0, 0]]
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["valid_tokens"] == 0


def test_d5_a_temperature_missing_on_one_side_shows(tensor_view):
    """Logits [2, 1, 0] at T = 0.6: −0.202573 on both sides and ratio 1; else 1.22757 would show."""
    logits = torch.tensor([2.0, 1.0, 0.0])
    tempered = torch.log_softmax(logits / 0.6, -1)[0].item()
    plain = torch.log_softmax(logits, -1)[0].item()
    assert tempered == pytest.approx(-0.202573, abs=1e-6)
    view = tensor_view(torch.tensor([[0.0, tempered]]))
    good = make_batch([[0, 1]], advantages=[1.0], prev=tempered, generation=tempered)
    metrics = ClippedPGLoss()(view, good)[1]
    assert metrics["ratio_mean"].value() == 1.0
    assert metrics["token_mult_prob_error"].value() == 1.0
    bad = make_batch([[0, 1]], advantages=[1.0], prev=tempered, generation=plain)
    metrics = ClippedPGLoss()(view, bad)[1]
    assert metrics["token_mult_prob_error"].value() == pytest.approx(1.22757, abs=1e-5)


def test_d6_d12_d13_kl_is_over_valid_tokens_only(run):
    """4 sampled tokens with KL 1, 6 tool tokens with anything, and a masked row: 1.0 over the 4."""
    mask = [[1] * 4 + [0] * 6, [1] * 10]
    reference = torch.full((2, 10), 9.0)
    reference[0, :4] = -2.0
    batch = make_batch(mask, advantages=[0.0, 0.0], prev=-1.0, reference=reference, samples=[True, False])
    _, _, metrics = run(ClippedPGLoss(kl_kind="k1"), -1.0, batch)
    assert metrics["kl"] == pytest.approx(1.0)
    loss, grad, _ = run(ClippedPGLoss(kl_kind="k1", kl_coefficient=0.5), -1.0, batch)
    assert loss == pytest.approx(0.5)
    assert grad[0].tolist() == pytest.approx([0.125] * 4 + [0] * 6)


def test_d7_the_kl_term_carries_gradient_only_when_it_counts(run):
    batch = make_batch([[0, 1]], advantages=[0.0], prev=-1.0, reference=-1.5)
    loss, grad, metrics = run(ClippedPGLoss(kl_coefficient=2.0), -1.0, batch)
    assert loss == pytest.approx(2 * 0.106531, abs=1e-6)
    assert grad[0, 1].item() == pytest.approx(2 * 0.393469, abs=1e-6)
    loss, grad, same = run(ClippedPGLoss(), -1.0, batch)
    assert (loss, grad[0, 1].item(), same["kl"]) == (0.0, 0.0, metrics["kl"])


def test_d14_extreme_log_probabilities_stay_finite_and_are_counted(run):
    batch = make_batch([[0, 1, 1]], advantages=[-1.0], prev=-100.0, reference=100.0)
    loss, grad, metrics = run(ClippedPGLoss(kl_coefficient=0.1), torch.tensor([[0.0, 0.0, -200.0]]), batch)
    assert math.isfinite(loss)
    assert torch.isfinite(grad).all()
    assert metrics["kl_input_clamped"] == metrics["kl_output_clamped"] == 2
    assert all(math.isfinite(value) for value in metrics.values())


def test_padding_may_hold_anything(run):
    """NaN and inf in every input outside the mask change neither loss, gradient nor metrics."""
    mask = [[0, 1, 1, 0, 0]]
    clean = {
        name: torch.tensor([[0.0, -1.0, -2.0, 0.0, 0.0]]) for name in ("prev", "generation", "reference")
    }
    dirty = {name: value.clone() for name, value in clean.items()}
    for value, poison in zip(dirty.values(), (math.nan, math.inf, -math.inf), strict=True):
        value[0, 0], value[0, 3:] = poison, poison
    logprobs = torch.tensor([[0.0, -1.1, -1.9, 0.0, 0.0]])
    poisoned = logprobs.clone()
    poisoned[0, 3:] = torch.tensor([math.nan, -math.inf])
    entropies = torch.tensor([[math.nan, 1.0, 2.0, math.inf, math.nan]])
    advantages = torch.tensor([[math.nan, 1.0, 1.0, math.inf, math.nan]])
    loss = ClippedPGLoss(
        kl_coefficient=0.1, entropy_coefficient=0.1, importance_correction="tis", importance_max=2.0
    )
    want = run(loss, logprobs, make_batch(mask, advantages=[1.0], **clean), torch.nan_to_num(entropies))
    found = run(loss, poisoned, make_batch(mask, advantages=advantages, **dirty), entropies)
    assert found[0] == want[0]
    assert found[1].tolist() == want[1].tolist()
    assert found[2] == want[2]


def test_importance_correction(run):
    weights = [0.5, 1.0, 4.0, math.inf]
    generation = torch.tensor([[0.0] + [-1.0 - log(w) if w != math.inf else -math.inf for w in weights]])
    batch = make_batch([[0, 1, 1, 1, 1]], advantages=[-1.0], prev=-1.0, generation=generation)
    loss, grad, metrics = run(ClippedPGLoss(importance_correction="tis", importance_max=2.0), -1.0, batch)
    assert grad[0].tolist() == pytest.approx([0, 0.125, 0.25, 0.5, 0])
    assert loss == pytest.approx(3.5 / 4)
    assert metrics["importance_weight_mean"] == pytest.approx(3.5 / 4)
    assert metrics["importance_weight_max"] == 2.0
    assert metrics["importance_truncated_share"] == 0.25
    assert metrics["importance_non_finite"] == metrics["generation_non_finite"] == 1
    icepop = ClippedPGLoss(importance_correction="icepop", importance_min=0.8, importance_max=2.0)
    loss, grad, metrics = run(icepop, -1.0, batch)
    assert grad[0].tolist() == pytest.approx([0, 0, 0.25, 0, 0])
    assert metrics["importance_truncated_share"] == 0.5


def test_entropy_is_computed_only_when_asked(run, tensor_view):
    batch = make_batch([[0, 1, 1]], advantages=[0.0], prev=-1.0)
    view = tensor_view(torch.full((1, 3), -1.0), torch.tensor([[9.0, 1.0, 3.0]]))
    assert "entropy" not in ClippedPGLoss()(view, batch)[1]
    assert view.entropy_calls == 0
    loss, metrics = ClippedPGLoss(report_entropy=True)(view, batch)
    assert (loss.item(), metrics["entropy"].value()) == (0.0, 2.0)
    loss, _ = ClippedPGLoss(entropy_coefficient=0.5)(view, batch)
    assert loss.item() == -1.0


def test_engine_versus_policy_metrics(run):
    generation = torch.tensor([[0.0, -1.2, -0.9, 0.0]])
    batch = make_batch([[0, 1, 1, 0]], advantages=[1.0], prev=-1.0, generation=generation)
    _, _, metrics = run(ClippedPGLoss(), -1.0, batch)
    assert metrics["generation_gap_mean"] == pytest.approx(0.15, abs=1e-6)
    assert metrics["generation_gap_max"] == pytest.approx(0.2, abs=1e-6)
    assert metrics["token_mult_prob_error"] == pytest.approx(math.exp(0.15), abs=1e-6)
    k3 = [math.exp(d) - 1 - d for d in (0.2, -0.1)]
    assert metrics["gen_kl_error"] == pytest.approx(sum(k3) / 2, abs=1e-6)


def test_dropping_rows_without_gradient_changes_nothing(run):
    torch.manual_seed(1)
    advantages = torch.tensor([1.0, 0.0, -1.0, 2.0])
    batch = make_batch(
        [[0, 1, 1, 0]] * 4, advantages=advantages, prev=-torch.rand(4, 4), samples=[True, True, True, False]
    )
    logprobs = -torch.rand(4, 4)
    moving = batch.without_zero_gradient_rows()
    assert len(moving) == 2
    for normalization in ("token", "sequence"):
        loss = ClippedPGLoss(normalization=normalization)
        want = run(loss, logprobs, batch)
        found = run(loss, logprobs[[0, 2]], moving)
        assert found[0] == pytest.approx(want[0], abs=1e-7)
        assert found[1].tolist() == want[1][[0, 2]].tolist()


def test_loss_pickles():
    loss = ClippedPGLoss(
        clip_high=0.28, importance_correction="icepop", importance_min=0.5, importance_max=2.0
    )
    assert pickle.loads(pickle.dumps(loss)) == loss


def test_what_the_loss_needs():
    assert not ClippedPGLoss().needs.reference
    assert ClippedPGLoss(kl_coefficient=0.1).needs.reference
    assert not ClippedPGLoss(force_on_policy_ratio=True).needs.prev
    assert not ClippedPGLoss(report_entropy=True).trains_zero_advantage_rows
    assert ClippedPGLoss(entropy_coefficient=0.1).trains_zero_advantage_rows
    assert ClippedPGLoss(kl_coefficient=0.1).trains_zero_advantage_rows


def test_missing_log_probabilities_are_named(run):
    batch = make_batch([[0, 1]], advantages=[1.0])
    with pytest.raises(LossError, match="without prev_logprobs"):
        run(ClippedPGLoss(), -1.0, batch)
    with pytest.raises(LossError, match="without reference_logprobs"):
        run(ClippedPGLoss(kl_coefficient=0.1), -1.0, batch.with_logprobs(prev=torch.zeros(1, 2)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_low": 1.0}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"clip_high": math.nan}, "clip_high"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"kl_coefficient": -1.0}, "kl_coefficient"),
        ({"kl_kind": "k9"}, "kl_kind"),
        ({"kl_input_clamp": 0.0}, "kl_input_clamp"),
        ({"normalization": "mean"}, "normalization"),
        ({"normalization": "constant"}, "given together"),
        ({"constant_length": 5}, "given together"),
        ({"normalization": "constant", "constant_length": 0}, "constant_length"),
        ({"importance_correction": "tis"}, "needs importance_max"),
        ({"importance_correction": "icepop", "importance_max": 2.0}, "needs importance_min"),
        ({"importance_max": 2.0}, "without importance_correction"),
        ({"importance_correction": "tis", "importance_min": 3.0, "importance_max": 2.0}, "min <= max"),
        ({"importance_correction": "seq"}, "importance_correction"),
        ({"disable_ppo_ratio": True, "force_on_policy_ratio": True}, "exclude each other"),
        ({"disable_ppo_ratio": True, "dual_clip": 3.0}, "dual_clip"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(options, message):
    with pytest.raises(LossError, match=message):
        ClippedPGLoss(**options)
