"""What holds of every loss whatever the batch: on a tabular policy in float64, over random batches."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_algorithms.batching import TrainBatch
from rl_algorithms.losses import ClippedPGLoss, DistillationLoss, DPOLoss, SFTLoss
from rl_algorithms.metrics import merge_metrics

VOCABULARY = 7
CORRECTED = {"importance_min": 0.7, "importance_max": 1.4}

LOSSES = {
    "ppo": ClippedPGLoss(clip_high=0.28),
    "dual clip": ClippedPGLoss(dual_clip=1.5),
    "sequences": ClippedPGLoss(normalization="sequence"),
    "constant": ClippedPGLoss(normalization="constant", constant_length=9),
    "gspo": ClippedPGLoss(sequence_ratio=True, normalization="sequence"),
    "cispo": ClippedPGLoss(cispo=True),
    "reinforce": ClippedPGLoss(disable_ppo_ratio=True),
    "on policy": ClippedPGLoss(force_on_policy_ratio=True),
    "tis": ClippedPGLoss(importance_correction="tis", **CORRECTED),
    "icepop": ClippedPGLoss(importance_correction="icepop", **CORRECTED),
    "seq-mask-tis": ClippedPGLoss(importance_correction="seq-mask-tis", **CORRECTED),
    "k1": ClippedPGLoss(kl_coefficient=0.3, kl_kind="k1"),
    "k2": ClippedPGLoss(kl_coefficient=0.3, kl_kind="k2"),
    "k3": ClippedPGLoss(kl_coefficient=0.3, kl_kind="k3"),
    "entropy": ClippedPGLoss(entropy_coefficient=0.2),
    "positive": ClippedPGLoss(positive_nll_coefficient=0.5),
    "sft": SFTLoss(),
    "dpo": DPOLoss(0.7),
    "reverse": DistillationLoss(k=3),
    "forward": DistillationLoss(k=3, divergence="forward"),
    "mixed": DistillationLoss(k=3, divergence="mixed", outside="zero", normalization="sequence"),
}
# Ratios and weights that gradients do not flow through make the loss another function than its gradient's.
NO_FINITE_DIFFERENCE = {"gspo", "cispo", "on policy", "dpo"}
QUICK = settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@dataclass
class Tabular:
    """A row of logits for every token of every row: a LogitsView in the table's own dtype."""

    table: torch.Tensor
    ids: torch.Tensor

    def _everything(self):
        return torch.log_softmax(self.table, -1)

    def logprobs(self):
        picked = self._everything().gather(2, self.ids.unsqueeze(2)).squeeze(2)
        return torch.cat([torch.zeros_like(picked[:, :1]), picked[:, 1:]], 1)

    def entropy(self):
        everything = self._everything()
        entropies = -(everything.exp() * everything).sum(2)
        return torch.cat([torch.zeros_like(entropies[:, :1]), entropies[:, 1:]], 1)

    def topk_logprobs(self, k):
        values, ids = self._everything().topk(k, dim=2)
        return values, ids

    def logprobs_of(self, token_ids):
        return self._everything().gather(2, token_ids)


@dataclass(frozen=True)
class Case:
    batch: TrainBatch
    table: torch.Tensor
    pairs: tuple[tuple[int, int], ...]

    def prepared(self, loss_fn):
        return loss_fn.prepare(self.batch, self.pairs) if isinstance(loss_fn, DPOLoss) else self.batch


@st.composite
def cases(draw, *, scale=1.0, drift=0.4, rows=None):
    seed = draw(st.integers(0, 2**31))
    count = rows or draw(st.integers(1, 3)) * 2
    width = draw(st.integers(2, 7))
    return case(seed, count, width, scale=scale, drift=drift)


def case(seed, count, width, *, scale=1.0, drift=0.4):
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, width + 1, (count,), generator=generator)
    inside = torch.arange(width).unsqueeze(0) < lengths.unsqueeze(1)
    mask = (torch.rand(count, width, generator=generator) < 0.75) & inside
    mask[:, 0] = False
    table = noise(count, width, VOCABULARY) * scale
    ids = torch.randint(0, VOCABULARY, (count, width), generator=generator)
    now = Tabular(table, ids).logprobs()
    values, support = (noise(count, width, VOCABULARY)).log_softmax(-1).topk(3, dim=2)
    samples = torch.rand(count, generator=generator) < 0.85
    alive = (mask.any(1) & samples).nonzero().flatten().tolist()
    if len(alive) % 2:
        samples[alive.pop()] = False
    batch = TrainBatch.create(
        input_ids=ids,
        lengths=lengths,
        token_mask=mask,
        sample_mask=samples,
        advantages=noise(count).float(),
        generation_logprobs=(now + drift * noise(count, width)).float(),
        prev_logprobs=(now + drift * noise(count, width)).float(),
        reference_logprobs=(now + drift * noise(count, width)).float(),
    ).with_teacher_topk(values, support)
    return Case(batch, table, tuple(zip(alive[::2], alive[1::2], strict=True)))


def value(loss_fn, batch, table, parts=None):
    """Loss, gradient of the table and metrics, over micro-batches."""
    leaf = table.clone().requires_grad_()
    total = torch.zeros((), dtype=table.dtype)
    metrics = []
    for rows in parts if parts is not None else [list(range(len(batch)))]:
        part = batch.select(rows)
        width = part.input_ids.shape[1]
        share, found = loss_fn(Tabular(leaf[rows, :width], part.input_ids), part)
        total = total + share
        metrics.append(found)
    if total.requires_grad:
        total.backward()
    gradient = torch.zeros_like(table) if leaf.grad is None else leaf.grad
    return total.detach(), gradient, {name: m.value() for name, m in merge_metrics(metrics).items()}


def agree(found, wanted):
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-7, atol=1e-9)
    assert found[2].keys() == wanted[2].keys()
    for name, number in wanted[2].items():
        assert found[2][name] == pytest.approx(number, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("name", LOSSES)
@QUICK
@given(data=st.data())
def test_order_and_micro_batches_change_nothing(name, data):
    loss_fn, made = LOSSES[name], data.draw(cases())
    batch = made.prepared(loss_fn)
    wanted = value(loss_fn, batch, made.table)
    order = data.draw(st.permutations(range(len(batch))))
    cuts = data.draw(st.sets(st.integers(1, max(len(batch) - 1, 1))))
    edges = [0, *sorted(cuts & set(range(len(batch)))), len(batch)]
    parts = [order[start:end] for start, end in pairwise(edges)]
    agree(value(loss_fn, batch, made.table, parts), wanted)


@pytest.mark.parametrize("name", LOSSES)
@QUICK
@given(made=cases(), junk=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_padding_may_hold_anything(name, made, junk):
    loss_fn = LOSSES[name]
    batch = made.prepared(loss_fn)
    wanted = value(loss_fn, batch, made.table)
    outside = ~batch.loss_mask
    poisoned = replace(
        batch,
        advantages=torch.where(batch.sample_mask, batch.advantages, junk),
        **{
            field: torch.where(outside, junk, getattr(batch, field))
            for field in ("generation_logprobs", "prev_logprobs", "reference_logprobs")
        },
        teacher_topk_logprobs=torch.where(outside.unsqueeze(2), junk, batch.teacher_topk_logprobs),
    )
    agree(value(loss_fn, poisoned, made.table), wanted)


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - NO_FINITE_DIFFERENCE))
@pytest.mark.parametrize("seed", range(4))
def test_gradients_by_finite_differences(name, seed):
    loss_fn = LOSSES[name]
    made = case(seed, 4, 5)
    batch = made.prepared(loss_fn)
    gradient = value(loss_fn, batch, made.table)[1]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        direction = torch.randn(made.table.shape, generator=generator, dtype=torch.float64)
        ahead, behind = (value(loss_fn, batch, made.table + sign * 1e-6 * direction)[0] for sign in (1, -1))
        slope = float(ahead - behind) / 2e-6
        assert float((gradient * direction).sum()) == pytest.approx(slope, rel=1e-4, abs=1e-8)


@QUICK
@given(made=cases())
def test_ratios_without_a_gradient_have_that_of_their_definition(made):
    """GSPO is the mean ratio with each token's own gradient; CISPO and the forced ratio weigh ∇lp."""
    batch, mask = made.batch, made.batch.loss_mask
    leaf = made.table.clone().requires_grad_()
    logprobs = torch.where(mask, Tabular(leaf, batch.input_ids).logprobs(), 0.0)
    prev = torch.where(mask, batch.prev_logprobs.double(), 0.0)
    advantages = torch.where(batch.sample_mask, batch.advantages, 0.0).double().unsqueeze(1)
    counts = mask.sum(1, keepdim=True).clamp(min=1)
    sequence = ((logprobs - prev).sum(1, keepdim=True) / counts).exp()
    bounded = torch.minimum(sequence * advantages, sequence.clamp(0.8, 1.2) * advantages)
    weight = (logprobs - prev).exp().detach().clamp(0.8, 1.2)
    tokens, rows = batch.global_valid_tokens or 1.0, batch.global_valid_samples or 1.0
    defined = {
        "gspo": -(bounded * mask.any(1, keepdim=True)).sum() / rows,
        "cispo": -(weight * advantages * logprobs).sum() / tokens,
        "on policy": -(advantages * logprobs).sum() / tokens,
    }
    for name, wanted in defined.items():
        (gradient,) = torch.autograd.grad(wanted, leaf, retain_graph=True)
        found = value(LOSSES[name], batch, made.table)
        torch.testing.assert_close(found[1], gradient, rtol=1e-6, atol=1e-9)
        if name != "on policy":
            torch.testing.assert_close(found[0], wanted.detach(), rtol=1e-6, atol=1e-9)


@QUICK
@given(made=cases(drift=0.0))
def test_on_policy_the_ratio_is_exactly_one(made):
    """Policy and scores from the same float32 table: not nearly one, one."""
    table = made.table.float()
    scores = Tabular(table, made.batch.input_ids).logprobs()
    batch = made.batch.with_logprobs(prev=scores)
    for name in ("ppo", "gspo", "cispo", "on policy"):
        metrics = value(LOSSES[name], batch, table)[2]
        if metrics["valid_tokens"]:
            assert metrics["ratio_min"] == metrics["ratio_max"] == metrics["ratio_mean"] == 1.0


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("kind", ["as it is", "fully masked", "one row", "nothing"])
def test_everything_is_finite(name, scale, kind):
    loss_fn, made = LOSSES[name], case(11, 4, 5, scale=scale)
    batch, table = made.batch, made.table.float()
    if kind == "fully masked":
        batch = replace(batch, sample_mask=torch.zeros(4, dtype=torch.bool)).with_own_denominators()
    if kind in ("one row", "nothing"):
        rows = [0] if kind == "one row" else []
        batch, table = batch.select(rows).with_own_denominators(), table[rows]
        if rows and isinstance(loss_fn, DPOLoss):
            batch = replace(batch, sample_mask=torch.zeros(1, dtype=torch.bool)).with_own_denominators()
        table = table[:, : batch.input_ids.shape[1]]
    if isinstance(loss_fn, DPOLoss):
        batch = loss_fn.prepare(batch, made.pairs if kind == "as it is" else ())
    loss, gradient, metrics = value(loss_fn, batch, table)
    assert math.isfinite(loss)
    assert torch.isfinite(gradient).all()
    assert all(math.isfinite(number) for number in metrics.values()), metrics
    if kind in ("fully masked", "nothing"):
        assert loss == 0
        assert not gradient.any()


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"dpo"}))
def test_a_copy_of_a_row_counts_as_a_row_of_its_own(name):
    """Denominators count rows and tokens, never distinct ones: the batch twice over is the batch."""
    loss_fn, made = LOSSES[name], case(5, 4, 6)
    twice = made.batch.select([0, 1, 2, 3, 0, 1, 2, 3]).with_own_denominators()
    single, width = value(loss_fn, made.batch, made.table), twice.input_ids.shape[1]
    double = value(loss_fn, twice, torch.cat([made.table, made.table])[:, :width])
    torch.testing.assert_close(double[0], single[0], rtol=1e-7, atol=1e-9)
    summed = double[1][:4] + double[1][4:]
    torch.testing.assert_close(summed, single[1][:, :width], rtol=1e-7, atol=1e-9)
