"""The sampling settings of a request, held against those that the server was started with.

A token is only worth training on if its distribution can be computed again. So a setting that a request
leaves out is never the model's own default, and one that the policy could not score is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..failures import ContextOverflowError, InvalidRequestError
from ..protocol import SamplingParams
from .refusals import UnknownModelError
from .schemas import ChatBody
from .settings import SamplingProfile, ServerSettings

_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "n": (1,),
    "stream": (False,),
    "stream_options": (),
    "stop": ([],),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    # A tool that is forced is sampled under a grammar.
    "tool_choice": ("auto", "none"),
}


@dataclass(frozen=True, slots=True)
class PinnedRequest:
    """What is left to decide once a request has been checked.

    Attributes:
        profile: what it is sampled from.
        max_new_tokens: as asked or as the server was told; ``None`` is as many as fit.
        seed: of the request.
    """

    profile: SamplingProfile
    max_new_tokens: int | None
    seed: int | None

    def sampling(self, room: int, stop_token_ids: tuple[int, ...]) -> SamplingParams:
        """For an engine, with at most ``room`` ≥ 1 tokens."""
        wanted = room if self.max_new_tokens is None else min(self.max_new_tokens, room)
        return SamplingParams(
            max_new_tokens=wanted,
            temperature=self.profile.temperature,
            top_p=self.profile.top_p,
            top_k=self.profile.top_k,
            stop_token_ids=stop_token_ids,
            seed=self.seed,
        )


def pin(body: ChatBody, settings: ServerSettings) -> PinnedRequest:
    """Check every setting of a request.

    Raises:
        InvalidRequestError: one cannot be scored, or no profile has it.
        UnknownModelError: the request is for another model.
    """
    check_model(body.model, settings)
    if body.stream not in (None, False):
        raise InvalidRequestError(
            "server: streaming is not supported; leave stream out, the answer comes in one piece", "stream"
        )
    for name, neutral in _NEUTRAL.items():
        value = getattr(body, name)
        if value is not None and not any(_same(value, allowed) for allowed in neutral):
            allowed = " or ".join(repr(value) for value in neutral)
            remedy = f"leave it out or set it to {allowed}" if neutral else "leave it out"
            raise InvalidRequestError(
                f"server: {name}={value!r} samples or answers in a way that cannot be scored; {remedy}", name
            )
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    wanted = getattr(body, name)
    if wanted is not None and wanted < 1:
        raise InvalidRequestError(f"server: {name} must be at least 1, got {wanted}", name)
    limit = settings.max_new_tokens if wanted is None else wanted
    return PinnedRequest(_profile(body, settings.profiles), limit, body.seed)


def check_model(model: str | None, settings: ServerSettings) -> None:
    """Raise :class:`UnknownModelError` where a request names another model."""
    if model is not None and model != settings.model:
        raise UnknownModelError(f"server: no model {model!r} here; this one is {settings.model!r}", "model")


def room_for(prompt_tokens: int, settings: ServerSettings) -> int:
    """How many tokens fit behind a prompt, at least 1.

    Raises:
        ContextOverflowError: none.
    """
    room = settings.max_context - prompt_tokens
    if room < 1:
        raise ContextOverflowError("server", prompt_tokens, settings.max_context)
    return room


def _profile(body: ChatBody, profiles: Sequence[SamplingProfile]) -> SamplingProfile:
    asked: dict[str, float] = {}
    for name in ("temperature", "top_p", "top_k"):
        value = getattr(body, name)
        if value is not None:
            # Some clients write "off" as -1.
            asked[name] = 0 if name == "top_k" and value == -1 else value
    for profile in profiles:
        if all(_same(value, getattr(profile, name)) for name, value in asked.items()):
            return profile
    given = ", ".join(f"{name}={value!r}" for name, value in asked.items())
    known = "; ".join(
        f"{p.name}: temperature={p.temperature!r}, top_p={p.top_p!r}, top_k={p.top_k}" for p in profiles
    )
    training = profiles[0]
    odd = next((name for name, value in asked.items() if not _same(value, getattr(training, name))), "")
    raise InvalidRequestError(
        f"server: {given} is none of the settings that this server samples with ({known}); leave them "
        "out, or start the server with a profile that has them",
        odd,
    )


def _same(value: Any, allowed: Any) -> bool:
    if isinstance(value, bool) or isinstance(allowed, bool):
        return value is allowed
    if isinstance(value, (int, float)) and isinstance(allowed, (int, float)):
        return math.isclose(value, allowed, rel_tol=1e-9)
    return value == allowed
