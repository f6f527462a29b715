"""What each rank contributes to a checkpoint, copied, and how it takes its part back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .adapters import Adapters
from .checkpoint import ADAPTERS, OPTIMIZER, RANDOM, REFERENCE, WEIGHTS, SavedFile, SavedPolicy
from .optimizer import PolicyOptimizer
from .placement import Placement
from .runtime import RandomStream
from .sharding import TensorTable, WeightShards

Named = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The parts of a policy that decide how it goes on.

    Attributes:
        placement: of this rank.
        shards: the table of the model's own weights.
        table: that of what is trained.
        optimizer: its state is saved.
        random: its stream is saved.
        adapters: saved in place of the weights, where there are any.
    """

    placement: Placement
    shards: WeightShards
    table: TensorTable
    optimizer: PolicyOptimizer
    random: RandomStream
    adapters: Adapters | None

    def files(self, weights: Named, reference: Named | None) -> list[SavedFile]:
        """Copies, in this machine's memory, of what this rank writes; a collective.

        Args:
            weights: the model's own, by megatron's name.
            reference: those of the frozen reference; adapters know their own.
        """
        files: list[SavedFile] = []
        if self.adapters is None:
            files.append(self._stage_file(WEIGHTS, self.shards.gather_stage(weights)))
            if reference is not None:
                files.append(self._stage_file(REFERENCE, self.shards.gather_stage(reference)))
        else:
            files.append(self._stage_file(ADAPTERS, self.adapters.stage_tensors()))
            frozen = self.adapters.stage_reference()
            if frozen is not None:
                files.append(self._stage_file(REFERENCE, frozen))
        files.append(self._stage_file(OPTIMIZER, self.optimizer.state(self.table).items()))
        if not self.shards.writes_stage:
            files.clear()
        if self.placement.speaks:
            rank = self.placement.data.rank
            states = {f"{rank}.{device}": state for device, state in self.random.state().items()}
            files.append(SavedFile.copied(RANDOM, f"{rank:02d}", states.items()))
        return files

    def continue_from(self, saved: SavedPolicy) -> None:
        """Take optimizer state and random stream from a checkpoint; the optimizer is new.

        A data-parallel rank beyond those that were saved keeps the stream it was made with.
        """
        self.optimizer.set_state(self.table, saved.steps, saved.groups[OPTIMIZER].read)
        self.random.set_state(saved.random(self.placement.data.rank))

    def _stage_file(self, group: str, named: Named) -> SavedFile:
        part = f"{self.placement.pipeline.rank:02d}-{self.placement.expert.rank:02d}"
        if self.shards.writes_stage:
            return SavedFile.copied(group, part, named)
        # The ranks that write gather from these.
        for _ in named:
            pass
        return SavedFile(group, part, {})
