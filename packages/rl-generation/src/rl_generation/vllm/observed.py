"""vLLM's engine as its HTTP app sees it: every request is checked once more, and its output is kept."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from ..failures import GenerationError, InvalidRequestError
from ..server.pinning import PinnedRequest
from .exchange import CURRENT, Complete
from .faults import converted

_COMPONENT = "server"
_NEUTRAL: dict[str, Any] = {
    "n": 1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "structured_outputs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
}


class ObservedClient:
    """Everything is the client's, except that failures are typed and outputs are put into the exchange.

    Args:
        client: vLLM's ``AsyncLLM``.
        complete: reads its outputs.
    """

    def __init__(self, client: Any, complete: Complete) -> None:
        self._client = client
        self._complete = complete

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    @property
    def dead_error(self) -> GenerationError:
        """Why the engine is dead."""
        return converted(self._client.dead_error, _COMPONENT, "a request")

    async def check_health(self) -> None:
        """Raise :class:`~rl_generation.failures.EngineDeadError` where the engine is gone."""
        try:
            await self._client.check_health()
        except Exception as error:
            raise converted(error, _COMPONENT, "the health check") from error

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **settings: Any
    ) -> AsyncGenerator[Any]:
        """As the client's, for requests of the contract only.

        Raises:
            GenerationError: another way in, settings other than the pinned ones, or what the engine raised.
        """
        exchange = CURRENT.get()
        if exchange is None or exchange.pinned is None:
            raise InvalidRequestError("server: only /v1/chat/completions samples")
        _check(sampling_params, exchange.pinned)
        # The log-probability of each sampled token, in the form in which it comes whole.
        sampling_params.logprobs = 0
        sampling_params.flat_logprobs = True
        try:
            async for output in self._client.generate(prompt, sampling_params, request_id, **settings):
                if output.finished:
                    exchange.completion = self._complete(output)
                yield output
        except Exception as error:
            raise converted(error, _COMPONENT, "a request") from error


def _check(sampling: Any, pinned: PinnedRequest) -> None:
    profile = pinned.profile
    greedy = profile.temperature == 0
    wanted = {
        **_NEUTRAL,
        "temperature": profile.temperature,
        "top_p": 1.0 if greedy else profile.top_p,
        "top_k": 0 if greedy else profile.top_k,
    }
    for name, value in wanted.items():
        got = getattr(sampling, name, value)
        if got != value and not (not got and not value):
            raise InvalidRequestError(
                f"server: vLLM would sample with {name}={got!r} instead of {value!r}; a parser "
                "changes it, so take another",
                name,
            )
