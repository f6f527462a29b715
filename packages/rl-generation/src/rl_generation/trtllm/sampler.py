"""One request at a time through ``AsyncLLM``: refused, submitted, awaited and read."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

from ..failures import ContextOverflowError, DeadlineError, RequestError
from ..protocol import GenerationRequest
from .admission import Flight
from .answers import Piece, read_output
from .api import TrtllmApi
from .faults import classified
from .sampling_arguments import is_certain, refuse_unscorable, sampling_arguments, stretch_seed
from .settings import TrtllmSettings


class Sampler:
    """What the engine's loop over pauses calls for each stretch of sampling.

    Args:
        llm: an ``AsyncLLM`` that is set up.
        api: what its release offers.
        settings: of the engine.
        flight: where requests are listed while the engine works on them.
        vocab_size: token ids lie below it.
        neutral: from :func:`~rl_generation.trtllm.sampling_arguments.model_opinions`.
    """

    def __init__(
        self,
        llm: Any,
        api: TrtllmApi,
        settings: TrtllmSettings,
        *,
        flight: Flight,
        vocab_size: int,
        neutral: Mapping[str, float | int],
    ) -> None:
        self._llm = llm
        self._api = api
        self._settings = settings
        self._component = settings.name
        self._flight = flight
        self._vocab_size = vocab_size
        self._neutral = neutral
        # Requests without a seed: replicas of one job must not draw the same numbers.
        self._random = random.Random(f"{settings.seed} {settings.replica}")
        self.sampled_tokens = 0

    def room_for(self, request: GenerationRequest) -> int:
        """The most tokens that may be sampled for a request.

        Raises:
            ContextOverflowError: its prompt leaves no room.
            RequestError: the prompt is none, or the settings cannot be scored.
        """
        prompt = request.prompt_token_ids
        name = f"request {request.request_id!r}" if request.request_id else "a request"
        if not prompt:
            raise RequestError(f"{self._component}: {name} has an empty prompt; give at least one token")
        if not 0 <= min(prompt) <= max(prompt) < self._vocab_size:
            raise RequestError(
                f"{self._component}: {name} has prompt tokens in {min(prompt)}..{max(prompt)}, outside the "
                f"vocabulary 0..{self._vocab_size - 1}; tokenise it with the model's own tokenizer"
            )
        refuse_unscorable(self._component, request.sampling, self._api)
        room = self._settings.max_context - len(prompt)
        if room < 1:
            raise ContextOverflowError(self._component, len(prompt), self._settings.max_context)
        return min(room, request.sampling.max_new_tokens)

    async def sample(self, request: GenerationRequest, earlier: Sequence[int], room: int) -> Piece:
        """Sample until the request ends or is aborted. Submits before it first waits.

        Args:
            request: whose prompt and settings count.
            earlier: its tokens of earlier stretches.
            room: how many more there may be, ≥ 1.

        Raises:
            DeadlineError: longer than ``request_timeout_s``; the request is aborted.
            EngineDeadError: a worker is gone.
            GenerationError: see :func:`~rl_generation.trtllm.answers.read_output`.
        """
        asked = request.sampling.seed
        seed = stretch_seed(self._random.getrandbits(63) if asked is None else asked, len(earlier))
        arguments = sampling_arguments(request, seed, room, self._api, self._neutral)
        prompt = [*request.prompt_token_ids, *earlier]
        timeout_s = self._settings.request_timeout_s
        with classified(self._component, "sample"):
            handle = self._llm.generate_async(
                inputs=prompt, sampling_params=self._api.sampling_params(**arguments), streaming=False
            )
            try:
                with self._flight.boarding(handle):
                    async with asyncio.timeout(timeout_s):
                        await handle.aresult()
            except TimeoutError as error:
                raise DeadlineError(
                    f"{self._component}: a request of {len(prompt)} tokens and at most {room} more took "
                    f"longer than {timeout_s:g} s"
                ) from error
            finally:
                await self._flight.land()
        piece = read_output(handle.outputs[0], request.sampling.stop_token_ids, room, self._component)
        self.sampled_tokens += len(piece.token_ids)
        if is_certain(request.sampling):
            return Piece(piece.token_ids, (0.0,) * len(piece.token_ids), piece.stop_reason)
        return piece
