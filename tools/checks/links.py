"""Links between the documents lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

from tools.checks.files import text_files

_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_INLINE_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
_REFERENCE = re.compile(r"^\[[^\]]+\]:\s*<?(\S+?)>?\s*$", re.MULTILINE)
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.MULTILINE)


def broken_links(root: Path) -> list[str]:
    """Return one complaint for each relative link to a missing file, folder or heading."""
    complaints = []
    for path, text in text_files(root):
        if path.suffix != ".md":
            continue
        prose = _INLINE_CODE.sub("", _FENCE.sub("", text))
        for target in [*_LINK.findall(prose), *_REFERENCE.findall(prose)]:
            if "://" in target or target.startswith("mailto:"):
                continue
            name, _, anchor = unquote(target).partition("#")
            there = (root / path.parent / name) if name else root / path
            if not there.exists():
                complaints.append(f"{path}: nothing at {target}")
            elif anchor and anchor not in _anchors(there):
                complaints.append(f"{path}: no heading for {target}")
    return complaints


def _anchors(document: Path) -> set[str]:
    if document.suffix != ".md":
        return set()
    found: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", document.read_text(encoding="utf-8"))):
        slug = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")
        number = 0
        while (anchor := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(anchor)
    return found
