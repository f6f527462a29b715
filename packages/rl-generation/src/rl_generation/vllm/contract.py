"""The contract of our servers around vLLM's own OpenAI app.

Bodies are checked and pinned before the app sees them; its answers get their tokens, its errors our types.
What the contract does not know is not let through: vLLM has many more addresses, without such guarantees.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any

from ..failures import DeadlineError, GenerationError, InfraError, InvalidRequestError
from ..server.answers import chat_document, models_document, tokenize_document
from ..server.asgi import (
    App,
    ClientGoneError,
    Message,
    Receive,
    Scope,
    Send,
    first_of,
    send_body,
    send_json,
    to_json,
)
from ..server.media import check_media
from ..server.parsing import CalledTool, ParsedAnswer
from ..server.pinning import PinnedRequest, check_model, pin
from ..server.refusals import UnknownRouteError, refusal_of
from ..server.rendering import check_template_settings
from ..server.schemas import ChatBody, ChatMessage, TokenizeBody, TokenizeTextBody, parse_body
from ..server.settings import ServerSettings
from ..server.sizes import read_document
from ..server.splice import TOKEN_FIELDS, carried_tokens
from .exchange import CURRENT, Exchange
from .seeds import request_seed

_LOG = logging.getLogger(__name__)

_HANG_UP_S = 2.0


class VllmContract:
    """An ASGI app around vLLM's.

    Args:
        app: vLLM's, over an :class:`~rl_generation.vllm.observed.ObservedClient`.
        client: that client.
        settings: of the contract, with its stop tokens.
        calls_tools: whether vLLM was given a tool parser.
    """

    def __init__(self, app: App, client: Any, settings: ServerSettings, *, calls_tools: bool) -> None:
        self._app = app
        self._client = client
        self._settings = settings
        self._calls_tools = calls_tools

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI, HTTP only."""
        if scope["type"] != "http":
            return
        try:
            body = to_json(await self._answer(scope, receive))
        except ClientGoneError:
            return
        except Exception as error:
            refusal = refusal_of(error)
            if refusal.status == 500:
                _LOG.exception("server: a request failed")
            await send_json(send, refusal.status, refusal.document, refusal.headers)
        else:
            await send_body(send, 200, body)

    async def _answer(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        where = (scope["method"], scope["path"])
        settings = self._settings
        if where == ("GET", "/health"):
            await self._client.check_health()
            return {"status": "ok"}
        if where == ("GET", "/v1/models"):
            return models_document(settings.model, settings.max_context)
        if where not in (("POST", "/v1/chat/completions"), ("POST", "/tokenize")):
            raise UnknownRouteError(f"server: there is no {where[0]} {where[1]} here", where[1])
        document = await read_document(receive, settings)
        if where[1] == "/tokenize":
            return await self._tokenize(scope, receive, document)
        return await self._chat(scope, receive, document)

    async def _tokenize(self, scope: Scope, receive: Receive, document: Any) -> dict[str, Any]:
        if isinstance(document, dict) and "prompt" in document:
            text = parse_body(TokenizeTextBody, document)
            check_model(text.model, self._settings)
            asked, exchange = text.model_dump(exclude_none=True), Exchange(None, None)
        else:
            body = parse_body(TokenizeBody, document)
            check_model(body.model, self._settings)
            asked, exchange = _prompt_fields(body), _exchange(body, None)
        answer = await self._call(scope, receive, asked, exchange)
        return tokenize_document(answer["tokens"], self._settings.max_context)

    async def _chat(self, scope: Scope, receive: Receive, document: Any) -> dict[str, Any]:
        body = parse_body(ChatBody, document)
        pinned = pin(body, self._settings)
        exchange = _exchange(body, pinned)
        with_tools = bool(body.tools) and body.tool_choice != "none"
        asked = {**_prompt_fields(body), **self._sampling_fields(pinned)}
        if body.tools:
            # Without a parser vLLM refuses the very question whether a tool may be called.
            asked["tool_choice"] = "auto" if with_tools and self._calls_tools else "none"
        if body.parallel_tool_calls is not None:
            asked["parallel_tool_calls"] = body.parallel_tool_calls
        answer = await self._call(scope, receive, asked, exchange)
        completion = exchange.completion
        if completion is None:
            raise InfraError("server: vLLM answered without having sampled; send the request again")
        parsed = _parsed(answer["choices"][0]["message"], with_tools and self._calls_tools)
        texts: list[str] = []
        if body.logprobs:
            decode = self._client.renderer.get_tokenizer().decode
            as_ids = body.return_tokens_as_token_ids
            texts = [f"token_id:{t}" if as_ids else str(decode([t])) for t in completion.token_ids]
        return chat_document(self._settings.model, exchange.prompt, completion, parsed, body, texts)

    def _sampling_fields(self, pinned: PinnedRequest) -> dict[str, Any]:
        """Everything that decides the distribution, so that no default of vLLM or the model is left."""
        context = self._settings.max_context
        sampling = pinned.sampling(context, self._settings.stop_token_ids)
        greedy = sampling.temperature == 0
        return {
            "n": 1,
            "temperature": sampling.temperature,
            "top_p": 1.0 if greedy else sampling.top_p,
            "top_k": 0 if greedy else sampling.top_k,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "seed": request_seed(sampling.seed),
            # vLLM takes it down to the room that is left.
            "max_completion_tokens": sampling.max_new_tokens,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,
            "skip_special_tokens": False,
        }

    async def _call(self, scope: Scope, receive: Receive, body: Any, exchange: Exchange) -> dict[str, Any]:
        """vLLM's answer to a body.

        Raises:
            GenerationError: it was an error, or none in time.
        """
        inner = _Inner(to_json(body | {"model": self._settings.model}), receive)
        timeout_s = self._settings.request_timeout_s

        async def served() -> None:
            CURRENT.set(exchange)
            await self._app(inner.scope(scope), inner.receive, inner.send)

        work = asyncio.ensure_future(served())
        try:
            await asyncio.wait({work}, timeout=timeout_s)
        finally:
            if not work.done():
                # vLLM aborts a request inside its engine when the client is gone, not when it is cancelled.
                inner.hang_up()
                await asyncio.wait({work}, timeout=_HANG_UP_S)
                work.cancel()
        if inner.hung_up:
            raise DeadlineError(
                f"server: no answer within {timeout_s:g} s; ask for fewer tokens, send fewer requests at a "
                "time, or raise request_timeout_s"
            )
        failure = work.exception()
        if exchange.failure is not None:
            raise exchange.failure
        if failure is not None:
            raise failure
        return inner.document()


class _Inner:
    """One exchange with vLLM's app: a body in, a document out."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._length = len(body)
        self._receive = receive
        self._gone = asyncio.Event()
        self._status = 0
        self._parts: list[bytes] = []

    def scope(self, scope: Scope) -> Scope:
        headers = [
            (name, value)
            for name, value in scope["headers"]
            if name not in (b"content-type", b"content-length", b"authorization", b"transfer-encoding")
        ]
        headers += [
            (b"content-type", b"application/json"),
            (b"content-length", str(self._length).encode()),
        ]
        return {**scope, "headers": headers}

    async def receive(self) -> Message:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        return await first_of(self._receive, self._gone)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif message["type"] == "http.response.body":
            self._parts.append(message.get("body", b""))

    @property
    def hung_up(self) -> bool:
        return self._gone.is_set()

    def hang_up(self) -> None:
        self._gone.set()

    def document(self) -> dict[str, Any]:
        try:
            document = json.loads(b"".join(self._parts))
        except ValueError as error:
            raise InfraError(f"server: vLLM answered {self._status} with what is no JSON") from error
        if self._status == 200 and isinstance(document, dict):
            return document
        raise _typed(self._status, document)


def _typed(status: int, document: Any) -> Exception:
    """Our failure for an error that vLLM's app made itself."""
    detail = document.get("error", document) if isinstance(document, Mapping) else {}
    said = str(detail.get("message", "no reason given"))
    if status == 200:
        return ClientGoneError("the client went away")
    if 400 <= status < 500:
        return InvalidRequestError(
            f"server: vLLM refuses the request: {said}", str(detail.get("param") or "")
        )
    if status == 503:
        return InfraError(f"server: vLLM cannot serve now: {said}")
    return GenerationError(f"server: vLLM failed: {said}")


def _exchange(body: ChatBody | TokenizeBody, pinned: PinnedRequest | None) -> Exchange:
    check_template_settings(body.chat_template_kwargs)
    check_media(body.messages)
    messages = [message.model_dump(exclude_none=True) for message in body.messages]
    return Exchange(carried_tokens(messages, body.required_prefix_token_ids), pinned)


def _prompt_fields(body: ChatBody | TokenizeBody) -> dict[str, Any]:
    fields: dict[str, Any] = {"messages": [_plain(message) for message in body.messages]}
    if body.tools:
        fields["tools"] = body.tools
    if body.chat_template_kwargs:
        fields["chat_template_kwargs"] = body.chat_template_kwargs
    return fields


def _plain(message: ChatMessage) -> dict[str, Any]:
    fields = message.model_dump(exclude_none=True, exclude=set(TOKEN_FIELDS))
    return {"content": "", **fields} if message.role != "assistant" else fields


def _parsed(message: Mapping[str, Any], calls_tools: bool) -> ParsedAnswer:
    content = message.get("content")
    calls = tuple(
        CalledTool(call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    )
    problems: tuple[str, ...] = ()
    if calls_tools and content and "<tool_call>" in content:
        problems = ("a tool call could not be read and was left in the text",)
    return ParsedAnswer(content or None, message.get("reasoning") or None, calls, problems)
