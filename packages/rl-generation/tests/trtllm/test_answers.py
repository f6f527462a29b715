"""From the engine's outputs to tokens with their own log-probabilities."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rl_generation.failures import DeadlineError, GenerationError
from rl_generation.trtllm.answers import Piece, read_output

STOP = 9


def output(tokens: list[int], logprobs: list[Any], reason: str | None = "stop") -> Any:
    return SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason=reason)


def read(given: Any, room: int = 8) -> Piece:
    return read_output(given, (STOP,), room, "t")


def candidates(**logprobs: float) -> dict[int, Any]:
    return {int(name[1:]): SimpleNamespace(logprob=value) for name, value in logprobs.items()}


@pytest.mark.parametrize("repeated", [0, 1, 3])
def test_stop_tokens_behind_the_sampled_one_go_with_their_log_probabilities(repeated: int) -> None:
    given = output([4, 5, STOP, *[STOP] * repeated], [-0.1, -0.2, -0.3, *[-7.0] * repeated])
    assert read(given) == Piece((4, 5, STOP), (-0.1, -0.2, -0.3), "stop")


def test_padding_of_any_kind_behind_the_stop_token_goes() -> None:
    assert read(output([4, STOP, 0, 0], [-0.1, -0.3, -1.0, -1.0])).token_ids == (4, STOP)


def test_padding_may_exceed_the_room() -> None:
    assert read(output([4, STOP, STOP, STOP], [-0.1, -0.3, -1.0, -1.0]), room=2).token_ids == (4, STOP)


def test_an_answer_of_one_stop_token() -> None:
    assert read(output([STOP, STOP], [-0.3, -0.1])) == Piece((STOP,), (-0.3,), "stop")


def test_a_length_stop_keeps_everything() -> None:
    assert read(output([4, 5], [-0.1, -0.2], "length")) == Piece((4, 5), (-0.1, -0.2), "length")


def test_a_stop_token_in_the_last_place_is_a_stop() -> None:
    assert read(output([4, STOP], [-0.1, -0.2], "length")).stop_reason == "stop"


def test_the_sampled_tokens_entry_counts_and_not_the_first() -> None:
    given = output([4, 5], [candidates(t8=-0.1, t4=-2.0), candidates(t5=-0.4)], "length")
    assert read(given).logprobs == (-2.0, -0.4)


def test_an_aborted_answer_is_cut_to_its_pairs() -> None:
    assert read(output([4, 5], [-0.1, -0.2, -0.2, -0.2], "cancelled")) == Piece(
        (4, 5), (-0.1, -0.2), "aborted"
    )
    assert read(output([4, 5], [-0.1], "cancelled")) == Piece((4,), (-0.1,), "aborted")
    assert read(output([], [], "cancelled")) == Piece((), (), "aborted")


@pytest.mark.parametrize(
    "given",
    [
        output([4, 5], [-0.1], "length"),
        output([4], [], "length"),
        output([4], [candidates(t8=-0.1)], "length"),
        output([4], [float("-inf")], "length"),
        output([4], [float("nan")], "length"),
        output([4], [0.5], "length"),
        output([4], [-0.1], "stop"),
        output([4], [-0.1], None),
        output([4] * 9, [-0.1] * 9, "length"),
    ],
    ids=[
        "too few log-probabilities",
        "none",
        "of another token",
        "minus infinity",
        "no number",
        "above zero",
        "without its stop token",
        "without a reason",
        "longer than asked for",
    ],
)
def test_what_is_no_answer_is_an_error(given: Any) -> None:
    with pytest.raises(GenerationError, match="t: "):
        read(given)


def test_rounding_does_not_lift_a_log_probability_above_zero() -> None:
    assert read(output([4], [1e-7], "length")).logprobs == (0.0,)


def test_a_request_that_the_engine_gave_up_on_may_be_sent_again() -> None:
    with pytest.raises(DeadlineError):
        read(output([4], [-0.1], "timeout"))
