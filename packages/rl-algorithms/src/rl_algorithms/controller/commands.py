"""What a controller wants done.

``Train``, ``Publish``, ``Evaluate`` and ``Save`` all use the policy: each is answered by its event before the
next of them is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..replay import Group


@dataclass(frozen=True, slots=True)
class Try:
    """One try of one rollout.

    Attributes:
        index: of the rollout in its group.
        number: of the try, counted from 0 through all replays of the row.
    """

    index: int
    number: int


@dataclass(frozen=True, slots=True)
class Start:
    """Play rollouts of the row at ``position``; each ends in a ``RolloutEnded``."""

    position: int
    tries: tuple[Try, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """These tries are of no more use. What ends all the same is ignored."""

    position: int
    tries: tuple[Try, ...]


@dataclass(frozen=True, slots=True)
class Train:
    """Train the step that leads to ``version``, on these groups."""

    version: int
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class Publish:
    """Give the engine the weights of ``version``; tokens in flight may go on with them."""

    version: int


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Measure the weights of ``version``."""

    version: int


@dataclass(frozen=True, slots=True)
class Save:
    """Write a checkpoint of ``version`` with the controller's snapshot as it is now."""

    version: int


@dataclass(frozen=True, slots=True)
class SaveGroups:
    """Write finished groups beside the checkpoint of ``anchor``, to which they belong."""

    anchor: int
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """The run is over; ``stopped`` if somebody asked for it before the last step."""

    stopped: bool


@dataclass(frozen=True, slots=True)
class Abort:
    """The run cannot go on: nothing has happened for too long."""

    reason: str


Command = Start | Cancel | Train | Publish | Evaluate | Save | SaveGroups | Finish | Abort
