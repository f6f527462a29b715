"""A base image for CPUs from Debian's packages alone: no registry of images is needed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tools.image.buildah import BUILD_TIMEOUT_S, Buildah, ImageError, run_in_session

TAG = "localhost/rl-base:bookworm"
SUITE = "bookworm"
#: Python with its headers, and a compiler: some locked packages are published as source only
INCLUDED = ("python3", "python3-venv", "libpython3-dev", "gcc", "libc6-dev", "ca-certificates")
_LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/lib/*/libpython3*.a")
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


def ensure_base(buildah: Buildah, root: Path, *, tag: str = TAG) -> str:
    """Make the base image if the storage does not have it; return its name.

    The root file system is kept in the user's cache folder; it is assembled again when the list of packages
    changes. The machine's own certificates go in, so that a proxy that it trusts is trusted inside.

    Raises ImageError when mmdebstrap or buildah fails.
    """
    if buildah.has(tag):
        return tag
    with tempfile.TemporaryDirectory(prefix="rl-base-", dir="/var/tmp") as folder:
        context = Path(folder)
        shutil.copy(root_file_system(), context / "base.tar")
        shutil.copy(_CERTIFICATES, context / _CERTIFICATES.name)
        buildah.build(context, root / "docker" / "base.Dockerfile", tag)
    return tag


def root_file_system() -> Path:
    """Return the archive of the root file system, assembled now if it is not in the cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rl-image"
    key = hashlib.sha256("\n".join((SUITE, *INCLUDED, *_LEFT_OUT)).encode()).hexdigest()[:12]
    archive = cache / f"base-{SUITE}-{key}.tar"
    if archive.exists():
        return archive
    cache.mkdir(parents=True, exist_ok=True)
    part = archive.with_suffix(f".{os.getpid()}.tar")
    command = [
        "mmdebstrap",
        "--quiet",
        "--variant=minbase",
        f"--include={','.join(INCLUDED)}",
        *(f"--dpkgopt=path-exclude={pattern}" for pattern in _LEFT_OUT),
        SUITE,
        str(part),
    ]
    try:
        done = run_in_session(command, BUILD_TIMEOUT_S)
        if done.returncode:
            raise ImageError(f"mmdebstrap ended with {done.returncode}:\n{done.stderr.strip()[-2000:]}")
        part.replace(archive)
    except subprocess.TimeoutExpired as error:
        raise ImageError(f"mmdebstrap did not end within {BUILD_TIMEOUT_S:.0f} s") from error
    finally:
        part.unlink(missing_ok=True)
    return archive
