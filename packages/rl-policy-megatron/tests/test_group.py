"""A policy over two Ray actors: the numbers of one process, and what becomes of it when a rank fails."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rl_policy_megatron import OptimizerSettings, ParallelLayout, PolicySettings
from rl_policy_megatron.errors import RankError, RuntimeStateError
from rl_policy_megatron.group import GroupSettings, MegatronPolicyGroup, RankSettings

from .conftest import running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

# Unequal numbers of tokens for the two ranks, and two micro-batches each.
LENGTHS = [24, 3, 17, 24, 1, 9, 12, 20, 5]
# Adam's first step is the sign of the gradient, which rounding decides where the gradient is nearly 0.
SMOOTH = OptimizerSettings(eps=1e-3)
LIMITS = GroupSettings(num_cpus=0.5, start_timeout_s=120.0, call_timeout_s=60.0, shutdown_timeout_s=10.0)


@dataclass(frozen=True)
class Total:
    """The simplest metric that can be merged."""

    total: float

    def merge(self, other: Total) -> Total:
        return Total(self.total + other.total)

    def value(self) -> float:
        return self.total


@dataclass(frozen=True)
class TokenMean:
    """A share of the mean negative log-probability; one rank may fail at it, or take long."""

    failing: int = -1
    slow: bool = False

    def __call__(self, logits: Any, batch: Any) -> tuple[torch.Tensor, dict[str, Total]]:
        if self.slow:
            time.sleep(60)
        if dist.get_rank() == self.failing:
            raise ZeroDivisionError("the denominator of row 3 is 0")
        loss = -(logits.logprobs() * batch.mask).sum() / batch.denominator
        return loss, {"tokens": Total(float(batch.mask.sum()))}


class Source:
    """Hands tensors out three by three, copied."""

    def __init__(self, spec: Callable[[], Any], stream: Callable[[], Iterator[Any]]) -> None:
        self._spec, self._stream = spec, stream

    def begin(self, transport: str) -> list[str]:
        self._reading = self._stream()
        return [item.name for item in self._spec()]

    def next_bucket(self) -> dict[str, torch.Tensor] | None:
        return {name: tensor.clone() for name, tensor in islice(self._reading, 3)} or None

    def end(self) -> None:
        # As a real one does: it lets go of the stream wherever it is.
        self._reading = iter(())


@pytest.fixture(scope="module")
def start(
    groups: list[MegatronPolicyGroup], model_of: Callable[..., Any]
) -> Callable[..., MegatronPolicyGroup]:
    """``start(world, model, tensor)`` → a group; no process of it may run when the tests are over."""

    def make(world: int = 2, directory: Path | None = None, tensor: int = 1) -> MegatronPolicyGroup:
        ranks = RankSettings(
            str(directory or model_of("qwen3-tied")[0]),
            PolicySettings(micro_batch_size=2, layout=ParallelLayout(tensor=tensor)),
            SMOOTH,
            world=world,
            threads=1,
            weight_source=Source,
        )
        groups.append(MegatronPolicyGroup(ranks, LIMITS))
        return groups[-1]

    return make


@pytest.fixture(scope="module")
def pair(start: Callable[..., MegatronPolicyGroup]) -> MegatronPolicyGroup:
    """Two ranks that share the tests of this file; the last of them kills one."""
    return start()


def weights(group: MegatronPolicyGroup) -> dict[str, torch.Tensor]:
    announced = group.begin("by value")
    found: dict[str, torch.Tensor] = {}
    while (bucket := group.next_bucket()) is not None:
        found |= bucket
    group.end()
    assert list(found) == announced
    return found


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_two_ranks_have_the_numbers_of_one_process(
    pair: MegatronPolicyGroup, policy_of: Callable[..., Any], rows_of: Callable[..., Any], tmp_path: Path
) -> None:
    alone, batch = policy_of("qwen3-tied", SMOOTH, micro_batch_size=2), rows_of(LENGTHS)
    assert len(set(pair.pids)) == pair.world == 2
    for name in ("parameter_count", "vocab_size", "max_context"):
        assert getattr(pair, name) == getattr(alone, name)
    assert pair.description["pid"] == pair.pids[0]
    close(pair.logprobs(batch), alone.logprobs(batch))
    close(pair.token_logits(batch), alone.token_logits(batch))
    ours, theirs = pair.gradients(batch, TokenMean()), alone.gradients(batch, TokenMean())
    assert ours.keys() == theirs.keys()
    for name in ours:
        close(ours[name], theirs[name])
    pair.keep_reference()
    alone.keep_reference()
    for step in range(3):
        # The last batch has fewer rows than there are ranks.
        rows = rows_of(LENGTHS if step < 2 else [7], seed=step)
        found = pair.train(rows, TokenMean(), learning_rate=1e-2)
        assert found == pytest.approx(alone.train(rows, TokenMean(), learning_rate=1e-2), rel=1e-5)
        assert found["tokens"] == float(rows.mask.sum())
    assert pair.weight_version() == 3
    close(pair.logprobs(batch), alone.logprobs(batch))
    close(pair.reference_logprobs(batch), alone.reference_logprobs(batch))
    handed = weights(pair)
    for spec, (name, tensor) in zip(pair.refit_spec(), alone.stream_weights(), strict=True):
        assert spec.name == name
        close(handed[name], tensor)
    assert pair.peak_memory_mb() > 2 * 50


def test_what_two_ranks_save_one_process_reads_and_they_themselves(
    pair: MegatronPolicyGroup, policy_of: Callable[..., Any], rows_of: Callable[..., Any], tmp_path: Path
) -> None:
    batch, directory = rows_of(LENGTHS), tmp_path / "saved"
    pair.save(directory)
    alone = policy_of("qwen3-tied", SMOOTH, micro_batch_size=2)
    alone.load(directory)
    for name, tensor in alone.stream_weights():
        assert torch.equal(tensor, weights(pair)[name])
    version = pair.weight_version()
    after = pair.train(batch, TokenMean(), learning_rate=1e-2)
    assert alone.train(batch, TokenMean(), learning_rate=1e-2) == pytest.approx(after, rel=1e-5)
    pair.load(directory)
    assert pair.weight_version() == version
    assert pair.train(batch, TokenMean(), learning_rate=1e-2) == after


def failure_of(group: MegatronPolicyGroup, batch: Any, loss: TokenMean) -> tuple[RankError, float]:
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        group.train(batch, loss, learning_rate=1e-2)
    seconds = time.monotonic() - began
    assert running(group) == []
    return caught.value, seconds


def test_a_rank_killed_while_it_trains_is_named_within_30_s_and_nothing_is_left(
    pair: MegatronPolicyGroup, rows_of: Callable[..., Any]
) -> None:
    threading.Timer(1.0, os.kill, (pair.pids[1], signal.SIGKILL)).start()
    error, seconds = failure_of(pair, rows_of(LENGTHS), TokenMean(slow=True))
    assert (error.rank, error.call) == (1, "train")
    assert "rank 1 of 2: it died during train" in str(error)
    assert seconds < 30


def test_so_is_the_first_rank_although_the_rendezvous_goes_with_it(
    start: Callable[..., MegatronPolicyGroup], rows_of: Callable[..., Any]
) -> None:
    group = start()
    threading.Timer(1.0, os.kill, (group.pids[0], signal.SIGKILL)).start()
    error, seconds = failure_of(group, rows_of(LENGTHS), TokenMean(slow=True))
    assert error.rank == 0
    assert "rank 0 of 2: it died during train" in str(error)
    assert seconds < 30


def test_a_refit_gathers_what_ranks_split_and_may_stop_anywhere_and_a_failing_loss_is_told_by_rank(
    start: Callable[..., MegatronPolicyGroup], policy_of: Callable[..., Any], rows_of: Callable[..., Any]
) -> None:
    group, alone, batch = (
        start(tensor=2),
        policy_of("qwen3-tied", SMOOTH, micro_batch_size=2),
        rows_of(LENGTHS),
    )
    for buckets in (0, 1):
        group.begin("by value")
        for _ in range(buckets):
            assert len(group.next_bucket()) == 3
        group.end()
    close(group.logprobs(batch), alone.logprobs(batch))
    group.train(batch, TokenMean(), learning_rate=1e-2)
    alone.train(batch, TokenMean(), learning_rate=1e-2)
    # Half of it, and nobody says that it is over.
    group.begin("by value")
    group.next_bucket()
    with pytest.raises(RuntimeStateError, match="train was called during a refit; call end first"):
        group.train(batch, TokenMean(), learning_rate=1e-2)
    group.end()
    for policy in (group, alone):
        policy.train(batch, TokenMean(), learning_rate=1e-2)
    handed = weights(group)
    for name, tensor in alone.stream_weights():
        close(handed[name], tensor)
    read = dict(group.stream_weights())
    assert read.keys() == handed.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in handed.items())
    reading = group.stream_weights()
    next(reading)
    group.train(batch, TokenMean(), learning_rate=0.0)
    with pytest.raises(RuntimeStateError, match="version 2 of the weights and they are of version 3"):
        next(reading)
    dropped = group.stream_weights()
    next(dropped)
    again = dict(group.stream_weights())
    assert again.keys() == handed.keys()
    with pytest.raises(RuntimeStateError, match="read one at a time"):
        next(dropped)
    before = group.logprobs(batch)
    with pytest.raises(ZeroDivisionError, match="the denominator of row 3 is 0") as caught:
        group.train(batch, TokenMean(failing=1), learning_rate=1e-2)
    assert caught.value.__notes__ == ["ZeroDivisionError of train, raised on rank 1 of 2"]
    # Where on the rank it was raised.
    assert "in __call__" in str(caught.value.__cause__)
    assert torch.equal(group.logprobs(batch), before)


def test_a_single_rank_that_raised_works_on(
    start: Callable[..., MegatronPolicyGroup], rows_of: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(RankError, match=r"rank 0 of 1: start failed: ModelDirectoryError: .*config\.json"):
        start(1, tmp_path / "nowhere")
    group, batch = start(1), rows_of(LENGTHS)
    with pytest.raises(ZeroDivisionError, match="row 3"):
        group.train(batch, TokenMean(failing=0), learning_rate=1e-2)
    assert group.train(batch, TokenMean(), learning_rate=1e-2)["loss"] > 0
    assert group.weight_version() == 1
    group.shutdown()
    assert running(group) == []
