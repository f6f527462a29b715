"""How a vocabulary lies over the ranks of a tensor-parallel group."""

from __future__ import annotations

from dataclasses import dataclass, field

from .placement import RankGroup


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """This rank's rows of the embedding and of the head.

    The vocabulary is padded to a multiple of the group's size, so that all shards are equally long.
    Padded rows belong to no token: they are zero, and no probability is given to them.

    Attributes:
        size: real tokens of the whole vocabulary.
        ranks: the tensor-parallel group.
    """

    size: int
    ranks: RankGroup = field(default_factory=RankGroup)

    @property
    def rows(self) -> int:
        """Rows of one shard, padding included."""
        return -(-self.size // self.ranks.size)

    @property
    def padded(self) -> int:
        """Rows of all shards."""
        return self.rows * self.ranks.size

    @property
    def start(self) -> int:
        """The token that this rank's first row belongs to."""
        return self.ranks.rank * self.rows

    @property
    def real_rows(self) -> int:
        """Rows of this rank that belong to tokens; they come first."""
        return min(max(self.size - self.start, 0), self.rows)
