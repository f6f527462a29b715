"""What tests make the double do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Quirks:
    """Set by a test, reset by its fixture.

    Attributes:
        repeated_stop_tokens: how often a stop token is repeated behind itself, with log-probabilities.
        drops_stop_token: leave it out although it was asked for.
        extra_logprobs_after_abort: how many more log-probabilities than tokens an aborted answer has.
        on_step: awaited before each token; may wait, or raise.
        load_failure: raised instead of loading the weights of a bucket.
        finalise_failure: raised instead of finalising.
        setup_delay_s: how long the workers take to start.
    """

    repeated_stop_tokens: int = 0
    drops_stop_token: bool = False
    extra_logprobs_after_abort: int = 2
    on_step: Callable[[Any], Awaitable[None]] | None = None
    load_failure: Exception | None = None
    finalise_failure: Exception | None = None
    setup_delay_s: float = 0.0


QUIRKS = Quirks()


def reset() -> None:
    """Back to good behaviour."""
    QUIRKS.__dict__.update(Quirks().__dict__)
