"""How micro-batches lie before the model: alignment, positions, padding, and who attends to whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

CPU = torch.device("cpu")
LENGTHS = [24, 3, 17, 24, 1, 9, 12, 20]


def _layout(batch: Any, **how: Any) -> Any:
    from rl_policy_megatron.microbatch import TokenLayout

    return TokenLayout.of(batch, CPU, **how)


def test_d9_each_value_lies_at_its_own_token(rows_of: Callable[..., Any]) -> None:
    """D9: lengths 4, 3, 2 give nine values, zeros at 0, 4 and 7."""
    batch = rows_of([4, 3, 2])
    for packing in (False, True):
        layout = _layout(batch, packing=packing)
        placed = layout.scatter(layout.token_ids.float() + 1)
        flat = torch.cat([row[:length] for row, length in zip(placed, [4, 3, 2], strict=True)])
        assert flat.numel() == 9
        assert (flat == 0).nonzero()[:, 0].tolist() == [0, 4, 7]
        assert torch.equal(placed, (batch.input_ids + 1) * batch.mask)


def test_d9_each_value_is_predicted_from_the_token_before_it(rows_of: Callable[..., Any]) -> None:
    batch = rows_of(LENGTHS)
    for packing, pad_to in [(False, 1), (False, 8), (True, 1), (True, 8)]:
        layout = _layout(batch, packing=packing, pad_to=pad_to)
        # The model's output is [L, B, H]: tokens before rows.
        read = layout.model_input.t().flatten()[layout.source]
        assert torch.equal(read, batch.input_ids.flatten()[layout.target - 1])
        places = layout.positions.t().flatten()[layout.source]
        assert torch.equal(places, layout.target % batch.input_ids.size(1) - 1)


def test_e6_positions_restart(rows_of: Callable[..., Any]) -> None:
    """E6: sequences that read 3 and 2 tokens have positions 0, 1, 2, 0, 1."""
    layout = _layout(rows_of([4, 3]), packing=True)
    assert layout.positions.tolist() == [[0, 1, 2, 0, 1]]
    assert layout.packed.cu_seqlens_q.tolist() == layout.packed.cu_seqlens_kv.tolist() == [0, 3, 5]
    assert (layout.packed.max_seqlen_q, layout.packed.max_seqlen_kv) == (3, 3)


def test_e2_last_row_shorter_than_its_padded_place(rows_of: Callable[..., Any]) -> None:
    """E2: lengths 3 and 2 in rows of 4, a tail longer than either: real tokens only, the tail 0."""
    batch = rows_of([3, 2], width=4, padding=60)
    layout = _layout(batch, packing=True, pad_to=12)
    first, second = batch.input_ids.tolist()
    assert layout.model_input.tolist() == [[*first[:2], second[0], *[0] * 9]]
    assert layout.positions.tolist() == [[0, 1, 0, *range(9)]]
    assert layout.packed.cu_seqlens_q.tolist() == [0, 2, 3, 12]
    assert layout.token_ids.tolist() == [*first[1:3], second[1]]
    assert layout.target.tolist() == [1, 2, 5]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("pad_to", [1, 8])
def test_e3_padding_is_not_counted(packing: bool, pad_to: int, rows_of: Callable[..., Any]) -> None:
    """E3: five tokens and three of padding predict four tokens, whatever the model's input is padded to."""
    layout = _layout(rows_of([5], width=8), packing=packing, pad_to=pad_to)
    assert layout.token_ids.numel() == layout.source.numel() == layout.target.numel() == 4
    assert layout.model_input.size(1) == max(4, pad_to)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("lengths", [[], [0, 0], [1, 1, 0]])
def test_what_predicts_nothing_still_runs(
    packing: bool, lengths: list[int], rows_of: Callable[..., Any], policy_of: Callable[..., Any]
) -> None:
    """A rank whose micro-batch is empty takes part in what all ranks do together."""
    batch = rows_of([3, 2]).select([]) if not lengths else rows_of(lengths)
    layout = _layout(batch, packing=packing, pad_to=4)
    assert layout.model_input.size(1) == 4
    assert not layout.model_input.any()
    assert layout.token_ids.numel() == 0
    hidden = _hidden(policy_of("llama"), layout)
    assert hidden.isfinite().all()
    assert layout.scatter(hidden.flatten(0, 1)[layout.source]).shape[:2] == batch.input_ids.shape


@pytest.mark.parametrize("packing", [False, True])
def test_no_length_is_forgotten_or_invented(packing: bool, rows_of: Callable[..., Any]) -> None:
    layout = _layout(rows_of(LENGTHS), packing=packing)
    assert layout.token_ids.numel() == sum(max(length - 1, 0) for length in LENGTHS)
    wide = (8, 23) if not packing else (1, layout.token_ids.numel())
    assert layout.model_input.shape == layout.positions.shape == wide


def _hidden(policy: Any, layout: Any) -> torch.Tensor:
    with torch.no_grad():
        return policy.model(
            layout.model_input,
            layout.positions,
            None,
            labels=layout.model_input,
            packed_seq_params=layout.packed,
        )


@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen2", "llama3-rope"])
@pytest.mark.parametrize("pad_to", [1, 16])
def test_hidden_states_are_those_of_rows_alone(
    kind: str, pad_to: int, rows_of: Callable[..., Any], policy_of: Callable[..., Any]
) -> None:
    policy, batch = policy_of(kind), rows_of(LENGTHS)
    alone = [_layout(batch.select([row])) for row in range(len(LENGTHS))]
    expected = torch.cat([_hidden(policy, layout)[:, 0][layout.source] for layout in alone])
    for packing in (False, True):
        layout = _layout(batch, packing=packing, pad_to=pad_to)
        found = _hidden(policy, layout).flatten(0, 1)[layout.source]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen2", "llama3-rope"])
@pytest.mark.parametrize("changed", range(5))
def test_e4_changing_a_row_moves_no_neighbour(
    kind: str, changed: int, rows_of: Callable[..., Any], policy_of: Callable[..., Any]
) -> None:
    """E4: every token of one row is another: first, last or between, its neighbours do not move."""
    batch = rows_of([12, 11, 9, 8, 5])
    policy = policy_of(kind, packing=True)
    ids = batch.input_ids.clone()
    ids[changed] = (ids[changed] + 7) % policy.vocab_size
    moved = (policy.logprobs(replace(batch, input_ids=ids)) - policy.logprobs(batch)).abs().amax(1)
    assert moved[changed] > 1e-2
    moved[changed] = 0
    assert moved.max() <= 1e-6


def _attention(heads: int, groups: int) -> Any:
    from rl_policy_megatron.layers import SDPACoreAttention
    from rl_policy_megatron.mcore import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=8 * heads, num_attention_heads=heads, num_query_groups=groups
    )
    return SDPACoreAttention(config, 1, None, "self")


@pytest.mark.parametrize("groups", [4, 2])
def test_packed_attention_equals_a_block_mask(groups: int) -> None:
    from rl_policy_megatron.mcore import PackedSeqParams

    torch.manual_seed(0)
    lengths = [5, 1, 7, 3]
    bounds = torch.tensor([0, 5, 6, 13, 16], dtype=torch.int32)
    query, key, value = (torch.randn(16, heads, 8, requires_grad=True) for heads in (4, groups, groups))
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    found = _attention(4, groups)(query, key, value, packed_seq_params=packed)

    own = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    allowed = (own[:, None] == own[None, :]).tril()
    heads_first = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]
    mixed = F.scaled_dot_product_attention(*heads_first, attn_mask=allowed, enable_gqa=True)
    expected = mixed[0].transpose(0, 1).flatten(1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    weights = torch.randn_like(expected)
    inputs = (query, key, value)
    for ours, theirs in zip(
        torch.autograd.grad((found * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_packed_attention_refuses_a_mask() -> None:
    from rl_policy_megatron import RuntimeStateError
    from rl_policy_megatron.mcore import PackedSeqParams

    bounds = torch.tensor([0, 4], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    inputs = [torch.zeros(4, 4, 8) for _ in range(3)]
    with pytest.raises(RuntimeStateError, match="mask over packed"):
        _attention(4, 4)(*inputs, torch.zeros(1, 1, 4, 4, dtype=torch.bool), packed_seq_params=packed)
