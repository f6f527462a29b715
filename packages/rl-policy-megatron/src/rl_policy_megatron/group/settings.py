"""What a rank is built from, and what the driver asks of Ray and of time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..checks import AboveZero, Count, Positive, Rate, check_fields
from ..mapping import WeightSpec
from ..settings import OptimizerSettings, PolicySettings


class WeightSource(Protocol):
    """Hands out a stream of tensors bucket by bucket; what a bucket is, is the engines' business."""

    def begin(self, transport: Any) -> Any:
        """Announce everything that this refit will carry."""
        ...

    def next_bucket(self) -> Any:
        """Publish the next part; ``None`` after the last."""
        ...

    def end(self) -> None:
        """Let go of what was published; idempotent."""
        ...


SourceFactory = Callable[
    [Callable[[], Iterable[WeightSpec]], Callable[[], Iterator[tuple[str, torch.Tensor]]]], WeightSource
]
"""``factory(spec, stream)``: what the stream yields, and the stream itself, called once for each refit."""


@dataclass(frozen=True, slots=True)
class RankSettings:
    """Everything that the ranks of one policy need to build themselves, in one picklable piece.

    Attributes:
        model_directory: in Hugging Face format, readable by every rank.
        policy: how it computes; its layout decides who holds what.
        optimizer: how it learns at first.
        world: number of ranks, ≥ 1.
        threads: CPU threads of a rank; 0 shares the cores that its process may use among the ranks.
        weight_source: makes rank 0's side of refits; ``None`` where nobody asks for weights.
        rendezvous_timeout_s: how long the ranks wait for each other at the start.
        collective_timeout_s: how long a rank waits for the others within a computation.
        refit_timeout_s: how long the end of a refit may take.
        verify_loads: whether loading a checkpoint compares its files with their digests; False where whoever
            keeps the checkpoints does so anyway.

    Raises:
        SettingsError: a value of another type or outside its range, naming it.
        RuntimeStateError: the layout does not fit the world.
    """

    model_directory: str
    policy: PolicySettings = field(default_factory=PolicySettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    world: Positive = 1
    threads: Count = 0
    weight_source: SourceFactory | None = None
    rendezvous_timeout_s: AboveZero = 120.0
    collective_timeout_s: AboveZero = 3600.0
    refit_timeout_s: AboveZero = 120.0
    verify_loads: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        self.policy.layout.data(self.world)


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """What the driver asks of Ray for each rank, and how long it waits; times in seconds.

    Attributes:
        num_cpus: that each rank asks for.
        num_gpus: that each rank asks for.
        env_vars: of each rank's process.
        environment: name of the actor whose row in the table of environments the ranks use; empty is the
            rank's own class.
        start_timeout_s: until every rank's process runs, and once more until all have loaded the model.
        call_timeout_s: for any other call.
        shutdown_timeout_s: for the ranks to release what they hold; then they are ended.
        kill_timeout_s: until killed processes are gone.
        grace_s: how long a rank that only saw another one fail waits for that one to say why.

    Raises:
        SettingsError: a value of another type or outside its range, naming it.
    """

    num_cpus: Rate = 1.0
    num_gpus: Rate = 0.0
    env_vars: Mapping[str, str] = field(default_factory=dict)
    environment: str = ""
    start_timeout_s: AboveZero = 600.0
    call_timeout_s: AboveZero = 3600.0
    shutdown_timeout_s: AboveZero = 20.0
    kill_timeout_s: AboveZero = 10.0
    grace_s: AboveZero = 5.0

    def __post_init__(self) -> None:
        check_fields(self)
