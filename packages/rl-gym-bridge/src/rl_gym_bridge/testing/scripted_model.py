"""A chat model that answers by a function, with real tokens, ids and limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..chat import ChatReply, ChatRequest, PromptRejected
from ..trajectory import StopReason
from .byte_tokenizer import ByteTokenizer


def in_turns(*answers: str) -> Callable[[ChatRequest], str]:
    """A script that gives the first answer in a rollout's first turn, the second in its second, and so on.

    The last answer is repeated in later turns.

    Raises:
        ValueError: no answer is given.
    """
    if not answers:
        raise ValueError("in_turns needs at least one answer")

    def script(request: ChatRequest) -> str:
        earlier = sum(message["role"] == "assistant" for message in request.messages)
        return answers[min(earlier, len(answers) - 1)]

    return script


class ScriptedChatModel:
    """A :class:`~rl_gym_bridge.chat.ChatModel` for tests: ``script(request)`` is the answer's text.

    The text is tokenised by :class:`ByteTokenizer` and closed by its end token. An answer that does not
    fit into ``max_new_tokens`` is cut, without end token, and stops by ``LENGTH``, as with an engine.

    Attributes:
        calls: the requests of every ``chat`` call so far.
        weight_version: reported with every reply; may be set between calls.
    """

    def __init__(
        self,
        script: Callable[[ChatRequest], str],
        *,
        context_length: int | None = None,
        weight_version: int = 0,
    ) -> None:
        """
        Args:
            script: the answer to a request.
            context_length: tokens of prompt and answer together at most; a prompt that fills it is
                rejected, and an answer is cut there. ``None`` is no limit.
            weight_version: the first one to report.
        """
        self.tokenizer = ByteTokenizer()
        self.calls: list[tuple[ChatRequest, ...]] = []
        self.weight_version = weight_version
        self._script = script
        self._context_length = context_length

    def chat(self, requests: Sequence[ChatRequest]) -> list[ChatReply | PromptRejected]:
        """One reply per request, in order."""
        self.calls.append(tuple(requests))
        return [self._reply(request) for request in requests]

    def _reply(self, request: ChatRequest) -> ChatReply | PromptRejected:
        if request.prefix_token_ids:
            prompt = self.tokenizer.chat_continuation(request.prefix_token_ids, request.new_messages)
        else:
            prompt = self.tokenizer.chat_prompt(request.messages)
        room = request.max_new_tokens
        if self._context_length is not None:
            room = min(room, self._context_length - len(prompt))
            if room < 1:
                return PromptRejected(
                    f"the prompt has {len(prompt)} tokens and the context {self._context_length}"
                )
        text_ids = self.tokenizer.encode(self._script(request))
        whole = [*text_ids, self.tokenizer.im_end_id]
        sampled = tuple(whole[:room])
        return ChatReply(
            prompt_token_ids=tuple(prompt),
            generation_token_ids=sampled,
            # Any fixed function of the token: a test that shifts or swaps them has to see it.
            generation_logprobs=tuple(-(1 + token % 7) / 8 for token in sampled),
            text=self.tokenizer.decode(sampled),
            stop_reason=StopReason.STOP if len(whole) <= room else StopReason.LENGTH,
            weight_version=self.weight_version,
        )
