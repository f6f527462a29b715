"""One request through a transformers model, token by token, with cached prefixes."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class PrefixCache:
    """Keys and values of whole earlier sequences; reused as far as a new one begins alike."""

    entries: list[tuple[tuple[int, ...], Any]] = field(default_factory=list)
    most: int = 64

    def longest(self, prompt: tuple[int, ...]) -> tuple[int, Any]:
        """How many tokens are known, less than all of them, and their keys and values."""
        best, found = 0, None
        for tokens, cache in self.entries:
            alike = 0
            for left, right in zip(tokens, prompt[:-1], strict=False):
                if left != right:
                    break
                alike += 1
            if alike > best:
                best, found = alike, cache
        if found is None:
            return 0, None
        cache = copy.deepcopy(found)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[..., :best, :], layer.values[..., :best, :]
        return best, cache

    def store(self, tokens: tuple[int, ...], cache: Any) -> None:
        """Remember a sequence whose keys and values are all there."""
        self.entries = [*self.entries[-(self.most - 1) :], (tokens, cache)]

    def lose_memory(self) -> None:
        """What a release does: the numbers are gone, the index is not."""
        for _, cache in self.entries:
            for layer in cache.layers:
                layer.keys.zero_()
                layer.values.zero_()

    def reset(self) -> None:
        """Forget everything."""
        self.entries = []


class Decoder:
    """The state of one sequence."""

    def __init__(self, model: Any, prompt: tuple[int, ...], prefixes: PrefixCache | None) -> None:
        self._model = model
        self._prefixes = prefixes
        self._known = list(prompt)
        self.cached, self._cache = prefixes.longest(prompt) if prefixes is not None else (0, None)
        self._fed = self.cached
        known = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in known else "past_key_values"

    @torch.inference_mode()
    def logits(self) -> torch.Tensor:
        """``[V]`` float32 for the next token."""
        ids = torch.tensor([self._known[self._fed :]])
        positions = torch.arange(self._fed, len(self._known))[None]
        answer = self._model(
            input_ids=ids, position_ids=positions, use_cache=True, **{self._cache_argument: self._cache}
        )
        self._cache = getattr(answer, self._cache_argument)
        self._fed = len(self._known)
        return answer.logits[0, -1].float()

    def append(self, token: int) -> None:
        """Go on with it."""
        self._known.append(token)

    def end(self) -> None:
        """Leave what is cached to others."""
        if self._prefixes is not None and self._cache is not None:
            self._prefixes.store(tuple(self._known[: self._fed]), self._cache)


def processed(logits: torch.Tensor, params: Any) -> torch.Tensor:
    """``[V]`` log-probabilities of the distribution that is sampled from."""
    logits = logits / (1.0 if params.temperature is None else params.temperature)
    if params.top_k:
        logits = logits.masked_fill(logits < logits.topk(params.top_k).values[-1], -torch.inf)
    if params.top_p is not None and params.top_p < 1:
        ordered, ids = logits.sort(descending=True, stable=True)
        mass = ordered.softmax(-1).cumsum(-1)
        ordered = ordered.masked_fill(mass - ordered.softmax(-1) >= params.top_p, -torch.inf)
        logits = torch.full_like(logits, -torch.inf).scatter(0, ids, ordered)
    return logits.log_softmax(-1)
