"""Adapters over layouts that split the model: same numbers as in one process, and the same files.

Functions whose names begin with ``rank_`` run in the ranks; see ranks.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rl_policy_megatron import LoraSettings, MegatronPolicy, OptimizerSettings, ParallelLayout, PolicySettings

pytestmark = pytest.mark.slow

LENGTHS = (3, 17, 9, 5, 12, 1, 8)
TOLERANCE = 1e-5
# A large eps: AdamW divides by the gradient's own size, which turns the rounding of a gradient that
# is nearly zero into a step of any sign.
LEARNS = OptimizerSettings(eps=1e-3, weight_decay=0.1, grad_clip=0.05)
ALL = {"rank": 3, "alpha": 7.0}
# One of three projections that share a matrix, one of two, and both matrices whose inputs are split.
SOME = {**ALL, "targets": ("k_proj", "o_proj", "up_proj", "down_proj")}
ATTENTION = {**ALL, "targets": ("q_proj", "k_proj", "v_proj", "o_proj")}
SEQUENCE = {"tensor": 2, "sequence_parallel": True}
CASES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "tensor": ("llama", 2, ALL, {"tensor": 2}, {"packing": True}),
    "tensor, some projections": ("qwen3-tied", 2, SOME, {"tensor": 2}, {"micro_batch_size": 2}),
    "sequence": ("qwen2", 2, ALL, SEQUENCE, {"micro_batch_size": 3}),
    "sequence, some projections": ("llama", 2, SOME, SEQUENCE, {"recompute": "full"}),
    "pipeline": ("qwen3-tied", 2, ALL, {"pipeline": 2}, {"micro_batch_size": 2}),
    "experts": ("qwen3-moe", 2, ATTENTION, {"expert": 2}, {}),
    "tensor and pipeline": ("qwen2", 4, ALL, {"tensor": 2, "pipeline": 2}, {"recompute": "full"}),
    "sequence and rows": ("llama", 4, SOME, SEQUENCE, {"packing": True}),
}


def loss(view: Any, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    total = importlib.import_module(type(batch).__module__).Total
    share = (-(view.logprobs() + 0.3 * view.entropy()) * batch.mask).sum() / batch.denominator
    return share, {"tokens": total(float(batch.mask.sum()))}


def observed(policy: MegatronPolicy, batch: Any, directory: Path, other: Path | None) -> dict[str, Any]:
    """What must not depend on the layout: from the base on, and from where another layout had stopped."""
    seen: dict[str, Any] = {"parameters": policy.parameter_count, "base": policy.logprobs(batch)}
    # Away from B = 0, where half of the gradients vanish.
    seen["first"] = policy.train(batch, loss, learning_rate=5e-2)
    policy.keep_reference()
    seen["gradients"] = policy.gradients(batch, loss)
    seen["second"] = policy.train(batch, loss, learning_rate=1e-2)
    seen["reference"] = policy.reference_logprobs(batch)
    policy.save(directory)
    seen["third"] = policy.train(batch, loss, learning_rate=1e-2)
    seen["weights"] = {name: tensor.clone() for name, tensor in policy.stream_weights()}
    seen["logprobs"] = policy.logprobs(batch)
    if other is not None:
        policy.load(other)
        seen["reference"] = policy.reference_logprobs(batch)
        seen["third"] = policy.train(batch, loss, learning_rate=1e-2)
        seen["weights"] = {name: tensor.clone() for name, tensor in policy.stream_weights()}
    return seen


def rank_observes(
    directory: str,
    rows: dict[str, Any],
    lora: dict[str, Any],
    layout: dict[str, Any],
    settings: dict[str, Any],
    own: str,
    other: str,
) -> dict[str, Any]:
    batch = importlib.import_module("conftest").Rows(**rows)
    made = PolicySettings(layout=ParallelLayout(**layout), lora=LoraSettings(**lora), **settings)
    with MegatronPolicy(directory, made, LEARNS) as policy:
        straight = observed(policy, batch, Path(own), None)
    with MegatronPolicy(directory, made, LEARNS) as policy:
        crossed = observed(policy, batch, Path(f"{own}-again"), Path(other))
    # Equal on every rank to the bit: the first one's numbers are enough.
    numbers = torch.cat([tensor.flatten() for tensor in straight["weights"].values()])
    others = [torch.empty_like(numbers) for _ in range(dist.get_world_size())]
    dist.all_gather(others, numbers)
    assert all(torch.equal(numbers, seen) for seen in others)
    return {"straight": straight, "crossed": crossed} if dist.get_rank() == 0 else {}


def deviation(got: Any, expected: Any) -> float:
    """Largest difference, relative to the largest number of its tensor."""
    if isinstance(expected, dict):
        assert got.keys() == expected.keys()
        return max(deviation(got[key], expected[key]) for key in expected)
    if isinstance(expected, torch.Tensor):
        assert got.shape == expected.shape
        return float((got - expected).abs().max()) / (float(expected.abs().max()) or 1.0)
    return abs(got - expected) / max(abs(expected), 1e-3)


@pytest.mark.parametrize("name", CASES)
def test_a_layout_changes_no_number_of_adapters_and_reads_what_another_has_saved(
    name: str,
    ranks_of: Callable[[int], Any],
    model_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    tmp_path: Path,
) -> None:
    kind, world, lora, layout, settings = CASES[name]
    directory, batch = model_of(kind)[0], rows_of(LENGTHS)
    alone = PolicySettings(lora=LoraSettings(**lora))
    with MegatronPolicy(directory, alone, LEARNS) as policy:
        expected = observed(policy, batch, tmp_path / "alone", None)
    found = ranks_of(world).call(
        "test_lora_ranks:rank_observes",
        directory=str(directory),
        rows={part: getattr(batch, part) for part in ("input_ids", "lengths", "mask", "denominator")},
        lora=lora,
        layout=layout,
        settings=settings,
        own=str(tmp_path / "ranks"),
        other=str(tmp_path / "alone"),
    )[0]
    assert deviation(found["straight"], expected) < TOLERANCE
    assert deviation(found["crossed"], expected) < TOLERANCE
    written = [key for file in (tmp_path / "ranks").glob("adapters-*") for key in load_file(file)]
    assert sorted(written) == sorted(expected["gradients"])
    assert min(float(gradient.abs().max()) for gradient in expected["gradients"].values()) > 1e-4
    with MegatronPolicy(directory, alone, LEARNS) as policy:
        policy.load(tmp_path / "ranks")
        assert deviation(policy.reference_logprobs(batch), expected["reference"]) < TOLERANCE
        assert deviation(policy.train(batch, loss, learning_rate=1e-2), expected["third"]) < TOLERANCE
