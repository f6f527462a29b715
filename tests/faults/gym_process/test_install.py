"""Installing Gym for a checkout: what links its servers is bounded, and an error of it is a typed one."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from rl_actor_envs.errors import BuildError
from rl_actor_envs.pinned import PinnedEnvironment
from tools.gym.install import _link_servers

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("exec sleep 60", r"could not be linked: .*timed out after 0\.5 seconds"),
        ("echo of this machine >&2; exit 1", "no server of Gym can be served: of this machine"),
        ("exit 0", "it has none"),
        (None, "could not be linked: .*No such file"),
    ],
)
def test_servers_that_cannot_be_linked_are_an_error_of_the_build(
    tmp_path: Path, script: str | None, problem: str
) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    if script is not None:
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
    environment = PinnedEnvironment(str(tmp_path), "gym", "", "", "", "")
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    began = time.monotonic()
    try:
        with pytest.raises(BuildError, match=problem):
            _link_servers(tmp_path, environment, lock, timeout_s=0.5)
    finally:
        os.close(lock)
    assert time.monotonic() - began < 10
