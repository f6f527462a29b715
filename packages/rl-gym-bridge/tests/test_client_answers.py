"""Answers are read as strictly as JSON is defined, whatever is wrong with them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from rl_gym_bridge.answers.parsing import beginning, parse_answer
from rl_gym_bridge.failures import GymAnswerError
from rl_gym_bridge.strict_json import JsonFault, loads_strict

REAL: dict[str, Any] = {
    "responses_create_params": {
        "input": [{"role": "user", "content": "2+2? é \U0001f600"}],
        "temperature": 1.0,
    },
    "response": {
        "output": [
            {
                "type": "message",
                "content": [
                    {"type": "output_text", "text": 'The answer is \\boxed{4}\n"', "annotations": []}
                ],
                "prompt_token_ids": list(range(100, 160)),
                "generation_token_ids": [151_644, 0, 7, 12],
                "generation_log_probs": [-1.1920928955078125e-07, -0.25, 0.0, -13.5],
            }
        ],
        "usage": None,
        "parallel": True,
    },
    "reward": 1.0,
}


@pytest.mark.parametrize("ascii_only", [False, True])
def test_an_answer_is_read_as_it_was_written(ascii_only: bool) -> None:
    assert parse_answer(json.dumps(REAL, ensure_ascii=ascii_only).encode()) == REAL


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "not JSON"),
        (b"[1]", "no JSON object"),
        (b"null", "no JSON object"),
        (b'{"a": 1} x', "not JSON"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": [1, -Infinity]}', "Infinity"),
        (b'{"a": [0.5, 1e999]}', "1e999"),
        (b'{"a": [[0.5], [-1e999, 1e999]]}', "1e999"),
        (b'{"a": ["x", 1e999]}', "1e999"),
        (b'{"a": -1e999}', "1e999"),
        (b'{"a": [{"b": [1, [1e999]]}]}', "1e999"),
        (b'{"a": 1, "a": 1}', "twice"),
        (b'{"a": [{"b": {"c": 1, "c": 2}}]}', "twice"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"\\uDFFF": 1}', "surrogate"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        ('{"a": 1}'.encode("utf-16"), "UTF-8"),
        (b'{"a": "\n"}', "not JSON"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "not JSON"),
        (b"<html>busy</html>", "<html>busy</html>"),
    ],
)
def test_what_is_no_answer_is_refused_and_says_why(body: bytes, why: str) -> None:
    with pytest.raises(GymAnswerError, match=why):
        parse_answer(body)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": [1e308, 1e308, -1e308]}',
        '{"a": [9007199254740993, 1e5]}',
        '{"a": [' + "9" * 400 + ", 1.5]}",
        '{"a": "\\ud83d\\ude00"}',
        '{"a": "\\\\ud800"}',
        '{"a": [true, null, false, "x", {}]}',
    ],
)
def test_what_only_looks_doubtful_is_read(text: str) -> None:
    assert parse_answer(text.encode()) == json.loads(text)


def mutant(rng: random.Random, whole: bytes) -> bytes:
    """One fault: cut, flipped bits, a value of another type, something doubled or left out."""
    kind = rng.randrange(6)
    at = rng.randrange(len(whole))
    if kind == 0:
        return whole[:at]
    if kind == 1:
        changed = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        return bytes(changed)
    if kind == 2:
        return whole[:at] + whole[at + rng.randrange(1, 20) :]
    if kind == 3:
        return whole[: at + 20] + whole[at:]
    tokens = [b"1.0", b"null", b"true", b"-0.25", b"151644", b"[]", b'"message"', b'"reward"']
    swaps = [b"NaN", b"1e999", b'"1"', b"{}", b"[[]]", b"nul", b"-", b'"\\ud800"', b'"reward"', b"1.0"]
    return whole.replace(rng.choice(tokens), rng.choice(swaps), rng.randrange(1, 3))


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(5))
def test_every_mutant_is_a_typed_error_or_exactly_what_strict_json_says(seed: int) -> None:
    rng = random.Random(seed)
    whole = json.dumps(REAL, ensure_ascii=bool(seed % 2)).encode()
    refused = 0
    for _ in range(400):
        body = mutant(rng, whole)
        try:
            expected = loads_strict(body.decode("utf-8"))
            assert isinstance(expected, dict)
        except (JsonFault, UnicodeDecodeError, AssertionError):
            with pytest.raises(GymAnswerError):
                parse_answer(body)
            refused += 1
        else:
            assert json.dumps(parse_answer(body)) == json.dumps(expected)
    assert 100 < refused < 400


def test_the_beginning_of_any_bytes_is_text() -> None:
    assert beginning(b"abc", 3) == "abc"
    assert beginning(b"abcd", 3) == "abc…"
    assert beginning(b"\xff" * 100, 3) == "\ufffd" * 3 + "…"
    assert beginning("é".encode() * 3, 3) == "ééé"
    assert beginning(b"", 3) == ""
