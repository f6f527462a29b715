"""A server under test: where it is, what it serves, and how to talk to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


@dataclass
class Served:
    """What the contract's cases need to know.

    Attributes:
        url: root of the server.
        token: that it wants.
        model: name that it serves.
        tokenizer: transformers' own.
        max_context: the most tokens of prompt and completion.
        vocab_size: token ids lie below it.
        turn_end: the token that ends a turn.
        profiles: temperatures that it samples with, that of training first; all without top-p and top-k.
        weight_version: of its weights.
        score: log-probabilities of sampled tokens behind a prompt, at a temperature.
        before_ready: what it answered when its address was reserved and its engine not there.
    """

    url: str
    token: str
    model: str
    tokenizer: Any
    max_context: int
    vocab_size: int
    turn_end: int
    profiles: tuple[float, ...]
    weight_version: int
    score: Callable[[Sequence[int], Sequence[int], float], list[float]]
    before_ready: httpx.Response
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        headers = {"authorization": f"Bearer {self.token}"}
        self.client = httpx.Client(base_url=self.url, headers=headers, timeout=60, trust_env=False)

    def ask(self, messages: Sequence[Any], **settings: Any) -> httpx.Response:
        """A chat request."""
        return self.client.post(
            "/v1/chat/completions", json={"model": self.model, "messages": list(messages), **settings}
        )

    def answer(self, messages: Sequence[Any], **settings: Any) -> dict[str, Any]:
        """The choice that a chat request gets."""
        response = self.ask(messages, **settings)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]

    def tokens(self, messages: Sequence[Any], **settings: Any) -> list[int]:
        """What ``/tokenize`` says."""
        response = self.client.post(
            "/tokenize", json={"model": self.model, "messages": list(messages), **settings}
        )
        assert response.status_code == 200, response.text
        return response.json()["tokens"]


def refusal(response: httpx.Response) -> dict[str, Any]:
    """The typed error of an answer."""
    error = response.json()["error"]
    assert error["code"] == response.status_code
    assert error["message"]
    return error


def given_back(message: dict[str, Any]) -> dict[str, Any]:
    """An answer's message as the history of the next request has it: text and tokens."""
    kept = {name: message[name] for name in ("role", "content", *TOKEN_FIELDS)}
    kept["content"] = kept["content"] or ""
    return kept
