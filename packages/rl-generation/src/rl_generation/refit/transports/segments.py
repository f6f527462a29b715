"""Files of shared memory: made for this user only, locked while their owner lives, swept when it is dead."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import tempfile

import torch

from ...failures import RefitError

SYSTEM_FOLDER = "/dev/shm"
PREFIX = "rl-generation-refit-"

_NAME = re.compile(re.escape(PREFIX) + r"[0-9a-f]{16}")
_ATTEMPTS = 16
# Of linux/mman.h; Python has no name for it.
_MADV_POPULATE_READ = 22


def shared_folder(folder: str = "") -> str:
    """The folder of the segments: the one given, the system's shared memory, or that of temporary files."""
    if folder:
        return os.path.abspath(folder)
    usable = os.path.isdir(SYSTEM_FOLDER) and os.access(SYSTEM_FOLDER, os.R_OK | os.W_OK | os.X_OK)
    return SYSTEM_FOLDER if usable else os.path.abspath(tempfile.gettempdir())


def page_aligned(nbytes: int) -> int:
    """The next multiple of the granularity at which files can be mapped; at least one."""
    return max(1, -(-nbytes // mmap.ALLOCATIONGRANULARITY)) * mmap.ALLOCATIONGRANULARITY


class Segment:
    """A file in shared memory, readable and writable for this user, gone with :meth:`close`.

    Its lock tells others that the owner lives; the kernel releases it however the owner ends.

    Args:
        nbytes: size, > 0; the memory is there when the constructor returns.
        folder: where it lies.

    Raises:
        RefitError: the folder has no room, or refuses.
    """

    def __init__(self, nbytes: int, folder: str) -> None:
        self.nbytes = nbytes
        self.path, self._descriptor = _create(folder)
        try:
            # Without it a full folder is found out by SIGBUS in the middle of a copy.
            os.posix_fallocate(self._descriptor, 0, nbytes)
            memory = mmap.mmap(self._descriptor, nbytes)
        except OSError as error:
            self.close()
            raise RefitError(
                f"refit: {folder} has no room for {nbytes} bytes: {error.strerror}; make it larger (in a "
                "container with --shm-size), lower bucket_bytes, or set another folder"
            ) from error
        self.buffer: torch.Tensor = torch.frombuffer(memory, dtype=torch.uint8)

    def close(self) -> None:
        """Unlink the file and let go of the memory; idempotent. Readers keep what they have mapped."""
        if self._descriptor < 0:
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self.buffer = torch.empty(0, dtype=torch.uint8)
        os.close(self._descriptor)
        self._descriptor = -1


def map_segment(path: str, offset: int, nbytes: int, folder: str) -> torch.Tensor:
    """Part of a segment as ``[nbytes]`` uint8, without a copy.

    The mapping is private: writing to it changes neither the segment nor what others read. What the owner
    writes later shows through, so it must not outlive the bucket.

    Args:
        path: of the file, directly within ``folder``.
        offset: a multiple of the page size.
        nbytes: 0 maps nothing.
        folder: the only one that is accepted.

    Raises:
        RefitError: the file is elsewhere, gone, not a plain file of this user alone, or too short.
    """
    if os.path.dirname(path) != folder or not _NAME.fullmatch(os.path.basename(path)):
        raise RefitError(f"refit: {path!r} is no segment in {folder}; refused")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise RefitError(
            f"refit: {path} is gone; its owner ended the refit, died, or runs on another node"
        ) from error
    except OSError as error:
        raise RefitError(f"refit: {path} cannot be opened: {error.strerror}; refused") from error
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
            raise RefitError(
                f"refit: {path} has mode {stat.filemode(facts.st_mode)} and owner {facts.st_uid}; expected a "
                f"plain file of user {os.geteuid()} alone; refused"
            )
        if min(offset, nbytes) < 0 or offset % mmap.ALLOCATIONGRANULARITY or offset + nbytes > facts.st_size:
            raise RefitError(
                f"refit: {path} holds {facts.st_size} bytes; a bucket of {nbytes} at {offset} cannot be in it"
            )
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        memory = mmap.mmap(
            descriptor,
            nbytes,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
            offset=offset,
        )
    finally:
        os.close(descriptor)
    # Saves a tenth of the time; kernels before 5.14 refuse. MAP_POPULATE would copy every page.
    with contextlib.suppress(OSError):
        memory.madvise(_MADV_POPULATE_READ)
    return torch.frombuffer(memory, dtype=torch.uint8)


def sweep(folder: str) -> list[str]:
    """Unlink this user's segments whose owners are dead.

    Returns:
        Their paths; what cannot be looked at is left alone.
    """
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    paths = [os.path.join(folder, name) for name in names if _NAME.fullmatch(name)]
    return [path for path in paths if _unlink_if_dead(path)]


def _unlink_if_dead(path: str) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
        return True
    except OSError:
        # Its owner lives, or somebody else was faster.
        return False
    finally:
        os.close(descriptor)


def _create(folder: str) -> tuple[str, int]:
    for _ in range(_ATTEMPTS):
        path = os.path.join(folder, PREFIX + secrets.token_hex(8))
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue
        except OSError as error:
            raise RefitError(
                f"refit: no segment can be made in {folder}: {error.strerror}; set another folder"
            ) from error
        try:
            os.fchmod(descriptor, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A sweep between creation and lock has taken it for one of a dead owner.
            if os.fstat(descriptor).st_nlink:
                return path, descriptor
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(descriptor)
                raise RefitError(f"refit: {path} cannot be locked: {error.strerror}") from error
        os.close(descriptor)
    raise RefitError(f"refit: {_ATTEMPTS} segments in {folder} were taken away at once; is a sweep running?")
