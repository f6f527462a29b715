"""How a policy is saved, restored and exported; :mod:`.checkpoint` and :mod:`.export` know the files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .adapters import own_weights
from .agreement import agreed
from .checkpoint import ADAPTERS, REFERENCE, WEIGHTS, SavedFile, read_checkpoint
from .errors import CheckpointError
from .export import publish_together
from .manifest import Manifest, Origin
from .parts import PolicyParts
from .refusals import alike
from .saver import PendingSave, Saver
from .snapshot import Snapshot


class Persistence:
    """Moves a policy's parts to disk and back; with several ranks all but ``close`` are collectives.

    Args:
        parts: of the policy.
        model_directory: that they were built from; its config and tokenizer go into exports.
    """

    def __init__(self, parts: PolicyParts, model_directory: Path) -> None:
        self._parts = parts
        self._model_directory = model_directory
        self._saver = Saver(parts.placement.world)

    def save_async(self, directory: Path, notes: Mapping[str, Any]) -> PendingSave:
        """See ``MegatronPolicy.save_async``."""
        optimizer = self._parts.optimizer
        manifest = Manifest(self._origin(), optimizer.steps, optimizer.settings, _written_down(notes))
        return self._saver.start(directory, self._files, manifest)

    def load(self, directory: Path, *, verify: bool) -> dict[str, Any]:
        """See ``MegatronPolicy.load``."""
        self._saver.settle()
        parts, origin = self._parts, self._origin()
        world, adapters = parts.placement.world, parts.adapters
        with agreed(world):
            saved = read_checkpoint(directory, origin)
            saved.check(
                {spec.name: spec for spec in parts.shards.specs},
                None if adapters is None else adapters.map.specs,
            )
            if verify:
                saved.verify(world.rank, world.size)
        trained = saved.groups[WEIGHTS if adapters is None else ADAPTERS]
        reference = saved.groups.get(REFERENCE)
        with parts.changing("a load"):
            parts.reset_optimizer(saved.optimizer_settings)
            with agreed(world):
                parts.set_trained(trained.read)
                self._snapshot().continue_from(saved)
            parts.set_reference(None if reference is None else reference.read)
        return dict(saved.notes)

    def export(self, directory: Path) -> None:
        """See ``MegatronPolicy.export_hf``."""
        parts = self._parts
        publish_together(
            directory, self._model_directory, parts.hf_weights(), parts.dtype, parts.placement.world
        )

    def close(self) -> None:
        """Wait for a save that is under way; raises as ``MegatronPolicy.shutdown``."""
        self._saver.close()

    def _origin(self) -> Origin:
        """What this policy's checkpoints belong to."""
        settings = self._parts.settings
        return Origin(self._parts.shape, settings.dtype, settings.lora, self._parts.base_digest)

    def _snapshot(self) -> Snapshot:
        parts = self._parts
        return Snapshot(
            parts.placement, parts.shards, parts.table, parts.optimizer, parts.random, parts.adapters
        )

    def _files(self) -> list[SavedFile]:
        return self._snapshot().files(own_weights(self._parts.model), self._parts.reference_weights)


def _written_down(notes: Mapping[str, Any]) -> dict[str, Any]:
    """The notes as they are now, whatever becomes of the objects in them."""
    with alike():
        try:
            return json.loads(json.dumps(dict(notes), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"notes to save must be what JSON can hold, got {notes!r}: {error}"
            ) from error
