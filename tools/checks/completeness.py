"""Every distribution carries what a stranger needs to use it alone."""

from __future__ import annotations

import re
from pathlib import Path

from tools.distributions import Distribution, distributions

_VERSION = re.compile(r'^__version__ = "(\d+\.\d+\.\d+)"$', re.MULTILINE)


def incomplete(root: Path) -> list[str]:
    """Return one complaint for each missing version, README, CHANGELOG entry, licence or typed marker."""
    licence = (root / "LICENSE").read_bytes()
    return [
        f"{item.name}: {complaint}"
        for item in distributions(root)
        for complaint in _complaints(item, licence)
    ]


def _complaints(item: Distribution, licence: bytes) -> list[str]:
    project = item.declaration["project"]
    complaints = []
    version_file = item.package / "_version.py"
    version = _VERSION.search(version_file.read_text()) if version_file.exists() else None
    if not version or "version" not in project.get("dynamic", []):
        complaints.append("no version in _version.py that its pyproject.toml reads")
    readme, changelog, own_licence = (item.folder / name for name in ("README.md", "CHANGELOG.md", "LICENSE"))
    if not readme.exists() or len(readme.read_text().split()) < 3:
        complaints.append("no README.md that says what it is")
    if version and (not changelog.exists() or f"## {version[1]}" not in changelog.read_text()):
        complaints.append(f"no CHANGELOG.md entry for {version[1]}")
    if not own_licence.exists() or own_licence.read_bytes() != licence:
        complaints.append("no LICENSE equal to the root's")
    if project.get("license") != "Apache-2.0":
        complaints.append("no license = 'Apache-2.0' in pyproject.toml")
    if not (item.package / "py.typed").exists():
        complaints.append("no py.typed")
    if not project.get("description"):
        complaints.append("no description")
    return complaints
