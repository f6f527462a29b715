"""What vLLM answers, as completions: tokens, log-probabilities, and who sampled each of them."""

from __future__ import annotations

import math
from typing import Any

from ..failures import GenerationError, InfraError
from ..protocol import Completion, EngineStopReason

_REASONS: dict[str, EngineStopReason] = {"stop": "stop", "length": "length", "abort": "aborted"}


def completion_of(output: Any, version: int, component: str) -> Completion:
    """The completion in a finished ``RequestOutput`` of vLLM.

    Args:
        output: of a request with ``logprobs=0`` and flat log-probabilities.
        version: of the weights now, for an engine that does not record it with each token.
        component: name that errors begin with.

    Raises:
        InfraError: vLLM failed within the request.
        GenerationError: tokens and log-probabilities do not match, or one is no number.
    """
    answer = output.outputs[0]
    reason = _REASONS.get(answer.finish_reason)
    if reason is None:
        raise InfraError(f"{component}: vLLM ended a request with {answer.finish_reason!r}; send it again")
    token_ids = tuple(answer.token_ids)
    logprobs = sampled_logprobs(answer.logprobs, token_ids, component)
    versions = token_versions(answer, len(token_ids), version)
    changed = bool(versions) and versions[0] != versions[-1]
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        stop_reason=reason,
        weight_version=versions[-1] if versions else version,
        token_versions=versions if changed else (),
    )


def sampled_logprobs(flat: Any, token_ids: tuple[int, ...], component: str) -> tuple[float, ...]:
    """One natural-log probability per token out of vLLM's flat ones.

    Raises:
        GenerationError: they are of other tokens, not one each, or not finite.
    """
    if not token_ids:
        return ()
    if flat is None or tuple(flat.token_ids) != token_ids:
        got = "none" if flat is None else f"{len(flat.token_ids)} of other tokens"
        raise GenerationError(
            f"{component}: {len(token_ids)} tokens came with log-probabilities that are not theirs ({got}); "
            "this version of vLLM is not supported"
        )
    logprobs = tuple(float(value) for value in flat.logprobs)
    if len(logprobs) != len(token_ids):
        raise GenerationError(
            f"{component}: {len(token_ids)} tokens came with {len(logprobs)} log-probabilities; this "
            "version of vLLM is not supported"
        )
    for place, (token, value) in enumerate(zip(token_ids, logprobs, strict=True)):
        # A sampled token cannot have probability zero.
        if not math.isfinite(value):
            raise GenerationError(
                f"{component}: token {token} at place {place} of an answer came with the log-probability "
                f"{value}; expected a finite number; does the model overflow its dtype?"
            )
    return logprobs


def token_versions(answer: Any, count: int, version: int) -> tuple[int, ...]:
    """Version of the weights that sampled each of ``count`` tokens.

    vLLM notes it with the batch in which a token was sampled, so what was under way when a refit began is
    told apart from what came after, however late it is read.
    """
    spans = getattr(answer, "weight_versions", None)
    if spans is None:
        return (version,) * count
    versions: list[int] = []
    for span in spans:
        versions.extend([int(span.version)] * (span.end - span.start))
    return tuple(versions[:count])
