"""From our sampling settings to TensorRT-LLM's, with nothing left to its defaults or to the model's own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..failures import RequestError
from ..protocol import GenerationRequest, SamplingParams
from .api import TrtllmApi

# What an unset field of a request is taken from where a model's folder has an opinion, and the value that
# switches it off. Temperature, top-k and top-p are always set.
_NEUTRAL: Mapping[str, float | int] = {
    "min_p": 0.0,
    "no_repeat_ngram_size": 1 << 30,
    "repetition_penalty": 1.0,
}

_NO_END = -1


def model_opinions(folder: Path) -> dict[str, float | int]:
    """Neutral values for every sampling default beside temperature, top-k and top-p that a model brings.

    Newer releases fill a request's unset fields from the model's ``generation_config.json``; what it says
    would change the distribution behind our back. A model without such a file has no opinions.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    said = json.loads(path.read_text(encoding="utf-8"))
    return {name: off for name, off in _NEUTRAL.items() if said.get(name) not in (None, off)}


def is_scorable(sampling: SamplingParams, api: TrtllmApi) -> bool:
    """Whether this release reports log-probabilities of the distribution that is sampled from."""
    plain = sampling.temperature == 1 and sampling.top_p == 1 and sampling.top_k == 0
    return api.processed_logprobs is not None or plain or is_certain(sampling) or sampling.temperature == 0


def refuse_unscorable(component: str, sampling: SamplingParams, api: TrtllmApi) -> None:
    """Refuse settings that are not :func:`is_scorable`.

    Raises:
        RequestError: names the settings and what may be asked instead.
    """
    if is_scorable(sampling, api):
        return
    raise RequestError(
        f"{component}: TensorRT-LLM {api.version} reports log-probabilities of the untempered, unfiltered "
        f"distribution only, so temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k "
        f"{sampling.top_k} cannot be scored; use temperature 1 without top_p and top_k, or a release whose "
        "SamplingParams have logprobs_mode"
    )


def is_certain(sampling: SamplingParams) -> bool:
    """Whether the distribution that is sampled from has a single token, so that its log-probability is 0."""
    return sampling.temperature > 0 and sampling.top_k == 1


def sampling_arguments(
    request: GenerationRequest, seed: int, room: int, api: TrtllmApi, neutral: Mapping[str, float | int]
) -> dict[str, Any]:
    """Keyword arguments of TensorRT-LLM's ``SamplingParams``.

    Args:
        request: the whole request.
        seed: from :func:`stretch_seed`.
        room: how many tokens may still be sampled, ≥ 1.
        api: what the release offers.
        neutral: from :func:`model_opinions`.
    """
    sampling = request.sampling
    greedy = sampling.temperature == 0 or is_certain(sampling)
    arguments: dict[str, Any] = {
        "max_tokens": room,
        "temperature": 0.0 if greedy else sampling.temperature,
        "top_k": 1 if greedy else sampling.top_k,
        "top_p": 1.0 if greedy else sampling.top_p,
        "seed": seed,
        # Only what the request names may end it, not what the model's files call its end.
        "end_id": _NO_END,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "include_stop_str_in_output": True,
        "detokenize": False,
        **neutral,
    }
    if api.processed_logprobs is not None and not greedy:
        arguments["logprobs_mode"] = api.processed_logprobs
    if api.flat_logprobs:
        # None beside the sampled token's, as plain numbers.
        return {**arguments, "logprobs": 0, "logprobs_simple_format": True}
    # 0 would mean none at all to older releases. The likeliest token's comes along.
    return {**arguments, "logprobs": 1}


def stretch_seed(seed: int, sampled: int) -> int:
    """What one stretch of a request is sampled with, in [0, 2**63).

    A request that goes on after a pause must not draw its first numbers again, nor those of a neighbour.

    Args:
        seed: of the request. The engine's own default is 0 for every request, so there has to be one.
        sampled: how many tokens the request has from earlier stretches.
    """
    digest = hashlib.blake2b(f"{seed} {sampled}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
