"""Gym's environment of a checkout: where it is, and how it is made."""

from __future__ import annotations

import subprocess
from pathlib import Path

from rl_actor_envs.errors import BuildError
from rl_actor_envs.pinned import PinnedEnvironment, build_pinned, find_pinned, pinned_environment

PROGRAM = "gym"
#: Where, below a checkout, the versions are pinned, the servers are listed and environments are made.
PINS, SERVERS, ENVIRONMENTS = "docker/gym.txt", "docker/gym_servers.py", ".actor-envs"
_LINK_TIMEOUT_S = 300.0


def gym_python(root: Path) -> Path | None:
    """Interpreter of the Gym that was installed for a checkout, if there is one with the pinned versions."""
    found = find_pinned(PROGRAM, root / PINS, root / ENVIRONMENTS, also=[root / SERVERS])
    return None if found is None else Path(found, "bin", "python")


def install_gym(root: Path, base: str) -> tuple[Path, bool]:
    """Install Gym for a checkout; returns its interpreter, and whether anything had to be done.

    Args:
        root: of the checkout.
        base: interpreter to make the environment with.

    Raises:
        BuildError: it could not be built.
    """
    environment = pinned_environment(
        PROGRAM, root / PINS, python=base, directory=root / ENVIRONMENTS, also=[root / SERVERS]
    )
    built = build_pinned(environment, finish=lambda made, lock: _link_servers(root, made, lock))
    return Path(environment.interpreter), built


def _link_servers(
    root: Path, environment: PinnedEnvironment, lock: int, timeout_s: float = _LINK_TIMEOUT_S
) -> None:
    """Make it the environment of every server of Gym that it can serve."""
    try:
        done = subprocess.run(
            [environment.interpreter, "-I", str(root / SERVERS), "--link"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            # It holds the lock, so that nobody builds anew what it still writes into.
            pass_fds=(lock,),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the servers of Gym could not be linked: {error}") from error
    if done.returncode or not done.stdout.strip():
        raise BuildError(f"no server of Gym can be served: {done.stderr.strip()[-500:] or 'it has none'}")
