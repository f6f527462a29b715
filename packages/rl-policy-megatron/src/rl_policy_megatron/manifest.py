"""The manifest of a checkpoint: written last, it says what the files are and whom they belong to."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .errors import CheckpointError
from .hf_config import ModelShape, read_json
from .lora import LoraSettings
from .settings import OptimizerSettings
from .tensor_files import sync_path, write_json

FORMAT = 3
# From here on every file has a digest, the manifest too.
_DIGESTS_SINCE = 3
MANIFEST = "policy.json"
_UNFINISHED = f"{MANIFEST}.partial"
# Where ranks kept their notes before the manifest had room for them.
_NOTES_FILE = "worker.json"
_OWN_DIGEST = "sha256"


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
class Manifest:
    """What a checkpoint says beside its files.

    Attributes:
        origin: what it belongs to.
        steps: updates made.
        optimizer_settings: of the policy's optimizer.
        notes: of whoever saves, as JSON; the policy itself does not read them.
    """

    origin: Origin
    steps: int
    optimizer_settings: OptimizerSettings
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file on disk, and the SHA-256 of its bytes."""

    group: str
    name: str
    digest: str


def write_manifest(directory: Path, files: Iterable[WrittenFile], manifest: Manifest) -> None:
    """Make a checkpoint of the files that all ranks wrote; from here on it loads.

    Raises:
        OSError: it cannot be written.
    """
    groups: dict[str, list[str]] = {}
    digests: dict[str, str] = {}
    for file in files:
        groups.setdefault(file.group, []).append(file.name)
        digests[file.name] = file.digest
    content = {
        "format": FORMAT,
        **manifest.origin.described(),
        "optimizer": asdict(manifest.optimizer_settings),
        "steps": manifest.steps,
        "files": groups,
        "digests": digests,
        "notes": dict(manifest.notes),
    }
    write_json(directory / _UNFINISHED, {**content, _OWN_DIGEST: _digest_of(content)})
    # The data files' entries must not reach the disk after the manifest's.
    sync_path(directory)
    os.replace(directory / _UNFINISHED, directory / MANIFEST)
    sync_path(directory)
    sync_path(directory.parent)


def files_of(manifest: Mapping[str, Any]) -> dict[str, list[str]]:
    """File names by group."""
    if manifest["format"] == 1:
        return {group: [f"{group}.safetensors"] for group in manifest["groups"]}
    return dict(manifest["files"])


def digests_of(manifest: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 by file name, of all files or, if the checkpoint is older, of none."""
    own, content = manifest.get(_OWN_DIGEST), dict(manifest)
    if own is None:
        if manifest["format"] >= _DIGESTS_SINCE or "digests" in manifest:
            raise ValueError(f"{MANIFEST} is damaged: its own digest is missing")
        return {}
    del content[_OWN_DIGEST]
    if own != _digest_of(content):
        raise ValueError(f"{MANIFEST} is damaged: it does not say what was saved")
    digests: dict[str, str] = manifest["digests"]
    without = {name for names in files_of(manifest).values() for name in names} - digests.keys()
    if without:
        raise ValueError(f"{MANIFEST} has no digest of {', '.join(sorted(without))}")
    return digests


def notes_of(manifest: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """What whoever saved wanted to know again."""
    if "notes" not in manifest and (directory / _NOTES_FILE).is_file():
        return read_json(directory / _NOTES_FILE)
    return dict(manifest.get("notes", {}))


def plain(name: str) -> str:
    """The name of a file that lies beside the manifest."""
    if Path(name).name != name:
        raise ValueError(f"{MANIFEST} names the file {name!r}, which is not beside it")
    return name


def check_origin(manifest: Mapping[str, Any], directory: Path, origin: Origin) -> None:
    """Refuse a checkpoint of a newer format, or of another model.

    Raises:
        CheckpointError: names what differs.
    """
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


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
