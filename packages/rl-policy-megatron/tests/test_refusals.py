"""One process and its user's mistakes: a typed error that names them, and the policy goes on as it was."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch

from rl_policy_megatron import (
    BatchError,
    LossError,
    MegatronPolicy,
    ModelDirectoryError,
    PolicySettings,
    RuntimeStateError,
    SettingsError,
)
from rl_policy_megatron.refusals import is_agreed

LENGTHS = (9, 3, 7, 5)


@pytest.fixture(scope="module")
def policy(model_of: Callable[..., Any]) -> Any:
    with MegatronPolicy(model_of("llama")[0], PolicySettings(micro_batch_size=2)) as made:
        yield made


@pytest.mark.parametrize("k", [0, 62, 2.5, "3", None, True, torch.tensor(2)])
def test_a_wrong_k_is_refused_alike_by_every_rank(k: Any, policy: Any, rows_of: Callable[..., Any]) -> None:
    with pytest.raises(LossError, match="integer between 1 and the vocabulary of 61, got") as caught:
        policy.topk_logits(rows_of(LENGTHS), k)
    assert is_agreed(caught.value)
    with pytest.raises(LossError, match="integer between 1 and the vocabulary of 61, got"):
        policy.train(rows_of(LENGTHS), lambda view, _: view.topk_logprobs(k), learning_rate=0.0)


@pytest.mark.parametrize("of", [torch.float32, torch.int32, list])
def test_token_ids_of_another_kind_are_named(of: Any, policy: Any, rows_of: Callable[..., Any]) -> None:
    def asking(view: Any, batch: Any) -> Any:
        ids = batch.input_ids[:, :, None]
        return view.logprobs_of(ids.tolist() if of is list else ids.to(of))

    with pytest.raises(LossError, match=f"int64 tensor.*got a {'list' if of is list else str(of)[6:]}"):
        policy.train(rows_of(LENGTHS), asking, learning_rate=0.0)


@pytest.mark.parametrize("rate", [1e38, 1e3, 10**400, float("inf"), -1.0, "1"])
def test_a_rate_beyond_reason_is_refused(
    rate: Any, policy: Any, rows_of: Callable[..., Any], token_mean_loss: Any, weights_hash: Any
) -> None:
    before = weights_hash(policy)
    with pytest.raises(SettingsError, match="learning_rate must be"):
        policy.train(rows_of(LENGTHS), token_mean_loss, learning_rate=rate)
    assert policy.is_whole
    assert weights_hash(policy) == before


def test_a_loss_function_cannot_change_its_policy(
    tmp_path: Any, policy: Any, rows_of: Callable[..., Any], token_mean_loss: Any, weights_hash: Any
) -> None:
    rows, before, updates = rows_of(LENGTHS), weights_hash(policy), policy.updates
    calls: list[Callable[[], Any]] = [
        lambda: policy.train(rows, token_mean_loss, learning_rate=0.1),
        lambda: policy.gradients(rows, token_mean_loss),
        lambda: policy.save(tmp_path / "in a loss"),
        lambda: policy.load("nowhere"),
        policy.shutdown,
    ]
    for call in calls:
        with pytest.raises(RuntimeStateError, match="under way"):
            policy.train(rows, lambda *_, call=call: call(), learning_rate=0.1)
        assert policy.is_whole
    assert weights_hash(policy) == before

    def reading(view: Any, batch: Any) -> Any:
        assert (policy.updates, policy.vocab_size) == (updates, 61)
        return token_mean_loss(view, batch)

    policy.train(rows, reading, learning_rate=0.0)


@dataclass(frozen=True)
class Broken:
    """A batch whose ``select`` returns what it is told to."""

    input_ids: torch.Tensor
    lengths: torch.Tensor
    whole: Any
    answer: Callable[[Any, Sequence[int]], Any]

    def select(self, rows: Sequence[int]) -> Any:
        return self.answer(self.whole, rows)


def _wider(whole: Any, rows: Sequence[int]) -> Any:
    part = whole.select(rows)
    return replace(part, input_ids=torch.nn.functional.pad(part.input_ids, (0, 12)))


@pytest.mark.parametrize(
    "answer",
    [
        lambda whole, rows: whole.select(rows[:1]),
        lambda whole, rows: whole.select(rows[::-1]),
        lambda whole, rows: None,
        lambda whole, rows: replace(whole.select(rows), lengths=[1, 2]),
        lambda whole, rows: replace(whole.select(rows), input_ids=whole.select(rows).input_ids[:, :1]),
        _wider,
    ],
    ids=["one row", "other order", "nothing", "a list", "cut", "wider"],
)
def test_what_select_returns_must_be_the_rows(
    answer: Any, policy: Any, rows_of: Callable[..., Any], token_mean_loss: Any
) -> None:
    whole = rows_of(LENGTHS)
    batch = Broken(whole.input_ids, whole.lengths, whole, answer)
    with pytest.raises(BatchError, match=r"Broken.select\(\["):
        policy.logprobs(batch)
    with pytest.raises(BatchError, match=r"Broken.select\(\["):
        policy.train(batch, token_mean_loss, learning_rate=0.0)


def test_a_batch_without_select_is_refused(policy: Any, rows_of: Callable[..., Any]) -> None:
    batch = replace(
        Broken(*[cast("Any", None)] * 4), input_ids=rows_of([3]).input_ids, lengths=rows_of([3]).lengths
    )
    object.__setattr__(batch, "select", None)
    with pytest.raises(BatchError, match=r"select\(rows\)"):
        policy.logprobs(batch)


def test_a_policy_that_was_shut_down_is_not_whole(policy_of: Callable[..., Any]) -> None:
    policy = policy_of("llama")
    assert policy.is_whole
    policy.shutdown()
    assert not policy.is_whole


@pytest.mark.parametrize("path", [None, 7, "", "a\0b", b"bytes"])
def test_what_is_no_path_is_refused(path: Any, policy: Any) -> None:
    for call in (policy.save, policy.load, policy.export_hf, MegatronPolicy):
        with pytest.raises(SettingsError, match="must be the path of a directory, got"):
            call(path)
    assert policy.is_whole


@pytest.mark.parametrize(
    "content", ["{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "b\\u0000"}}']
)
def test_an_index_that_names_no_files_is_refused(content: str, model_of: Any, tmp_path: Any) -> None:
    directory = tmp_path / "model"
    shutil.copytree(model_of("llama")[0], directory)
    (directory / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelDirectoryError, match=r"index\.json"):
        MegatronPolicy(directory)
