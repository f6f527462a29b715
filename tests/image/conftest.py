"""The checkout, and one real build of its image for every test that looks at it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.image.base import ensure_base
from tools.image.build import LEFT_OUT, BuildReport, build_image, local_wheels
from tools.image.buildah import Buildah, temporary_storage, unavailable


@dataclass(frozen=True)
class Built:
    """An image of a copy of the checkout."""

    buildah: Buildah
    checkout: Path
    base: str
    tag: str
    report: BuildReport

    def again(self, checkout: Path, **changed: object) -> tuple[BuildReport, str]:
        """Build another checkout with the layers that this build left."""
        options = {"base": self.base, "tag": f"{self.tag}-again", "skip": LEFT_OUT, "wheels": local_wheels()}
        return build_image(self.buildah, checkout, **{**options, **changed})


@pytest.fixture(scope="session")
def root() -> Path:
    return Path(__file__).resolve().parents[2]


def copy_of_checkout(root: Path, target: Path) -> Path:
    """What git would put into a clone, with the changes that are not committed."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        timeout=60,
        check=True,
    ).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (root / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)
    return target


@pytest.fixture(scope="session")
def built(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Built]:
    reason = unavailable()
    if reason is not None:
        pytest.skip(f"NO IMAGE WAS BUILT: {reason}")
    checkout = copy_of_checkout(root, tmp_path_factory.mktemp("checkout"))
    # As under a umask of 077: the image has to run as any user all the same.
    for folder in ("packages/rl-algorithms/src/rl_algorithms", "packages/rl-actor-envs/src/rl_actor_envs"):
        for path in (checkout / folder, *(checkout / folder).glob("*.py")):
            path.chmod(path.stat().st_mode & 0o700)
    with temporary_storage() as buildah:
        base = ensure_base(buildah, checkout)
        report, _ = build_image(
            buildah, checkout, base=base, tag="localhost/rl-test", skip=LEFT_OUT, wheels=local_wheels()
        )
        yield Built(buildah, checkout, base, "localhost/rl-test", report)
