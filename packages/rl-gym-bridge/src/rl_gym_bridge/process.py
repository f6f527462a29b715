"""Gym as a context manager, without Ray: start it, ask whether it is well, and leave nothing of it behind."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

from .config import NemoGymConfig
from .failures import GymConfigError, GymServerDied, GymStartError, GymTimeout
from .interpreter import GymInterpreter, find_gym_interpreter
from .supervision.deployment import Deployment
from .supervision.health import WHOLE, dead, died, unknown_if_unseen, unwell
from .supervision.program_end import end_quietly, end_with_program, has_ended
from .supervision.servers import AGENT_TYPE, GymServer
from .supervision.starting import start_deployment

_LOG = logging.getLogger(__name__)
# What a failing start may take to clean up after itself, beyond the time to shut Gym down.
_MARGIN_S = 5.0


class GymProcess:
    """NeMo Gym, running in its own interpreter.

    ``with GymProcess(config) as gym: … gym.agents …``. Every way out ends all of Gym: leaving the block, an
    error in it or while starting, :meth:`shutdown` from any thread, the end of this program, and its death by
    a signal.

    Attributes:
        config: the settings.
    """

    def __init__(
        self,
        config: NemoGymConfig,
        *,
        interpreter: GymInterpreter | None = None,
        search_folder: str | Path | None = None,
    ) -> None:
        """Nothing is started yet.

        Args:
            config: the settings.
            interpreter: what runs Gym; by default it is found by ``config.python``.
            search_folder: where the user's own configuration files and servers are; by default the working
                folder.
        """
        self.config = config
        self._interpreter = interpreter
        self._search_folder = Path.cwd() if search_folder is None else Path(search_folder).absolute()
        self._deployment: Deployment | None = None
        # Attempts to start that came to nothing, of which something may have survived.
        self._earlier: list[Deployment] = []
        self._owned_folder: Path | None = None
        self._owner = os.getpid()
        self._stopping = threading.Event()
        self._lock = threading.RLock()
        self._started = False
        self._starter = 0
        self._settled = threading.Event()
        self._settled.set()
        self._ready = False

    def start(self) -> GymProcess:
        """Start Gym and wait until every server answers.

        Raises:
            GymConfigError: settings or interpreter cannot be used.
            GymStartError: Gym did not become ready within ``start_timeout_s``; with the lines of its log that
                tell why. Whatever the error is, nothing of Gym is left when it is raised.
        """
        if sys.platform != "linux":
            raise GymConfigError(
                f"Gym cannot be supervised on {sys.platform}",
                component="platform",
                remedy="use Linux, or run Gym yourself and give the bridge its addresses",
            )
        with self._lock:
            if self._started:
                raise GymStartError("it was started before", component="gym", remedy="make a new GymProcess")
            self._started = True
            self._settled.clear()
        began = time.monotonic()
        end_with_program(self)
        self._starter = threading.get_ident()
        try:
            self._start(began + self.config.start_timeout_s)
        except BaseException:
            end_quietly(self)
            raise
        finally:
            self._settled.set()
        _LOG.info("Gym is ready after %.1f s: %s", time.monotonic() - began, ", ".join(self.servers))
        return self

    def _start(self, deadline: float) -> None:
        interpreter = self._interpreter or find_gym_interpreter(self.config.python)
        self._interpreter = interpreter
        try:
            start_deployment(
                self.config,
                interpreter,
                parent_folder=self._parent_folder,
                search_folder=self._search_folder,
                deadline=deadline,
                stopping=self._stopping.is_set,
                publish=self._publish,
            )
        except OSError as error:
            raise GymStartError(
                f"this machine refused something: {error}",
                component="gym",
                remedy="check the rights and space of the working folder and the limit of open files",
            ) from error
        with self._lock:
            if self._stopping.is_set():
                raise GymStartError("it was shut down while it started", component="gym")
            self._ready = True

    def _publish(self, deployment: Deployment) -> None:
        if self._deployment is not None:
            self._earlier.append(self._deployment)
        self._deployment = deployment

    def _parent_folder(self) -> Path:
        if self.config.work_dir is not None:
            return Path(self.config.work_dir).absolute()
        if self._owned_folder is None:
            self._owned_folder = Path(tempfile.mkdtemp(prefix="rl-gym-"))
        return self._owned_folder

    def __enter__(self) -> GymProcess:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.shutdown()
        else:
            end_quietly(self)

    @property
    def servers(self) -> Mapping[str, GymServer]:
        """Every server by its name; empty unless Gym is ready."""
        deployment = self._deployment
        return (
            {} if deployment is None or not self._ready else {each.name: each for each in deployment.servers}
        )

    @property
    def agents(self) -> Mapping[str, str]:
        """Address of every agent by its name; empty unless Gym is ready."""
        return {name: server.url for name, server in self.servers.items() if server.kind == AGENT_TYPE}

    @property
    def head_url(self) -> str:
        """Address of the head server, empty before the start."""
        return "" if self._deployment is None else self._deployment.head_url

    @property
    def run_id(self) -> str:
        """``RL_GYM_RUN_ID`` in the environment of every process of Gym, empty before the start."""
        return "" if self._deployment is None else self._deployment.run_id

    @property
    def log_path(self) -> Path | None:
        """Gym's output; deleted with the folder if that was not chosen and nothing failed."""
        return None if self._deployment is None else self._deployment.log

    @property
    def version(self) -> str:
        """Gym's version, empty while its interpreter is not known."""
        return "" if self._interpreter is None else self._interpreter.version

    def check(self) -> None:
        """See that Gym and all its servers run, without a request: microseconds per server.

        Raises:
            GymServerDied: one does not; ``component`` names it.
            GymStateUnknown: this process has no file descriptor left to see it with.
        """
        deployment = self._running()
        with unknown_if_unseen(WHOLE, deployment.head_url):
            problems = dead(deployment)
        if problems:
            raise died(deployment, problems)

    def health(self, timeout_s: float = 5.0) -> None:
        """Ask every server at the same time; returns or raises after at most about ``timeout_s`` seconds.

        Raises:
            GymServerDied: one ended or does not answer; ``component`` names it, or all of them, or ``gym``
                if Gym's command itself ended.
            GymStateUnknown: this process has no file descriptor left to ask with.
        """
        deployment = self._running()
        began = time.monotonic()
        with unknown_if_unseen(WHOLE, deployment.head_url):
            problems = unwell(deployment, timeout_s)
        if problems:
            raise died(deployment, problems, elapsed_s=time.monotonic() - began)

    def _running(self) -> Deployment:
        deployment = self._deployment
        if deployment is None or not self._ready or self._stopping.is_set():
            state = "was shut down" if self._stopping.is_set() else "was not started"
            raise GymServerDied(f"Gym {state}", component="gym", remedy="start a GymProcess")
        return deployment

    def shutdown(self, timeout_s: float | None = None) -> None:
        """End Gym and everything that it started.

        May be called again, and in any thread.

        Args:
            timeout_s: after which what is left is killed; by default ``config.shutdown_timeout_s``; 0 kills
                at once. The shortest one that was asked for holds, also for a shutdown under way.

        Raises:
            GymTimeout: a process survived SIGKILL; names it.
            GymStateUnknown: this process has no file descriptor left to see with what is left.
        """
        if os.getpid() != self._owner:
            # A fork of the owner: Gym is not its to end.
            return
        bound = self.config.shutdown_timeout_s if timeout_s is None else timeout_s
        self.ask_shutdown(bound)
        if self._starter != threading.get_ident():
            # A start under way sees the request, and launches nothing after it.
            self._settled.wait(bound + _MARGIN_S)
        with self._lock:
            deployment = self._deployment
            if deployment is None:
                self._remove_owned_folder()
                return
            began = time.monotonic()
            was_ready, self._ready = self._ready, False
            with unknown_if_unseen(WHOLE, self.head_url):
                left = [entry for each in (deployment, *self._earlier) for entry in each.end(bound)]
            has_ended(self)
            if left:
                raise GymTimeout(
                    f"processes {', '.join(str(entry.pid) for entry in left)} survived SIGKILL",
                    component="gym",
                    address=self.head_url,
                    elapsed_s=time.monotonic() - began,
                    remedy="they hang in the kernel: look at their state",
                )
            if was_ready:
                self._remove_owned_folder()

    def ask_shutdown(self, timeout_s: float | None = None) -> None:
        """Begin to shut down and return at once, so that several can end at the same time.

        Args:
            timeout_s: as for :meth:`shutdown`.
        """
        if os.getpid() != self._owner:
            return
        self._stopping.set()
        deployment = self._deployment
        if deployment is not None and deployment.command is not None:
            deployment.command.ask_end(self.config.shutdown_timeout_s if timeout_s is None else timeout_s)

    def _remove_owned_folder(self) -> None:
        if self._owned_folder is not None:
            shutil.rmtree(self._owned_folder, ignore_errors=True)


def shutdown_all(processes: Iterable[GymProcess]) -> None:
    """Shut several down at the same time; all of them, whatever happens to one.

    Raises:
        GymTimeout: the first that could not be ended.
    """
    everyone = list(processes)
    for each in everyone:
        each.ask_shutdown()
    first: Exception | None = None
    for each in everyone:
        try:
            each.shutdown()
        except Exception as error:
            first = first or error
    if first is not None:
        raise first
