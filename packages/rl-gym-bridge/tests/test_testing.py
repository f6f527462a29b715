from __future__ import annotations

import pytest

from rl_gym_bridge.chat import ChatReply, ChatRequest, PromptRejected
from rl_gym_bridge.testing import ByteTokenizer, ScriptedChatModel, in_turns
from rl_gym_bridge.trajectory import StopReason

TOKENIZER = ByteTokenizer()
USER = {"role": "user", "content": "hi"}


def test_text_survives_the_tokenizer() -> None:
    text = "a ü 語\n\x00<|im_end|>"
    ids = TOKENIZER.encode(text)
    assert max(ids) < 256
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.decode([0xFF]) == "\ufffd"


def test_control_tokens_are_written_only_when_asked_for() -> None:
    ids = [TOKENIZER.im_start_id, *TOKENIZER.encode("x"), TOKENIZER.im_end_id, TOKENIZER.pad_token_id]
    assert TOKENIZER.decode(ids) == "x"
    assert TOKENIZER.decode(ids, skip_control_tokens=False) == "<|im_start|>x<|im_end|><|endoftext|>"


@pytest.mark.parametrize("token", [-1, 263])
def test_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(ValueError, match="not in the vocabulary of 263"):
        TOKENIZER.decode([token])


@pytest.mark.parametrize("closed", [True, False], ids=["end token sampled", "end token not sampled"])
def test_b1_turn_by_turn_gives_the_tokens_of_the_whole_conversation(closed: bool) -> None:
    answer = [*TOKENIZER.encode("yes"), *([TOKENIZER.im_end_id] if closed else [])]
    seen = TOKENIZER.chat_prompt([USER]) + answer
    conversation = [USER, {"role": "assistant", "content": "yes"}, {"role": "tool", "content": "4"}]
    assert TOKENIZER.chat_continuation(seen, conversation[2:]) == TOKENIZER.chat_prompt(conversation)


def request(max_new_tokens: int = 100) -> ChatRequest:
    return ChatRequest(messages=(USER,), max_new_tokens=max_new_tokens)


def reply(model: ScriptedChatModel, asked: ChatRequest) -> ChatReply:
    (answer,) = model.chat([asked])
    assert isinstance(answer, ChatReply)
    return answer


@pytest.mark.parametrize(
    ("limit", "text", "stop_reason", "sampled"),
    [(6, "hello", StopReason.STOP, 6), (5, "hello", StopReason.LENGTH, 5), (2, "he", StopReason.LENGTH, 2)],
)
def test_an_answer_that_does_not_fit_is_cut_and_says_so(
    limit: int, text: str, stop_reason: StopReason, sampled: int
) -> None:
    answer = reply(ScriptedChatModel(in_turns("hello")), request(limit))
    assert (answer.text, answer.stop_reason) == (text, stop_reason)
    assert len(answer.generation_token_ids) == len(answer.generation_logprobs) == sampled
    assert (answer.generation_token_ids[-1] == TOKENIZER.im_end_id) is (stop_reason is StopReason.STOP)


def test_the_context_limits_prompt_and_answer_together() -> None:
    prompt = len(TOKENIZER.chat_prompt([USER]))
    answer = reply(ScriptedChatModel(in_turns("hello"), context_length=prompt + 2), request())
    assert (answer.text, answer.stop_reason) == ("he", StopReason.LENGTH)
    (rejected,) = ScriptedChatModel(in_turns("hello"), context_length=prompt).chat([request()])
    assert isinstance(rejected, PromptRejected)
    assert str(prompt) in rejected.reason


def test_calls_and_weight_version_are_the_authors_to_inspect_and_set() -> None:
    model = ScriptedChatModel(in_turns("x"), weight_version=3)
    assert reply(model, request()).weight_version == 3
    model.weight_version = 4
    assert reply(model, request(7)).weight_version == 4
    assert [call[0].max_new_tokens for call in model.calls] == [100, 7]


def test_a_script_in_turns_repeats_its_last_answer() -> None:
    script = in_turns("a", "b")
    answers = [
        script(ChatRequest(messages=(USER, *({"role": "assistant", "content": "x"},) * n), max_new_tokens=1))
        for n in range(4)
    ]
    assert answers == ["a", "b", "b", "b"]
    with pytest.raises(ValueError, match="at least one"):
        in_turns()
