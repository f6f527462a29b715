"""No file names a package registry's host or a folder of one machine."""

from __future__ import annotations

import re
from pathlib import Path

from pip._internal.models.index import PyPI, TestPyPI

from tools.checks.files import text_files

# Computed, because this file is checked too.
_HOSTS = re.compile(
    "|".join(
        re.escape(host)
        for host in sorted(
            {PyPI.netloc, PyPI.file_storage_domain, TestPyPI.netloc, TestPyPI.file_storage_domain}
        )
    )
)
_MACHINE_FOLDER = re.compile(r"(?<![\w.}/-])/(?:tmp|root|work|home)/[A-Za-z]")


def registry_hosts(root: Path) -> list[str]:
    """Return one complaint for each line that names a host of the package registry."""
    return _matches(root, _HOSTS, "names a package registry's host")


def machine_folders(root: Path) -> list[str]:
    """Return one complaint for each line that names an absolute folder; tests may use invented ones."""
    found = _matches(root, _MACHINE_FOLDER, "names a folder of one machine")
    home = re.compile(re.escape(f"{root}/"))
    return [line for line in found if "tests/" not in line.partition(":")[0]] + _matches(
        root, home, "names this checkout's folder"
    )


def _matches(root: Path, pattern: re.Pattern[str], complaint: str) -> list[str]:
    return [
        f"{path}:{number}: {complaint}"
        for path, text in text_files(root)
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]
