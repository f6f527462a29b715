"""Saves and restores a policy: safetensors and JSON, named as in Hugging Face's layout.

Files of a checkpoint, the manifest last:

- ``weights.safetensors``: the model, in its own type.
- ``optimizer.safetensors``: float32 moments, and master weights where the model is bfloat16.
- ``random.safetensors``: generator states.
- ``reference.safetensors``: the frozen reference, if one is kept.
- ``policy.json``: format, model shape, optimizer settings, number of updates, and the groups above.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .errors import CheckpointError, ModelDirectoryError
from .hf_config import ModelShape, read_json
from .mapping import WeightSpec
from .optimizer import MASTER, MOMENTS
from .settings import OptimizerSettings
from .tensor_files import read_tensors, sync_path, write_json, write_tensors

FORMAT = 1
MANIFEST = "policy.json"
_ALWAYS = ("weights", "optimizer", "random")
_REFERENCE = "reference"


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
        groups[_REFERENCE] = state.reference
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise CheckpointError(f"{directory} is not empty; save into a new directory")
        for group, tensors in groups.items():
            write_tensors(_file(directory, group), tensors)
        manifest = {
            "format": FORMAT,
            "dtype": dtype,
            "model": asdict(shape),
            "optimizer": asdict(state.optimizer_settings),
            "steps": state.steps,
            "groups": list(groups),
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
        _check_origin(manifest, directory, shape, dtype)
        wanted = [*_ALWAYS, *([_REFERENCE] if _REFERENCE in manifest["groups"] else [])]
        groups = {group: read_tensors(_file(directory, group)) for group in wanted}
        optimizer: dict[str, Any] = manifest["optimizer"]
        optimizer["betas"] = tuple(optimizer["betas"])
        settings = OptimizerSettings(**optimizer)
        steps = int(manifest["steps"])
    except (ModelDirectoryError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{directory} is no complete policy checkpoint: {error}") from error
    return PolicyState(
        weights=groups["weights"],
        optimizer=groups["optimizer"],
        random=groups["random"],
        reference=groups.get(_REFERENCE),
        steps=steps,
        optimizer_settings=settings,
    )


def check_tensors(state: PolicyState, specs: Mapping[str, WeightSpec], source: Path | str) -> None:
    """Refuse a state with other tensors than a model of ``specs`` (by name) needs.

    Raises:
        CheckpointError: a tensor is missing, one too many, or of another shape or type.
    """
    expected = {spec.name: (spec.shape, spec.dtype) for spec in specs.values()}
    _check_group("weights", state.weights, expected, source)
    if state.reference is not None:
        _check_group(_REFERENCE, state.reference, expected, source)
    master = any(spec.dtype != torch.float32 for spec in specs.values())
    kinds = (*(MOMENTS if state.steps else ()), *([MASTER] if master else []))
    expected = {
        f"{kind}.{spec.name}": (spec.shape, torch.float32) for kind in kinds for spec in specs.values()
    }
    _check_group("optimizer", state.optimizer, expected, source)
    if "cpu" not in state.random:
        raise CheckpointError(f"{source}: random.safetensors lacks the generator state 'cpu'")


def _check_group(
    group: str,
    tensors: Mapping[str, torch.Tensor],
    expected: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    source: Path | str,
) -> None:
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    for name in sorted(expected.keys() | found.keys()):
        if found.get(name) != expected.get(name):
            raise CheckpointError(
                f"{source}: {group}.safetensors has {found.get(name, 'nothing')} for {name}, "
                f"this policy needs {expected.get(name, 'nothing')}"
            )


def _file(directory: Path, group: str) -> Path:
    return directory / f"{group}.safetensors"


def _check_origin(manifest: Mapping[str, Any], directory: Path, shape: ModelShape, dtype: str) -> None:
    found_format = manifest.get("format")
    if found_format != FORMAT:
        raise CheckpointError(f"{directory} has format {found_format!r}, this version reads {FORMAT}")
    expected = {"dtype": dtype, **asdict(shape)}
    found = {"dtype": manifest.get("dtype"), **manifest.get("model", {})}
    for key in expected | found:
        if expected.get(key) != found.get(key):
            raise CheckpointError(
                f"{directory} was saved with {key} = {found.get(key)!r}, this policy has "
                f"{expected.get(key)!r}; load it into a policy of the same model and settings"
            )
