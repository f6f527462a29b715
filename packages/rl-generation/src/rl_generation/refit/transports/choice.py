"""Which transport a refit takes, from where the policy and the engines are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...failures import RefitError
from ..contract import TransportName

ALL: frozenset[TransportName] = frozenset({"shared_memory", "cuda_ipc", "collective", "object_store"})


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One process that gives or takes weights. An engine over several GPUs is several of them.

    Attributes:
        node: anything that is the same for processes that share memory.
        device: where its weights are.
        gpu: UUID of the GPU; empty on the CPU.
        transports: what it can do.
    """

    node: str
    device: Literal["cpu", "cuda"] = "cpu"
    gpu: str = ""
    transports: frozenset[TransportName] = ALL

    def __post_init__(self) -> None:
        if (self.device == "cuda") != bool(self.gpu):
            raise ValueError(f"an endpoint on {self.device} has the GPU {self.gpu!r}; expected one with cuda")


def choose(source: Endpoint, targets: Sequence[Endpoint]) -> TransportName:
    """The fastest transport that reaches every target.

    On one GPU device memory is shared; GPUs of their own take part in a collective; on one node everything
    else goes through shared memory, and between nodes through Ray's store.

    Raises:
        RefitError: there are no targets, or no transport that all of them can do reaches them.
    """
    if not targets:
        raise RefitError("refit: no engine to choose a transport for")
    able = source.transports.intersection(*(target.transports for target in targets))
    reaching = _reaching(source, targets)
    for name in reaching:
        if name in able:
            return name
    raise RefitError(
        f"refit: {', '.join(reaching)} would reach every engine, and all of them can do "
        f"{', '.join(sorted(able)) or 'nothing in common'}; move them or install what is missing"
    )


def _reaching(source: Endpoint, targets: Sequence[Endpoint]) -> list[TransportName]:
    everyone = [source, *targets]
    one_node = {end.node for end in everyone} == {source.node}
    gpus = [end.gpu for end in everyone if end.device == "cuda"]
    only_gpus = len(gpus) == len(everyone)
    names: list[TransportName] = []
    if only_gpus and one_node and set(gpus) == {source.gpu}:
        names.append("cuda_ipc")
    # NCCL refuses two members on one GPU.
    if only_gpus and len(set(gpus)) == len(gpus):
        names.append("collective")
    if one_node:
        names.append("shared_memory")
    return [*names, "object_store"]
