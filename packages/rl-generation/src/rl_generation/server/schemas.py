"""The bodies of requests, for every backend. Unknown fields are refused, not ignored."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, ValidationError

from ..failures import InvalidRequestError
from .messages import check_messages, require_unicode

Role = Literal["system", "developer", "user", "assistant", "tool"]
Number = Annotated[float, Field(strict=True)]
TokenIds = list[Annotated[int, Field(strict=True, ge=0, lt=2**31)]]


class ChatMessage(BaseModel):
    """One message. Fields that only a chat template knows are kept, unless they are nearly one of these."""

    model_config = ConfigDict(extra="allow")

    role: Role
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    prompt_token_ids: TokenIds | None = None
    generation_token_ids: TokenIds | None = None
    generation_log_probs: list[Number] | None = None
    weight_versions: list[StrictInt] | None = None


class _Conversation(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    required_prefix_token_ids: TokenIds | None = None
    """Exact tokens up to the end of the last assistant message, where the messages do not carry them."""


class ChatBody(_Conversation):
    """``POST /v1/chat/completions``."""

    max_tokens: StrictInt | None = None
    max_completion_tokens: StrictInt | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: StrictInt | None = None
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)] | None = None
    logprobs: StrictBool | None = None
    return_tokens_as_token_ids: StrictBool | None = None
    parallel_tool_calls: StrictBool | None = None
    tool_choice: Any = None

    # They change nothing that is sampled.
    top_logprobs: Literal[0] | None = None
    return_token_ids: StrictBool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    store: StrictBool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    request_id: str | None = None
    session_id: str | None = None

    # They would, so only the value that leaves the distribution alone is taken (see ``pinning``).
    n: Any = None
    stream: Any = None
    stream_options: Any = None
    stop: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    min_p: Any = None
    logit_bias: Any = None
    min_tokens: Any = None
    ignore_eos: Any = None
    stop_token_ids: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    use_beam_search: Any = None
    truncate_prompt_tokens: Any = None
    echo: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None


class TokenizeBody(_Conversation):
    """``POST /tokenize`` of a conversation."""

    add_generation_prompt: Literal[True] | None = None


class TokenizeTextBody(BaseModel):
    """``POST /tokenize`` of plain text."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    prompt: str
    add_special_tokens: StrictBool = True


_Body = TypeVar("_Body", bound=BaseModel)


def parse_body(kind: type[_Body], document: Any) -> _Body:
    """A body from its JSON document.

    Raises:
        InvalidRequestError: it is no object, has unknown fields or wrong values; names the first of them.
    """
    if not isinstance(document, dict):
        raise InvalidRequestError("server: the body must be a JSON object")
    # A field without a value asks for nothing.
    document = {name: value for name, value in document.items() if value is not None}
    unknown = sorted(set(document) - set(kind.model_fields))
    if unknown:
        near = difflib.get_close_matches(unknown[0], kind.model_fields, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "; leave it out"
        raise InvalidRequestError(f"server: unknown field {unknown[0]!r}{hint}", unknown[0])
    require_unicode(document)
    try:
        body = kind.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InvalidRequestError(f"server: {place}: {first['msg']}", place) from error
    if isinstance(body, _Conversation):
        check_messages(body.messages, body.required_prefix_token_ids)
    return body
