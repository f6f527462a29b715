"""Conversations to tokens with a tokenizer's chat template, earlier turns token for token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ..failures import InvalidRequestError
from .media import check_media
from .schemas import ChatMessage
from .splice import carried_tokens, check_vocabulary, spliced_prompt

_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "padding",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
_MARKER = "\u241f"


class ChatTokenizer(Protocol):
    """What is used of a transformers tokenizer that has a chat template."""

    eos_token_id: int | None
    added_tokens_decoder: dict[int, Any]

    def apply_chat_template(self, conversation: Any, **settings: Any) -> Any:
        """The text of a conversation."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to token ids."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Token ids to text."""
        ...


class ChatRenderer:
    """The one way from messages to prompt tokens, for chat and for ``/tokenize`` alike.

    Args:
        tokenizer: with a chat template.
        vocab_size: token ids lie below it.
    """

    def __init__(self, tokenizer: ChatTokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    async def prompt(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_settings: Mapping[str, Any] | None = None,
        required_prefix: Sequence[int] | None = None,
    ) -> list[int]:
        """The tokens of a conversation, up to where the assistant begins to speak.

        Args:
            messages: an assistant's may carry its tokens.
            tools: OpenAI function tools, for the template.
            template_settings: further variables of the template.
            required_prefix: exact tokens up to the end of the last assistant message.

        Raises:
            InvalidRequestError: they hold more than text, the template refuses them, or the tokens they
                carry cannot be those.
        """
        settings = dict(template_settings or {})
        check_template_settings(settings)
        check_media(messages)
        plain = [message.model_dump(exclude_none=True) for message in messages]

        async def render(conversation: list[dict[str, Any]], with_header: bool) -> str:
            return self._text(conversation, tools, settings, with_header)

        carried = carried_tokens(plain, required_prefix)
        if carried is None:
            return self.encode(await render(plain, True))
        check_vocabulary(carried.token_ids, self._vocab_size)
        return await spliced_prompt(plain, carried, render, self.encode)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Text to token ids."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Token ids to text, control tokens included."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def _text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        settings: Mapping[str, Any],
        with_header: bool,
    ) -> str:
        conversation = [_for_template(message, f"messages.{i}") for i, message in enumerate(messages)]
        try:
            text = self._tokenizer.apply_chat_template(
                conversation,
                tools=[dict(tool) for tool in tools] if tools else None,
                tokenize=False,
                add_generation_prompt=with_header,
                **settings,
            )
        except Exception as error:
            raise InvalidRequestError(
                f"server: the chat template refuses the messages: {error}", "messages"
            ) from error
        return str(text)


def check_template_settings(settings: Mapping[str, Any] | None) -> None:
    """Raise :class:`InvalidRequestError` where variables for the template would change how it is called."""
    reserved = sorted(_RESERVED & set(settings or ()))
    if reserved:
        name = f"chat_template_kwargs.{reserved[0]}"
        raise InvalidRequestError(f"server: {name} is the server's own; leave it out", name)


def turn_end_tokens(tokenizer: ChatTokenizer, chat_template: str | None = None) -> tuple[int, ...]:
    """The tokens that end an assistant's turn: the chat template's own, and the end of sequence.

    Only a token that ordinary text never becomes counts as the template's own.

    Args:
        tokenizer: with a chat template.
        chat_template: used instead of the tokenizer's.
    """
    conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARKER}]
    rendered = tokenizer.apply_chat_template(
        conversation, chat_template=chat_template, tokenize=False, add_generation_prompt=False
    )
    text = str(rendered).rpartition(_MARKER)[2]
    behind = tokenizer.encode(text, add_special_tokens=False)[:1]
    ends = [token for token in behind if token in tokenizer.added_tokens_decoder]
    if tokenizer.eos_token_id is not None:
        ends.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(ends))


def _for_template(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    plain["content"] = _text_of(message.get("content"), where)
    if message.get("tool_calls"):
        plain["tool_calls"] = [_with_arguments(call) for call in message["tool_calls"]]
    return plain


def _text_of(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    known = [text for text in texts if isinstance(text, str)]
    if len(known) < len(texts):
        raise InvalidRequestError(
            f"server: {where}.content has a part that is no text; this server takes text only",
            f"{where}.content",
        )
    return "\n".join(known)


def _with_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """Templates want arguments as an object; text that is none stays as it is."""
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            parsed = None
        if isinstance(parsed, dict):
            return {**call, "function": {**function, "arguments": parsed}}
    return dict(call)
