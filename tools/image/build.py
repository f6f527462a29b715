"""Builds the image and says what that took."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.image.buildah import Buildah

#: what a build can leave out, each by its own argument
SKIPPABLE = ("vllm", "trtllm", "mcore", "gym")
#: of these, what does not run on a CPU, or fills the disk
LEFT_OUT = ("vllm", "trtllm")

_VERSION_FILE = "apps/grpo/src/rl_app_grpo/_version.py"
_STEP = re.compile(r"(?:\[(\d+)/\d+\] )?STEP (\d+)/\d+: (.*)")
_STAGE = re.compile(r"FROM \S+(?: AS (\S+))?")


@dataclass(frozen=True)
class BuildReport:
    """What a build took.

    Attributes:
        seconds: wall time.
        size: of the image, as buildah words it.
        linked_files: files below /opt/rl with more than one link, each counted once.
        links: number of links -> number of such files.
        ran: stage -> instructions that were not answered by a layer of an earlier build.
    """

    seconds: float
    size: str
    linked_files: int
    links: dict[int, int]
    ran: dict[str, list[str]]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def local_wheels() -> Path | None:
    """The folder of wheels that pip is told about, if there is one."""
    named = Path(os.environ.get("PIP_FIND_LINKS", ""))
    return named if named.is_absolute() and named.is_dir() else None


def build_image(
    buildah: Buildah,
    root: Path,
    *,
    base: str,
    tag: str,
    skip: Collection[str] = (),
    wheels: Path | None = None,
    target: str | None = None,
) -> tuple[BuildReport, str]:
    """Build `docker/Dockerfile` of the checkout at `root`; return the report and the log.

    Args:
        base: image to build on.
        skip: of SKIPPABLE.
        wheels: folder whose wheels are taken before the index's, such as a CPU build of torch.
        target: last stage to build, by default all.

    Raises ImageError when a step fails.
    """
    flags = ["--build-arg", f"BASE_IMAGE={base}", *_labels(root)]
    for name in skip:
        flags += ["--build-arg", f"SKIP_{name.upper()}_BUILD=1"]
    if wheels is not None:
        flags += ["--build-context", f"wheels={wheels}"]
    if target is not None:
        flags += ["--target", target]
    began = time.monotonic()
    log = buildah.build(root, root / "docker" / "Dockerfile", tag, *flags)
    seconds = time.monotonic() - began
    with buildah.container(tag) as container:
        links = count_links(Path(buildah.run("mount", container).strip()) / "opt" / "rl")
    report = BuildReport(
        seconds=round(seconds, 1),
        size=json.loads(buildah.run("images", "--json", tag))[0]["size"],
        linked_files=sum(links.values()),
        links=links,
        ran=steps_that_ran(log),
    )
    return report, log


def steps_that_ran(log: str) -> dict[str, list[str]]:
    """Return stage -> instructions whose layer no earlier build had, from buildah's log.

    Instructions that make no file (ARG, ENV, LABEL, FROM, WORKDIR) are left out.
    """
    ran: dict[str, list[str]] = {}
    stage, pending = "", ""
    for line in log.splitlines():
        step = _STEP.match(line)
        if step:
            pending = step.group(3)
            found = _STAGE.match(pending)
            if found:
                stage = found.group(1) or "base"
                ran.setdefault(stage, [])
        elif line.startswith("--> ") and pending:
            if not line.startswith("--> Using cache") and pending.startswith(("RUN", "COPY", "ADD")):
                ran[stage].append(" ".join(pending.split()))
            pending = ""
    return ran


def _labels(root: Path) -> list[str]:
    """Build arguments for the image's labels: the job's version, and the commit if there is one."""
    flags: list[str] = []
    version = re.search(r'__version__ = "(.+)"', (root / _VERSION_FILE).read_text())
    if version:
        flags += ["--build-arg", f"VERSION={version.group(1)}"]
    if shutil.which("git"):
        described = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if described.returncode == 0:
            flags += ["--build-arg", f"REVISION={described.stdout.strip()}"]
    return flags


def count_links(folder: Path) -> dict[int, int]:
    """Return number of links -> number of files with so many, for files with more than one link."""
    seen: set[int] = set()
    counts: Counter[int] = Counter()
    for parent, _, names in os.walk(folder):
        for name in names:
            entry = os.lstat(os.path.join(parent, name))
            if entry.st_nlink > 1 and entry.st_ino not in seen:
                seen.add(entry.st_ino)
                counts[entry.st_nlink] += 1
    return dict(sorted(counts.items()))
