"""Reads what ``uv export`` writes: which entries are the workspace's own, and which versions are pinned."""

from __future__ import annotations

from collections.abc import Collection, Sequence

_EDITABLE = "-e "
_AFTER_NAME = " =<>!~;[@("


def entries(export: str) -> list[str]:
    """The requirements of an export, each on one line."""
    lines = export.replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def is_member(entry: str) -> bool:
    """Whether a requirement is a folder of the workspace."""
    return entry.startswith((_EDITABLE, "./", "../"))


def member_folder(entry: str) -> str:
    """The folder of a member, relative to where the export was made, with its marker cut off."""
    return entry.removeprefix(_EDITABLE).partition(" ;")[0].strip()


def package_of(entry: str) -> str:
    """The normalised name of a third-party requirement's package."""
    end = min((entry.find(mark) for mark in _AFTER_NAME if mark in entry), default=len(entry))
    return entry[:end].strip().lower().replace("_", "-").replace(".", "-")


def of_packages(found: Sequence[str], packages: Collection[str]) -> list[str]:
    """Those entries that are about ``packages``, with version and marker but without hashes."""
    return [entry.partition(" --hash=")[0].strip() for entry in found if package_of(entry) in packages]


def without_packages(found: Sequence[str], packages: Collection[str]) -> list[str]:
    """Those entries that are not about ``packages``."""
    return [entry for entry in found if package_of(entry) not in packages]
