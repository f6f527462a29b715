"""The same batch and weights over every layout of ranks: same loss, gradients, step, weights and scores.

Functions whose names begin with ``rank_`` run in the ranks; see ranks.py.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist

from rl_policy_megatron import (
    BatchError,
    MegatronPolicy,
    OptimizerSettings,
    ParallelLayout,
    PeerError,
    PolicyError,
    PolicySettings,
    RuntimeStateError,
    UnsupportedModelError,
)
from rl_policy_megatron.hf_config import read_model_shape

# A large eps: AdamW divides by the gradient's own size, which turns the rounding of a gradient that
# is nearly zero into a step of any sign.
LEARNS = OptimizerSettings(eps=1e-3, weight_decay=0.1, grad_clip=0.05)
LENGTHS = (3, 17, 9, 5, 12, 1, 8)
TOLERANCE = 1e-5


def rich_loss(view: Any, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """Uses everything that a view offers."""
    mask, total = batch.mask, importlib.import_module(type(batch).__module__).Total
    likely, tokens = view.topk_logprobs(3)
    again = view.logprobs_of(tokens)
    share = (
        -(view.logprobs() * mask).sum()
        + 0.3 * (view.entropy() * mask).sum()
        + 0.1 * (likely * mask[..., None]).sum()
        + 0.05 * (again.exp() * mask[..., None]).sum()
    )
    return share / batch.denominator, {"tokens": total(float(mask.sum()))}


def observed(policy: MegatronPolicy, batch: Any) -> dict[str, Any]:
    """Everything that must not depend on the layout."""
    seen: dict[str, Any] = {
        "spec": [(spec.name, spec.shape, spec.dtype) for spec in policy.refit_spec()],
        "initial": {name: tensor.clone() for name, tensor in policy.stream_weights()},
        "parameters": policy.parameter_count,
        "logits": policy.token_logits(batch),
        "logprobs": policy.logprobs(batch),
        "likely": policy.topk_logits(batch, 3)[0],
        "gradients": policy.gradients(batch, rich_loss),
    }
    policy.keep_reference()
    seen["metrics"] = policy.train(batch, rich_loss, learning_rate=1e-2)
    seen["reference"] = policy.reference_logprobs(batch)
    seen["weights"] = {name: tensor.clone() for name, tensor in policy.stream_weights()}
    seen["second"] = policy.train(batch, rich_loss, learning_rate=1e-2)
    seen["trained"] = policy.logprobs(batch)
    return seen


def rank_observes(directory: str, rows: dict[str, Any], layout: dict[str, Any], **settings: Any) -> Any:
    batch = importlib.import_module("conftest").Rows(**rows)
    with MegatronPolicy(
        directory, PolicySettings(layout=ParallelLayout(**layout), **settings), LEARNS
    ) as policy:
        seen = observed(policy, batch)
    # Equal on every rank to the bit: the first one's numbers are enough.
    own = torch.cat([seen["logprobs"].flatten(), *(t.flatten() for t in seen["weights"].values())])
    others = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(others, own)
    seen["same everywhere"] = all(torch.equal(own, other) for other in others)
    return seen if dist.get_rank() == 0 else (seen["same everywhere"], seen["metrics"])


def deviation(got: Any, expected: Any) -> float:
    """Largest difference, relative to the largest number of its tensor."""
    if isinstance(expected, dict):
        assert list(got) == list(expected)
        return max(deviation(got[key], expected[key]) for key in expected)
    if isinstance(expected, torch.Tensor):
        assert got.shape == expected.shape
        if not expected.numel():
            return 0.0
        scale = float(expected.abs().max())
        return float((got - expected).abs().max()) / (scale or 1.0)
    return abs(got - expected) / max(abs(expected), 1e-3)


@pytest.fixture(scope="module")
def alone(model_of: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """``alone(kind, rows, **settings)`` → what one process observes, computed once."""
    known: dict[Any, dict[str, Any]] = {}

    def observe(kind: str, rows: Any, **settings: Any) -> dict[str, Any]:
        key = (kind, tuple(rows.lengths.tolist()), *sorted(settings.items()))
        if key not in known:
            with MegatronPolicy(model_of(kind)[0], PolicySettings(**settings), LEARNS) as policy:
                known[key] = observed(policy, rows)
        return known[key]

    return observe


@pytest.fixture
def agree(
    ranks_of: Callable[[int], Any],
    model_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    alone: Callable[..., Any],
) -> Callable[..., dict[str, float]]:
    """``agree(world, kind, lengths, layout, **settings)``: one process and ``world`` of them see the same."""

    def check(
        world: int, kind: str, lengths: Any, layout: dict[str, Any], **settings: Any
    ) -> dict[str, float]:
        settings = {"micro_batch_size": 2, "logprob_chunk_tokens": 7, "temperature": 0.7, **settings}
        rows = rows_of(lengths, padding=999_999)
        fields = {name: getattr(rows, name) for name in ("input_ids", "lengths", "mask", "denominator")}
        expected = alone(kind, rows, **settings)
        seen, *others = ranks_of(world).call(
            "test_layouts:rank_observes",
            directory=str(model_of(kind)[0]),
            rows=fields,
            layout=layout,
            seconds=100,
            **settings,
        )
        assert seen["same everywhere"]
        assert all(same and metrics == seen["metrics"] for same, metrics in others)
        assert seen["spec"] == expected["spec"]
        assert seen["parameters"] == expected["parameters"]
        assert all(torch.equal(seen["initial"][name], tensor) for name, tensor in expected["initial"].items())
        numbers = ("logits", "logprobs", "likely", "gradients", "metrics")
        numbers += ("reference", "weights", "second", "trained")
        found = {name: deviation(seen[name], expected[name]) for name in numbers}
        print(world, kind, layout, {name: f"{value:.1e}" for name, value in found.items()})
        assert all(value <= TOLERANCE for value in found.values()), found
        return found

    return check


_TENSOR, _SEQUENCE = {"tensor": 2}, {"tensor": 2, "sequence_parallel": True}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("qwen3-tied", _TENSOR),
        ("qwen3-tied", _SEQUENCE),
        ("qwen3-tied", {"pipeline": 2}),
        ("qwen3-tied", {}),
        ("qwen2", _TENSOR),
        ("qwen2", _SEQUENCE),
        ("qwen2", {"pipeline": 2}),
        ("qwen3-moe", {"expert": 2}),
        ("qwen3-moe-mixed", {"pipeline": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "data",
)
def test_two_ranks_see_what_one_sees(agree: Callable[..., Any], kind: str, layout: dict[str, Any]) -> None:
    """Tied and untied. The vocabulary of 61 does not divide: its padding must never be counted."""
    agree(2, kind, LENGTHS, layout)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("qwen3-tied", {**_SEQUENCE, "pipeline": 2}),
        ("qwen3-tied", _TENSOR),
        ("qwen3-moe-tied", {"pipeline": 2, "expert": 2}),
    ],
    ids=["pipeline", "data", "expert"],
)
def test_four_ranks_see_what_one_sees(agree: Callable[..., Any], kind: str, layout: dict[str, Any]) -> None:
    agree(4, kind, LENGTHS, layout)


@pytest.mark.parametrize("layout", [{**_SEQUENCE, "pipeline": 2}, _TENSOR], ids=["pipeline", "data"])
def test_e1_e5_fewer_rows_than_ranks_and_rows_that_predict_nothing(
    agree: Callable[..., Any], layout: dict[str, Any]
) -> None:
    """Five rows among two data ranks leave one with an empty micro-batch; the second row predicts nothing."""
    agree(4, "qwen3-tied", (7, 1, 4, 6, 3) if "pipeline" in layout else (9,), layout)


def _checks() -> Any:
    return importlib.import_module("conftest")


def shares_by_length(view: Any, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """4 for each token of the row with one predicted token, 0 for the others, over all tokens."""
    value = torch.where(batch.lengths == 2, 4.0, 0.0)[:, None]
    loss = ((value + 0 * view.logprobs()) * batch.mask).sum() / batch.denominator
    return loss, {"tokens": _checks().Total(float(batch.mask.sum()))}


def rank_sees_unequal_shares(directory: str) -> dict[str, float]:
    batch = _checks().make_rows((2, 4))
    with MegatronPolicy(directory, optimizer=LEARNS) as policy:
        return policy.train(batch, shares_by_length, learning_rate=0.0)


def test_d17_the_loss_is_no_mean_of_the_ranks_means(
    ranks_of: Callable[[int], Any], model_of: Callable[..., Any]
) -> None:
    """Ranks with 1 and 3 tokens and losses 4 and 0: 1, not 2."""
    seen = ranks_of(2).call("test_layouts:rank_sees_unequal_shares", directory=str(model_of("qwen2")[0]))
    assert seen[0] == seen[1]
    assert seen[0]["loss"] == pytest.approx(1.0, rel=1e-6)
    assert seen[0]["tokens"] == 4


def rank_has_a_loss_that_fails(directory: str, layout: dict[str, Any], failing: int) -> dict[str, Any]:
    batch = _checks().make_rows(LENGTHS)
    rank, world = dist.get_rank(), dist.get_world_size()

    def loss(view: Any, rows: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        # After one collective and before others, where the ranks of a tensor group would wait for ever.
        view.entropy()
        if rank == failing:
            raise KeyError("the reason")
        return rich_loss(view, rows)

    def unlike(view: Any, rows: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        return rich_loss(view, rows) if rank == failing else _checks().token_mean(view, rows)

    class Local(_checks().Total):
        """Of no module that another process could import it from."""

        def merge(self, other: Any) -> Any:
            return self

    def unsendable(view: Any, rows: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        share, _ = rich_loss(view, rows)
        return share, {"tokens": Local(1.0)} if rank == failing else {}

    raised: dict[str, Any] = {}
    settings = PolicySettings(layout=ParallelLayout(**layout), micro_batch_size=2)
    functions = {"loss": loss, "unsendable": unsendable, **({"unlike": unlike} if layout == _TENSOR else {})}
    with MegatronPolicy(directory, settings, LEARNS) as policy:
        before = policy.logprobs(batch)
        for name, function in functions.items():
            try:
                policy.train(batch, function, learning_rate=1e-2)
            except Exception as error:
                raised[name] = (type(error).__name__, str(error))
        try:
            policy.logprobs(_checks().make_rows(LENGTHS[: 3 + (rank == world - 1)]))
        except BatchError as error:
            raised["batches"] = str(error)
        raised["unchanged"] = torch.equal(policy.logprobs(batch), before)
        raised["usable"] = policy.train(batch, rich_loss, learning_rate=1e-2)
    return raised


@pytest.mark.parametrize(
    "layout", [_TENSOR, {"pipeline": 2}, {}], ids=lambda layout: "-".join(layout) or "data"
)
def test_a_loss_that_fails_on_one_rank_fails_on_all_and_leaves_the_policy_usable(
    ranks_of: Callable[[int], Any], model_of: Callable[..., Any], layout: dict[str, Any]
) -> None:
    """The rank itself raises its own exception, the others say whose and why; nobody waits for anybody."""
    failing = 1
    seen = ranks_of(2).call(
        "test_layouts:rank_has_a_loss_that_fails",
        directory=str(model_of("qwen3-tied")[0]),
        layout=layout,
        failing=failing,
        seconds=40,
    )
    own, other = seen[failing], seen[1 - failing]
    assert own["loss"] == ("KeyError", "'the reason'")
    assert other["loss"][0] == "PeerError"
    assert f"rank {failing} of 2 failed: KeyError: 'the reason'" in other["loss"][1]
    assert own["unsendable"][0] == "LossError"
    assert "'tokens' cannot be sent" in other["unsendable"][1]
    if layout == _TENSOR:
        assert own["unlike"][0] == other["unlike"][0] == "PeerError"
        assert "same function" in own["unlike"][1]
    for result in seen:
        assert "every rank needs the whole batch" in result["batches"]
        assert result["unchanged"]
        assert result["usable"] == own["usable"]


def rank_mixes_layouts(directory: str) -> list[str]:
    told = []
    with MegatronPolicy(directory, PolicySettings(layout=ParallelLayout(pipeline=2))) as policy:
        for layout in (ParallelLayout(), ParallelLayout(tensor=2, pipeline=2)):
            with pytest.raises(RuntimeStateError) as caught:
                MegatronPolicy(directory, PolicySettings(layout=layout))
            told.append(str(caught.value))
        with MegatronPolicy(directory, policy.settings) as second:
            assert second.parameter_count == policy.parameter_count
    return told


def test_policies_of_one_process_share_a_layout_that_fits_the_world(
    ranks_of: Callable[[int], Any], model_of: Callable[..., Any]
) -> None:
    directory = str(model_of("qwen2")[0])
    for other, large in ranks_of(2).call("test_layouts:rank_mixes_layouts", directory=directory):
        assert "share one layout" in other
        assert "world of 2 processes" in large


def test_a_layout_that_does_not_divide_the_model_is_refused(model_of: Callable[..., Any]) -> None:
    shape = read_model_shape(model_of("qwen2")[0])
    refused = {
        "num_attention_heads": ({"tensor": 3}, {}),
        "num_key_value_heads": ({"tensor": 4}, {}),
        "intermediate_size": ({"tensor": 2}, {"intermediate": 49}),
        "num_hidden_layers": ({"pipeline": 3}, {}),
        "vocab_size": ({"tensor": 2}, {"vocabulary": 1}),
        "no experts": ({"expert": 2}, {}),
    }
    for words, (layout, changes) in refused.items():
        with pytest.raises(UnsupportedModelError, match=words):
            ParallelLayout(**layout).check_fit(replace(shape, **changes))
    with pytest.raises(UnsupportedModelError, match="needs CUDA"):
        MegatronPolicy(model_of("qwen3-moe")[0], PolicySettings(layout=ParallelLayout(tensor=2)))
    for wrong in ({"tensor": 0}, {"pipeline": 1.5}, {"sequence_parallel": True}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ParallelLayout(**wrong)
    assert ParallelLayout(tensor=2, pipeline=2).data(8) == 2
    with pytest.raises(RuntimeStateError, match="cannot split experts 2 ways"):
        ParallelLayout(tensor=2, expert=2).data(6)


def test_errors_of_other_ranks_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(PeerError("rank 3 of 4 failed", rank=3)))
    assert (str(error), error.rank) == ("rank 3 of 4 failed", 3)


def rank_exports(directory: str, target: str) -> str:
    layout = ParallelLayout(tensor=2, sequence_parallel=True)
    with MegatronPolicy(directory, PolicySettings(layout=layout)) as policy:
        policy.export_hf(target)
        try:
            policy.export_hf(target)
        except PolicyError as error:
            return type(error).__name__
    return ""


def test_an_export_is_the_model_it_came_from_to_the_bit_and_fails_on_all_ranks(
    ranks_of: Callable[[int], Any], model_of: Callable[..., Any], tmp_path: Path
) -> None:
    source, target = model_of("qwen3-tied")[0], tmp_path / "exported"
    told = ranks_of(2).call("test_layouts:rank_exports", directory=str(source), target=str(target))
    assert told == ["CheckpointError", "PeerError"]
    original, exported = (safetensors.torch.load_file(d / "model.safetensors") for d in (source, target))
    assert original.keys() == exported.keys()
    assert all(torch.equal(original[name], exported[name]) for name in original)
