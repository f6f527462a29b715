"""What a loss function may be and return; everything else is refused in words that name it.

Functions whose names begin with ``rank_`` run in the ranks; see ranks.py.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rl_policy_megatron import LossError, MegatronPolicy, ParallelLayout, PeerError, PolicySettings

LENGTHS = (9, 3, 7, 5)
CONTRACT = "it must return (loss, metrics)"


class Odd:
    """A metric that cannot do what metrics do."""

    def __init__(self, broken: str = "merge") -> None:
        self._broken = broken

    def merge(self, other: Any) -> Any:
        if self._broken == "merge":
            raise RuntimeError("cannot be added up")
        return self

    def value(self) -> Any:
        return "many"


def share(view: Any, batch: Any) -> torch.Tensor:
    return -(view.logprobs() * batch.mask).sum() / batch.denominator


def total_of(batch: Any) -> Callable[[float], Any]:
    return importlib.import_module(type(batch).__module__).Total


# What a loss function returns, and what is said of it.
WRONG: dict[str, tuple[Callable[[Any, Any], Any], list[str]]] = {
    "a loss alone": (share, ["returned a float32 tensor of shape ()", CONTRACT]),
    "nothing": (lambda view, batch: None, ["returned None", CONTRACT]),
    "three things": (
        lambda view, batch: (share(view, batch), {}, 3),
        ["a tuple of 3 (a float32 tensor of shape (), a dict ({}), 3)", CONTRACT],
    ),
    "a list": (lambda view, batch: [share(view, batch), {}], ["a list of 2", CONTRACT]),
    "a number": (lambda view, batch: (1.5, {}), ["returned 1.5 as its loss", "float32 scalar"]),
    "a vector": (
        lambda view, batch: (view.logprobs(), {}),
        ["float32 tensor of shape (", "as its loss", "scalar"],
    ),
    "an integer": (
        lambda view, batch: (torch.zeros((), dtype=torch.int64), {}),
        ["int64 tensor of shape ()", "float32 scalar"],
    ),
    "half precision": (
        lambda view, batch: (share(view, batch).bfloat16(), {}),
        ["bfloat16 tensor of shape ()"],
    ),
    "NaN": (
        lambda view, batch: (share(view, batch) * math.nan, {}),
        ["a loss of nan", "count that can be 0"],
    ),
    "infinity": (lambda view, batch: (share(view, batch) / 0, {}), ["a loss of inf"]),
    "detached": (
        lambda view, batch: (share(view, batch).detach(), {}),
        ["without gradient", "logits.logprobs()", "detach()"],
    ),
    "detached at times": (
        lambda view, batch: (
            share(view, batch).detach() if len(batch.mask[0]) < 8 else share(view, batch),
            {},
        ),
        ["returned a loss of ", "without gradient, so nothing would be learned"],
    ),
    "always a constant 0": (lambda view, batch: (torch.zeros(()), {}), ["without gradient only"]),
    "metrics of no kind": (lambda view, batch: (share(view, batch), 3), ["returned 3 for metrics", CONTRACT]),
    "a number for a metric": (
        lambda view, batch: (share(view, batch), {"kl": 0.5}),
        ["returned 0.5 for the metric 'kl'", "merge(other) and value()", "Mean(total, count)"],
    ),
    "a tensor for a metric": (
        lambda view, batch: (share(view, batch), {"kl": torch.zeros(2)}),
        ["float32 tensor of shape (2,) for the metric 'kl'"],
    ),
    "a class for a metric": (
        lambda view, batch: (share(view, batch), {"kl": Odd}),
        ["a type (", "for the metric 'kl'"],
    ),
    "a number for a name": (
        lambda view, batch: (share(view, batch), {3: total_of(batch)(1.0)}),
        ["named a metric 3", "strings"],
    ),
    "a name of the policy's own": (
        lambda view, batch: (share(view, batch), {"grad_norm": total_of(batch)(1.0)}),
        ["named a metric 'grad_norm'", "another name"],
    ),
    "names that change": (
        lambda view, batch: (
            share(view, batch),
            {"tokens": total_of(batch)(1.0), f"of {batch.input_ids.size(1)}": total_of(batch)(1.0)},
        ),
        ["other metrics for one micro-batch than for those before (of 7, of 9 in some only)", "count of 0"],
    ),
    "metrics that do not merge": (
        lambda view, batch: (share(view, batch), {"odd": Odd()}),
        ["the metric 'odd' was", "do not merge: RuntimeError: cannot be added up"],
    ),
    "kinds that change": (
        lambda view, batch: (
            share(view, batch),
            {"mixed": total_of(batch)(1.0) if batch.input_ids.size(1) == 9 else Odd()},
        ),
        ["the metric 'mixed' was Total(total=", "AttributeError"],
    ),
    "a metric without a value": (
        lambda view, batch: (share(view, batch), {"odd": Odd("value")}),
        ["value() of the metric 'odd'", "gave no number: ValueError"],
    ),
}


def named(name: str) -> str:
    """Where a loss function of the table is from, as messages say it."""
    function = WRONG[name][0]
    return f"the loss function {function.__module__}.{function.__qualname__}"


@pytest.fixture(scope="module")
def policy(model_of: Callable[..., Any]) -> Any:
    with MegatronPolicy(model_of("llama")[0], PolicySettings(micro_batch_size=1)) as made:
        yield made


@pytest.mark.parametrize("name", WRONG)
def test_what_breaks_the_contract_is_told_by_name(
    name: str, policy: Any, rows_of: Callable[..., Any], weights_hash: Callable[..., Any]
) -> None:
    function, told = WRONG[name]
    before = weights_hash(policy)
    with pytest.raises(LossError) as caught:
        policy.train(rows_of(LENGTHS), function, learning_rate=1e-2)
    message = str(caught.value)
    for part in (named(name), *told):
        assert part in message
    assert "\n" not in message
    assert weights_hash(policy) == before
    with pytest.raises(LossError):
        policy.gradients(rows_of(LENGTHS), function)


def only_a_view(view: Any) -> None:
    pytest.fail("was called")


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (None, ["callable as loss_fn(logits, batch)", "got None"]),
        (Odd, ["got a type", "make an object of it"]),
        (only_a_view, ["only_a_view must take (logits, batch)", "it takes (view: "]),
        (functools.partial(share, batch=3), ["share must take (logits, batch)"]),
    ],
)
def test_what_is_no_loss_function_is_refused_before_anything_is_computed(
    function: Any, told: list[str], policy: Any, rows_of: Callable[..., Any]
) -> None:
    with pytest.raises(LossError) as caught:
        policy.train(rows_of(LENGTHS), function, learning_rate=0.0)
    for part in told:
        assert part in str(caught.value)


def test_what_a_micro_batch_without_anything_to_train_may_return(
    policy: Any, rows_of: Callable[..., Any]
) -> None:
    """No gradient and no metrics, in float64 as well; and of no token nothing is asked."""

    def careful(view: Any, batch: Any) -> Any:
        if batch.input_ids.size(1) < 6:
            return torch.zeros((), dtype=torch.float64), {}
        return share(view, batch).double(), {"rows": total_of(batch)(1.0)}

    assert policy.train(rows_of(LENGTHS), careful, learning_rate=0.0)["rows"] == 2
    silent = policy.train(rows_of([1, 1]), lambda *_: (torch.zeros(()), {}), learning_rate=0.0)
    assert silent == {"loss": 0.0, "grad_norm": 0.0}


def rank_breaks_the_contract(directory: str, rows: dict[str, Any], layout: dict[str, Any]) -> Any:
    """On all ranks, and on rank 1 alone: what each rank raises; and that the policy goes on."""
    batch = importlib.import_module("conftest").Rows(**rows)
    rank, seen = dist.get_rank(), {}
    settings = PolicySettings(layout=ParallelLayout(**layout), micro_batch_size=1)

    def raised(function: Any) -> tuple[str, str]:
        try:
            policy.train(batch, function, learning_rate=1e-2)
        except Exception as error:
            return type(error).__name__, str(error)
        return "nothing", ""

    def right(view: Any, rows: Any) -> Any:
        return share(view, rows), {"tokens": total_of(rows)(1.0)}

    with MegatronPolicy(directory, settings) as policy:
        for name, (function, _) in WRONG.items():
            alone = right if rank == 0 else function
            seen[name] = raised(function), raised(alone)
        seen["no function"] = raised(None), raised(None if rank else right)
        seen["right"] = raised(right), raised(right)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"tensor": 2}, {"pipeline": 2}], ids=["data", "tensor", "pipeline"])
def test_all_ranks_learn_of_a_broken_contract(
    layout: dict[str, int],
    ranks_of: Callable[..., Any],
    model_of: Callable[..., Any],
    rows_of: Callable[..., Any],
) -> None:
    batch = rows_of((*LENGTHS, 9, 3, 7, 5))
    rows = {name: getattr(batch, name) for name in ("input_ids", "lengths", "mask", "denominator")}
    answers = ranks_of(2).call(
        "test_loss_contract:rank_breaks_the_contract",
        directory=str(model_of("llama")[0]),
        rows=rows,
        layout=layout,
        seconds=240.0,
    )
    assert [answer["right"] for answer in answers] == [(("nothing", ""), ("nothing", ""))] * 2
    first, second = answers
    for name, (_, told) in WRONG.items():
        assert {first[name][0][0], second[name][0][0]} <= {LossError.__name__, PeerError.__name__}, name
        told_of_all = first[name][0][1] + second[name][0][1]
        assert all(part in told_of_all for part in (told[0], told[-1])), name
    # What one rank alone does wrong, the other learns from it; a first stage asks for no loss at all.
    for name in ("a loss alone", "detached", "NaN", "a number for a metric", "no function"):
        assert second[name][1][0] == LossError.__name__, name
        assert first[name][1][0] == PeerError.__name__, name
        assert second[name][1][1][:40] in first[name][1][1] or layout == {"tensor": 2}, name
