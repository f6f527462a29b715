from __future__ import annotations

import pickle

import pytest

from rl_gym_bridge.chat import ChatReply, ChatRequest, ContinuityError, new_prompt_tokens
from rl_gym_bridge.trajectory import StopReason


def test_new_prompt_tokens_are_those_behind_the_seen_ones() -> None:
    assert new_prompt_tokens((1, 2), (1, 2, 7, 8), turn=2) == (7, 8)
    assert new_prompt_tokens((), (4,), turn=1) == (4,)


def test_b5_a_prompt_that_changes_earlier_tokens_names_turn_and_index() -> None:
    with pytest.raises(ContinuityError) as caught:
        new_prompt_tokens([1, 2, 3, 4], [1, 2, 3, 9, 5], turn=2)
    error = caught.value
    assert (error.turn, error.index, error.got, error.want) == (2, 3, 9, 4)
    assert "turn 2" in str(error)
    assert "index 3 got 9, want 4" in str(error)


def test_b5_a_prompt_that_ends_too_early_is_no_extension() -> None:
    with pytest.raises(ContinuityError) as caught:
        new_prompt_tokens([1, 2, 3], [1, 2], turn=3)
    assert (caught.value.index, caught.value.got, caught.value.want) == (2, None, 3)


def test_continuity_error_keeps_its_facts_across_processes() -> None:
    error = pickle.loads(pickle.dumps(ContinuityError(turn=2, index=3, got=9, want=4)))
    assert (error.turn, error.index, error.got, error.want) == (2, 3, 9, 4)
    assert str(error) == str(ContinuityError(turn=2, index=3, got=9, want=4))


def test_new_messages_are_all_of_them_in_the_first_turn() -> None:
    shown = (
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    )
    assert ChatRequest(messages=shown, max_new_tokens=1).new_messages == shown


def test_new_messages_are_those_after_the_last_answer_in_later_turns() -> None:
    messages = (
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "tool", "content": "c"},
        {"role": "tool", "content": "d"},
    )
    assert (
        ChatRequest(messages=messages, max_new_tokens=1, prefix_token_ids=(1,)).new_messages == messages[2:]
    )


@pytest.mark.parametrize("reason", [StopReason.TOOL_LIMIT, StopReason.ENVIRONMENT_FAILURE])
def test_an_engine_cannot_stop_for_a_reason_of_the_environment(reason: StopReason) -> None:
    with pytest.raises(ValueError, match=reason.value):
        ChatReply((1,), (2,), (-0.1,), "x", reason, 0)
