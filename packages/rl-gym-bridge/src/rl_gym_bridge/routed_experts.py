"""Which experts the router chose for each token, packed: they outweigh the tokens a hundredfold."""

from __future__ import annotations

import sys
from array import array
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

#: Integer types that choices are kept in, with their codes in :mod:`array`.
TYPE_CODES = {"int8": "b", "uint8": "B", "int16": "h", "int32": "i"}
_ENVELOPE = "nrlre1"


class RoutedExpertsError(ValueError):
    """A recording of routed experts that is malformed, does not fit its integer type or its tokens."""


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The router's choices for consecutive tokens, shape ``[tokens, layers, top_k]`` in C order.

    ``torch.frombuffer`` and ``numpy.frombuffer`` read :attr:`data` without a copy.

    Attributes:
        dtype: ``int8``, ``uint8``, ``int16`` or ``int32``, in the byte order of this machine.
        tokens: recorded tokens, from the first one of the sequence on.
        layers: layers that have experts.
        top_k: experts per token and layer.
        data: the packed integers.
    """

    dtype: str
    tokens: int
    layers: int
    top_k: int
    data: bytes = field(repr=False)

    @classmethod
    def parse(cls, recorded: Any, dtype: str) -> RoutedExperts:
        """From what an answer carries: nested lists, or text ``nrlre1:<dtype>:<T>x<L>x<K>:<base64>``.

        Args:
            recorded: the value.
            dtype: integer type to pack with.

        Raises:
            RoutedExpertsError: the value is neither, is ragged, or holds something that ``dtype`` cannot.
        """
        if dtype not in TYPE_CODES:
            raise RoutedExpertsError(
                f"there is no integer type {dtype!r}; use one of {', '.join(TYPE_CODES)}"
            )
        tokens, layers, top_k, flat = (
            _from_text(recorded) if isinstance(recorded, str) else _from_lists(recorded)
        )
        try:
            packed = array(TYPE_CODES[dtype], flat)
        except (OverflowError, TypeError) as error:
            raise RoutedExpertsError(f"an expert's number does not fit {dtype} ({error})") from error
        if min(packed) < 0:
            raise RoutedExpertsError(f"an expert's number is negative ({min(packed)})")
        return cls(dtype, tokens, layers, top_k, packed.tobytes())

    def rows(self, start: int, stop: int) -> bytes:
        """The packed choices of tokens ``start`` to ``stop``, the latter not included."""
        width = len(self.data) // self.tokens
        return self.data[start * width : stop * width]


def join_calls(recordings: Sequence[RoutedExperts], lengths: Sequence[int]) -> RoutedExperts:
    """One recording of a whole rollout from those of its model calls.

    Every call records its sequence from the first token on, so an earlier token is recorded again by each
    later call; what counts is the first recording, the one that sampled. The last sampled token of a call may
    be unrecorded, because no model has read it yet; the next call fills it in.

    Args:
        recordings: one per call.
        lengths: prompt and sampled tokens of each call together.

    Raises:
        RoutedExpertsError: a recording is not as long as its call or has another shape than the first.
    """
    first = recordings[0]
    joined: list[bytes] = []
    known = 0
    for number, (recording, length) in enumerate(zip(recordings, lengths, strict=True), start=1):
        if (recording.dtype, recording.layers, recording.top_k) != (first.dtype, first.layers, first.top_k):
            raise RoutedExpertsError(
                f"model call {number} records {recording.layers} layers of {recording.top_k} experts, "
                f"the first one {first.layers} of {first.top_k}"
            )
        if recording.tokens not in (length, length - 1):
            raise RoutedExpertsError(
                f"model call {number} records the experts of {recording.tokens} tokens, but its prompt and "
                f"answer have {length}"
            )
        joined.append(recording.rows(known, recording.tokens))
        known = recording.tokens
    return RoutedExperts(first.dtype, known, first.layers, first.top_k, b"".join(joined))


def _from_lists(recorded: Any) -> tuple[int, int, int, list[int]]:
    try:
        tokens, layers, top_k = len(recorded), len(recorded[0]), len(recorded[0][0])
        by_layer = list(chain.from_iterable(recorded))
        flat = list(chain.from_iterable(by_layer))
    except (TypeError, LookupError) as error:
        raise RoutedExpertsError(f"they are no lists of lists of lists ({error})") from error
    if set(map(len, recorded)) != {layers} or set(map(len, by_layer)) != {top_k}:
        raise RoutedExpertsError("they are ragged: every token needs as many layers and experts as the first")
    if set(map(type, flat)) != {int}:
        raise RoutedExpertsError("an expert's number is not an integer")
    return tokens, layers, top_k, flat


def _from_text(recorded: str) -> tuple[int, int, int, array[int]]:
    try:
        name, dtype, shape, encoded = recorded.split(":", 3)
        if name != _ENVELOPE:
            raise ValueError(f"it begins with {name!r}")
        tokens, layers, top_k = (int(size) for size in shape.split("x"))
        flat = array(TYPE_CODES[dtype])
        flat.frombytes(b64decode(encoded, validate=True))
    except (ValueError, KeyError) as error:
        raise RoutedExpertsError(
            f"the text is not {_ENVELOPE}:<dtype>:<tokens>x<layers>x<top_k>:<base64> ({error})"
        ) from error
    if sys.byteorder == "big":
        flat.byteswap()
    if min(tokens, layers, top_k) < 1 or len(flat) != tokens * layers * top_k:
        raise RoutedExpertsError(f"{len(flat)} numbers do not make {tokens} x {layers} x {top_k}")
    return tokens, layers, top_k, flat
