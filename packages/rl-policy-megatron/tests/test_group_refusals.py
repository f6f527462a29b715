"""A group of two and its user's mistakes: the same errors as of one process, and the group goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_policy_megatron import (
    BatchError,
    CheckpointError,
    LossError,
    MegatronPolicy,
    NonFiniteGradientError,
    OptimizerSettings,
    PolicySettings,
    RuntimeStateError,
    SettingsError,
    checkpoint,
    snapshot,
)
from rl_policy_megatron.errors import RankError
from rl_policy_megatron.group import GroupSettings, MegatronPolicyGroup, RankSettings

from .conftest import running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

LENGTHS = [24, 3, 17, 24, 1, 9, 12, 20, 5]
SMOOTH = OptimizerSettings(eps=1e-3)
SETTINGS = PolicySettings(micro_batch_size=2)
RATE = 1e-2


def token_mean(logits: Any, batch: Any) -> Any:
    return -(logits.logprobs() * batch.mask).sum() / batch.denominator, {}


def dividing_by_0(logits: Any, batch: Any) -> Any:
    return 1 / 0, {}


class Weird(Exception):
    """Pickles, and cannot be read again."""

    def __init__(self, a: str, b: str) -> None:
        super().__init__(a)


def weird(logits: Any, batch: Any) -> Any:
    raise Weird("row 3 is odd", "b")


def without_number(logits: Any, batch: Any) -> Any:
    return logits.logprobs().sum() * math.nan, {}


def infinite_slope(logits: Any, batch: Any) -> Any:
    return (logits.logprobs() * 0).sum().sqrt(), {}


@dataclass(frozen=True)
class Writing:
    """A loss that, on its way, makes the rank's saves wait for a file, or fail."""

    gate: str = ""
    failing: bool = False

    def __call__(self, logits: Any, batch: Any) -> Any:
        original = getattr(checkpoint, "_original", checkpoint.write_tensors)
        checkpoint._original = original  # pyrefly: ignore

        def write(path: Path, tensors: Any) -> None:
            if self.failing and torch.distributed.get_rank() == 1:
                raise OSError("the disk is gone")
            while self.gate and not Path(self.gate).exists():
                time.sleep(0.01)
            original(path, tensors)

        checkpoint.write_tensors = write
        return token_mean(logits, batch)


def breaking_loads(logits: Any, batch: Any) -> Any:
    """A loss after which the second rank fails at the second half of every load."""
    if torch.distributed.get_rank() == 1:

        def continue_from(self: Any, saved: Any) -> None:
            raise OSError("the disk is gone")

        snapshot.Snapshot.continue_from = continue_from
    return token_mean(logits, batch)


@pytest.fixture(scope="module")
def start(
    groups: list[MegatronPolicyGroup], model_of: Callable[..., Any]
) -> Callable[..., MegatronPolicyGroup]:
    def make(**limits: Any) -> MegatronPolicyGroup:
        ranks = RankSettings(str(model_of("qwen3-tied")[0]), SETTINGS, SMOOTH, world=2, threads=1)
        given = {"start_timeout_s": 120.0, "call_timeout_s": 60.0, "shutdown_timeout_s": 10.0, **limits}
        groups.append(MegatronPolicyGroup(ranks, GroupSettings(num_cpus=0.5, **given)))
        return groups[-1]

    return make


@pytest.fixture(scope="module")
def pair(start: Callable[..., MegatronPolicyGroup]) -> MegatronPolicyGroup:
    """Two ranks that share the tests of this file; the last of them ends it."""
    return start()


@pytest.fixture(scope="module")
def alone(pair: MegatronPolicyGroup, model_of: Callable[..., Any]) -> Iterator[MegatronPolicy]:
    """What the pair is compared with: never asked for anything wrong but what it refuses as well."""
    with MegatronPolicy(model_of("qwen3-tied")[0], SETTINGS, SMOOTH) as policy:
        yield policy


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def token(batch: Any, value: int) -> Any:
    ids = batch.input_ids.clone()
    ids[2, 5] = value
    return replace(batch, input_ids=ids)


def too_long(batch: Any) -> Any:
    return replace(
        batch,
        input_ids=torch.zeros(2, 300, dtype=torch.int64),
        lengths=torch.tensor([9, 257]),
        mask=torch.ones(2, 300),
    )


Policy = MegatronPolicy | MegatronPolicyGroup
# What is asked for, given a policy, a batch, and a folder with a checkpoint, an export and a damaged copy of
# the checkpoint; the error, and its text.
MISTAKES: dict[str, tuple[Callable[[Any, Any, Path], Any], type[Exception], str]] = {
    "token -1": (lambda p, b, at: p.logprobs(token(b, -1)), BatchError, r"input_ids\[2, 5\] is -1"),
    "token beyond the vocabulary": (
        lambda p, b, at: p.train(token(b, 61), token_mean, learning_rate=RATE),
        BatchError,
        r"input_ids\[2, 5\] is 61, outside the model's vocabulary of 61",
    ),
    "row too long": (
        lambda p, b, at: p.logprobs(too_long(b)),
        BatchError,
        "row 1 has 257 tokens, the model was made for 256",
    ),
    "no batch": (lambda p, b, at: p.logprobs([1, 2]), BatchError, "a batch has the tensors input_ids"),
    "rate": (
        lambda p, b, at: p.train(b, token_mean, learning_rate=math.nan),
        SettingsError,
        "learning_rate",
    ),
    "top 0": (
        lambda p, b, at: p.topk_logits(b, 0),
        LossError,
        "integer between 1 and the vocabulary of 61, got 0",
    ),
    "no reference": (lambda p, b, at: p.reference_logprobs(b), RuntimeStateError, "no reference weights"),
    "loss raises": (
        lambda p, b, at: p.train(b, dividing_by_0, learning_rate=RATE),
        ZeroDivisionError,
        "division by zero",
    ),
    "loss is no number": (
        lambda p, b, at: p.train(b, without_number, learning_rate=RATE),
        LossError,
        "loss of nan",
    ),
    "gradient is no number": (
        lambda p, b, at: p.train(b, infinite_slope, learning_rate=RATE),
        NonFiniteGradientError,
        "the weights were not changed",
    ),
    "save over": (lambda p, b, at: p.save(at / "saved"), CheckpointError, "saved is not empty"),
    "export over": (lambda p, b, at: p.export_hf(at / "exported"), CheckpointError, "exists already"),
    "export below a file": (
        lambda p, b, at: p.export_hf(at / "saved" / "policy.json" / "below"),
        CheckpointError,
        "cannot be exported to .*below",
    ),
    "load nowhere": (
        lambda p, b, at: p.load(at / "nowhere"),
        CheckpointError,
        r"nowhere is no policy checkpoint: it has no policy\.json",
    ),
    "load damaged": (
        lambda p, b, at: p.load(at / "damaged"),
        CheckpointError,
        r"damaged.optimizer-00-00\.safetensors is damaged",
    ),
}


def test_a_mistake_is_refused_as_by_one_process_and_the_next_call_has_the_right_numbers(
    pair: MegatronPolicyGroup, alone: MegatronPolicy, rows_of: Callable[..., Any], tmp_path_factory: Any
) -> None:
    batch = rows_of(LENGTHS)
    for policy in (pair, alone):
        policy.train(batch, token_mean, learning_rate=RATE)
    folder = tmp_path_factory.mktemp("folder")
    for name in ("saved", "damaged"):
        pair.save(folder / name)
    pair.export_hf(folder / "exported")
    damaged = folder / "damaged" / "optimizer-00-00.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-9] ^= 1
    damaged.write_bytes(content)
    pids, version = pair.pids, pair.weight_version()
    for number, (name, (ask, kind, text)) in enumerate(MISTAKES.items()):
        told = []
        for policy in (pair, alone):
            with pytest.raises(kind, match=text) as caught:
                ask(policy, batch, folder)
            assert type(caught.value) is kind, name
            told.append(str(caught.value))
        assert told[0] == told[1], name
        assert running(pair) == pids, name
        if number % 4 == 0:
            rows = rows_of(LENGTHS, seed=number)
            ours = pair.train(rows, token_mean, learning_rate=RATE)
            assert ours == pytest.approx(alone.train(rows, token_mean, learning_rate=RATE), rel=1e-5), name
            version += 1
        assert pair.weight_version() == version, name
    close(pair.logprobs(batch), alone.logprobs(batch))


def test_what_cannot_be_sent_to_ranks_or_from_them_is_told_and_they_go_on(
    pair: MegatronPolicyGroup, alone: MegatronPolicy, rows_of: Callable[..., Any]
) -> None:
    class Unreadable:
        def __reduce__(self) -> Any:
            return eval, ("1 / 0",)

    class Unsendable:
        def __reduce__(self) -> Any:
            raise TypeError("a lock stays where it is")

    batch = rows_of(LENGTHS)
    with pytest.raises(TypeError, match="a lock stays where it is"):
        pair.train(batch, Unsendable(), learning_rate=RATE)
    with pytest.raises(RankError, match=r"train was not begun, its arguments .*division by zero") as caught:
        pair.train(batch, Unreadable(), learning_rate=RATE)
    assert caught.value.answered
    with pytest.raises(RankError, match=r"of 2: train raised Weird: row 3 is odd \(") as caught:
        pair.train(batch, weird, learning_rate=RATE)
    assert caught.value.answered
    assert len(running(pair)) == 2
    close(pair.logprobs(batch), alone.logprobs(batch))


def test_a_save_goes_on_while_training_does_and_holds_the_state_at_the_call(
    pair: MegatronPolicyGroup, alone: MegatronPolicy, rows_of: Callable[..., Any], tmp_path: Path
) -> None:
    batch, gate = rows_of(LENGTHS), tmp_path / "gate"
    for policy in (pair, alone):
        policy.train(batch, token_mean if policy is alone else Writing(str(gate)), learning_rate=RATE)
    version, wanted = pair.weight_version(), pair.logprobs(batch)
    pending = pair.save_async(tmp_path / "saved")
    pair.train(batch, token_mean, learning_rate=RATE)
    assert not pending.done
    with pytest.raises(CheckpointError, match=r"takes longer than 0\.3 s; it goes on"):
        pending.wait(0.3)
    assert not (tmp_path / "saved" / "policy.json").exists()
    gate.touch()
    pending.wait()
    pending.wait()
    assert pending.done
    pair.load(tmp_path / "saved")
    assert pair.weight_version() == version
    assert torch.equal(pair.logprobs(batch), wanted)
    alone.load(tmp_path / "saved")
    # Two at a time there are never: the second one's call waits for the first.
    gate.unlink()
    first = pair.save_async(tmp_path / "first")
    gate.touch()
    second = pair.save_async(tmp_path / "second")
    assert first.done
    second.wait()
    first.wait()


def test_a_save_that_fails_is_told_once_and_the_group_goes_on(
    pair: MegatronPolicyGroup, alone: MegatronPolicy, rows_of: Callable[..., Any], tmp_path: Path
) -> None:
    batch = rows_of(LENGTHS)
    for policy in (pair, alone):
        policy.train(batch, token_mean if policy is alone else Writing(failing=True), learning_rate=RATE)
    pending = pair.save_async(tmp_path / "told")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"cannot be saved to .*told: the disk is gone"):
            pending.wait()
    pair.save_async(tmp_path / "untold")
    with pytest.raises(CheckpointError, match="untold: the disk is gone"):
        pair.save(tmp_path / "next")
    for policy in (pair, alone):
        policy.train(batch, token_mean if policy is alone else Writing(), learning_rate=RATE)
    for name in ("next", "untold"):
        pair.save(tmp_path / name)
        pair.load(tmp_path / name)
    close(pair.logprobs(batch), alone.logprobs(batch))


def test_a_group_reads_what_one_process_saved(
    pair: MegatronPolicyGroup, alone: MegatronPolicy, rows_of: Callable[..., Any], tmp_path: Path
) -> None:
    alone.save(tmp_path / "alone", {"step": 3})
    assert pair.load(tmp_path / "alone") == {"step": 3}
    assert pair.weight_version() == pair.updates == alone.updates > 0
    assert pair.is_whole
    pair.save(tmp_path / "pair", {"step": 4})
    assert pair.load(tmp_path / "pair", verify=False) == {"step": 4}
    batch = rows_of(LENGTHS)
    ours = pair.train(batch, token_mean, learning_rate=RATE)
    assert ours == pytest.approx(alone.train(batch, token_mean, learning_rate=RATE), rel=1e-5)


def test_a_shutdown_leaves_no_half_written_checkpoint_that_loads(
    start: Callable[..., MegatronPolicyGroup], rows_of: Callable[..., Any], tmp_path: Path
) -> None:
    group = start(shutdown_timeout_s=1.0)
    group.train(rows_of(LENGTHS), Writing(str(tmp_path / "never")), learning_rate=RATE)
    pending = group.save_async(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="was not complete 1 s after shutdown"):
        group.shutdown()
    assert running(group) == []
    assert not (tmp_path / "saved" / "policy.json").exists()
    with pytest.raises(CheckpointError, match=r"was not saved to .*saved when the group ended"):
        pending.wait()
    group.shutdown()


def test_a_load_that_fails_half_way_ends_the_ranks(
    pair: MegatronPolicyGroup, rows_of: Callable[..., Any], tmp_path: Path
) -> None:
    """All of them gave up together, but weights and optimizer no longer belong to each other."""
    pair.train(rows_of(LENGTHS), breaking_loads, learning_rate=RATE)
    pair.save(tmp_path / "saved")
    with pytest.raises(RankError, match="rank 1 of 2: load failed: OSError: the disk is gone") as caught:
        pair.load(tmp_path / "saved")
    assert isinstance(caught.value.__cause__, OSError)
    assert running(pair) == []
