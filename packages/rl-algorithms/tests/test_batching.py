from __future__ import annotations

import pickle

import pytest
import torch

from rl_algorithms.batching import BatchError, TrainBatch, build_sft_batch, build_train_batch


def flags(*values):
    return torch.tensor(values, dtype=torch.bool)


@pytest.fixture
def batch(trajectory):
    rollouts = [
        trajectory(([1, 2], [3, 4, 5])),
        trajectory(([1], [6])),
        trajectory(([1, 2, 3], [7, 8])),
        trajectory(([1, 2, 3, 4, 5, 6], [9])),
    ]
    advantages = torch.tensor([1.0, 0.0, -1.0, 2.0])
    return build_train_batch(rollouts, advantages, flags(True, True, True, False), pad_token_id=99)


def test_rows_keep_their_order_and_padding_is_on_the_right(batch):
    assert batch.input_ids[0].tolist() == [1, 2, 3, 4, 5, 99, 99]
    assert batch.input_ids[3].tolist() == [1, 2, 3, 4, 5, 6, 9]
    assert batch.lengths.tolist() == [5, 2, 5, 7]
    assert batch.token_mask[0].tolist() == [False, False, True, True, True, False, False]
    assert batch.generation_logprobs[0].tolist() == [0, 0, -0.5, -0.5, -0.5, 0, 0]
    assert batch.generation_logprobs.dtype == batch.advantages.dtype == torch.float32


def test_e3_padding_and_masked_rows_are_not_counted(batch):
    assert batch.global_valid_tokens == 3 + 1 + 2
    assert batch.global_valid_samples == 3


def test_b8_an_end_token_that_was_appended_is_not_trained(trajectory):
    built = build_train_batch([trajectory(([1], [5, 6]), ([2], []))], torch.ones(1), flags(True), 0)
    assert built.input_ids.tolist() == [[1, 5, 6, 2]]
    assert built.token_mask.int().tolist() == [[0, 1, 1, 0]]


def test_b9_separators_and_tool_tokens_between_turns_are_not_trained(trajectory):
    rollout = trajectory(([1, 2], [3, 4]), ([90, 91, 92, 93], [5]), ([94], [6, 7]))
    built = build_train_batch([rollout], torch.ones(1), flags(True), 0)
    assert built.token_mask.sum() == rollout.sampled_tokens == 5
    assert built.input_ids[built.token_mask].tolist() == [3, 4, 5, 6, 7]
    assert built.global_valid_tokens == 5


def test_a_trajectory_without_sampled_tokens_is_never_valid(trajectory):
    built = build_train_batch(
        [trajectory(([1, 2], [])), trajectory(([1], [2]))], torch.ones(2), flags(True, True), 0
    )
    assert built.sample_mask.tolist() == [False, True]
    assert built.global_valid_samples == 1


def test_select_trims_and_keeps_the_denominators(batch):
    part = batch.select([2, 1])
    assert part.input_ids.tolist() == [[1, 2, 3, 7, 8], [1, 6, 99, 99, 99]]
    assert part.advantages.tolist() == [-1, 0]
    assert (part.global_valid_tokens, part.global_valid_samples) == (6, 3)
    own = part.with_own_denominators()
    assert (own.global_valid_tokens, own.global_valid_samples) == (3, 2)
    assert len(batch.select([])) == 0


def test_select_takes_every_tensor_along(batch):
    scored = batch.with_logprobs(
        prev=torch.arange(28.0).reshape(4, 7), reference=torch.arange(28.0, 56.0).reshape(4, 7)
    )
    part = scored.select([1, 3])
    assert part.prev_logprobs[1].tolist() == list(range(21, 28))
    assert part.reference_logprobs[0].tolist() == list(range(35, 42))
    assert batch.prev_logprobs is None


def test_log_probabilities_are_constants(batch):
    prev = torch.zeros(4, 7, dtype=torch.float64, requires_grad=True)
    scored = batch.with_logprobs(prev=prev).with_logprobs(reference=torch.ones(4, 7))
    assert scored.prev_logprobs.dtype == torch.float32
    assert not scored.prev_logprobs.requires_grad
    assert scored.reference_logprobs.sum() == 28


def test_rows_without_gradient_are_dropped_but_counted(batch):
    moving = batch.without_zero_gradient_rows()
    assert moving.advantages.tolist() == [1, -1]
    assert (moving.global_valid_tokens, moving.global_valid_samples) == (6, 3)
    assert batch.without_zero_gradient_rows(keep_zero_advantages=True).advantages.tolist() == [1, 0, -1]


def test_advantages_per_token(trajectory):
    rollouts = [trajectory(([1], [2, 3])), trajectory(([1], [4]))]
    per_token = torch.tensor([[5.0, 0.0, 0.0], [0.0, 1.0, 7.0]])
    built = build_train_batch(rollouts, per_token, flags(True, True), 0)
    assert built.token_advantages.tolist() == per_token.tolist()
    assert built.without_zero_gradient_rows().input_ids.tolist() == [[1, 4]]


def test_pickles_small_and_whole(trajectory):
    rollouts = [trajectory(([1], [2, 3])), trajectory(([1] * 5000, [4]))]
    built = build_train_batch(rollouts, torch.ones(2), flags(True, True), 0)
    part = built.select([0])
    data = pickle.dumps(part)
    assert len(data) < 5000, "a trimmed part must not carry the storage it was cut from"
    again = pickle.loads(data)
    assert again.input_ids.tolist() == [[1, 2, 3]]
    assert again.global_valid_tokens == 3


def test_sft_batch():
    built = build_sft_batch([((1, 2, 3), (1, 0, 1)), ([4, 5], [0, 1])], pad_token_id=9)
    assert built.input_ids.tolist() == [[1, 2, 3], [4, 5, 9]]
    assert built.token_mask.int().tolist() == [[0, 0, 1], [0, 1, 0]]
    assert (built.global_valid_tokens, built.global_valid_samples) == (2, 2)


def test_refusals_name_the_part(trajectory, batch):
    with pytest.raises(BatchError, match="r samples its first token without a prompt"):
        build_train_batch([trajectory(([], [1, 2]))], torch.ones(1), flags(True), 0)
    with pytest.raises(BatchError, match="at least one trajectory"):
        build_train_batch([], torch.ones(0), flags(), 0)
    with pytest.raises(BatchError, match="1 trajectories with 2 advantages"):
        build_train_batch([trajectory(([1], [2]))], torch.ones(2), flags(True), 0)
    with pytest.raises(BatchError, match="example 0 has 2 token ids and 1 mask"):
        build_sft_batch([([1, 2], [1])], 0)
    with pytest.raises(BatchError, match="prev_logprobs is"):
        batch.with_logprobs(prev=torch.zeros(4, 6))
    for mask, message in (
        (batch.token_mask.float(), "token_mask is torch.float32"),
        (torch.ones_like(batch.token_mask), r"token_mask of rows \[0, 1, 2\] is set beyond"),
    ):
        with pytest.raises(BatchError, match=message):
            TrainBatch.create(
                input_ids=batch.input_ids,
                lengths=batch.lengths,
                token_mask=mask,
                sample_mask=batch.sample_mask,
                advantages=batch.advantages,
                generation_logprobs=batch.generation_logprobs,
            )
