"""What the applications' command lines have in common: exit codes and one clear line for an error."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from .config import ConfigError


class ExitCode(IntEnum):
    """Why the command ended. 0 means that the target steps are done, nothing less."""

    DONE = 0
    FAILED = 1
    WRONG_CONFIGURATION = 2
    INTERRUPTED = 130
    TERMINATED = 143


class Interrupted(Exception):
    """The run stopped because it was asked to, at a point that it can be resumed from.

    Attributes:
        signal_number: which signal asked.
        message: what to tell the user.
    """

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.signal_number = signal_number
        self.message = message


@contextlib.contextmanager
def guarded(errors: Console, *, crash_file: list[Path] | None = None) -> Iterator[None]:
    """Turn every outcome of a command into its exit code and, for an error, one line on ``errors``.

    Args:
        errors: a console on standard error.
        crash_file: when the block has put a path in it, the traceback of a failure is written there.

    Raises:
        SystemExit: always, unless the block ends normally.
    """
    try:
        yield
    except ConfigError as error:
        _say(errors, f"error: {error}")
        raise SystemExit(ExitCode.WRONG_CONFIGURATION) from None
    except Interrupted as stop:
        _say(errors, stop.message)
        raise SystemExit(128 + stop.signal_number) from None
    except KeyboardInterrupt:
        _say(errors, "interrupted")
        raise SystemExit(ExitCode.INTERRUPTED) from None
    except SystemExit:
        raise
    except Exception as error:
        _say(errors, f"error: {' '.join(str(error).split()) or type(error).__name__}")
        trace = traceback.format_exc()
        if crash_file:
            with contextlib.suppress(OSError):
                crash_file[0].parent.mkdir(parents=True, exist_ok=True)
                crash_file[0].write_text(trace, encoding="utf-8")
                _say(errors, f"the whole story is in {crash_file[0]}")
        else:
            _say(errors, trace)
        raise SystemExit(ExitCode.FAILED) from None


def quiet_process() -> None:
    """Keep libraries from writing to a person's screen. For command lines, never for libraries."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.ERROR)


def _say(console: Console, text: str) -> None:
    console.print(escape(text), highlight=False, soft_wrap=True)
