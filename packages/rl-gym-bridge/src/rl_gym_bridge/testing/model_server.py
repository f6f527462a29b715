"""An OpenAI-compatible model server on loopback whose answers are scripted, with exact tokens.

It stands in for a policy and for a judge at the same time, and remembers every request, so that a test can
say what an environment asked for.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from .completions import Completion, RequestRefused, TokenStyle, complete, request_prompt, turn_index
from .judges import Judge, judge_by_equality
from .model_calls import CallKind, ModelCall
from .model_http import ModelHttpServer, Reply
from .scripted_turn import ScriptedTurn

CASE_KEY = "scripted_case"
"""The field of a request's ``metadata`` that names the script which answers it."""


class ScriptedModelServer:
    """A model server for tests; a context manager that listens on ``127.0.0.1`` while it is entered.

    ``POST /v1/chat/completions``, ``POST /tokenize``, ``GET /v1/models`` and ``GET /health``. A policy call
    is answered from the script that its ``metadata`` names, its first turn in a rollout's first call,
    the second in its second, and so on; the last one is repeated. Nothing else is kept per rollout, so that
    any number of them may run at the same time.

    Attributes:
        model: name under which the policy is served.
        judge_model: requests for this model are the judge's.
        judge: answers them; may be set between calls.
        default: answers policy calls without a script, ``None`` refuses them; may be set between calls.
        alter: changes the JSON object of an answer before it is sent; may be set between calls.
        style: where token ids are put; may be set between calls.
        context_length: tokens of prompt and answer together at most; may be set between calls.
    """

    def __init__(
        self,
        scripts: Mapping[str, Sequence[ScriptedTurn]] | None = None,
        *,
        model: str = "scripted-policy",
        judge_model: str = "scripted-judge",
        judge: Judge = judge_by_equality,
        default: ScriptedTurn | None = None,
        style: TokenStyle = "message",
        context_length: int = 200_000,
        port: int = 0,
    ) -> None:
        """
        Args:
            scripts: turns by name.
            port: port to listen on; 0 takes a free one, which is kept when the server is started again.
        """
        self.model = model
        self.judge_model = judge_model
        self.judge = judge
        self.default = default
        self.style: TokenStyle = style
        self.context_length = context_length
        self.alter: Callable[[ModelCall, dict[str, Any]], dict[str, Any]] | None = None
        self._scripts = {name: tuple(turns) for name, turns in (scripts or {}).items()}
        self._port = port
        self._lock = threading.Lock()
        self._calls: list[ModelCall] = []
        self._number = 0
        self._faults: Counter[tuple[str, int]] = Counter()
        self._running_case = ""
        self._running_from = 0
        self._server: ModelHttpServer | None = None

    def __enter__(self) -> ScriptedModelServer:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """``http://127.0.0.1:PORT``.

        Raises:
            RuntimeError: the server was never started.
        """
        if not self._port:
            raise RuntimeError("the model server has no address before it is started")
        return f"http://127.0.0.1:{self._port}"

    @property
    def base_url(self) -> str:
        """The OpenAI base URL, ending in ``/v1``."""
        return f"{self.url}/v1"

    def start(self) -> None:
        """Listen; does nothing if it listens already.

        Raises:
            OSError: the port is taken.
        """
        if self._server is None:
            self._server = ModelHttpServer(self._port, self._answer)
            self._port = self._server.server_port

    def stop(self) -> None:
        """Stop listening and cut every connection; may be started again at the same address."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def script(self, case: str, turns: Sequence[ScriptedTurn]) -> None:
        """Set the turns of a case, and forget the faults that it has had."""
        if not turns:
            raise ValueError(f"the script of {case!r} has no turn")
        with self._lock:
            self._scripts[case] = tuple(turns)
            self._faults = Counter({key: count for key, count in self._faults.items() if key[0] != case})

    @contextlib.contextmanager
    def running(self, case: str) -> Generator[None, None, None]:
        """Meanwhile, policy calls that name no script are answered from this one; for one rollout at a time.

        As soon as one call of the rollout named its script, unnamed ones are a judge's that uses the policy's
        model. A rollout whose history has lost its tokens gets its turns in order all the same.
        """
        with self._lock:
            self._running_case, self._running_from = case, self._number
        try:
            yield
        finally:
            self._running_case = ""

    @property
    def calls(self) -> tuple[ModelCall, ...]:
        """Every request so far, in the order of arrival."""
        with self._lock:
            return tuple(sorted(self._calls, key=lambda call: call.number))

    def calls_of(self, kind: CallKind, case: str | None = None) -> tuple[ModelCall, ...]:
        """The requests of one kind, and of one case where one is named."""
        return tuple(call for call in self.calls if call.kind is kind and (case is None or call.case == case))

    def calls_for(self, case: str) -> tuple[ModelCall, ...]:
        """The requests for a case, and those that nobody can tell a case of.

        Gym may go on with a rollout that nobody waits for; its calls are not among those of the next.
        """
        return tuple(call for call in self.calls if call.case in (case, ""))

    def clear(self) -> None:
        """Forget requests and faults; the scripts stay."""
        with self._lock:
            self._calls.clear()
            self._faults.clear()

    def _answer(self, method: str, path: str, body: Any) -> Reply:
        if method == "GET":
            documents: dict[str, Any] = {
                "/health": {"status": "ok"},
                "/v1/models": {
                    "object": "list",
                    "data": [
                        {"id": name, "object": "model", "max_model_len": self.context_length}
                        for name in (self.model, self.judge_model)
                    ],
                },
            }
            return Reply.json(documents[path]) if path in documents else Reply.error(404, f"no {path} here")
        if path not in ("/v1/chat/completions", "/tokenize"):
            return Reply.error(404, f"no {path} here")
        if not isinstance(body, Mapping):
            return Reply.error(400, "the request is no JSON object")
        with self._lock:
            number, self._number = self._number, self._number + 1
        try:
            if path == "/tokenize":
                return self._tokenize(number, body)
            return self._chat(number, body)
        except RequestRefused as refusal:
            self._remember(ModelCall(number, self._kind(body), self._case(body), 0, body, refusal.status))
            return Reply.error(refusal.status, str(refusal))

    def _tokenize(self, number: int, body: Mapping[str, Any]) -> Reply:
        prompt = request_prompt(body)
        turn = turn_index(body.get("messages") or ())
        self._remember(ModelCall(number, CallKind.TOKENIZE, self._case(body), turn, body, 200, tuple(prompt)))
        return Reply.json({"count": len(prompt), "max_model_len": self.context_length, "tokens": prompt})

    def _chat(self, number: int, body: Mapping[str, Any]) -> Reply:
        kind, case = self._kind(body), self._case(body)
        index, turn = self._turn(kind, case, body)
        if turn.delay_s:
            time.sleep(turn.delay_s)
        if turn.is_fault and self._is_faulty_now(kind, case, index, turn):
            status = 0 if turn.drop_connection else turn.status
            self._remember(ModelCall(number, kind, case, index, body, status))
            if turn.drop_connection:
                return Reply.dropped()
            if turn.body is not None:
                return Reply(turn.status, turn.body.encode("utf-8"))
            return Reply.error(turn.status, "the script says so")
        answer = complete(body, turn, number=number, context_length=self.context_length, style=self.style)
        call = _answered(number, kind, case, index, body, answer)
        self._remember(call)
        return Reply.json(self.alter(call, answer.document) if self.alter else answer.document)

    def _kind(self, body: Mapping[str, Any]) -> CallKind:
        if body.get("model") == self.judge_model:
            return CallKind.JUDGE
        running = self._running_case
        if running and not _named_case(body):
            with self._lock:
                named = any(_named_case(call.body) == running for call in self._calls)
            if named:
                return CallKind.JUDGE
        return CallKind.POLICY

    def _case(self, body: Mapping[str, Any]) -> str:
        return _named_case(body) or self._running_case

    def _turn(self, kind: CallKind, case: str, body: Mapping[str, Any]) -> tuple[int, ScriptedTurn]:
        if kind is CallKind.JUDGE:
            return 0, self.judge(body)
        index = turn_index(body.get("messages") or ())
        with self._lock:
            script = self._scripts.get(case)
            if case == self._running_case:
                index = max(index, self._answered_to_running())
        if script:
            return index, script[min(index, len(script) - 1)]
        if self.default is None:
            raise RequestRefused(
                f"there is no script {case!r}" if case else f"the request's metadata has no {CASE_KEY}"
            )
        return index, self.default

    def _answered_to_running(self) -> int:
        return sum(
            call.kind is CallKind.POLICY
            and call.case == self._running_case
            and call.number >= self._running_from
            and bool(call.generation_token_ids)
            for call in self._calls
        )

    def _is_faulty_now(self, kind: CallKind, case: str, index: int, turn: ScriptedTurn) -> bool:
        key = (f"{kind.value}:{case}" if kind is CallKind.JUDGE else case, index)
        with self._lock:
            self._faults[key] += 1
            return turn.faulty_calls is None or self._faults[key] <= turn.faulty_calls

    def _remember(self, call: ModelCall) -> None:
        with self._lock:
            self._calls.append(call)


def reserved_port() -> int:
    """A port of loopback that was free a moment ago, for a server that is started later."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _named_case(body: Mapping[str, Any]) -> str:
    metadata = body.get("metadata")
    name = metadata.get(CASE_KEY) if isinstance(metadata, Mapping) else None
    return name if isinstance(name, str) else ""


def _answered(
    number: int, kind: CallKind, case: str, turn: int, body: Mapping[str, Any], answer: Completion
) -> ModelCall:
    return ModelCall(
        number=number,
        kind=kind,
        case=case,
        turn=turn,
        body=body,
        prompt_token_ids=answer.prompt_token_ids,
        generation_token_ids=answer.generation_token_ids,
        generation_log_probs=answer.generation_log_probs,
        finish_reason=answer.finish_reason,
    )
