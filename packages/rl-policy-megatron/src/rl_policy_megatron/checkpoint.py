"""Saves and restores a policy: safetensors and JSON, named as in Hugging Face's layout.

Files of a checkpoint, the manifest last:

- ``weights.safetensors``: the model, in its own type.
- ``optimizer.safetensors``: float32 moments, and master weights where the model is bfloat16.
- ``reference.safetensors``: the frozen reference, if one is kept.
- ``random.safetensors``: generator states.
- ``policy.json``: format, model shape, optimizer settings, number of updates, and the file list.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .errors import CheckpointError, ModelDirectoryError
from .hf_config import ModelShape, read_json
from .settings import OptimizerSettings
from .tensor_files import read_tensors, sync_path, write_json, write_tensors

FORMAT = 1
MANIFEST = "policy.json"
_ALWAYS = ("weights", "optimizer", "random")


@dataclass(slots=True)
class PolicyState:
    """Everything that decides how a policy goes on. Tensors have HF names."""

    weights: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    random: dict[str, torch.Tensor]
    reference: dict[str, torch.Tensor] | None
    steps: int
    optimizer_settings: OptimizerSettings


def write_state(directory: Path, state: PolicyState, shape: ModelShape, dtype: str) -> None:
    """Write a checkpoint into ``directory``, on disk when this returns.

    Raises:
        CheckpointError: the directory holds something already, or cannot be written.
    """
    groups = {"weights": state.weights, "optimizer": state.optimizer, "random": state.random}
    if state.reference is not None:
        groups["reference"] = state.reference
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise CheckpointError(f"{directory} is not empty; save into a new directory")
        for group, tensors in groups.items():
            write_tensors(directory / f"{group}.safetensors", tensors)
        manifest = {
            "format": FORMAT,
            "dtype": dtype,
            "model": asdict(shape),
            "optimizer": asdict(state.optimizer_settings),
            "steps": state.steps,
            "files": sorted(f"{group}.safetensors" for group in groups),
        }
        write_json(directory / MANIFEST, manifest)
        sync_path(directory)
    except OSError as error:
        raise CheckpointError(f"the policy cannot be saved to {directory}: {error}") from error


def read_state(directory: Path, shape: ModelShape, dtype: str) -> PolicyState:
    """Read what :func:`write_state` wrote for a policy of this shape and type.

    Raises:
        CheckpointError: a file is missing or broken, or the checkpoint is of another model.
    """
    try:
        manifest = read_json(directory / MANIFEST)
        _check_manifest(manifest, directory, shape, dtype)
        groups = {name: read_tensors(directory / name) for name in manifest["files"]}
    except ModelDirectoryError as error:
        raise CheckpointError(f"{directory} is no complete policy checkpoint: {error}") from error
    optimizer = manifest["optimizer"]
    return PolicyState(
        weights=groups["weights.safetensors"],
        optimizer=groups["optimizer.safetensors"],
        random=groups["random.safetensors"],
        reference=groups.get("reference.safetensors"),
        steps=int(manifest["steps"]),
        optimizer_settings=OptimizerSettings(**{**optimizer, "betas": tuple(optimizer["betas"])}),
    )


def _check_manifest(manifest: dict[str, Any], directory: Path, shape: ModelShape, dtype: str) -> None:
    if manifest.get("format") != FORMAT:
        found_format = manifest.get("format")
        raise CheckpointError(f"{directory} has format {found_format!r}, this version reads {FORMAT}")
    expected = {"dtype": dtype, **asdict(shape)}
    found = {"dtype": manifest.get("dtype"), **manifest.get("model", {})}
    for key in _differing(expected, found):
        raise CheckpointError(
            f"{directory} was saved with {key} = {found.get(key)!r}, this policy has {expected.get(key)!r}; "
            "load it into a policy made from the same model directory and settings"
        )
    missing = {f"{group}.safetensors" for group in _ALWAYS} - set(manifest.get("files", ()))
    if missing:
        raise CheckpointError(f"{directory / MANIFEST} does not list {', '.join(sorted(missing))}")


def _differing(expected: dict[str, Any], found: dict[str, Any]) -> Iterable[str]:
    return [key for key in expected | found if expected.get(key) != found.get(key)]
