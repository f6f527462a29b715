"""A tokenizer without files: one token per UTF-8 byte, and the control tokens of the ChatML format."""

from __future__ import annotations

from collections.abc import Sequence

from ..chat import Message

_CONTROL_TEXT = {
    256: "<|endoftext|>",
    257: "<|im_start|>",
    258: "<|im_end|>",
    259: "<think>",
    260: "</think>",
    261: "<tool_call>",
    262: "</tool_call>",
}


class ByteTokenizer:
    """Ids 0–255 are bytes; behind them come the control tokens.

    Control tokens are never made from text: ``encode("<|im_end|>")`` gives ten byte tokens.
    """

    pad_token_id = 256
    im_start_id = 257
    im_end_id = 258
    think_open_id = 259
    think_close_id = 260
    tool_call_open_id = 261
    tool_call_close_id = 262
    vocab_size = 263

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of ``text``."""
        return list(text.encode("utf-8"))

    def decode(self, token_ids: Sequence[int], *, skip_control_tokens: bool = True) -> str:
        """The text of the bytes; invalid UTF-8 becomes U+FFFD.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        pieces: list[bytes] = []
        for token in token_ids:
            if 0 <= token < 256:
                pieces.append(bytes((token,)))
            elif token not in _CONTROL_TEXT:
                raise ValueError(f"token {token} is not in the vocabulary of {self.vocab_size} tokens")
            elif not skip_control_tokens:
                pieces.append(_CONTROL_TEXT[token].encode("ascii"))
        return b"".join(pieces).decode("utf-8", "replace")

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """A whole conversation and the header of the assistant's next answer."""
        token_ids: list[int] = []
        for message in messages:
            role, content = str(message["role"]), str(message["content"])
            if role == "tool":
                role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
            token_ids += [
                self.im_start_id,
                *self.encode(f"{role}\n{content}"),
                self.im_end_id,
                *self.encode("\n"),
            ]
        return [*token_ids, self.im_start_id, *self.encode("assistant\n")]

    def chat_continuation(self, seen: Sequence[int], new_messages: Sequence[Message]) -> list[int]:
        """``seen``, which ends with an answer, followed by new messages and the next answer's header.

        The answer's end token is added where the policy did not sample it, and so is the newline that
        the format has behind it. Neither was sampled: they belong to the prompt of the new turn.
        """
        closing = [] if seen and seen[-1] == self.im_end_id else [self.im_end_id]
        return [*seen, *closing, *self.encode("\n"), *self.chat_prompt(new_messages)]
