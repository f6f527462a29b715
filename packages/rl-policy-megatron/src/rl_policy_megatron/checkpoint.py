"""What a saved policy is on disk: safetensors and JSON, named as in Hugging Face's layout.

Files of a checkpoint, the manifest last. ``P`` is a pipeline stage and expert group, ``D`` a
data-parallel rank; one process writes ``P = 00-00`` and ``D = 00``. A tensor is found in whichever
file of its group has it, so that any layout of ranks can load what any other wrote.

- ``weights-P.safetensors``: the model, in its own type. With adapters, which leave it as it was:
  ``adapters-P.safetensors`` instead, and the digest of the base in the manifest.
- ``optimizer-P.safetensors``: float32 moments, and master weights where the model is bfloat16.
- ``random-D.safetensors``: generator states.
- ``reference-P.safetensors``: the frozen reference, if one is kept.
- ``policy.json``: format, model shape, optimizer settings, number of updates, the files by group, the SHA-256
  of each file and of what the manifest itself says, and the notes of whoever saved.

Format 1 had one file per group, without a number, and a list of groups. Checkpoints from before there were
digests hold none and are read unchecked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .errors import CheckpointError, ModelDirectoryError
from .hf_config import read_json
from .manifest import (
    MANIFEST,
    Origin,
    WrittenFile,
    check_origin,
    digests_of,
    files_of,
    notes_of,
    plain,
)
from .mapping import WeightSpec
from .optimizer import MASTER, MOMENTS
from .settings import OptimizerSettings
from .tensor_files import TensorFiles, file_digest, write_tensors

WEIGHTS, ADAPTERS, OPTIMIZER, RANDOM, REFERENCE = "weights", "adapters", "optimizer", "random", "reference"
# Everything that a save leaves when it is killed; the last is how safetensors calls a file until it is whole.
_LEFTOVER = re.compile(
    r"(weights|adapters|optimizer|random|reference)(-\d+)*\.safetensors|policy\.json\.partial|\.tmp\w{6}"
)


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
    """A checkpoint whose files are there, of this model, and open; tensors are read one at a time.

    Attributes:
        source: its directory.
        groups: the files' tensors by group.
        steps: updates made.
        optimizer_settings: of the policy's optimizer.
        digests: SHA-256 by file name; empty if it was saved before there were any.
        notes: of whoever saved it.
    """

    source: Path
    groups: dict[str, TensorFiles]
    steps: int
    optimizer_settings: OptimizerSettings
    digests: Mapping[str, str]
    notes: Mapping[str, Any]

    def verify(self, rank: int, ranks: int) -> None:
        """Read this rank's share of the files and compare them with what was written.

        Args:
            rank: of this process.
            ranks: that share the work.

        Raises:
            CheckpointError: a file holds something else; names it.
        """
        for name in sorted(self.digests)[rank::ranks]:
            path = self.source / name
            try:
                found = file_digest(path)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
            if found != self.digests[name]:
                raise CheckpointError(
                    f"{path} is damaged: it does not hold what was saved; load another checkpoint, or "
                    "restore this file from a copy"
                )

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
        self._check_random()

    def _check_random(self) -> None:
        if "cpu" not in self.random(0):
            raise CheckpointError(f"{self.source}: random.safetensors lacks the generator state 'cpu'")
        files = self.groups[RANDOM]
        for name in sorted(files.names):
            device = name.rpartition(".")[2]
            # A state of a device that is not here is not used either.
            if device == "cpu" or (device == "cuda" and torch.cuda.is_available()):
                try:
                    torch.Generator(device).set_state(files.read(name).clone())
                except (RuntimeError, TypeError) as error:
                    raise CheckpointError(
                        f"{self.source}: {name} of {RANDOM} is no state of a random generator: {error}"
                    ) from error

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


def write_files(directory: Path, files: Iterable[SavedFile]) -> list[WrittenFile]:
    """Write one rank's files, on disk when this returns.

    Raises:
        OSError: a file cannot be written.
    """
    written: list[WrittenFile] = []
    for file in files:
        path = directory / file.name
        write_tensors(path, file.tensors)
        # What was just written is in the machine's cache: reading it costs little beside the sum.
        written.append(WrittenFile(file.group, file.name, file_digest(path)))
    return written


def read_checkpoint(directory: Path, origin: Origin) -> SavedPolicy:
    """Open what was saved for a policy of this origin, in this or an older format.

    Raises:
        CheckpointError: a file is missing or broken, or the checkpoint is of another model.
    """
    if not (directory / MANIFEST).is_file():
        raise CheckpointError(
            f"{directory} is no policy checkpoint: it has no {MANIFEST}, which a save writes last; give the "
            "directory of a save that was completed"
        )
    try:
        manifest = read_json(directory / MANIFEST)
        check_origin(manifest, directory, origin)
        groups = {
            group: TensorFiles.of([directory / plain(name) for name in names], f"{directory}: {group}")
            for group, names in files_of(manifest).items()
        }
        trained = WEIGHTS if origin.lora is None else ADAPTERS
        missing = [group for group in (trained, OPTIMIZER, RANDOM) if group not in groups]
        if missing:
            raise KeyError(f"no files of {', '.join(missing)}")
        optimizer: dict[str, Any] = manifest["optimizer"]
        options: dict[str, Any] = {**optimizer, "betas": tuple(optimizer["betas"])}
        settings = OptimizerSettings(**options)
        steps, digests = int(manifest["steps"]), digests_of(manifest)
        return SavedPolicy(directory, groups, steps, settings, digests, notes_of(manifest, directory))
    except (ModelDirectoryError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{directory} is no complete policy checkpoint: {error}") from error
