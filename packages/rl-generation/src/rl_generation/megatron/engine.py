"""The rollout engine over the policy's own model object."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from ..failures import ContextOverflowError, GenerationError, InvalidRequestError
from ..lifecycle import Lifecycle
from ..protocol import Completion, GenerationRequest, RefitSpec
from .context_session import ContextSession
from .decoding import Continuation, decode
from .inspection import refuse_unsupported, unwrap, why_not_by_layers
from .layer_session import LayerSession
from .planning import PromptBatch, plan_batches

DecodePath = Literal["auto", "layers", "model"]

_COMPONENT = "megatron generation"


class MegatronGeneration:
    """Generates with a megatron-core GPTModel that the application also trains.

    The weights are read where they are at the moment of each call, so a refit moves nothing:
    :meth:`update_weights` only advances the version.

    Args:
        model: a GPTModel, or a wrapper around one; held by reference.
        vocab_size: number of real tokens; logits beyond it are padding and are never sampled.
        max_context: the most tokens that prompt and completion may have together.
        max_batch: the most rows that are decoded at once; more requests are taken in turns.
        weight_version: version of the weights that the model holds now.
        path: ``layers`` decodes through the model's modules around a cache of our own; ``model`` through its
            forward pass and megatron's static inference context, slower and one prompt length at a time, but
            whatever the layers are; ``auto`` is ``layers`` where the model allows it.
        wait_timeout_s: the longest that a call waits for another one or for :meth:`resume`.

    Raises:
        GenerationError: the model or a limit is unsuitable; names what and why.
    """

    def __init__(
        self,
        model: Any,
        *,
        vocab_size: int,
        max_context: int,
        max_batch: int = 256,
        weight_version: int = 0,
        path: DecodePath = "auto",
        wait_timeout_s: float = 600.0,
    ) -> None:
        self._model: Any = unwrap(model)
        refuse_unsupported(self._model, vocab_size, max_context, max_batch)
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._max_batch = max_batch
        self._weight_version = weight_version
        self._lifecycle = Lifecycle(_COMPONENT, wait_timeout_s)
        self._device = next(self._model.parameters()).device
        obstacle = why_not_by_layers(self._model)
        if path == "layers" and obstacle:
            raise GenerationError(
                f"{_COMPONENT}: the model has {obstacle}, so it cannot be decoded by layers; use path='auto'"
            )
        self._by_layers = path != "model" and obstacle is None
        self._requests_done = 0
        self._tokens_done = 0

    @property
    def base_urls(self) -> list[str]:
        """Always ``[]``: this engine serves no HTTP."""
        return []

    @property
    def weight_version(self) -> int:
        """Version of the weights that the next token is sampled from."""
        return self._weight_version

    @property
    def max_context(self) -> int:
        """The most tokens that prompt and completion may have together."""
        return self._max_context

    @property
    def vocab_size(self) -> int:
        """Token ids lie below it."""
        return self._vocab_size

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Completions in the order of the requests.

        Rows that share a prompt share its prefill. A request with a seed gets the same answer in any batch,
        as far as the model's own rounding allows (logits differ by about 1e-6 between batch shapes). Nothing
        is kept from one call to the next, so no cached key or value outlives the weights that made it.

        Raises:
            ContextOverflowError: a prompt leaves no room; nothing has run then.
            InvalidRequestError: a prompt is empty or holds a token outside the vocabulary; as above.
            InfraError: asleep or closed.
            DeadlineError: waited too long for another call or for :meth:`resume`.
            GenerationError: the model gave logits that are not numbers.
        """
        with self._lifecycle.generating():
            limits = [self._room_for(request) for request in requests]
            version = self._weight_version
            answers: list[Completion | None] = [None] * len(requests)
            prompts = [request.prompt_token_ids for request in requests]
            batches = plan_batches(prompts, self._max_batch, equal_lengths=not self._by_layers)
            # megatron's forward pass keeps tensors (of positions) that training uses later, so it must not
            # make them in inference mode; our own walk through the layers leaves nothing behind.
            without_gradients = torch.inference_mode if self._by_layers else torch.no_grad
            with _evaluating(self._model), without_gradients():
                for batch in batches:
                    for request, row in zip(
                        batch.requests, self._decode(batch, requests, limits), strict=True
                    ):
                        answers[request] = Completion(row.token_ids, row.logprobs, row.stop_reason, version)
            completions = [answer for answer in answers if answer is not None]
            self._requests_done += len(completions)
            self._tokens_done += sum(len(c.token_ids) for c in completions)
            return completions

    async def generate_async(self, request: GenerationRequest) -> Completion:
        """One completion, decoded in a thread of its own; raises what :meth:`generate` raises."""
        return (await asyncio.to_thread(self.generate, [request]))[0]

    def prepare_refit(self, spec: RefitSpec) -> None:
        """Accept the one refit there is, that of shared weights.

        Raises:
            GenerationError: tensors are announced.
            InfraError: the engine is closed.
        """
        self._lifecycle.refuse_closed()
        if spec.tensors:
            raise GenerationError(
                f"{_COMPONENT}: shares the policy's weights, so a refit carries no tensors, but "
                f"{len(spec.tensors)} were announced (first: {spec.tensors[0].name}); send an empty spec"
            )

    def update_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Advance to the version that the shared weights already have.

        All tokens of a completion are of one version: the weights are the policy's and change outside this
        class, so a generation in flight, paused or not, could neither keep the old ones nor tell where the
        new ones begin. It refuses the update; let it return, or :meth:`shutdown` the engine.

        Raises:
            GenerationError: the stream carries a tensor, the version does not advance, or a generation is in
                flight.
            InfraError: the engine is closed.
        """
        with self._lifecycle.idle("change weights"):
            for name, _ in stream:
                raise GenerationError(
                    f"{_COMPONENT}: shares the policy's weights and cannot load the tensor {name!r}; "
                    "pass an empty stream"
                )
            if version <= self._weight_version:
                raise GenerationError(
                    f"{_COMPONENT}: weight version must grow, got {version} after {self._weight_version}"
                )
            self._weight_version = version

    def pause(self) -> None:
        """Stop before the next token; the call in flight keeps what it has until :meth:`resume`."""
        self._lifecycle.pause()

    def resume(self) -> None:
        """Undo :meth:`pause`."""
        self._lifecycle.resume()

    def sleep(self) -> None:
        """Refuse generations and give cached device memory back; the weights are the policy's and stay."""
        self._lifecycle.sleep()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Undo :meth:`sleep`."""
        self._lifecycle.wake()

    def health(self) -> dict[str, Any]:
        """State, version and counts; answers in every state, also after :meth:`shutdown`."""
        return {
            "backend": "megatron",
            "state": self._lifecycle.state,
            "busy": self._lifecycle.busy,
            "path": "layers" if self._by_layers else "model",
            "weight_version": self._weight_version,
            "requests": self._requests_done,
            "tokens": self._tokens_done,
        }

    def shutdown(self, timeout_s: float) -> None:
        """Let the model go; idempotent. A generation in flight ends as ``aborted`` at its next step.

        Args:
            timeout_s: the longest to wait for that.
        """
        self._lifecycle.close(timeout_s)
        self._model = None

    def _decode(
        self, batch: PromptBatch, requests: Sequence[GenerationRequest], limits: Sequence[int]
    ) -> list[Continuation]:
        params = [requests[i].sampling for i in batch.requests]
        room = [limits[i] for i in batch.requests]
        kind = LayerSession if self._by_layers else ContextSession
        session = kind(self._model, batch, batch.longest_prompt + max(room), self._device)
        return decode(session, params, room, self._vocab_size, self._device, self._lifecycle.may_go_on)

    def _room_for(self, request: GenerationRequest) -> int:
        prompt = request.prompt_token_ids
        name = f"request {request.request_id!r}" if request.request_id else "a request"
        if not prompt:
            raise InvalidRequestError(
                f"{_COMPONENT}: {name} has an empty prompt; give at least one token", "prompt_token_ids"
            )
        if not 0 <= min(prompt) <= max(prompt) < self._vocab_size:
            raise InvalidRequestError(
                f"{_COMPONENT}: {name} has prompt tokens in {min(prompt)}..{max(prompt)}, outside the "
                f"vocabulary 0..{self._vocab_size - 1}; tokenise it with the model's own tokenizer",
                "prompt_token_ids",
            )
        room = self._max_context - len(prompt)
        if room < 1:
            raise ContextOverflowError(f"{_COMPONENT}: {name}", len(prompt), self._max_context)
        return min(room, request.sampling.max_new_tokens)


@contextmanager
def _evaluating(model: torch.nn.Module) -> Generator[None]:
    """Eval mode inside; each module's own mode back afterwards, whatever happens."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
