"""What a saved policy is on disk: safetensors and JSON, named as in Hugging Face's layout.

Files of a checkpoint, the manifest last. ``P`` is a pipeline stage and expert group, ``D`` a
data-parallel rank; one process writes ``P = 00-00`` and ``D = 00``. A tensor is found in whichever
file of its group has it, so that any layout of ranks can load what any other wrote.

- ``weights-P.safetensors``: the model, in its own type. With adapters, which leave it as it was:
  ``adapters-P.safetensors`` instead, and the digest of the base in the manifest.
- ``optimizer-P.safetensors``: float32 moments, and master weights where the model is bfloat16.
- ``random-D.safetensors``: generator states.
- ``reference-P.safetensors``: the frozen reference, if one is kept.
- ``policy.json``: format, model shape, optimizer settings, number of updates, the files by group.

Format 1 had one file per group, without a number, and a list of groups.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .errors import CheckpointError, ModelDirectoryError
from .hf_config import ModelShape, read_json
from .lora import LoraSettings
from .mapping import WeightSpec
from .optimizer import MASTER, MOMENTS
from .settings import OptimizerSettings
from .tensor_files import TensorFiles, sync_path, write_json, write_tensors

FORMAT = 2
MANIFEST = "policy.json"
WEIGHTS, ADAPTERS, OPTIMIZER, RANDOM, REFERENCE = "weights", "adapters", "optimizer", "random", "reference"
_UNFINISHED_MANIFEST = f"{MANIFEST}.partial"
# Everything that a save leaves when it is killed; the last is how safetensors calls a file until it is whole.
_LEFTOVER = re.compile(
    r"(weights|adapters|optimizer|random|reference)(-\d+)*\.safetensors|policy\.json\.partial|\.tmp\w{6}"
)


@dataclass(frozen=True, slots=True)
class Origin:
    """What a checkpoint belongs to: it loads into no other policy.

    Attributes:
        shape: of the model.
        dtype: of its weights.
        lora: its adapters, if only those are trained.
        base: digest of the weights under the adapters.
    """

    shape: ModelShape
    dtype: str
    lora: LoraSettings | None = None
    base: str | None = None

    def described(self) -> dict[str, Any]:
        """As JSON keeps it."""
        lora = None if self.lora is None else asdict(self.lora)
        content = {"dtype": self.dtype, "model": asdict(self.shape), "lora": lora, "base": self.base}
        # Tuples become lists, so that it compares with what was read.
        return json.loads(json.dumps(content))


@dataclass(frozen=True, slots=True)
class SavedFile:
    """One file that a rank writes: tensors of a group, and what tells it from the group's other files."""

    group: str
    part: str
    tensors: dict[str, torch.Tensor]

    @classmethod
    def copied(cls, group: str, part: str, named: Iterable[tuple[str, torch.Tensor]]) -> SavedFile:
        """With copies in this machine's memory, which later updates leave alone."""
        return cls(group, part, {name: tensor.detach().to("cpu", copy=True) for name, tensor in named})

    @property
    def name(self) -> str:
        return f"{self.group}-{self.part}.safetensors"


@dataclass(frozen=True, slots=True)
class SavedPolicy:
    """A checkpoint whose files are there, of this model, and open; tensors are read one at a time."""

    source: Path
    groups: dict[str, TensorFiles]
    steps: int
    optimizer_settings: OptimizerSettings

    def random(self, data_rank: int) -> dict[str, torch.Tensor]:
        """Generator states by device of a data-parallel rank; empty if fewer ranks were saved."""
        files, prefix = self.groups[RANDOM], f"{data_rank}."
        return {
            name.removeprefix(prefix): files.read(name).clone()
            for name in files.names
            # Format 1 knew one rank only, and did not number it.
            if name.startswith(prefix) or (data_rank == 0 and "." not in name)
        }

    def check(self, weights: Mapping[str, WeightSpec], adapters: Mapping[str, WeightSpec] | None) -> None:
        """Refuse tensors other than those that a policy of these weights or adapters needs.

        Raises:
            CheckpointError: a tensor is missing, one too many, or of another shape or type.
        """
        trained = weights if adapters is None else adapters
        expected = {spec.name: (spec.shape, spec.dtype) for spec in trained.values()}
        self._check_group(WEIGHTS if adapters is None else ADAPTERS, expected)
        if REFERENCE in self.groups:
            self._check_group(REFERENCE, expected)
        master = any(spec.dtype != torch.float32 for spec in trained.values())
        kinds = (*(MOMENTS if self.steps else ()), *([MASTER] if master else []))
        moments = {
            f"{kind}.{spec.name}": (spec.shape, torch.float32) for kind in kinds for spec in trained.values()
        }
        self._check_group(OPTIMIZER, moments)
        if "cpu" not in self.random(0):
            raise CheckpointError(f"{self.source}: random.safetensors lacks the generator state 'cpu'")

    def _check_group(self, group: str, expected: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        files = self.groups[group]
        for name in sorted(expected.keys() | files.names):
            found = files.described(name) if name in files.names else "nothing"
            if found != expected.get(name, "nothing"):
                raise CheckpointError(
                    f"{self.source}: {group} has {found} for {name}, "
                    f"this policy needs {expected.get(name, 'nothing')}"
                )


def prepare_directory(directory: Path) -> None:
    """Make ``directory`` ready for a save, and remove what a save that was killed has left in it.

    Raises:
        CheckpointError: it holds a checkpoint or anything else, or cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        found = list(directory.iterdir())
        if any(not _LEFTOVER.fullmatch(path.name) for path in found):
            raise CheckpointError(f"{directory} is not empty; save into a new directory")
        for path in found:
            path.unlink()
    except OSError as error:
        raise CheckpointError(f"the policy cannot be saved to {directory}: {error}") from error


def write_files(directory: Path, files: Iterable[SavedFile]) -> dict[str, list[str]]:
    """Write one rank's files, on disk when this returns; their names by group.

    Raises:
        OSError: a file cannot be written.
    """
    written: dict[str, list[str]] = {}
    for file in files:
        write_tensors(directory / file.name, file.tensors)
        written.setdefault(file.group, []).append(file.name)
    return written


def write_manifest(
    directory: Path,
    files: Iterable[Mapping[str, list[str]]],
    origin: Origin,
    steps: int,
    optimizer_settings: OptimizerSettings,
) -> None:
    """Make a checkpoint of the files that all ranks wrote; from here on it loads.

    Raises:
        OSError: it cannot be written.
    """
    groups: dict[str, list[str]] = {}
    for written in files:
        for group, names in written.items():
            groups.setdefault(group, []).extend(names)
    content = {
        "format": FORMAT,
        **origin.described(),
        "optimizer": asdict(optimizer_settings),
        "steps": steps,
        "files": groups,
    }
    write_json(directory / _UNFINISHED_MANIFEST, content)
    # The data files' entries must not reach the disk after the manifest's.
    sync_path(directory)
    os.replace(directory / _UNFINISHED_MANIFEST, directory / MANIFEST)
    sync_path(directory)
    sync_path(directory.parent)


def read_checkpoint(directory: Path, origin: Origin) -> SavedPolicy:
    """Open what was saved for a policy of this origin, in this or an older format.

    Raises:
        CheckpointError: a file is missing or broken, or the checkpoint is of another model.
    """
    try:
        manifest = read_json(directory / MANIFEST)
        _check_origin(manifest, directory, origin)
        groups = {
            group: TensorFiles.of([directory / _plain(name) for name in names], f"{directory}: {group}")
            for group, names in _files(manifest).items()
        }
        trained = WEIGHTS if origin.lora is None else ADAPTERS
        missing = [group for group in (trained, OPTIMIZER, RANDOM) if group not in groups]
        if missing:
            raise KeyError(f"no files of {', '.join(missing)}")
        optimizer: dict[str, Any] = manifest["optimizer"]
        optimizer["betas"] = tuple(optimizer["betas"])
        settings = OptimizerSettings(**optimizer)
        return SavedPolicy(directory, groups, int(manifest["steps"]), settings)
    except (ModelDirectoryError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{directory} is no complete policy checkpoint: {error}") from error


def _files(manifest: Mapping[str, Any]) -> dict[str, list[str]]:
    """File names by group."""
    if manifest["format"] == 1:
        return {group: [f"{group}.safetensors"] for group in manifest["groups"]}
    return dict(manifest["files"])


def _plain(name: str) -> str:
    if Path(name).name != name:
        raise ValueError(f"{MANIFEST} names the file {name!r}, which is not beside it")
    return name


def _check_origin(manifest: Mapping[str, Any], directory: Path, origin: Origin) -> None:
    found_format = manifest.get("format")
    if found_format not in range(1, FORMAT + 1):
        raise CheckpointError(
            f"{directory} has format {found_format!r}, this version reads 1 to {FORMAT}; "
            "load it with a newer version of rl-policy-megatron"
        )
    content = origin.described()
    # What a shape did not have yet when the checkpoint was made, it had by default.
    defaults = {
        field.name: field.default
        for field in dataclasses.fields(ModelShape)
        if field.default is not dataclasses.MISSING
    }
    expected = {**content, **content.pop("model")}
    found = {key: manifest.get(key) for key in content} | defaults | dict(manifest.get("model", {}))
    for key in expected | found:
        if key != "model" and expected.get(key) != found.get(key):
            raise CheckpointError(
                f"{directory} was saved with {key} = {found.get(key)!r}, this policy has "
                f"{expected.get(key)!r}; load it into a policy of the same model and settings"
            )
