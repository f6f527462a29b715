"""Announcements and buckets as JSON, for engines whose processes pass on nothing but text."""

from __future__ import annotations

import json
from typing import Any

from ..failures import RefitError
from ..protocol import RefitSpec, RefitTensor
from .buckets import dtype_name, dtype_of
from .contract import Bucket, TensorPlace


def spec_to_json(spec: RefitSpec) -> str:
    """Text that :func:`spec_from_json` reads."""
    return json.dumps([[t.name, list(t.shape), dtype_name(t.dtype)] for t in spec.tensors])


def spec_from_json(text: str) -> RefitSpec:
    """What :func:`spec_to_json` wrote.

    Raises:
        RefitError: this is not an announcement.
    """
    try:
        entries = json.loads(text)
        return RefitSpec(
            tuple(RefitTensor(str(name), _shape(shape), dtype_of(dtype)) for name, shape, dtype in entries)
        )
    except (TypeError, ValueError) as error:
        raise RefitError(f"refit: no announcement: {error}") from error


def bucket_to_json(bucket: Bucket) -> str:
    """Text that :func:`bucket_from_json` reads.

    Raises:
        RefitError: the bucket's place cannot be said in text, as one in Ray's store cannot.
    """
    places = [[p.name, list(p.shape), p.dtype, p.offset] for p in bucket.tensors]
    content = {
        "transport": bucket.transport,
        "location": bucket.location,
        "nbytes": bucket.nbytes,
        "tensors": places,
        "window": bucket.window,
    }
    try:
        return json.dumps(content)
    except TypeError as error:
        raise RefitError(
            f"refit: a bucket in the {bucket.transport} cannot be passed on as text; open it in the process "
            "that received it, or choose another transport"
        ) from error


def bucket_from_json(text: str) -> Bucket:
    """What :func:`bucket_to_json` wrote.

    Raises:
        RefitError: this is not a bucket.
    """
    try:
        content = json.loads(text)
        places = tuple(
            TensorPlace(str(name), _shape(shape), str(dtype), int(offset))
            for name, shape, dtype, offset in content["tensors"]
        )
        return Bucket(
            content["transport"],
            content["location"],
            int(content["nbytes"]),
            places,
            window=int(content["window"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RefitError(f"refit: no bucket: {error}") from error


def _shape(sizes: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in sizes)
