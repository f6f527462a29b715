"""Tries an image out: its environments, its records of itself, and a real job as a user without rights."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

from rl_actor_envs.fingerprint import fingerprint
from tools.image.buildah import Buildah, ImageError

_TABLE = "packages/rl-actor-envs/src/rl_actor_envs/table.py"
_USER = "1000:1000"
# Every image has it, and everybody may write there.
_HOME = "/var/tmp"
_SETTINGS = {
    "warm_start.steps": 2,
    "algorithm.steps": 1,
    "algorithm.prompts_per_step": 4,
    "algorithm.group_size": 2,
    "data.held_out.size": 4,
}
_JOB = ["grpo", "run", *(f"{key}={value}" for key, value in _SETTINGS.items())]
_IMPORT = (
    "import importlib, sys; getattr(importlib.import_module(sys.argv[1]), sys.argv[2]); print(sys.prefix)"
)
# What a process may write at: nothing of the image itself.
_WATCHED = ("opt", "usr")
_STARTED = "var/tmp/started"


def smoke_test(buildah: Buildah, root: Path, image: str, *, skip: Collection[str] = ()) -> list[str]:
    """Check `image` against the checkout at `root`; return a line for each thing that held.

    Args:
        skip: the extras' names that the image was built without.

    Raises ImageError naming the first thing that does not hold.
    """
    held: list[str] = []
    with buildah.container(image) as container:
        mount = Path(buildah.run("mount", container).strip())
        _trace(mount)
        before = _listing(mount)
        rows = _check_records(buildah, root, container, skip)
        held.append(f"table, list of environments and fingerprint agree with the checkout ({len(rows)} rows)")
        for actor in rows:
            held.append(f"{_check_environment(buildah, container, actor)} imports {actor}")
        shutil.rmtree(mount / _STARTED)
        buildah.execute(container, ["grpo", "validate"], user=_USER, env={"HOME": _HOME})
        said = buildah.execute(container, _JOB, user=_USER, env={"HOME": _HOME})
        if "/summary.json" not in said:
            raise ImageError(f"{image}: grpo run ended without a summary:\n{said}")
        started = sorted(os.listdir(mount / _STARTED)) if (mount / _STARTED).exists() else []
        if not started:
            raise ImageError(f"{image}: grpo run used no environment of an actor; its worker ran elsewhere")
        held.append(f"grpo run trains as user {_USER}, its worker in {', '.join(started)}")
        changed = sorted(set(_listing(mount).items()) ^ set(before.items()))
        if changed:
            raise ImageError(
                f"{image}: {len(changed)} files changed while it ran, the first: {changed[0][0]}"
            )
        held.append(f"none of {len(before)} files changed")
    return held


def _check_records(buildah: Buildah, root: Path, container: str, skip: Collection[str]) -> list[str]:
    """Compare what the image says of itself with the checkout; return its actors."""
    wanted = _rows(root, skip)
    found = buildah.execute(container, ["cat", "/opt/rl/rows.tsv"])
    if found != wanted:
        raise ImageError(f"/opt/rl/rows.tsv is not what the checkout's table gives:\n{found}\n{wanted}")
    if buildah.execute(container, ["cat", f"/opt/rl/src/{_TABLE}"]) != (root / _TABLE).read_text():
        raise ImageError("the table inside is not the checkout's")
    recorded = buildah.execute(container, ["cat", "/opt/rl/fingerprint.json"])
    if recorded != fingerprint(root).to_json():
        raise ImageError("/opt/rl/fingerprint.json is not the checkout's fingerprint")
    buildah.execute(container, ["rl-actor-envs", "fingerprint", "--check", "/opt/rl/fingerprint.json"])
    return [line.partition("\t")[0] for line in wanted.splitlines()]


def _rows(root: Path, skip: Collection[str]) -> str:
    """The list that the checkout's own script writes; it alone knows which extras a flag stands for."""
    flags = {f"SKIP_{name.upper()}_BUILD": "1" for name in skip}
    tools = {"RL_BUILD_TABLE": str(root / _TABLE), "RL_BUILD_PYTHON": sys.executable}
    with tempfile.NamedTemporaryFile("r") as rows:
        subprocess.run(
            ["sh", str(root / "docker/write_rows.sh"), rows.name],
            env={**os.environ, **flags, **tools},
            capture_output=True,
            timeout=60,
            check=True,
        )
        return Path(rows.name).read_text()


def _check_environment(buildah: Buildah, container: str, actor: str) -> str:
    """Import an actor's class with the interpreter of its environment; return the name of its command."""
    module, _, name = actor.rpartition(".")
    command = f"python-{name}"
    prefix = buildah.execute(container, [command, "-c", _IMPORT, module, name], user=_USER).strip()
    root = buildah.execute(container, ["rl-actor-envs", "path", actor], user=_USER).strip()
    if prefix.splitlines()[-1] != root:
        raise ImageError(f"{command} runs in {prefix}, not in {root}")
    return command


def _trace(mount: Path) -> None:
    """Let the interpreter of every actor's environment leave its name in a folder when it starts."""
    for packages in (mount / "opt/rl/environments").glob("*/lib/python*/site-packages"):
        name = packages.parents[2].name
        line = (
            f"import os; os.makedirs('/{_STARTED}', exist_ok=True); open('/{_STARTED}/{name}', 'a').close()"
        )
        (packages / "rl_image_trace.pth").write_text(line + "\n")


def _listing(mount: Path) -> dict[str, tuple[int, int, int]]:
    """Path -> size, mode and time of last change of everything that is watched below a container's root."""
    found = {}
    for top in _WATCHED:
        for parent, folders, names in os.walk(mount / top):
            for name in (*folders, *names):
                path = os.path.join(parent, name)
                entry = os.lstat(path)
                found[os.path.relpath(path, mount)] = (entry.st_size, entry.st_mode, entry.st_mtime_ns)
    return found
