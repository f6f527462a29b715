"""What a model in HF layout consists of, read from the headers of its safetensors files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch

from ..failures import RefitError
from ..protocol import RefitSpec, RefitTensor

# The names that the safetensors format uses.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# Above it the format itself is violated.
_LONGEST_HEADER = 100_000_000


def spec_of_checkpoint(directory: Path | str) -> RefitSpec:
    """Name, shape and dtype of every tensor in the ``*.safetensors`` files of a model directory.

    Raises:
        RefitError: there is no such file, one is broken, or a name or a dtype is not one's own.
    """
    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise RefitError(f"refit: no *.safetensors file in {directory}; expected a model in HF layout")
    tensors: dict[str, RefitTensor] = {}
    for file in files:
        for name, entry in _header(file).items():
            if name == "__metadata__":
                continue
            if name in tensors:
                raise RefitError(f"refit: {name} is in two files of {directory}; expected it once")
            tensors[name] = _described(file, name, entry)
    return RefitSpec(tuple(tensors.values()))


def _header(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            text = stream.read(length)
        if len(text) < length:
            raise ValueError(f"{len(text)} of {length} bytes of its header")
        header = json.loads(text)
        if not isinstance(header, dict):
            raise ValueError("the header is no object")
        return header
    except (OSError, ValueError, struct.error) as error:
        raise RefitError(f"refit: {file} is no readable safetensors file: {error}") from error


def _described(file: Path, name: str, entry: Any) -> RefitTensor:
    try:
        return RefitTensor(name, tuple(int(size) for size in entry["shape"]), _DTYPES[entry["dtype"]])
    except (KeyError, TypeError, ValueError) as error:
        raise RefitError(f"refit: {file}: {name}: {entry!r} has no shape or dtype that is known") from error
