"""Chat messages to exact token ids, turn by turn, with any Hugging Face chat template.

Earlier turns are never rendered and tokenised again: only the text that the template puts *after*
an assistant's answer is, so that the tokens the policy sampled stay the tokens it is trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]

# Prompts recur within a group and between steps; past this many nothing more is remembered.
_CACHED = 50_000

_MARKER = "\u241f\u241f"


class ChatTemplateError(ValueError):
    """A tokenizer whose chat template cannot carry a conversation; says what to change."""


class ConversationTokenizer:
    """A tokenizer with its chat template, seen as pieces of exact token ids.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template and an end-of-sequence token.

    Raises:
        ChatTemplateError: it has no template or no end-of-sequence token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise ChatTemplateError(
                "the tokenizer has no chat template; set model.chat_template to a Jinja file"
            )
        if tokenizer.eos_token_id is None:
            raise ChatTemplateError("the tokenizer has no end-of-sequence token; set eos_token in its files")
        self._tokenizer = tokenizer
        self._prompts: dict[str, tuple[int, ...]] = {}
        self._tails: dict[str, tuple[int, ...]] = {}
        self._turn_end = self._find_turn_end()

    @property
    def pad_token_id(self) -> int:
        """Padding; any id will do since padding is masked, so the end token serves where none is set."""
        pad = self._tokenizer.pad_token_id
        return pad if pad is not None else self._tokenizer.eos_token_id

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an assistant's turn: the template's own and the end of sequence."""
        return tuple(dict.fromkeys((self._turn_end, self._tokenizer.eos_token_id)))

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        """Token ids of a conversation's start, up to where the assistant begins to speak.

        Args:
            messages: system and user messages.
            tools: what the policy may call, for templates that show it.
        """
        key = json.dumps([*messages, *tools])
        ids = self._prompts.get(key)
        if ids is None:
            text = self._render(messages, add_generation_prompt=True, tools=tools)
            ids = self._encode(text)
            if len(self._prompts) < _CACHED:
                self._prompts[key] = ids
        return ids

    def continuation(self, messages: Sequence[Message], last_token_id: int) -> tuple[int, ...]:
        """Token ids between the last sampled token and the assistant's next turn.

        Args:
            messages: the conversation, with the assistant's last turn somewhere before its end.
            last_token_id: the last token sampled in that turn; when the policy was cut off before
                it ended its turn, the end token is part of the result (and never trained on).

        Raises:
            ChatTemplateError: the template does not keep the assistant's text apart.
        """
        last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=None)
        if last is None:
            raise ChatTemplateError("a continuation needs an assistant turn to continue from")
        # What follows a turn depends on the messages after it, not on what was said before.
        marked = [*messages[:last], {"role": "assistant", "content": _MARKER}, *messages[last + 1 :]]
        key = json.dumps(marked)
        tail = self._tails.get(key)
        if tail is None:
            _, marker, text = self._render(marked, add_generation_prompt=True).rpartition(_MARKER)
            if not marker:
                raise ChatTemplateError("the chat template changes the assistant's text")
            tail = self._encode(text)
            if len(self._tails) < _CACHED:
                self._tails[key] = tail
        return tail[1:] if tail and tail[0] == last_token_id else tail

    def answer(self, text: str) -> tuple[int, ...]:
        """Token ids of an assistant's text and the token that ends its turn."""
        return (*self._encode(text), self._turn_end)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of sampled tokens, without the token that ends the turn."""
        ids = list(token_ids)
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def _find_turn_end(self) -> int:
        conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARKER}]
        text = self._render(conversation, add_generation_prompt=False)
        _, marker, tail = text.rpartition(_MARKER)
        if not marker:
            raise ChatTemplateError("the chat template changes the assistant's text")
        ids = self._encode(tail)
        # Only a token that no ordinary text becomes can end a turn.
        return (
            ids[0] if ids and ids[0] in self._tokenizer.added_tokens_decoder else self._tokenizer.eos_token_id
        )

    def _render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        try:
            rendered = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:
            raise ChatTemplateError(f"the chat template refuses the conversation: {error}") from error
        return str(rendered)

    def _encode(self, text: str) -> tuple[int, ...]:
        # The tokenizers library itself, where it is there: the wrapper around it costs ten times as much.
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None:
            return tuple(backend.encode(text, add_special_tokens=False).ids)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def load_tokenizer(model_dir: Path, *, key: str = "model.path") -> Any:
    """The tokenizer of a Hugging Face directory; no code of its own is run.

    Args:
        model_dir: with the tokenizer's files.
        key: of the configuration that names it, for the error.

    Raises:
        ConfigError: it cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ConfigError(f"{key}={model_dir}: its tokenizer cannot be read: {error}") from error


def load_conversation(model_dir: Path, chat_template: Path | None) -> ConversationTokenizer:
    """The tokenizer of a Hugging Face directory, with another chat template if one is given.

    Raises:
        ConfigError: it cannot be read, or its template cannot carry a conversation.
    """
    tokenizer = load_tokenizer(model_dir)
    if chat_template is not None:
        try:
            tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"model.path={model_dir}: its tokenizer cannot be read: {error}") from error
    try:
        return ConversationTokenizer(tokenizer)
    except ChatTemplateError as error:
        raise ConfigError(f"model.path={model_dir}: {error}") from error
