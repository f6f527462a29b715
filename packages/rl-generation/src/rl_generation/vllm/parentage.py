"""Processes that do not outlive the one that made them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(owner: int) -> None:
    """Let the kernel kill this process when the thread that made it ends.

    Linux's signal follows the creating *thread*: whoever makes such a process does so from a thread that
    lives as long as the process shall. Does nothing in the owner itself.

    Args:
        owner: id of the process that wants the engine, and runs this too where the engine is in it.
    """
    if os.getpid() == owner:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    # A parent that died before the call above sends no signal any more.
    parent = multiprocessing.parent_process()
    if os.getppid() != (owner if parent is None else parent.pid):
        os.kill(os.getpid(), signal.SIGKILL)
