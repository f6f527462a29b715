"""The model side of an in-process rollout: chat messages in, exact tokens and their log-probabilities out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

from .trajectory import StopReason

Message = Mapping[str, Any]
"""One chat message: ``role`` (``system``, ``user``, ``assistant`` or ``tool``) and text ``content``."""

_ENGINE_STOP_REASONS = (StopReason.STOP, StopReason.LENGTH, StopReason.ABORTED)


class ContinuityError(ValueError):
    """A prompt that does not extend the tokens that the rollout already has.

    Attributes:
        turn: the turn whose prompt it is, counted from 1.
        index: position of the first token that differs.
        got: the prompt's token there, ``None`` where the prompt ends too early.
        want: the token that the rollout has there.
    """

    def __init__(self, *, turn: int, index: int, got: int | None, want: int) -> None:
        self.turn = turn
        self.index = index
        self.got = got
        self.want = want
        found = "the prompt ends there" if got is None else f"got {got}"
        super().__init__(
            f"the prompt of turn {turn} does not extend the tokens seen so far: at index {index} {found}, "
            f"want {want}; build the prompt from the request's prefix_token_ids, never by tokenising "
            f"earlier turns again"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_continuity_error, (self.turn, self.index, self.got, self.want)


def _rebuild_continuity_error(turn: int, index: int, got: int | None, want: int) -> ContinuityError:
    return ContinuityError(turn=turn, index=index, got=got, want=want)


class ChatModelError(RuntimeError):
    """A chat model that raised, or that broke the :class:`ChatModel` contract."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One model call of one rollout.

    Attributes:
        messages: the whole conversation so far, ending with what the assistant has to answer.
        max_new_tokens: upper bound on the tokens of *this* answer, ≥ 1.
        prefix_token_ids: the exact tokens of the rollout so far (prompts and sampled tokens of all
            earlier turns), empty in the first turn. The reply's prompt must start with them, so a
            model tokenises only :attr:`new_messages` after them.
        seed: makes the answer reproducible whatever else is in the batch; ``None`` draws one.
        greedy: take the most probable token instead of sampling.
        tools: the tools on offer, as ``{"type": "function", "function": {"name", "description",
            "parameters"}}``, for the chat template.
    """

    messages: tuple[Message, ...]
    max_new_tokens: int
    prefix_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    greedy: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def new_messages(self) -> tuple[Message, ...]:
        """The messages that ``prefix_token_ids`` does not hold yet.

        In the first turn all of them, later those after the last assistant message (whose sampled
        tokens end the prefix; whatever the chat template puts behind an answer still has to follow).
        """
        if not self.prefix_token_ids:
            return self.messages
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index].get("role") == "assistant":
                return self.messages[index + 1 :]
        return self.messages


@dataclass(frozen=True, slots=True)
class ChatReply:
    """What the model sampled for one request.

    Attributes:
        prompt_token_ids: the *whole* prompt; it starts with the request's ``prefix_token_ids``.
        generation_token_ids: the sampled tokens exactly as sampled, the end token included if sampled.
        generation_logprobs: natural-log probability of each of them under the distribution that it
            was sampled from.
        text: the sampled text without the end token; thinking and tool-call tags stay in it.
        stop_reason: ``STOP``, ``LENGTH`` or ``ABORTED``, as the engine says (never inferred).
        weight_version: version of the weights that sampled its last token.
        token_versions: one per sampled token, where weights changed on the way; empty means
            ``weight_version`` for all.

    Raises:
        ValueError: a stop reason that no engine has, or not one version per token.
    """

    prompt_token_ids: tuple[int, ...]
    generation_token_ids: tuple[int, ...]
    generation_logprobs: tuple[float, ...]
    text: str
    stop_reason: StopReason
    weight_version: int
    token_versions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.token_versions and len(self.token_versions) != len(self.generation_token_ids):
            raise ValueError(
                f"a chat reply has {len(self.token_versions)} versions for {len(self.generation_token_ids)} "
                "sampled tokens; give one for each, or none where all are of weight_version"
            )
        if self.stop_reason not in _ENGINE_STOP_REASONS:
            allowed = ", ".join(reason.value for reason in _ENGINE_STOP_REASONS)
            raise ValueError(f"a chat reply stops by one of {allowed}, got {self.stop_reason!r}")

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """Version of the weights that sampled each token."""
        return self.token_versions or (self.weight_version,) * len(self.generation_token_ids)


@dataclass(frozen=True, slots=True)
class PromptRejected:
    """A request whose prompt leaves no room for an answer in the model's context.

    In the first turn it makes the rollout a data failure; later the rollout ends with
    ``StopReason.LENGTH`` and the turns that it has.

    Attributes:
        reason: for people, with the numbers: prompt length and context length.
    """

    reason: str


class ChatModel(Protocol):
    """What :func:`rl_gym_bridge.local.run_local_rollouts` samples from."""

    def chat(self, requests: Sequence[ChatRequest]) -> Sequence[ChatReply | PromptRejected]:
        """One reply per request, in their order.

        It bounds its own time and raises if the engine fails; one request that does not fit is a
        :class:`PromptRejected` in its place, so that it does not take the others down.
        """
        ...


def new_prompt_tokens(seen: Sequence[int], prompt: Sequence[int], *, turn: int) -> tuple[int, ...]:
    """The tokens of ``prompt`` behind ``seen``.

    Args:
        seen: every token of the rollout before this turn.
        prompt: the whole prompt of this turn.
        turn: its number, counted from 1, for the error.

    Raises:
        ContinuityError: ``prompt[:len(seen)] != seen``.
    """
    if tuple(prompt[: len(seen)]) == tuple(seen):
        return tuple(prompt[len(seen) :])
    agreed = takewhile(lambda pair: pair[0] == pair[1], zip(seen, prompt, strict=False))
    index = sum(1 for _ in agreed)
    got = prompt[index] if index < len(prompt) else None
    raise ContinuityError(turn=turn, index=index, got=got, want=seen[index])
