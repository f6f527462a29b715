"""Rewrites a uv lock so that it names files and hashes but no host, the same for the same pins."""

from __future__ import annotations

import re

#: uv's own form for packages from a local folder: a folder name and file names relative to it. Hashes,
#: sizes and upload times stay, so any index or mirror can serve the files and each one is verified.
REGISTRY = "wheelhouse"

_REGISTRY_URL = re.compile(r'registry = "[a-z][a-z0-9+.-]*://[^"]*"')
_FILE_URL = re.compile(r'\{ url = "[a-z][a-z0-9+.-]*://[^"]*/([^"/]+)"')
#: the cases for which uv resolved; it lists them in an order that depends on the lock it started from
_CASES = re.compile(r"^(resolution-markers = \[\n)((?: .*\n)*)", re.MULTILINE)


def neutralise(lock: str) -> str:
    """Return `lock` with every registry and file address replaced by its neutral form, and its cases sorted.

    The result of a second call is the same text. Raises ValueError when an address of another kind is left
    (a package from git, say), because such a lock cannot be made free of hosts.
    """
    text = _REGISTRY_URL.sub(f'registry = "{REGISTRY}"', lock)
    text = _FILE_URL.sub(r'{ path = "\1"', text)
    text = _CASES.sub(lambda found: found[1] + "".join(sorted(found[2].splitlines(keepends=True))), text)
    left = addresses(text)
    if left:
        raise ValueError(
            f"uv.lock still names {len(left)} address(es) after the rewrite, the first on line "
            f"{left[0][0]}: {left[0][1]}; take the package from a registry instead"
        )
    return text


def addresses(lock: str) -> list[tuple[int, str]]:
    """Return (line number from 1, line) of every line that holds an address."""
    return [(number, line.strip()) for number, line in enumerate(lock.splitlines(), 1) if "://" in line]
