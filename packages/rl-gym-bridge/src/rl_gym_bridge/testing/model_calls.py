"""What the scripted model server was asked, and what it said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class CallKind(str, Enum):
    """Who asks: the policy's calls carry a token contract, a judge's do not."""

    POLICY = "policy"
    JUDGE = "judge"
    TOKENIZE = "tokenize"


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One request that the server got.

    Attributes:
        number: its place in the order of arrival, from 0.
        kind: who asks.
        case: the script that it was answered from, empty where none was found.
        turn: which turn of it, from 0.
        body: the request as it came.
        status: HTTP status of the answer, 0 where the connection was dropped.
        prompt_token_ids: the prompt, empty where nothing was sampled.
        generation_token_ids: the answer.
        generation_log_probs: log-probability of each of its tokens.
        finish_reason: why it ended.
    """

    number: int
    kind: CallKind
    case: str
    turn: int
    body: Mapping[str, Any]
    status: int = 200
    prompt_token_ids: tuple[int, ...] = ()
    generation_token_ids: tuple[int, ...] = ()
    generation_log_probs: tuple[float, ...] = ()
    finish_reason: str = ""
