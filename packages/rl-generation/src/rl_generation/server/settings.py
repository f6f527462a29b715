"""What a server is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass

from ..protocol import SamplingParams

# As many spaces as one token stands for in vocabularies with long ones.
_BYTES_PER_TOKEN = 128
_LEAST_TEXT_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class SamplingProfile:
    """One distribution that the server may sample from.

    Attributes:
        name: for errors, such as ``training``.
        temperature: > 0 divides the logits; exactly 0 is greedy decoding.
        top_p: nucleus mass in (0, 1]; 1 is off.
        top_k: number of candidates, 0 is off.

    Raises:
        ValueError: a value outside its range.
    """

    name: str = "training"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        SamplingParams(1, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The contract of one server, whatever the engine behind it.

    Attributes:
        model: name under which the model is served.
        max_context: the most tokens that prompt and completion may have together.
        vocab_size: token ids lie below it.
        profiles: what may be sampled from, in order of preference: a request that leaves a setting out gets
            that of the first profile that agrees with those it names, and one that no profile agrees with is
            refused. The first is that of training.
        max_new_tokens: bound on the tokens of an answer whose request names none; ``None`` is the context.
        stop_token_ids: sampling one of these ends an answer; empty takes those of the chat template.
        request_timeout_s: the longest that a request may take.
        max_body_bytes: of a request. What its texts may be is less: see :attr:`max_text_bytes`.

    Raises:
        ValueError: no profile, or a limit below 1.
    """

    model: str
    max_context: int
    vocab_size: int
    profiles: tuple[SamplingProfile, ...] = (SamplingProfile(),)
    max_new_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    request_timeout_s: float = 1800.0
    max_body_bytes: int = 64 << 20

    @property
    def max_text_bytes(self) -> int:
        """Of all texts of a request in UTF-8; more could not be the tokens of one context.

        Tokenising takes seconds for each megabyte, in which a server answers nobody else.
        """
        return max(_LEAST_TEXT_BYTES, _BYTES_PER_TOKEN * self.max_context)

    def __post_init__(self) -> None:
        if not self.profiles:
            raise ValueError("a server needs at least one sampling profile")
        limits = {"max_context": self.max_context, "vocab_size": self.vocab_size}
        limits["max_body_bytes"] = self.max_body_bytes
        if self.max_new_tokens is not None:
            limits["max_new_tokens"] = self.max_new_tokens
        for name, value in limits.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.request_timeout_s <= 0:
            raise ValueError(f"request_timeout_s must be above 0, got {self.request_timeout_s:g}")
