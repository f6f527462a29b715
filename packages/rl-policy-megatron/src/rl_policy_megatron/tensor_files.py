"""Named tensors on disk: safetensors files, alone or in shards with an index, durable once written."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .errors import ModelDirectoryError
from .hf_config import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class TensorFiles:
    """Tensors of several safetensors files by name, read one at a time.

    Args:
        file_of: the file of each tensor.
        source: what messages call the collection.
    """

    def __init__(self, file_of: Mapping[str, Path], source: object) -> None:
        self._file_of = dict(file_of)
        self._source = source
        self._opened: dict[Path, Any] = {}

    @classmethod
    def of(cls, paths: Iterable[Path], source: object) -> TensorFiles:
        """All tensors of ``paths``; a name that several files have is read from the first.

        Raises:
            ModelDirectoryError: a file is missing or broken.
        """
        file_of: dict[str, Path] = {}
        for path in paths:
            for name in tensor_names(path):
                file_of.setdefault(name, path)
        return cls(file_of, source)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU, in the type it was stored in.

        Raises:
            ModelDirectoryError: there is no such tensor.
        """
        return self._file(name).get_tensor(name)

    def described(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type of one tensor, from the file's header.

        Raises:
            ModelDirectoryError: there is no such tensor.
        """
        # A slice of nothing has the tensor's own type, whatever safetensors calls it.
        piece = self._file(name).get_slice(name)
        shape = tuple(piece.get_shape())
        return shape, (piece[:0] if shape else self.read(name)).dtype

    def _file(self, name: str) -> Any:
        path = self._file_of.get(name)
        if path is None:
            raise ModelDirectoryError(f"{self._source} holds no tensor {name!r}, which its model needs")
        if path not in self._opened:
            self._opened[path] = _open(path)
        return self._opened[path]


class TensorDirectory(TensorFiles):
    """The safetensors of an HF-format directory, read one tensor at a time.

    Raises:
        ModelDirectoryError: no weights, a broken file, or an index that points outside the directory.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(_locate(directory), directory)


def _locate(directory: Path) -> dict[str, Path]:
    index = directory / INDEX_FILE
    if not index.exists():
        single = directory / SINGLE_FILE
        if not single.exists():
            raise ModelDirectoryError(
                f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}; "
                "save the model in safetensors format"
            )
        return dict.fromkeys(tensor_names(single), single)
    file_names = read_json(index).get("weight_map")
    if not isinstance(file_names, dict) or not all(isinstance(name, str) for name in file_names.values()):
        raise ModelDirectoryError(
            f"{index} must map names of tensors to names of files under 'weight_map'; write the model again"
        )
    for file_name in sorted(set(file_names.values())):
        if "\0" in file_name or Path(file_name).name != file_name or not (directory / file_name).is_file():
            raise ModelDirectoryError(f"{index} names the file {file_name!r}, which is not beside it")
    return {name: directory / file_name for name, file_name in file_names.items()}


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise ModelDirectoryError(f"{path} cannot be read as safetensors: {error}") from error


def tensor_names(path: Path) -> list[str]:
    """Names of the tensors in one file."""
    with _open(path) as file:
        return list(file.keys())


def digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over names, types, shapes and bits of tensors: equal exactly when all of these are."""
    sha = hashlib.sha256()
    for name, tensor in tensors:
        on_host = tensor.detach().cpu().contiguous()
        sha.update(f"{name}\0{on_host.dtype}\0{tuple(on_host.shape)}\0".encode())
        sha.update(on_host.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """One safetensors file, on disk when this returns."""
    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(on_host, path, metadata={"format": "pt"})
    # The writer keeps the file to its owner; whoever may read config.json beside it may read it, too.
    path.chmod(0o644)
    sync_path(path)


def write_sharded(directory: Path, tensors: Iterable[tuple[str, torch.Tensor]], max_shard_bytes: int) -> None:
    """Weights as HF expects them: one file if they fit, else numbered files and an index."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    sizes = [0]
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and sizes[-1] + size > max_shard_bytes:
            shards.append({})
            sizes.append(0)
        shards[-1][name] = tensor.detach().cpu().contiguous()
        sizes[-1] += size
    if len(shards) == 1:
        write_tensors(directory / SINGLE_FILE, shards[0])
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(directory / file_name, shard)
        weight_map.update(dict.fromkeys(shard, file_name))
    write_json(directory / INDEX_FILE, {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """One JSON file, on disk when this returns."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    sync_path(path)


def sync_path(path: Path) -> None:
    """Flush a file, or a directory's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
