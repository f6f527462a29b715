"""Divergences over a teacher's likely tokens, teachers by task, and a student that learns."""

from __future__ import annotations

import math

import pytest
import torch

from rl_algorithms.advantages import Constant, OnPolicyDistillation
from rl_algorithms.batching import TrainBatch
from rl_algorithms.distillation import DistillationError, TaskTeachers, topk_divergence
from rl_algorithms.loops import LoopSettings, run_sync
from rl_algorithms.losses import ClippedPGLoss, DistillationLoss, LossError
from rl_algorithms.method import Method
from rl_algorithms.metrics import merge_metrics

VOCABULARY = 14


def distributions(*shape, seed=0, scale=1.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=dtype) * scale).log_softmax(-1)


def supported(student, teacher, k):
    ids = teacher.topk(k, dim=-1).indices
    return student.gather(-1, ids), teacher.gather(-1, ids)


def test_with_the_whole_vocabulary_it_is_the_divergence():
    student, teacher = distributions(5, 30), distributions(5, 30, seed=1)
    pair = supported(student, teacher, 30)
    forward = (teacher.exp() * (teacher - student)).sum(-1)
    reverse = (student.exp() * (student - teacher)).sum(-1)
    for outside in ("tail", "zero"):
        for kind, want in (("forward", forward), ("reverse", reverse)):
            torch.testing.assert_close(
                topk_divergence(*pair, kind=kind, outside=outside), want, atol=1e-5, rtol=1e-6
            )
        mixed = topk_divergence(*pair, kind="mixed", forward_weight=0.25, outside=outside)
        torch.testing.assert_close(mixed, 0.25 * forward + 0.75 * reverse, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("kind", ["forward", "reverse", "mixed"])
@pytest.mark.parametrize("k", [1, 4, 29])
def test_with_a_tail_it_is_a_divergence_of_bins(kind, k):
    """Never negative, 0 for equals, and by hand: the tail is one more outcome."""
    student, teacher = distributions(200, 30, scale=3), distributions(200, 30, seed=1, scale=3)
    pair = supported(student, teacher, k)
    found = topk_divergence(*pair, kind=kind)
    assert (found > -1e-12).all()
    bins = [torch.cat([part.exp(), 1 - part.exp().sum(-1, keepdim=True)], -1) for part in pair]
    forward = (bins[1] * (bins[1] / bins[0]).log()).sum(-1)
    reverse = (bins[0] * (bins[0] / bins[1]).log()).sum(-1)
    want = {"forward": forward, "reverse": reverse, "mixed": (forward + reverse) / 2}[kind]
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
    same = supported(teacher, teacher, k)
    assert topk_divergence(*same, kind=kind).abs().max() < 1e-12


def test_without_a_tail_it_may_be_negative_and_still_has_a_gradient():
    student = torch.tensor([[0.9, 0.05, 0.05]]).log().requires_grad_()
    teacher = torch.tensor([[0.5, 0.3, 0.2]]).log()
    found = topk_divergence(student[:, :1], teacher[:, :1], kind="forward", outside="zero")
    assert found.item() == pytest.approx(0.5 * math.log(0.5 / 0.9))
    assert found.item() < 0
    found.sum().backward()
    assert student.grad[0, 0] == pytest.approx(-0.5)


@pytest.mark.parametrize("outside", ["tail", "zero"])
@pytest.mark.parametrize("kind", ["forward", "reverse", "mixed"])
def test_gradient_by_finite_differences(kind, outside):
    logits = torch.randn(3, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    teacher = distributions(3, 9, seed=6)

    def value(given):
        pair = supported(given.log_softmax(-1), teacher, 4)
        return topk_divergence(*pair, kind=kind, outside=outside).sum()

    leaf = logits.clone().requires_grad_()
    value(leaf).backward()
    for place in ((0, 0), (1, 3), (2, 8)):
        bump = torch.zeros_like(logits)
        bump[place] = 1e-6
        slope = (value(logits + bump) - value(logits - bump)) / 2e-6
        assert leaf.grad[place].item() == pytest.approx(slope.item(), rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("outside", ["tail", "zero"])
@pytest.mark.parametrize("kind", ["forward", "reverse", "mixed"])
def test_finite_where_logits_are_extreme(kind, outside):
    """A support that holds all mass leaves a tail of 0, of which float32 knows no logarithm."""
    logits = torch.tensor([[1e4, 0.0, -1e4, 0.0], [0.0, 1e4, 0.0, -1e4]], requires_grad=True)
    teacher = torch.tensor([[1e4, 0.0, 0.0, -1e4], [-1e4, 0.0, 1e4, 0.0]]).log_softmax(-1)
    pair = supported(logits.log_softmax(-1), teacher, 2)
    found = topk_divergence(*pair, kind=kind, outside=outside)
    found.sum().backward()
    assert torch.isfinite(found).all()
    assert torch.isfinite(logits.grad).all()


def test_refuses():
    with pytest.raises(DistillationError, match="same tokens"):
        topk_divergence(torch.zeros(2, 3), torch.zeros(2, 4))
    for options in ({"kind": "both"}, {"outside": "top"}, {"forward_weight": 1.5}):
        with pytest.raises(DistillationError, match="choose of"):
            topk_divergence(torch.zeros(2, 3), torch.zeros(2, 3), **options)
    for options in (
        {"k": 0},
        {"divergence": "both"},
        {"outside": "x"},
        {"forward_weight": -1},
        {"normalization": "constant"},
    ):
        with pytest.raises(LossError, match=next(iter(options))):
            DistillationLoss(**options)


def batch_of(lengths, width=5, k=3, seed=0):
    rows = len(lengths)
    mask = torch.arange(width).unsqueeze(0) < torch.tensor(lengths).unsqueeze(1)
    mask[:, 0] = False
    teacher = distributions(rows, width, VOCABULARY, seed=seed, dtype=torch.float32)
    values, ids = teacher.topk(k, dim=-1)
    batch = TrainBatch.create(
        input_ids=torch.ones(rows, width, dtype=torch.int64),
        lengths=torch.tensor(lengths),
        token_mask=mask,
        sample_mask=torch.ones(rows, dtype=torch.bool),
        advantages=torch.zeros(rows),
        generation_logprobs=torch.zeros(rows, width),
    )
    return batch.with_teacher_topk(values, ids)


@pytest.fixture
def run(tensor_view):
    def call(loss_fn, student, batch, micro_batches=None):
        leaf = student.clone().requires_grad_()
        total, parts = 0.0, []
        for rows in micro_batches or [range(len(batch))]:
            part = batch.select(rows)
            view = tensor_view(
                leaf[list(rows), :, 0], distribution=leaf[list(rows), : part.input_ids.shape[1]]
            )
            loss, metrics = loss_fn(view, part)
            total = total + loss
            parts.append(metrics)
        total.backward()
        return total.item(), leaf.grad, {n: m.value() for n, m in merge_metrics(parts).items()}

    return call


@pytest.mark.parametrize("normalization", ["token", "sequence"])
def test_micro_batches_and_padding_change_nothing(run, normalization):
    batch = batch_of([5, 3, 4, 1])
    student = distributions(4, 5, VOCABULARY, seed=9, dtype=torch.float32)
    loss_fn = DistillationLoss(k=3, divergence="mixed", normalization=normalization)
    whole = run(loss_fn, student, batch)
    cut = run(loss_fn, student, batch, micro_batches=[[2], [0, 3], [1]])
    assert cut[0] == pytest.approx(whole[0], rel=1e-6)
    torch.testing.assert_close(cut[1], whole[1])
    assert cut[2]["divergence"] == pytest.approx(whole[2]["divergence"])
    assert whole[2]["valid_tokens"] == 4 + 2 + 3
    poisoned = batch.with_teacher_topk(
        torch.where(batch.loss_mask.unsqueeze(2), batch.teacher_topk_logprobs, math.nan),
        batch.teacher_topk_ids,
    )
    broken = torch.where(batch.loss_mask.unsqueeze(2), student, math.inf)
    padded = run(loss_fn, broken, poisoned)
    assert padded[0] == pytest.approx(whole[0], rel=1e-6)
    torch.testing.assert_close(padded[1], whole[1])


def test_an_empty_part_adds_nothing_and_an_unasked_batch_is_refused(run, tensor_view):
    batch = batch_of([1, 1])
    loss, gradient, metrics = run(DistillationLoss(k=3), distributions(2, 5, VOCABULARY), batch)
    assert loss == 0
    assert not gradient.any()
    assert all(math.isfinite(value) for value in metrics.values())
    unasked = TrainBatch.create(
        input_ids=batch.input_ids,
        lengths=batch.lengths,
        token_mask=batch.token_mask,
        sample_mask=batch.sample_mask,
        advantages=batch.advantages,
        generation_logprobs=batch.generation_logprobs,
    )
    with pytest.raises(LossError, match="without a teacher's tokens"):
        DistillationLoss()(tensor_view(torch.zeros(2, 5)), unasked)


class TableTeacher:
    """Knows the next token from the last one."""

    def __init__(self, seed, scale=2.0):
        self.table = distributions(VOCABULARY, VOCABULARY, seed=seed, scale=scale, dtype=torch.float32)
        self.asked = []

    def _everything(self, batch):
        return torch.nn.functional.pad(self.table[batch.input_ids[:, :-1]], (0, 0, 1, 0))

    def logprobs(self, batch, agents):
        self.asked.append((len(batch.input_ids), tuple(agents)))
        return self._everything(batch).gather(2, batch.input_ids.unsqueeze(2)).squeeze(2)

    def topk_logprobs(self, batch, agents, k):
        self.asked.append((len(batch.input_ids), tuple(agents)))
        values, ids = self._everything(batch).topk(k, dim=2)
        return values, ids


def test_every_row_goes_to_the_teacher_of_its_task():
    batch = batch_of([5, 2, 4, 3])
    adder, other = TableTeacher(1), TableTeacher(2)
    agents = ["adder", "poet", "adder", ""]
    teachers = TaskTeachers({"adder": adder}, other)
    values, ids = teachers.topk_logprobs(batch, agents, 4)
    found = teachers.logprobs(batch, agents)
    assert adder.asked == [(2, ("adder", "adder"))] * 2
    assert other.asked == [(2, ("poet", ""))] * 2
    for row, (teacher, length) in enumerate(zip([adder, other, adder, other], [5, 2, 4, 3], strict=True)):
        part = batch.select([row])
        want = teacher.topk_logprobs(part, agents[:1], 4)
        assert torch.equal(values[row, :length], want[0][0, :length])
        assert torch.equal(ids[row, :length], want[1][0, :length])
        assert torch.equal(found[row, :length], teacher.logprobs(part, agents[:1])[0, :length])
    with pytest.raises(DistillationError, match="no teacher for the environment 'poet'"):
        TaskTeachers({"adder": adder}).logprobs(batch, agents)
    with pytest.raises(DistillationError, match="without a name"):
        TaskTeachers({"adder": adder}).logprobs(batch, ["adder", "", "adder", "adder"])


def gap(policy, teacher):
    """KL(student ‖ teacher) over the contexts that rollouts meet."""
    student = policy.table.detach().log_softmax(-1)
    return float((student.exp() * (student - teacher.table)).sum(-1)[:12].mean())


@pytest.mark.parametrize("objective", ["topk", "whole", "opd"])
def test_a_student_becomes_its_teacher(world, objective):
    teacher = TableTeacher(3, scale=1.0)
    settings = LoopSettings(
        steps=120, prompts_per_step=12, group_size=8, learning_rate=0.1, decay="linear", warmup_steps=5
    )
    method = {
        "topk": Method(Constant(), DistillationLoss(k=6, divergence="reverse"), teacher=teacher),
        "whole": Method(Constant(), DistillationLoss(k=14, divergence="forward"), teacher=teacher),
        "opd": Method(OnPolicyDistillation(), ClippedPGLoss(), teacher=teacher),
    }[objective]
    world.policy.micro_batch = 96
    world.source.max_tokens = 6
    before = gap(world.policy, teacher)
    result = run_sync(
        settings=settings,
        method=method,
        rows=list(range(12)),
        source=world.source,
        policy=world.policy,
        pad_token_id=0,
        metrics_logger=world.recorder,
    )
    assert result.steps_done == 120
    share = {"topk": 0.35, "whole": 0.05, "opd": 0.4}[objective]
    assert gap(world.policy, teacher) < share * before
    if objective != "opd":
        divergence = world.recorder.series("divergence")
        assert divergence[-1] < 0.1 * divergence[0]
