"""Publishes a policy's weights as a Hugging Face model directory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from .agreement import agreed
from .errors import CheckpointError
from .hf_config import read_json
from .placement import RankGroup
from .tensor_files import sync_path, write_json, write_sharded

MAX_SHARD_BYTES = 4 << 30

_COPIED_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def publish_model(
    directory: Path,
    source: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write weights, config and tokenizer to ``directory``, which appears complete or not at all.

    Config and tokenizer come from ``source``. config.json is unchanged but for the type of the
    weights, where it says another one.

    Raises:
        CheckpointError: ``directory`` exists and is not an empty directory, or it cannot be written.
    """
    directory = directory.absolute()
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise CheckpointError(f"{directory} exists already; export to a new directory")
        directory.parent.mkdir(parents=True, exist_ok=True)
        _publish(directory, source, tensors, dtype, max_shard_bytes)
    except OSError as error:
        raise CheckpointError(
            f"the model cannot be exported to {directory}: {error}; export to a directory that can be written"
        ) from error


def _publish(
    directory: Path,
    source: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> None:
    partial = directory.parent / f".{directory.name}.partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        write_sharded(partial, tensors, max_shard_bytes)
        _write_config(partial / "config.json", source / "config.json", str(dtype).removeprefix("torch."))
        for name in _COPIED_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, partial / name)
                sync_path(partial / name)
        sync_path(partial)
        partial.rename(directory)
        sync_path(directory.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def publish_together(
    directory: Path,
    source: Path,
    tensors: Iterator[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    world: RankGroup,
) -> None:
    """:func:`publish_model` of the first rank, for all; each must bring the tensors, gathered one at a time.

    Raises:
        CheckpointError: ``directory`` exists and is not an empty directory.
        PeerError: so it was on another rank.
    """
    with agreed(world):
        try:
            if world.first:
                publish_model(directory, source, tensors, dtype)
        finally:
            # The others gather what one writes, to the last tensor, also where writing failed.
            for _ in tensors:
                pass


def _write_config(path: Path, source: Path, dtype: str) -> None:
    content = read_json(source)
    stale = {key: dtype for key in ("dtype", "torch_dtype") if content.get(key) not in (None, dtype)}
    if stale:
        write_json(path, {**content, **stale})
    else:
        shutil.copyfile(source, path)
        sync_path(path)
