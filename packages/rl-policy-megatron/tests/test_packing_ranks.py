"""Packed micro-batches over two ranks: the same numbers as padded rows in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

LENGTHS = [24, 3, 17, 24, 1, 9, 12, 20, 5, 18]
PACKED = {"packing": True, "micro_batch_tokens": 40}
LAYOUTS: dict[str, dict[str, Any]] = {
    "rows": {},
    "tensors": {"tensor": 2},
    "tensors and tokens": {"tensor": 2, "sequence_parallel": True},
    "layers": {"pipeline": 2},
    "experts": {"expert": 2},
}


@dataclass(frozen=True)
class Tokens:
    """Random rows; the loss is the mean negative log-probability over ``predicted`` tokens."""

    input_ids: torch.Tensor
    lengths: torch.Tensor
    predicted: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Tokens:
        ids = torch.randint(0, 61, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(0))
        return cls(ids, torch.tensor(lengths), sum(max(length - 1, 0) for length in lengths))

    def select(self, rows: Sequence[int]) -> Tokens:
        return replace(self, input_ids=self.input_ids[list(rows)], lengths=self.lengths[list(rows)])


def _loss(logits: Any, batch: Tokens) -> tuple[torch.Tensor, dict[str, Any]]:
    return -logits.logprobs().sum() / batch.predicted, {}


def outcome(
    directory: str, lengths: list[int], layout: dict[str, Any], settings: dict[str, Any]
) -> dict[str, Any]:
    """Log-probabilities, gradients, metrics and weights after one update."""
    from rl_policy_megatron import MegatronPolicy, OptimizerSettings, ParallelLayout, PolicySettings

    batch = Tokens.of(lengths)
    # AdamW divides by the gradient's size: a small eps makes a step of the rounding of a gradient near 0.
    learns = OptimizerSettings(eps=1e-3)
    computes = PolicySettings(layout=ParallelLayout(**layout), **settings)
    with MegatronPolicy(directory, computes, learns) as policy:
        return {
            "gradients": policy.gradients(batch, _loss),
            "logprobs": policy.logprobs(batch),
            "metrics": policy.train(batch, _loss, learning_rate=1e-3),
            "weights": {name: tensor.clone() for name, tensor in policy.stream_weights()},
        }


def _assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(found["logprobs"], expected["logprobs"], rtol=1e-5, atol=1e-5)
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)
    for part in ("gradients", "weights"):
        assert found[part].keys() == expected[part].keys()
        scale = max(float(tensor.abs().max()) for tensor in expected[part].values())
        for name, tensor in expected[part].items():
            torch.testing.assert_close(
                found[part][name], tensor, rtol=1e-5, atol=1e-5 * scale, msg=f"{part} of {name}"
            )


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_rows_do_the_same_on_two_ranks(
    layout: str, recompute: str, model_of: Callable[..., Any], ranks_of: Callable[[int], Any]
) -> None:
    """Among them 21 packed tokens, which two ranks cannot share without padding."""
    directory = str(model_of("qwen3-moe" if layout == "experts" else "qwen3-tied")[0])
    for lengths in (LENGTHS, [12, 11]):
        expected = outcome(directory, lengths, {}, {})
        answers = ranks_of(2).call(
            "test_packing_ranks:outcome",
            directory=directory,
            lengths=lengths,
            layout=LAYOUTS[layout],
            settings={**PACKED, "recompute": recompute},
        )
        for answer in answers:
            _assert_equal(answer, expected)


@pytest.mark.parametrize("kind", ["qwen3-moe", "qwen2-tied"])
@pytest.mark.parametrize("lengths", [[7], [1, 9, 0]])
def test_e1_a_rank_without_rows_changes_nothing(
    kind: str, lengths: list[int], model_of: Callable[..., Any], ranks_of: Callable[[int], Any]
) -> None:
    """E1: fewer rows than ranks; with experts, the idle rank still takes part in their exchange."""
    directory = str(model_of(kind)[0])
    expected = outcome(directory, lengths, {}, {})
    layout = {"expert": 2} if "moe" in kind else {}
    for answer in ranks_of(2).call(
        "test_packing_ranks:outcome", directory=directory, lengths=lengths, layout=layout, settings=PACKED
    ):
        _assert_equal(answer, expected)
