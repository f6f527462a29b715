"""Routed experts: packed, checked against their tokens, and joined from the calls that sampled them."""

from __future__ import annotations

import base64
import pickle
from array import array
from typing import Any

import pytest

from rl_gym_bridge.failures import GymTokenError
from rl_gym_bridge.postprocess import postprocess_nemo_gym_result
from rl_gym_bridge.routed_experts import RoutedExperts, RoutedExpertsError
from rl_gym_bridge.trajectory import Trajectory

Nested = list[list[list[int]]]


def recorded(tokens: int, start: int = 0) -> Nested:
    """Two layers of three experts, all numbers different."""
    return [[[start + 6 * t + 3 * layer + k for k in range(3)] for layer in range(2)] for t in range(tokens)]


def unpacked(experts: RoutedExperts) -> Nested:
    code = {"int8": "b", "uint8": "B", "int16": "h", "int32": "i"}[experts.dtype]
    flat = array(code, experts.data).tolist()
    width = experts.layers * experts.top_k
    return [
        [
            flat[t * width + layer * experts.top_k : t * width + (layer + 1) * experts.top_k]
            for layer in range(experts.layers)
        ]
        for t in range(experts.tokens)
    ]


def envelope(values: Nested, dtype: str = "int16") -> str:
    code = {"int8": "b", "int16": "h", "int32": "i"}[dtype]
    flat = array(code, [number for token in values for layer in token for number in layer])
    shape = f"{len(values)}x{len(values[0])}x{len(values[0][0])}"
    return f"nrlre1:{dtype}:{shape}:{base64.b64encode(flat.tobytes()).decode()}"


@pytest.mark.parametrize("dtype", ["int16", "int32", "uint8"])
def test_lists_and_text_are_packed_alike(dtype: str) -> None:
    values = recorded(4)
    experts = RoutedExperts.parse(values, dtype)
    assert (experts.dtype, experts.tokens, experts.layers, experts.top_k) == (dtype, 4, 2, 3)
    assert unpacked(experts) == values
    assert RoutedExperts.parse(envelope(values), dtype) == experts
    assert len(experts.data) == 24 * {"int16": 2, "int32": 4, "uint8": 1}[dtype]
    assert pickle.loads(pickle.dumps(experts)) == experts
    assert "data" not in repr(experts)


@pytest.mark.parametrize(
    "values",
    [
        [],
        [[]],
        [[[]]],
        5,
        [5],
        [[5]],
        [[[1], [2]], [[1]]],
        [[[1, 2], [3]]],
        [[[1.0]]],
        [[[True]]],
        [[["1"]]],
        [[[-1]]],
        [[[40000]]],
        "x",
        "nrlre1:int16:1x1x1:",
        "nrlre1:int16:1x1x2:AAA=",
        "nrlre1:int99:1x1x1:AAA=",
        "other:int16:1x1x1:AAA=",
        "nrlre1:int16:1x1:AAA=",
        "nrlre1:int16:1x1x1:!!!",
        "nrlre1:int16:0x1x1:",
        "nrlre1:int16:-1x-1x1:AAA=",
    ],
)
def test_what_is_no_recording_is_refused(values: Any) -> None:
    with pytest.raises(RoutedExpertsError):
        RoutedExperts.parse(values, "int16")


def test_an_unknown_integer_type_is_refused() -> None:
    with pytest.raises(RoutedExpertsError, match="float16"):
        RoutedExperts.parse(recorded(1), "float16")


def replayed(first: Any, second: Any, **settings: Any) -> Trajectory:
    """Two turns: prompt [1,2], sampled [3,4], then new [5], sampled [6]."""
    calls = [([1, 2], [3, 4], first), ([1, 2, 3, 4, 5], [6], second)]
    output = [
        {
            "type": "message",
            "role": "assistant",
            "content": "x",
            "prompt_token_ids": prompt,
            "generation_token_ids": sampled,
            "generation_log_probs": [-0.5] * len(sampled),
            "routed_experts": experts,
        }
        for prompt, sampled, experts in calls
    ]
    return postprocess_nemo_gym_result(
        {"response": {"output": output}, "reward": 1.0}, **{"require_routed_experts": True, **settings}
    )


@pytest.mark.parametrize("unread", [0, 1])
def test_each_token_keeps_the_experts_of_the_call_that_read_it_first(unread: int) -> None:
    """``unread``: engines may or may not record the last sampled token, which no model has read."""
    first, second = recorded(4 - unread), recorded(6 - unread, start=1000)
    experts = replayed(first, second).routed_experts
    assert experts is not None
    assert unpacked(experts) == [*first, *second[4 - unread :]]
    assert experts.tokens == 6 - unread


def test_experts_are_kept_only_where_they_are_required() -> None:
    assert replayed(recorded(4), recorded(6), require_routed_experts=False).routed_experts is None
    assert replayed(None, None, require_routed_experts=False).routed_experts is None


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (None, recorded(6), r"calls \[1\] of 2 record no"),
        (recorded(4), None, r"calls \[2\] of 2 record no"),
        (recorded(4), recorded(4), "call 2 records the experts of 4 tokens.*have 6"),
        (recorded(2), recorded(6), "call 1 records the experts of 2 tokens.*have 4"),
        (recorded(5), recorded(6), "call 1 records the experts of 5 tokens.*have 4"),
        (recorded(4), [[[1]]] * 6, "call 2 records 1 layers of 1 experts"),
        (recorded(4), "junk", "nrlre1"),
    ],
)
def test_experts_that_are_missing_or_do_not_fit_are_refused(first: Any, second: Any, words: str) -> None:
    with pytest.raises(GymTokenError, match=words):
        replayed(first, second)
