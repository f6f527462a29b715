"""What the applications' command lines have in common: exit codes and one clear line for an error."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Generator
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape

from .config import ConfigError
from .exit_codes import ExitCode, exit_code_of
from .interrupts import Interrupted, terminable
from .run_directory import RunDirectory

# What a person still reads, a command to copy included; the whole text is in the log.
_LONGEST = 800
_NOTHING = "; nothing was begun"


@dataclass(slots=True)
class Running:
    """What a command is working on, for the message of whatever ends it.

    Attributes:
        directory: of the run, once there is one.
        resume_hint: the command that continues it.
    """

    directory: RunDirectory | None = None
    resume_hint: str = ""


@contextlib.contextmanager
def guarded(errors: Console, running: Running | None = None) -> Generator[None]:
    """Turn every outcome of a command into its exit code and, for an error, one line on ``errors``.

    Args:
        errors: a console on standard error.
        running: the traceback of a failure goes to the ``logs`` of its directory.

    Raises:
        SystemExit: always, unless the block ends normally.
    """
    running = running or Running()
    try:
        with terminable():
            yield
    except ConfigError as error:
        _say(errors, f"error: {_one_line(error)}")
        raise SystemExit(ExitCode.WRONG_CONFIGURATION) from None
    except Interrupted as stop:
        _say(errors, f"{stop}{running.resume_hint or _NOTHING}")
        raise SystemExit(128 + stop.signal_number) from None
    except KeyboardInterrupt:
        _say(errors, f"interrupted{running.resume_hint or _NOTHING}")
        raise SystemExit(ExitCode.INTERRUPTED) from None
    except SystemExit:
        raise
    except Exception as error:
        _say(errors, f"error: {_one_line(error)}{running.resume_hint}")
        trace = traceback.format_exc()
        if running.directory is None:
            _say(errors, trace)
        else:
            file = running.directory.logs / "error.log"
            with contextlib.suppress(OSError):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(trace, encoding="utf-8")
                _say(errors, f"the whole story is in {file}")
        raise SystemExit(exit_code_of(error)) from None


def quiet_process() -> None:
    """Keep libraries from writing to a person's screen. For command lines, never for libraries."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.ERROR)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    text = text if len(text) <= _LONGEST else text[:_LONGEST] + " …"
    return "; ".join([text, *getattr(error, "__notes__", [])])


def _say(console: Console, text: str) -> None:
    console.print(escape(text), highlight=False, soft_wrap=True)
