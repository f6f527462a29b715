"""Announcements and buckets as text, and models read from their files."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rl_generation.failures import RefitError
from rl_generation.protocol import RefitSpec, RefitTensor
from rl_generation.refit.checkpoint import spec_of_checkpoint
from rl_generation.refit.contract import Bucket
from rl_generation.refit.publisher import TensorSource
from rl_generation.refit.receive import BucketReader
from rl_generation.refit.settings import TransportSettings
from rl_generation.refit.wire import bucket_from_json, bucket_to_json, spec_from_json, spec_to_json

from .conftest import described, random_tensors, require_same


def test_an_announcement_survives_as_text() -> None:
    spec = RefitSpec(tuple(described(random_tensors(0))))
    assert spec_from_json(spec_to_json(spec)) == spec


def test_a_bucket_survives_as_text_and_can_be_opened(
    make_source: Callable[..., TensorSource], settings: TransportSettings
) -> None:
    tensors = random_tensors(0)
    source, reader, received = make_source(tensors), BucketReader(settings), {}
    while (bucket := source.next_bucket()) is not None:
        passed_on = bucket_from_json(bucket_to_json(bucket))
        assert passed_on == bucket
        received |= {name: tensor.clone() for name, tensor in reader.tensors(passed_on)}
    require_same(received, tensors)


def test_a_place_that_is_no_text_is_refused() -> None:
    with pytest.raises(RefitError, match="in the object_store cannot be passed on as text"):
        bucket_to_json(Bucket("object_store", object(), 0, ()))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"tensors": [[1]]}', "null"])
def test_text_that_is_no_bucket_is_refused(text: str) -> None:
    with pytest.raises(RefitError, match="no bucket"):
        bucket_from_json(text)


@pytest.mark.parametrize("text", ["", "{", "[1]", '[["w", 3, "float32"]]', '[["w", [3]]]', "null"])
def test_text_that_is_no_announcement_is_refused(text: str) -> None:
    with pytest.raises(RefitError, match="no announcement"):
        spec_from_json(text)


def write_safetensors(file: Path, entries: dict[str, tuple[str, list[int]]]) -> None:
    """The header of a safetensors file; the numbers are left out."""
    header = {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in entries.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text)


def test_a_model_is_described_by_the_headers_of_its_files(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model-1.safetensors", {"a": ("BF16", [2, 3])})
    write_safetensors(tmp_path / "model-2.safetensors", {"b": ("F32", []), "c": ("I64", [0])})
    assert spec_of_checkpoint(tmp_path).tensors == (
        RefitTensor("a", (2, 3), torch.bfloat16),
        RefitTensor("b", (), torch.float32),
        RefitTensor("c", (0,), torch.int64),
    )


def test_a_file_that_the_real_library_wrote_is_read(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    tensors = {name: t.contiguous() for name, t in random_tensors(0).items() if t.numel()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert set(spec_of_checkpoint(str(tmp_path)).tensors) == set(described(tensors))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no readable safetensors file"),
        (struct.pack("<Q", 1 << 60) + b"{}", "a header of 1152921504606846976 bytes"),
        (struct.pack("<Q", 9) + b"{}", "2 of 9 bytes of its header"),
        (struct.pack("<Q", 2) + b"[]", "the header is no object"),
        (struct.pack("<Q", 7) + b'{"a":1}', "a: 1 has no shape or dtype that is known"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(RefitError, match=message):
        spec_of_checkpoint(tmp_path)


def test_an_unknown_dtype_a_double_name_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RefitError, match=r"no \*\.safetensors file in"):
        spec_of_checkpoint(tmp_path)
    write_safetensors(tmp_path / "one.safetensors", {"a": ("F4", [2])})
    with pytest.raises(RefitError, match=r"a: .*F4.* has no shape or dtype that is known"):
        spec_of_checkpoint(tmp_path)
    write_safetensors(tmp_path / "one.safetensors", {"a": ("F32", [2])})
    write_safetensors(tmp_path / "two.safetensors", {"a": ("F32", [2])})
    with pytest.raises(RefitError, match="a is in two files"):
        spec_of_checkpoint(tmp_path)
