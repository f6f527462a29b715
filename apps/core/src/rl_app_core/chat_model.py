"""The bridge's ``ChatModel`` on top of an engine that knows tokens only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rl_generation.protocol import Completion, GenerationRequest, SamplingParams
from rl_gym_bridge.chat import ChatReply, ChatRequest, PromptRejected
from rl_gym_bridge.trajectory import StopReason

from .config.generation import Generation
from .conversation import ConversationTokenizer


class TokenEngine(Protocol):
    """The one method of an engine that chatting needs."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]: ...


class EngineChatModel:
    """Renders a conversation, samples its next turn, and keeps every earlier token as it was."""

    def __init__(
        self, engine: TokenEngine, conversation: ConversationTokenizer, sampling: Generation, max_context: int
    ) -> None:
        self._engine = engine
        self._conversation = conversation
        self._sampling = sampling
        self._max_context = max_context

    def chat(self, requests: Sequence[ChatRequest]) -> list[ChatReply | PromptRejected]:
        """One reply per request, in order; a prompt that fills the context is rejected by itself."""
        prompts = [self._prompt(request) for request in requests]
        fitting = [index for index, prompt in enumerate(prompts) if len(prompt) < self._max_context]
        completions = self._engine.generate(
            [GenerationRequest(prompts[index], self._params(requests[index])) for index in fitting]
        )
        replies: list[ChatReply | PromptRejected] = [
            PromptRejected(f"its prompt of {len(prompt)} tokens fills the context of {self._max_context}")
            for prompt in prompts
        ]
        for index, completion in zip(fitting, completions, strict=True):
            replies[index] = self._reply(prompts[index], completion)
        return replies

    def _reply(self, prompt: tuple[int, ...], completion: Completion) -> ChatReply:
        return ChatReply(
            prompt_token_ids=prompt,
            generation_token_ids=completion.token_ids,
            generation_logprobs=completion.logprobs,
            text=self._conversation.decode(completion.token_ids),
            stop_reason=StopReason(completion.stop_reason),
            weight_version=completion.weight_version,
            token_versions=completion.token_versions,
        )

    def _prompt(self, request: ChatRequest) -> tuple[int, ...]:
        seen = request.prefix_token_ids
        if not seen:
            return self._conversation.prompt(request.messages, request.tools)
        return (*seen, *self._conversation.continuation(request.messages, seen[-1]))

    def _params(self, request: ChatRequest) -> SamplingParams:
        sampling = self._sampling
        return SamplingParams(
            max_new_tokens=request.max_new_tokens,
            temperature=0.0 if request.greedy else sampling.temperature,
            top_p=1.0 if request.greedy else sampling.top_p,
            top_k=0 if request.greedy else sampling.top_k,
            stop_token_ids=self._conversation.stop_token_ids,
            seed=request.seed,
        )
