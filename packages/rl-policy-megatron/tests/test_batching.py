"""One batch, many ways to compute it: the same losses, gradients and updates, float32, within 1e-5."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

# Sixteen rows: one micro-batch, four or sixteen.
LENGTHS = [24, 3, 17, 24, 1, 9, 12, 20, 5, 18, 2, 11, 24, 7, 15, 0]
KINDS = ["qwen3-tied", "qwen2", "llama3-rope", "qwen3-moe"]
WAYS: dict[str, dict[str, Any]] = {
    "padded, 4 micro-batches": {"micro_batch_size": 4},
    "padded, 16 micro-batches": {"micro_batch_size": 1},
    "padded by tokens": {"micro_batch_tokens": 50},
    "packed, 1 micro-batch": {"micro_batch_size": 16, "packing": True},
    "packed, 4 micro-batches": {"micro_batch_size": 4, "packing": True},
    "packed, 16 micro-batches": {"micro_batch_size": 1, "packing": True},
    "packed by tokens": {"micro_batch_tokens": 50, "packing": True},
    "packed, rows beyond the limit": {"micro_batch_tokens": 10, "packing": True},
    "recomputed": {"micro_batch_size": 4, "recompute": "full"},
    "packed and recomputed": {"micro_batch_tokens": 50, "packing": True, "recompute": "full"},
}


@dataclass(frozen=True)
class Outcome:
    """All that a batch does to a policy."""

    logprobs: torch.Tensor
    gradients: dict[str, torch.Tensor]
    metrics: dict[str, float]
    weights: dict[str, torch.Tensor]


def _everything(logits: Any, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """A share of a loss over all that a view offers."""
    top, ids = logits.topk_logprobs(4)
    again = logits.logprobs_of(ids)
    shares = (
        -(logits.logprobs() * batch.mask).sum()
        + 0.3 * (logits.entropy() * batch.mask).sum()
        + 0.1 * ((top.exp() + again) * batch.mask[..., None]).sum()
    )
    return shares / batch.denominator, {}


def _outcome(policy: Any, batch: Any, loss_fn: Callable[..., Any]) -> Outcome:
    gradients = policy.gradients(batch, loss_fn)
    logprobs = policy.logprobs(batch)
    metrics = policy.train(batch, loss_fn, learning_rate=1e-3)
    weights = {name: tensor.clone() for name, tensor in policy.stream_weights()}
    return Outcome(logprobs, gradients, metrics, weights)


def _assert_equal(found: Outcome, expected: Outcome) -> None:
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-5)
    for ours, theirs in [(found.gradients, expected.gradients), (found.weights, expected.weights)]:
        assert ours.keys() == theirs.keys()
        scale = max(float(tensor.abs().max()) for tensor in theirs.values())
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-5 * scale, msg=name)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_does_the_same_however_it_is_computed(
    kind: str, way: str, policy_of: Callable[..., Any], rows_of: Callable[..., Any]
) -> None:
    batch = rows_of(LENGTHS)
    expected = _outcome(policy_of(kind, micro_batch_size=16), batch, _everything)
    _assert_equal(_outcome(policy_of(kind, **WAYS[way]), batch, _everything), expected)


def test_the_ways_are_different_ones(
    policy_of: Callable[..., Any], rows_of: Callable[..., Any], token_mean_loss: Callable[..., Any]
) -> None:
    """How many micro-batches, and how many tokens the model reads, rows of 24 costing 23 each."""
    batch = rows_of(LENGTHS)
    seen: dict[str, tuple[int, int]] = {}
    for way, settings in WAYS.items():
        policy, read = policy_of("llama", **settings), []
        policy.model.embedding.register_forward_hook(
            lambda _m, _i, out, read=read: read.append(len(out[:, 0]) * out.size(1))
        )
        policy.gradients(batch, token_mean_loss)
        seen[way] = len(read), sum(read)
    tokens = sum(max(length - 1, 0) for length in LENGTHS)
    # The two rows that predict nothing cost a token when they are alone.
    assert seen["padded, 16 micro-batches"] == seen["packed, 16 micro-batches"] == (16, tokens + 2)
    assert seen["packed, 1 micro-batch"] == (1, tokens)
    assert seen["packed, 4 micro-batches"] == (4, tokens)
    assert seen["padded, 4 micro-batches"] == (4, 4 * (23 + 17 + 10 + 2))
    assert seen["packed by tokens"] == (-(-sum(LENGTHS) // 50), tokens)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_d4_fully_masked_micro_batch_changes_nothing(
    packing: bool,
    recompute: str,
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
) -> None:
    """D4: rows of whole micro-batches count for nothing: loss, metrics, gradients and update as without."""
    batch = rows_of(LENGTHS)
    dead = sorted(range(16), key=lambda row: -LENGTHS[row])[:8]
    mask = batch.mask.clone()
    mask[dead] = 0
    masked = replace(batch, mask=mask, denominator=float(mask.sum()))
    alive = masked.select([row for row in range(16) if row not in dead])
    settings = {"micro_batch_size": 4, "packing": packing, "recompute": recompute}
    expected = _outcome(policy_of("qwen3-tied", **settings), alive, token_mean_loss)
    found = _outcome(policy_of("qwen3-tied", **settings), masked, token_mean_loss)
    kept = found.logprobs[[row for row in range(16) if row not in dead]][:, : expected.logprobs.size(1)]
    _assert_equal(replace(found, logprobs=kept), expected)


@pytest.mark.parametrize("packing", [False, True])
def test_e1_empty_micro_batches_add_nothing(
    packing: bool,
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
) -> None:
    """E1: what fills a rank's share has a loss of 0 and no gradient, though the model runs."""
    policy, batch = policy_of("llama", packing=packing), rows_of([5, 3]).select([])
    ran: list[int] = []
    policy.model.embedding.register_forward_hook(lambda *_: ran.append(1))
    gradients = _accumulated(policy, [batch, batch], token_mean_loss)
    assert len(ran) == 2
    assert not any(gradient.any() for gradient in gradients.values())


def _accumulated(policy: Any, micro_batches: Sequence[Any], loss_fn: Callable[..., Any]) -> dict[str, Any]:
    """Gradients of given micro-batches, planned by nobody."""
    from rl_policy_megatron import schedule

    with pytest.MonkeyPatch.context() as patch:
        whole = _Given(micro_batches)
        patch.setattr(schedule, "check_batch", lambda *_: None)
        patch.setattr(schedule, "selected", lambda batch, rows: batch.select(rows))
        patch.setattr(schedule, "plan_micro_batches", lambda *_a, ranks, **_k: [[[0], [1]]] * ranks)
        return policy.gradients(whole, loss_fn)


class _Given:
    """A batch whose row n is the n-th micro-batch."""

    def __init__(self, micro_batches: Sequence[Any]) -> None:
        self._micro_batches = micro_batches
        self.lengths = torch.ones(len(micro_batches), dtype=torch.int64)

    def select(self, rows: Sequence[int]) -> Any:
        return self._micro_batches[rows[0]]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("padding", [-1, 10**12])
def test_padding_may_hold_anything(
    padding: int,
    packing: bool,
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
) -> None:
    """To the bit, and however much padding there is."""
    settings = {"micro_batch_size": 4, "packing": packing}
    expected = _outcome(policy_of("qwen2", **settings), rows_of(LENGTHS), token_mean_loss)
    odd = rows_of(LENGTHS, width=40, padding=padding)
    found = _outcome(policy_of("qwen2", **settings), odd, token_mean_loss)
    assert torch.equal(found.logprobs[:, :24], expected.logprobs)
    assert not found.logprobs[:, 24:].any()
    assert found.metrics == expected.metrics
    for name, gradient in expected.gradients.items():
        assert torch.equal(found.gradients[name], gradient), name
        assert torch.equal(found.weights[name], expected.weights[name]), name


@pytest.mark.parametrize("packing", [False, True])
def test_nan_at_padding_reaches_no_gradient(
    packing: bool, policy_of: Callable[..., Any], rows_of: Callable[..., Any]
) -> None:
    """A loss that masks by choosing has NaN slopes where its weights are NaN, all of them at padding."""
    batch = rows_of(LENGTHS, width=30)

    def loss_with(filler: float) -> Callable[..., Any]:
        def loss_fn(logits: Any, rows: Any) -> tuple[torch.Tensor, dict[str, Any]]:
            weights = torch.full_like(rows.mask, filler).where(rows.mask == 0, 0.5)
            chosen = (logits.logprobs() * weights).where(rows.mask > 0, 0.0)
            return chosen.sum() / rows.denominator, {}

        return loss_fn

    policy = policy_of("qwen3-tied", micro_batch_size=4, packing=packing)
    expected = policy.gradients(batch, loss_with(0.0))
    found = policy.gradients(batch, loss_with(float("nan")))
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def test_d8_where_the_padding_lies_changes_nothing(
    policy_of: Callable[..., Any], rows_of: Callable[..., Any]
) -> None:
    """D8: five columns of padding before or behind a prompt; rows of batches are right-padded, so that
    those before it go to the model itself, with a mask.
    """
    policy, batch = policy_of("llama3-rope"), rows_of([12, 9, 4], width=17)
    expected = policy.logprobs(batch)
    torch.testing.assert_close(policy.logprobs(batch.select([0, 1, 2])), expected[:, :12], rtol=0, atol=1e-5)
    for row, length in enumerate([12, 9, 4]):
        ids = torch.cat([torch.full((5,), 60), batch.input_ids[row, :length]])[None]
        hidden = torch.ones(5 + length, 5 + length, dtype=torch.bool).triu(1)
        hidden[:, :5] = True
        # A column of padding sees itself: a softmax over nothing is NaN.
        hidden.fill_diagonal_(False)
        positions = torch.arange(-5, length)[None].clamp(min=0)
        with torch.no_grad():
            logits = policy.model(ids, positions, hidden[None, None])
        scores = logits[0, 5:-1].log_softmax(-1).gather(1, ids[0, 6:, None])[:, 0]
        torch.testing.assert_close(scores, expected[row, 1:length], rtol=0, atol=1e-5)


@pytest.mark.parametrize("packing", [False, True])
def test_recompute_computes_layers_twice_and_keeps_less(
    packing: bool,
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
) -> None:
    batch = rows_of(LENGTHS)
    calls, kept, found = {}, {}, {}
    for recompute in ("none", "full"):
        policy = policy_of("qwen3-tied", micro_batch_size=8, packing=packing, recompute=recompute)
        runs: list[int] = []
        for layer in policy.model.decoder.layers:
            layer.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        sizes: list[int] = []
        held: list[int] = []

        def keep(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        def loss_fn(
            logits: Any, rows: Any, sizes: list[int] = sizes, held: list[int] = held
        ) -> tuple[torch.Tensor, dict[str, Any]]:
            held.append(sum(sizes))
            return token_mean_loss(logits, rows)

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            found[recompute] = policy.gradients(batch, loss_fn)
        # What the first micro-batch keeps for its backward pass, before any has begun.
        calls[recompute], kept[recompute] = len(runs), held[0]
        policy.logprobs(batch)
        assert len(runs) - calls[recompute] == 4
    assert kept["full"] < 0.25 * kept["none"]
    # Two layers, two micro-batches.
    assert calls == {"none": 4, "full": 8}
    for name, gradient in found["none"].items():
        assert torch.equal(found["full"][name], gradient), name


def test_recompute_trains_layers_behind_frozen_embeddings(
    policy_of: Callable[..., Any], rows_of: Callable[..., Any]
) -> None:
    """Adapters leave everything before the layers untrained; their gradients must not vanish."""
    batch, slopes = rows_of(LENGTHS), {}
    for recompute in ("none", "full"):
        model = policy_of("qwen2", recompute=recompute).model.train()
        model.embedding.requires_grad_(False)
        ids = batch.input_ids[:4, :16]
        loss = model(ids, torch.arange(16).expand_as(ids), None, labels=ids).square().sum()
        weight = model.decoder.layers[0].mlp.linear_fc1.weight
        (slopes[recompute],) = _leaf_gradients(loss, [weight])
    assert slopes["none"].any()
    assert torch.equal(slopes["full"], slopes["none"])


def test_adapters_learn_the_same_packed_and_recomputed(
    policy_of: Callable[..., Any], rows_of: Callable[..., Any], token_mean_loss: Callable[..., Any]
) -> None:
    from rl_policy_megatron import LoraSettings

    batch, found = rows_of(LENGTHS), []
    for way in (
        {"micro_batch_size": 4},
        {"micro_batch_size": 4, "recompute": "full"},
        WAYS["packed by tokens"],
    ):
        policy = policy_of("qwen3-tied", lora=LoraSettings(rank=2), **way)
        # Half of an adapter has no gradient before the other half has moved.
        policy.train(batch, token_mean_loss, learning_rate=1e-2)
        found.append(policy.gradients(batch, token_mean_loss))
    plain, recomputed, packed = found
    scale = max(float(gradient.abs().max()) for gradient in plain.values())
    assert all(gradient.any() for gradient in plain.values())
    for name, gradient in plain.items():
        assert torch.equal(recomputed[name], gradient), name
        torch.testing.assert_close(packed[name], gradient, rtol=1e-5, atol=1e-5 * scale, msg=name)


def _leaf_gradients(loss: torch.Tensor, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Recomputed units refuse ``autograd.grad``, and a policy's weights gather theirs in its buffers."""
    found: list[torch.Tensor] = []
    handles = [leaf.register_hook(lambda slope: found.append(slope.clone())) for leaf in leaves]
    loss.backward()
    for handle in handles:
        handle.remove()
    return found


def test_a_failing_loss_leaves_a_recomputing_policy_usable(
    policy_of: Callable[..., Any], rows_of: Callable[..., Any], token_mean_loss: Callable[..., Any]
) -> None:
    policy, batch = policy_of("llama", micro_batch_size=4, packing=True, recompute="full"), rows_of(LENGTHS)
    expected = policy.gradients(batch, token_mean_loss)
    state = torch.get_rng_state()

    def fails(logits: Any, rows: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        torch.rand(3)
        if int(rows.lengths.max()) < 12:
            raise KeyError("advantages")
        return token_mean_loss(logits, rows)

    with pytest.raises(KeyError, match="advantages"):
        policy.gradients(batch, fails)
    assert torch.equal(torch.get_rng_state(), state)
    assert not policy.model.training
    again = policy.gradients(batch, token_mean_loss)
    assert all(torch.equal(again[name], gradient) for name, gradient in expected.items())
