"""The contract of an HTTP server, whatever the engine behind it.

A backend's test module gives a fixture ``server`` (a ``Served``) and inherits :class:`ServerContract`.
"""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

_served = importlib.import_module("packages.rl-generation.tests.contract.served")
Served, given_back, refusal = _served.Served, _served.given_back, _served.refusal

USER = {"role": "user", "content": "What is the answer?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}

UNSCORABLE = {
    "n": 2,
    "stream": True,
    "stop": ["x"],
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.1,
    "min_p": 0.1,
    "logit_bias": {"5": 3.0},
    "min_tokens": 3,
    "ignore_eos": True,
    "stop_token_ids": [3],
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a+"},
    "bad_words": ["a"],
    "allowed_token_ids": [4, 5],
    "use_beam_search": True,
    "truncate_prompt_tokens": 4,
    "echo": True,
    "add_generation_prompt": False,
    "continue_final_message": True,
    "tool_choice": "required",
    "top_logprobs": 3,
    "seed": -1,
    "max_tokens": 0,
    "max_completion_tokens": "4",
    "temperature": 0.9,
    "top_p": 0.8,
    "top_k": 3,
}

NEUTRAL = {
    "n": 1,
    "stream": False,
    "stop": [],
    "frequency_penalty": 0.0,
    "presence_penalty": 0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "top_p": 1,
    "top_k": -1,
    "top_logprobs": 0,
    "metadata": {"anything": "at all"},
    "user": "someone",
    "web_search_options": None,
}


def check_tokens(server: Any, choice: dict[str, Any], temperature: float) -> None:
    """The tokens of an answer are whole, and their log-probabilities those of the distribution."""
    message = choice["message"]
    prompt, sampled = message["prompt_token_ids"], message["generation_token_ids"]
    assert sampled
    assert len(sampled) == len(message["generation_log_probs"])
    assert message["weight_versions"] == [server.weight_version] * len(sampled)
    assert message["generation_log_probs"] == pytest.approx(
        server.score(prompt, sampled, temperature), abs=1e-4
    )


class ServerContract:
    """Inherit it in a module with a fixture ``server``."""

    def test_it_names_its_model_and_is_well(self, server: Any) -> None:
        assert server.client.get("/health").status_code == 200
        (entry,) = server.client.get("/v1/models").json()["data"]
        assert entry["id"] == server.model
        assert entry["max_model_len"] == server.max_context

    def test_f6_logprobs_are_those_of_the_pinned_distribution(self, server: Any) -> None:
        """The model's own defaults (top_p 0.5, top_k 3, temperature 0.3, two tokens) never creep in."""
        training, validation = server.profiles
        tokens = 0
        for seed in range(4):
            choice = server.answer([USER], max_tokens=16, seed=seed)
            check_tokens(server, choice, training)
            tokens += len(choice["message"]["generation_token_ids"])
        assert tokens > 4 * 3
        check_tokens(server, server.answer([USER], max_tokens=16, seed=1, temperature=validation), validation)

    def test_without_a_bound_an_answer_may_fill_the_context(self, server: Any) -> None:
        for seed in range(4):
            choice = server.answer([USER], seed=seed)
            message = choice["message"]
            used = len(message["prompt_token_ids"]) + len(message["generation_token_ids"])
            if choice["finish_reason"] == "length":
                assert used == server.max_context
            else:
                assert message["generation_token_ids"][-1] == server.turn_end

    def test_b6_three_turns_keep_every_token(self, server: Any) -> None:
        """No token of an earlier turn is ever what its text would be tokenised to."""
        messages: list[dict[str, Any]] = [USER]
        seen: list[int] = []
        differs = False
        for turn in range(3):
            tokenized = server.tokens(messages)
            choice = server.answer(messages, max_tokens=12, seed=turn)
            message = choice["message"]
            prompt, sampled = message["prompt_token_ids"], message["generation_token_ids"]
            assert prompt[: len(seen)] == seen
            assert tokenized == prompt
            check_tokens(server, choice, server.profiles[0])
            behind = server.tokenizer.decode(prompt[len(seen) :])
            assert behind.endswith("<|im_start|>assistant\n")
            if turn:
                ended = seen[-1] == server.turn_end
                assert behind.startswith("\n" if ended else "<|im_end|>\n")
                assert behind.count("<|im_start|>user\nGo on.") == 1
            text = server.tokenizer.decode(sampled)
            differs |= server.tokenizer.encode(text, add_special_tokens=False) != sampled
            seen = prompt + sampled
            messages += [given_back(message), {"role": "user", "content": "Go on."}]
        assert differs, "this conversation would also pass if its text were tokenised again"

    def test_an_end_that_was_sampled_is_not_said_twice(self, server: Any) -> None:
        answer = {
            "role": "assistant",
            "content": "whatever",
            "prompt_token_ids": [10, 11, 12],
            "generation_token_ids": [20, 21, server.turn_end],
        }
        tokens = server.tokens([USER, answer, USER])
        assert tokens[:6] == [10, 11, 12, 20, 21, server.turn_end]
        assert tokens[6] != server.turn_end
        cut = server.tokens([USER, {**answer, "generation_token_ids": [20, 21]}, USER])
        assert cut == tokens

    def test_the_last_carried_tokens_win_and_later_messages_are_rendered(self, server: Any) -> None:
        first = {
            "role": "assistant",
            "content": "a",
            "prompt_token_ids": [10],
            "generation_token_ids": [20],
        }
        second = {
            "role": "assistant",
            "content": "b",
            "prompt_token_ids": [10, 20, 30],
            "generation_token_ids": [40],
        }
        plain = {"role": "assistant", "content": "said by nobody"}
        tokens = server.tokens([USER, first, USER, second, USER, plain, USER])
        assert tokens[:4] == [10, 20, 30, 40]
        text = server.tokenizer.decode(tokens[4:])
        assert "said by nobody" in text
        assert text.count("What is the answer?") == 2

    def test_a_prefix_may_be_given_beside_the_messages(self, server: Any) -> None:
        answer = {"role": "assistant", "content": "a"}
        asked = {"required_prefix_token_ids": [10, 11, 12]}
        tokens = server.tokens([USER, answer, USER], **asked)
        assert tokens[:3] == [10, 11, 12]
        choice = server.answer([USER, answer, USER], max_tokens=2, **asked)
        assert choice["message"]["prompt_token_ids"] == tokens
        lone = server.ask([USER], **asked)
        assert lone.status_code == 400
        assert refusal(lone)["param"] == "required_prefix_token_ids"

    def test_tool_traffic_keeps_the_tokens_and_shows_the_output(self, server: Any) -> None:
        call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": Infinity'}}
        answer = {
            "role": "assistant",
            "content": "",
            "tool_calls": [call],
            "prompt_token_ids": [10, 11],
            "generation_token_ids": [20],
        }
        messages = [USER, answer, {"role": "tool", "tool_call_id": "c1", "content": "forty-two"}]
        tokens = server.tokens(messages, tools=[TOOL])
        assert tokens[:3] == [10, 11, 20]
        assert "forty-two" in server.tokenizer.decode(tokens[3:])
        choice = server.answer(messages, tools=[TOOL], max_tokens=2)
        assert choice["message"]["prompt_token_ids"] == tokens

    def test_tools_are_shown_and_may_be_declined(self, server: Any) -> None:
        offered = server.tokens([USER], tools=[TOOL])
        assert "Adds." in server.tokenizer.decode(offered)
        for choice in ("auto", "none"):
            message = server.answer([USER], tools=[TOOL], tool_choice=choice, max_tokens=2)["message"]
            assert message["prompt_token_ids"] == offered

    def test_tokens_that_cannot_be_are_refused(self, server: Any) -> None:
        good = {"role": "assistant", "content": "", "prompt_token_ids": [1], "generation_token_ids": [2]}
        bad = [
            {**good, "generation_token_ids": [server.vocab_size]},
            {**good, "generation_token_ids": [-1]},
            {**good, "generation_token_ids": ["2"]},
            {**good, "generation_token_ids": None},
            {**good, "prompt_token_ids": None},
            {**good, "role": "user"},
        ]
        for message in bad:
            for response in (
                server.ask([USER, message, USER], max_tokens=1),
                server.client.post("/tokenize", json={"messages": [USER, message, USER]}),
            ):
                assert response.status_code == 400, message
                assert refusal(response)["type"] == "InvalidRequestError"
                assert refusal(response)["param"].startswith("messages")

    def test_f1_a_prompt_that_fills_the_context_is_a_typed_400(self, server: Any) -> None:
        for extra in (0, 1, 700):
            prompt = [7] * (server.max_context + extra)
            answer = {
                "role": "assistant",
                "content": "",
                "prompt_token_ids": prompt,
                "generation_token_ids": [],
            }
            messages = [USER, answer]
            length = len(server.tokens(messages))
            response = server.ask(messages, max_tokens=4)
            assert response.status_code == 400
            error = refusal(response)
            assert (error["type"], error["kind"]) == ("ContextOverflowError", "data")
            # NeMo Gym tells a full context by these words.
            assert "context length" in error["message"]
            assert str(length) in error["message"]
            assert str(server.max_context) in error["message"]
            assert "-" not in error["message"].replace("non-", "")

    def test_f1_long_text_overflows_with_its_real_length(self, server: Any) -> None:
        messages = [{"role": "user", "content": "word " * 10 * server.max_context}]
        length = len(server.tokens(messages))
        assert length > 2 * server.max_context
        error = refusal(server.ask(messages))
        assert error["type"] == "ContextOverflowError"
        assert str(length) in error["message"]

    def test_f2_room_for_one_token_is_used_and_no_more(self, server: Any) -> None:
        for room in (1, 3):
            answer = {
                "role": "assistant",
                "content": "",
                "prompt_token_ids": [7],
                "generation_token_ids": [server.turn_end],
            }
            tail = len(server.tokens([USER, answer, USER])) - 2
            answer["prompt_token_ids"] = [7] * (server.max_context - room - tail - 1)
            choice = server.answer([USER, answer, USER], max_tokens=1000, seed=3)
            message = choice["message"]
            assert len(message["prompt_token_ids"]) == server.max_context - room
            assert 1 <= len(message["generation_token_ids"]) <= room
            if len(message["generation_token_ids"]) < room:
                assert message["generation_token_ids"][-1] == server.turn_end
            elif message["generation_token_ids"][-1] != server.turn_end:
                assert choice["finish_reason"] == "length"

    def test_settings_that_cannot_be_scored_are_typed_400s(self, server: Any) -> None:
        for name, value in UNSCORABLE.items():
            response = server.ask([USER], **{name: value})
            assert response.status_code == 400, name
            error = refusal(response)
            assert (error["type"], error["param"], error["kind"]) == ("InvalidRequestError", name, "data")

    def test_settings_that_change_nothing_are_taken(self, server: Any) -> None:
        check_tokens(server, server.answer([USER], max_tokens=4, **NEUTRAL), server.profiles[0])

    def test_what_it_does_not_know_is_refused_by_name(self, server: Any) -> None:
        for name, near in (("temprature", "temperature"), ("chat_template", None), ("guided_json", None)):
            response = server.ask([USER], **{name: "x"})
            assert response.status_code == 400
            error = refusal(response)
            assert (error["type"], error["param"]) == ("InvalidRequestError", name)
            assert near is None or near in error["message"]
        reserved = server.ask([USER], chat_template_kwargs={"chat_template": "{{ messages }}"})
        assert reserved.status_code == 400
        response = server.client.post("/tokenize", json={"messages": [USER], "temperature": 1.0})
        assert response.status_code == 400
        assert refusal(response)["param"] == "temperature"

    def test_nothing_is_fetched_for_a_client(self, server: Any) -> None:
        image = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}
        message = {"role": "user", "content": [{"type": "text", "text": "?"}, image]}
        tokenized = server.client.post("/tokenize", json={"messages": [USER, message]})
        for response in (server.ask([USER, message]), tokenized):
            assert response.status_code == 400
            error = refusal(response)
            assert (error["type"], error["param"]) == ("InvalidRequestError", "messages.1.content")
            assert "fetches nothing" in error["message"]

    def test_other_models_and_routes_are_typed_404s(self, server: Any) -> None:
        for response, kind in (
            (server.ask([USER], model="another"), "UnknownModelError"),
            (
                server.client.post("/tokenize", json={"model": "another", "messages": [USER]}),
                "UnknownModelError",
            ),
            (
                server.client.post("/v1/completions", json={"model": server.model, "prompt": "x"}),
                "UnknownRouteError",
            ),
            (server.client.get("/docs"), "UnknownRouteError"),
        ):
            assert response.status_code == 404
            assert refusal(response)["type"] == kind

    def test_what_is_no_request_is_a_typed_400(self, server: Any) -> None:
        bodies: list[Any] = [b"{", b"[]", b'{"messages": []}', b'{"messages": [{"role": "judge"}]}']
        for body in bodies:
            response = server.client.post(
                "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
            )
            assert response.status_code == 400, body
            assert refusal(response)["type"] == "InvalidRequestError"

    def test_logprobs_name_tokens_by_id_where_asked(self, server: Any) -> None:
        asked = {"logprobs": True, "top_logprobs": 0, "return_tokens_as_token_ids": True, "max_tokens": 3}
        choice = server.answer([USER], **asked)
        entries = choice["logprobs"]["content"]
        message = choice["message"]
        assert [entry["token"] for entry in entries] == [
            f"token_id:{token}" for token in message["generation_token_ids"]
        ]
        assert [entry["logprob"] for entry in entries] == message["generation_log_probs"]
        assert server.answer([USER], max_tokens=1)["logprobs"] is None

    def test_a_seed_gives_the_same_answer_again(self, server: Any) -> None:
        first, again, other = (
            server.answer([USER], max_tokens=12, seed=seed)["message"]["generation_token_ids"]
            for seed in (11, 11, 12)
        )
        assert first == again != other

    def test_requests_at_the_same_time_keep_apart(self, server: Any) -> None:
        def ask(number: int) -> dict[str, Any]:
            return server.answer([{"role": "user", "content": f"number {number}"}], max_tokens=8)

        with ThreadPoolExecutor(8) as pool:
            choices = list(pool.map(ask, range(8)))
        for number, choice in enumerate(choices):
            assert f"number {number}" in server.tokenizer.decode(choice["message"]["prompt_token_ids"])
            check_tokens(server, choice, server.profiles[0])

    def test_nobody_comes_in_without_the_token(self, server: Any) -> None:
        body = {"messages": [USER], "max_tokens": 1}
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {server.token}"}):
            with httpx.Client(base_url=server.url, headers=headers, trust_env=False) as client:
                for response in (
                    client.post("/v1/chat/completions", json=body),
                    client.post("/tokenize", json=body),
                    client.get("/v1/models"),
                ):
                    assert response.status_code == 401
                    assert refusal(response)["type"] == "UnauthorizedError"
                    assert server.token not in response.text
                assert client.get("/health").status_code == 200

    def test_before_the_engine_is_there_it_says_so(self, server: Any) -> None:
        response = server.before_ready
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        error = refusal(response)
        assert (error["type"], error["kind"]) == ("NotReadyError", "infra")
