"""Checkpoints of several ranks: any layout goes on from any other, and all ranks fail or none.

Functions whose names begin with ``rank_`` run in the ranks; see ranks.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_policy_megatron import (
    CheckpointError,
    LoraSettings,
    MegatronPolicy,
    OptimizerSettings,
    ParallelLayout,
    PeerError,
    PolicySettings,
    checkpoint,
)

LENGTHS = (3, 17, 9, 5, 12, 1, 8)
RATE = 1e-2
TOLERANCE = 1e-5
# A large eps: AdamW divides by the gradient's own size, which turns the rounding of a gradient that
# is nearly zero into a step of any sign.
LEARNS = OptimizerSettings(eps=1e-3, weight_decay=0.1, grad_clip=0.5)


def _conftest() -> Any:
    """The one beside this file: pytest and the script that is a rank know it by different names."""
    try:
        return importlib.import_module("packages.rl-policy-megatron.tests.conftest")
    except ModuleNotFoundError:
        return importlib.import_module("conftest")


def _policy(source: str, layout: dict[str, Any], **settings: Any) -> MegatronPolicy:
    made = PolicySettings(layout=ParallelLayout(**layout), micro_batch_size=2, **settings)
    return MegatronPolicy(source, made, LEARNS)


def _batch(step: int) -> Any:
    return _conftest().make_rows(LENGTHS, seed=step)


def _noisy(logits: Any, batch: Any) -> Any:
    """A loss that also depends on the random stream of each data-parallel rank."""
    loss, metrics = _conftest().token_mean(logits, batch)
    return loss * (1 + 0.5 * torch.rand(())), metrics


def _goes_on(policy: MegatronPolicy, first: int, last: int, loss: Any = None) -> list[dict[str, float]]:
    loss = loss or _conftest().token_mean
    return [policy.train(_batch(step), loss, learning_rate=RATE) for step in range(first, last)]


def _seen(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    """Everything that a checkpoint must bring back, in what it does."""
    seen = {name: tensor.clone() for name, tensor in policy.stream_weights()}
    return {**seen, "scores": policy.logprobs(_batch(9)), "reference": policy.reference_logprobs(_batch(9))}


def rank_resumes(source: str, saved: str, layout: dict[str, Any], target: str | None = None) -> Any:
    """Go on from a checkpoint, and save where that led."""
    with _policy(source, layout) as policy:
        policy.load(saved)
        metrics = _goes_on(policy, 3, 6)
        seen = _seen(policy)
        if target is not None:
            policy.save(target)
    return metrics, seen


def rank_resumes_itself(source: str, directory: str, layout: dict[str, Any], **settings: Any) -> Any:
    """Six updates at once, and six with a save in the background, a load, and other updates in between."""
    with _policy(source, layout, **settings) as straight:
        straight.keep_reference()
        expected = _goes_on(straight, 0, 3, _noisy)
        pending = straight.save_async(directory)
        expected += _goes_on(straight, 3, 6, _noisy)
        pending.wait()
        end = _seen(straight)
    with _policy(source, layout, **settings, seed=5) as resumed:
        _goes_on(resumed, 4, 6, _noisy)
        resumed.load(directory)
        equal = _goes_on(resumed, 3, 6, _noisy) == expected[3:]
        again = _seen(resumed)
        equal = equal and all(torch.equal(again[name], tensor) for name, tensor in end.items())
    return equal, sorted(path.name for path in Path(directory).iterdir())


def rank_fails(source: str, directory: str, failing: int) -> list[tuple[str, str]]:
    """What every rank is told where one of them cannot save, and where none can load."""
    told = []

    def attempt(action: Callable[[], Any]) -> None:
        try:
            action()
        except (CheckpointError, PeerError) as error:
            told.append((type(error).__name__, str(error)))
        else:
            told.append(("", ""))

    original = checkpoint.write_tensors

    def broken(path: Path, tensors: Any) -> None:
        if torch.distributed.get_rank() == failing:
            raise OSError("the disk is gone")
        original(path, tensors)

    at = Path(directory)
    with _policy(source, {"pipeline": 2}) as policy:
        checkpoint.write_tensors = broken
        try:
            attempt(lambda: policy.save(at / "partial"))
        finally:
            checkpoint.write_tensors = original
        attempt(lambda: policy.load(at / "partial"))
        attempt(lambda: policy.save(at / "partial"))
        attempt(lambda: policy.save(at / "partial"))
        attempt(lambda: policy.load(at / "partial"))
    return told


@pytest.fixture(scope="module")
def one_process(model_of: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """``one_process(kind)`` → checkpoint after three updates, and metrics and numbers after six."""
    known: dict[str, Any] = {}

    def make(kind: str) -> Any:
        if kind not in known:
            saved = tmp_path_factory.mktemp("one") / "saved"
            with _policy(str(model_of(kind)[0]), {}) as policy:
                policy.keep_reference()
                _goes_on(policy, 0, 3)
                policy.save(saved)
                known[kind] = saved, _goes_on(policy, 3, 6), _seen(policy)
        return known[kind]

    return make


def _same(got: Any, expected: Any) -> None:
    metrics, seen = got
    expected_metrics, expected_seen = expected
    for one, other in zip(metrics, expected_metrics, strict=True):
        assert one == pytest.approx(other, rel=TOLERANCE)
    assert seen.keys() == expected_seen.keys()
    for name, tensor in expected_seen.items():
        assert float((seen[name] - tensor).abs().max()) <= TOLERANCE * max(1.0, float(tensor.abs().max())), (
            name
        )


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("qwen3-tied", {"tensor": 2}),
        ("qwen2", {"tensor": 2, "sequence_parallel": True}),
        ("qwen3-tied", {"pipeline": 2}),
        ("qwen2", {}),
        ("qwen3-moe", {"expert": 2}),
    ],
    ids=["tensor", "sequence", "pipeline", "data", "expert"],
)
def test_h14_one_process_to_two_ranks_and_back(
    kind: str,
    layout: dict[str, Any],
    one_process: Callable[..., Any],
    ranks_of: Callable[[int], Any],
    model_of: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """H14: 1 → 2 ranks within 1e-5, 2 → 1 to the bit, and what 2 ranks saved trains on in one process."""
    saved, metrics, seen = one_process(kind)
    source, target = str(model_of(kind)[0]), tmp_path / "two"
    answers = ranks_of(2).call(
        "test_checkpoint_ranks:rank_resumes",
        source=source,
        saved=str(saved),
        layout=layout,
        target=str(target),
        seconds=100,
    )
    for answer in answers:
        _same(answer, (metrics, seen))
    split = layout.get("pipeline", 1) > 1 or layout.get("expert", 1) > 1
    assert len(list(target.glob("weights-*"))) == (2 if split else 1)
    with _policy(source, {}) as policy:
        policy.load(target)
        found = _seen(policy)
        weights = [name for name, _ in policy.stream_weights()]
        assert all(torch.equal(found[name], answers[0][1][name]) for name in weights)
        further = _goes_on(policy, 6, 8)
        policy.load(saved)
        _goes_on(policy, 3, 6)
        for one, other in zip(further, _goes_on(policy, 6, 8), strict=True):
            assert one == pytest.approx(other, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "layout", "settings"),
    [
        ("qwen3-tied", {"tensor": 2}, {}),
        ("qwen3-tied", {"pipeline": 2}, {"dtype": "bfloat16"}),
        ("qwen2", {}, {}),
        ("qwen2", {}, {"lora": LoraSettings(rank=2)}),
    ],
    ids=["tensor", "pipeline", "data", "lora"],
)
def test_h13_two_ranks_resume_to_the_bit_while_saving_in_the_background(
    kind: str,
    layout: dict[str, Any],
    settings: dict[str, Any],
    ranks_of: Callable[[int], Any],
    model_of: Callable[..., Any],
    tmp_path: Path,
) -> None:
    answers = ranks_of(2).call(
        "test_checkpoint_ranks:rank_resumes_itself",
        source=str(model_of(kind)[0]),
        directory=str(tmp_path / "saved"),
        layout=layout,
        seconds=100,
        **settings,
    )
    for equal, files in answers:
        assert equal
        streams = [name for name in files if name.startswith("random")]
        assert len(streams) == (1 if layout else 2), "one stream per data-parallel rank"


def test_h14_two_ranks_to_four(
    one_process: Callable[..., Any],
    ranks_of: Callable[[int], Any],
    model_of: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """H14: what two pipeline stages saved goes on over four ranks, as tensor × pipeline and as data."""
    saved, metrics, seen = one_process("qwen3-tied")
    source, two = str(model_of("qwen3-tied")[0]), tmp_path / "two"
    ranks_of(2).call(
        "test_checkpoint_ranks:rank_saves", source=source, saved=str(saved), directory=str(two), seconds=100
    )
    for layout in ({"tensor": 2, "pipeline": 2, "sequence_parallel": True}, {}):
        answers = ranks_of(4).call(
            "test_checkpoint_ranks:rank_resumes", source=source, saved=str(two), layout=layout, seconds=100
        )
        for answer in answers:
            _same(answer, (metrics, seen))


def rank_saves(source: str, saved: str, directory: str) -> None:
    with _policy(source, {"pipeline": 2}) as policy:
        policy.load(saved)
        policy.save(directory)


@pytest.mark.parametrize("failing", [0, 1])
def test_h7_all_ranks_get_an_error_or_none(
    failing: int, ranks_of: Callable[[int], Any], model_of: Callable[..., Any], tmp_path: Path
) -> None:
    answers = ranks_of(2).call(
        "test_checkpoint_ranks:rank_fails",
        source=str(model_of("llama")[0]),
        directory=str(tmp_path),
        failing=failing,
        seconds=100,
    )
    for rank, (gone, unloadable, saved, full, loaded) in enumerate(answers):
        assert gone[0] == "CheckpointError"
        assert "the disk is gone" in gone[1]
        assert (f"rank {failing}" in gone[1]) == (rank != failing)
        assert unloadable[0] == "CheckpointError"
        assert saved == ("", ""), "what a failed save left is in nobody's way"
        assert full[0] == ("CheckpointError" if rank == 0 else "PeerError")
        assert "not empty" in full[1]
        assert loaded == ("", "")
