"""Finished groups that no checkpoint holds yet."""

from __future__ import annotations

from ..replay import Group
from .commands import SaveGroups


class GroupJournal:
    """Keeps finished groups, trained ones too, until they are on disk.

    A crash undoes the steps after the last checkpoint, and with them the training of their groups; those of
    weights that the checkpoint has seen can be trained once more.
    """

    def __init__(self) -> None:
        self._groups: list[Group] = []
        self._writing = False

    def add(self, group: Group) -> None:
        """It is finished."""
        self._groups.append(group)

    def written(self) -> None:
        """What was asked for is on disk."""
        self._writing = False

    def forget_before(self, serial: int) -> None:
        """A checkpoint holds, or has trained, all groups with smaller serials."""
        self._groups = [group for group in self._groups if group.serial >= serial]

    def due(self, anchor: int | None) -> SaveGroups | None:
        """What is to be written beside the checkpoint of version ``anchor``, if there is one to write to."""
        if anchor is None or self._writing:
            return None
        groups = tuple(group for group in self._groups if group.newest <= anchor)
        self._groups = []
        if not groups:
            return None
        self._writing = True
        return SaveGroups(anchor, groups)
