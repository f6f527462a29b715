"""Messages that would be misread are refused, for every backend: both apps read bodies here."""

from __future__ import annotations

from typing import Any

import pytest

from rl_generation.failures import InvalidRequestError
from rl_generation.server.pinning import pin
from rl_generation.server.schemas import ChatBody, TokenizeBody, TokenizeTextBody, parse_body
from rl_generation.server.settings import SamplingProfile, ServerSettings

USER: dict[str, Any] = {"role": "user", "content": "hi"}
ANSWER: dict[str, Any] = {
    "role": "assistant",
    "content": "ho",
    "prompt_token_ids": [1],
    "generation_token_ids": [2, 3],
    "generation_log_probs": [-0.5, -1],
    "weight_versions": [4, 4],
}


def refused(*messages: dict[str, Any], **fields: Any) -> tuple[str, str]:
    with pytest.raises(InvalidRequestError) as caught:
        parse_body(ChatBody, {"messages": list(messages), **fields})
    with pytest.raises(InvalidRequestError) as again:
        parse_body(TokenizeBody, {"messages": list(messages), **fields})
    assert str(caught.value) == str(again.value)
    return caught.value.parameter, str(caught.value)


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"role": "user", "content": "a\ud800b"}, "messages.0.content"),
        ({"role": "user", "content": [{"type": "text", "text": "\udfff"}]}, "messages.0.content.0.text"),
        ({"role": "user", "content": "x", "template's own": {"\ud800": 1}}, "messages.0.template's own"),
    ],
)
def test_half_a_surrogate_pair_is_refused_by_its_place(message: dict[str, Any], place: str) -> None:
    parameter, said = refused(message)
    assert parameter == place
    assert "surrogate" in said
    said.encode()


def test_half_a_surrogate_pair_in_a_text_to_tokenize_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="prompt has half"):
        parse_body(TokenizeTextBody, {"prompt": "\udc00"})
    assert parse_body(TokenizeTextBody, {"prompt": "\U0001f600"}).prompt == "\U0001f600"


@pytest.mark.parametrize(
    ("message", "place", "told"),
    [
        ({**ANSWER, "prompt_token_ids": []}, "messages.1.prompt_token_ids", "would be dropped"),
        ({**ANSWER, "generation_log_probs": [-0.5]}, "messages.1.generation_log_probs", "1 entries for 2"),
        ({**ANSWER, "weight_versions": [4, 4, 4]}, "messages.1.weight_versions", "3 entries for 2"),
        ({**ANSWER, "weight_versions": ["4", 4]}, "messages.1.weight_versions.0", "integer"),
        ({**ANSWER, "generation_token_id": [1]}, "messages.1.generation_token_id", "generation_token_ids'?"),
        ({"role": "user", "contents": "hi", "content": "x"}, "messages.1.contents", "'content'?"),
        ({"role": "user"}, "messages.1.content", "has no content"),
        ({"role": "tool", "content": None, "tool_call_id": "a"}, "messages.1.content", "has no content"),
    ],
)
def test_a_message_that_would_be_misread_is_refused(message: dict[str, Any], place: str, told: str) -> None:
    parameter, said = refused(USER, message)
    assert parameter == place
    assert told in said


def test_an_empty_prefix_would_drop_the_history() -> None:
    assert refused(USER, ANSWER, required_prefix_token_ids=[])[0] == "required_prefix_token_ids"


def test_what_a_server_has_answered_and_what_a_template_knows_is_taken() -> None:
    told: dict[str, Any] = {
        **ANSWER,
        "reasoning": "r",
        "reasoning_content": "r",
        "refusal": None,
        "tool_calls": [],
    }
    mine = {"role": "user", "content": "", "thinking_budget": 3}
    tool = {"role": "tool", "content": "4", "tool_call_id": "a", "name": "add"}
    assert len(parse_body(ChatBody, {"messages": [USER, told, tool, mine]}).messages) == 4


@pytest.mark.parametrize("name", ["temperature", "top_p"])
@pytest.mark.parametrize("value", [True, "1"])
def test_a_number_is_a_number(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_body(ChatBody, {"messages": [USER], name: value})
    assert caught.value.parameter == name
    assert parse_body(ChatBody, {"messages": [USER], name: 1}).model_dump()[name] == 1


def test_streaming_is_told_as_what_it_is_and_numbers_with_all_their_digits() -> None:
    settings = ServerSettings("m", 8, 8, profiles=(SamplingProfile(temperature=0.70000001),))
    with pytest.raises(InvalidRequestError, match="streaming is not supported"):
        pin(parse_body(ChatBody, {"messages": [USER], "stream": True}), settings)
    with pytest.raises(InvalidRequestError, match=r"temperature=0\.7 is none .*temperature=0\.70000001"):
        pin(parse_body(ChatBody, {"messages": [USER], "temperature": 0.7}), settings)
    pin(parse_body(ChatBody, {"messages": [USER], "stream": False}), settings)
