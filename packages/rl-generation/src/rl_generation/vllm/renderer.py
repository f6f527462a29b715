"""vLLM's own renderer, made to keep the tokens of earlier turns. ``/tokenize`` goes the same way as chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.renderers.online_renderer import OnlineRenderer

from ..failures import InvalidRequestError
from ..server.pinning import room_for
from ..server.settings import ServerSettings
from ..server.splice import check_vocabulary, spliced_prompt
from .exchange import CURRENT


class TokenExactRenderer(OnlineRenderer):
    """Renders what comes through the contract token for token, and measures the prompt before it is sampled.

    Made of the renderer that vLLM builds, by :meth:`adopt`: several of its servers share that one object.
    """

    _contract: ServerSettings

    @classmethod
    def adopt(cls, renderer: OnlineRenderer, settings: ServerSettings) -> None:
        """Turn a renderer into one of these, wherever it is used."""
        renderer.model_config = _Unbounded(renderer.model_config)
        renderer.__class__ = type(cls.__name__, (cls, type(renderer)), {})
        renderer._contract = settings

    async def preprocess_chat(
        self, request: Any, messages: list[Any], *arguments: Any, **settings: Any
    ) -> tuple[list[Any], list[Any]]:
        """As vLLM's, with the tokens that the messages carried.

        Raises:
            InvalidRequestError: those tokens cannot be, or the template does not allow to keep them.
            ContextOverflowError: a prompt that is to be continued leaves no room.
        """
        exchange = CURRENT.get()
        if exchange is None:
            return await super().preprocess_chat(request, messages, *arguments, **settings)
        if exchange.carried is None:
            conversation, (prompt,) = await super().preprocess_chat(request, messages, *arguments, **settings)
        else:
            check_vocabulary(exchange.carried.token_ids, self._contract.vocab_size)
            rendered: list[tuple[list[Any], Any]] = []

            async def render(marked: list[dict[str, Any]], with_header: bool) -> str:
                asked = request
                if not with_header:
                    asked = request.model_copy(update={"add_generation_prompt": False})
                answer, (prompt,) = await super(TokenExactRenderer, self).preprocess_chat(
                    asked, marked, *arguments, **settings
                )
                if with_header:
                    rendered.append((answer, prompt))
                return _text_of(prompt)

            tokens = await spliced_prompt(messages, exchange.carried, render, self._encode)
            conversation, prompt = rendered[-1]
            prompt["prompt_token_ids"] = tokens
            prompt.pop("prompt", None)
        exchange.prompt = tuple(prompt["prompt_token_ids"])
        if exchange.pinned is not None:
            room_for(len(exchange.prompt), self._contract)
        return conversation, [prompt]

    def _encode(self, text: str) -> Sequence[int]:
        return self.renderer.get_tokenizer().encode(text, add_special_tokens=False)


class _Unbounded:
    """A model's configuration as the renderer sees it: without a context.

    It would not say by how much a prompt exceeds that, and some releases refuse what has only to be clamped.
    """

    max_model_len: int | None = None

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _text_of(prompt: Any) -> str:
    text = prompt.get("prompt")
    if prompt.get("type") != "token" or not isinstance(text, str):
        raise InvalidRequestError(
            "server: the tokens of earlier turns can be kept in conversations of text only; send the "
            "messages without their tokens",
            "messages",
        )
    return text
