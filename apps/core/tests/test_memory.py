"""Processes that compute get huge pages, and a user's own settings of malloc are kept."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from rl_app_core.memory import huge_page_variables

CHOICE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HUGE_KIB = """
x = bytearray(64 << 20)
import re
print(re.search(r"AnonHugePages:\\s+(\\d+)", open("/proc/self/smaps_rollup").read())[1])
"""


@pytest.mark.parametrize(
    ("set_already", "expected"),
    [
        (None, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}),
        ("", {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}),
        ("glibc.malloc.check=3", {"GLIBC_TUNABLES": "glibc.malloc.check=3:glibc.malloc.hugetlb=1"}),
        ("glibc.malloc.check=3:glibc.malloc.hugetlb=0", {}),
        ("glibc.malloc.hugetlb=2", {}),
    ],
)
def test_what_a_user_has_chosen_is_kept(
    monkeypatch: pytest.MonkeyPatch, set_already: str | None, expected: dict[str, str]
) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if set_already is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", set_already)
    assert huge_page_variables() == expected


def test_a_process_with_these_variables_has_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if not CHOICE.is_file() or "[madvise]" not in CHOICE.read_text():
        pytest.skip("the kernel does not give huge pages to those who ask, and to them alone")
    library, version = platform.libc_ver()
    if library != "glibc" or tuple(map(int, version.split("."))) < (2, 35):
        pytest.skip(f"the C library is {library} {version}, which cannot ask")

    def huge_mib(variables: dict[str, str]) -> float:
        done = subprocess.run(
            [sys.executable, "-c", HUGE_KIB],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return int(done.stdout) / 1024

    assert huge_mib(huge_page_variables()) >= 32
    assert huge_mib({}) < 32
