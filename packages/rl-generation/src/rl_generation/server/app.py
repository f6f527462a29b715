"""An OpenAI-compatible server over any engine that takes tokens and gives tokens."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from fastapi import FastAPI, Request, Response

from ..failures import DeadlineError
from ..protocol import Completion, GenerationRequest
from .answers import chat_document, models_document, tokenize_document
from .asgi import ClientGoneError, to_json
from .parsing import AnswerParser, PlainParser
from .pinning import check_model, pin, room_for
from .refusals import UnknownRouteError, refusal_of
from .rendering import ChatRenderer, ChatTokenizer, turn_end_tokens
from .schemas import ChatBody, TokenizeBody, TokenizeTextBody, parse_body
from .settings import ServerSettings
from .sizes import read_document

_LOG = logging.getLogger(__name__)


class AsyncEngine(Protocol):
    """The one method of an engine that serving needs."""

    async def generate_async(self, request: GenerationRequest) -> Completion:
        """One completion; cancelling the call gives the request up."""
        ...


def create_app(
    engine: AsyncEngine,
    tokenizer: ChatTokenizer,
    settings: ServerSettings,
    parser: AnswerParser | None = None,
) -> FastAPI:
    """``/v1/chat/completions``, ``/tokenize``, ``/v1/models`` and ``/health``.

    Args:
        engine: samples; its failures become typed answers.
        tokenizer: a transformers tokenizer with a chat template.
        settings: of the contract; ``stop_token_ids`` are the chat template's if it has none.
        parser: reads thinking and tool calls; by default all of an answer is visible text.
    """
    if not settings.stop_token_ids:
        settings = dataclasses.replace(settings, stop_token_ids=turn_end_tokens(tokenizer))
    endpoints = _Endpoints(engine, tokenizer, settings, parser or PlainParser())
    app = FastAPI(title="rl-generation", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_api_route("/v1/chat/completions", endpoints.chat, methods=["POST"])
    app.add_api_route("/tokenize", endpoints.tokenize, methods=["POST"])
    app.add_api_route("/v1/models", endpoints.models, methods=["GET"])
    app.add_api_route("/health", endpoints.health, methods=["GET"])
    for status in (404, 405):
        app.add_exception_handler(status, _unknown_route)
    return app


class _Endpoints:
    def __init__(
        self, engine: AsyncEngine, tokenizer: ChatTokenizer, settings: ServerSettings, parser: AnswerParser
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._parser = parser
        self._renderer = ChatRenderer(tokenizer, settings.vocab_size)

    async def health(self) -> Response:
        return _json({"status": "ok"})

    async def models(self) -> Response:
        return _json(models_document(self._settings.model, self._settings.max_context))

    async def tokenize(self, request: Request) -> Response:
        return await _answered(self._tokenize, request)

    async def chat(self, request: Request) -> Response:
        return await _answered(self._chat, request)

    async def _tokenize(self, request: Request) -> dict[str, Any]:
        document = await read_document(request.receive, self._settings)
        if isinstance(document, dict) and "prompt" in document:
            text = parse_body(TokenizeTextBody, document)
            check_model(text.model, self._settings)
            tokens = self._renderer.encode(text.prompt, add_special_tokens=text.add_special_tokens)
        else:
            body = parse_body(TokenizeBody, document)
            check_model(body.model, self._settings)
            tokens = await self._prompt(body)
        return tokenize_document(tokens, self._settings.max_context)

    async def _chat(self, request: Request) -> dict[str, Any]:
        body = parse_body(ChatBody, await read_document(request.receive, self._settings))
        pinned = pin(body, self._settings)
        prompt = await self._prompt(body)
        stops = self._settings.stop_token_ids
        sampling = pinned.sampling(room_for(len(prompt), self._settings), stops)
        completion = await self._sample(request, GenerationRequest(tuple(prompt), sampling))
        sampled = completion.token_ids
        ended = completion.stop_reason == "stop" and bool(sampled) and sampled[-1] in stops
        text = self._renderer.decode(sampled[:-1] if ended else sampled)
        parsed = self._parser.parse(text, with_tools=bool(body.tools) and body.tool_choice != "none")
        texts: list[str] = []
        if body.logprobs:
            as_ids = body.return_tokens_as_token_ids
            texts = [f"token_id:{t}" if as_ids else self._renderer.decode([t]) for t in sampled]
        return chat_document(self._settings.model, prompt, completion, parsed, body, texts)

    async def _prompt(self, body: ChatBody | TokenizeBody) -> list[int]:
        return await self._renderer.prompt(
            body.messages, body.tools, body.chat_template_kwargs, body.required_prefix_token_ids
        )

    async def _sample(self, request: Request, wanted: GenerationRequest) -> Completion:
        """Sample until done, out of time, or the client has gone; the body has been read before."""
        work = asyncio.ensure_future(self._engine.generate_async(wanted))
        gone = asyncio.ensure_future(_disconnected(request))
        timeout_s = self._settings.request_timeout_s
        try:
            await asyncio.wait({work, gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise _unanswered(gone.done(), timeout_s)
            return work.result()
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)


def _unanswered(gone: bool, timeout_s: float) -> DeadlineError:
    if gone:
        return DeadlineError("server: the client went away")
    return DeadlineError(
        f"server: no answer within {timeout_s:g} s; ask for fewer tokens, send fewer requests at a time, or "
        "raise request_timeout_s"
    )


async def _answered(endpoint: Callable[[Request], Awaitable[dict[str, Any]]], request: Request) -> Response:
    try:
        return _json(await endpoint(request))
    except ClientGoneError:
        # Nobody reads it.
        return Response(status_code=400)
    except Exception as error:
        refusal = refusal_of(error)
        if refusal.status == 500:
            _LOG.exception("server: a request failed")
        return _json(refusal.document, refusal.status, refusal.headers)


async def _disconnected(request: Request) -> None:
    with contextlib.suppress(RuntimeError):
        while (await request.receive())["type"] != "http.disconnect":
            pass


async def _unknown_route(request: Request, error: Exception) -> Response:
    refusal = refusal_of(
        UnknownRouteError(f"server: there is no {request.method} {request.url.path} here", request.url.path)
    )
    return _json(refusal.document, refusal.status, refusal.headers)


def _json(document: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(document), status, headers, media_type="application/json")
