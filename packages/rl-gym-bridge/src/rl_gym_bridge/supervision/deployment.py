"""One attempt to run Gym: its folder, its command and its servers, from launch to the end."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..failures import GymStartError
from ..interpreter import GymInterpreter
from ..redaction import secret_values
from .launch import GuardedCommand, GuardianFailed
from .log_excerpt import excerpt, port_was_taken
from .ports import Ports
from .probing import get_all
from .processes import Process
from .servers import BadList, GymServer, NotOurs, parse_servers
from .settings import FOLDERS_OF_SERVERS, write_settings
from .variables import gym_environment

_PROBE_S = 2.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


class PortTaken(RuntimeError):
    """Another program got a port between its choice and its use."""


class Deployment:
    """Gym as one guarded command.

    Attributes:
        run_id: in the environment of every process of it.
        folder: working folder; holds the log.
        log: Gym's output.
        head_url: address of the head server.
        servers: all of them, once ready.
        command: the running command, ``None`` before it is launched.
    """

    def __init__(
        self,
        interpreter: GymInterpreter,
        settings: Mapping[str, Any],
        ports: Ports,
        *,
        parent_folder: Path,
        search_folder: Path,
        shutdown_timeout_s: float,
    ) -> None:
        self.run_id = secrets.token_hex(8)
        self.folder = parent_folder / f"gym-{self.run_id}"
        self.log = self.folder / "gym.log"
        self.head_url = f"http://127.0.0.1:{ports.head}"
        self._head_port = ports.head
        self.servers: tuple[GymServer, ...] = ()
        self.command: GuardedCommand | None = None
        self._interpreter = interpreter
        self._settings = settings
        self._secrets = secret_values(settings)
        self._search_folder = search_folder
        self._shutdown_timeout_s = shutdown_timeout_s
        self._ray_folder: Path | None = None
        self._settings_file = self.folder / "env.yaml"

    def prepare(self) -> None:
        """Make the working folder and write the settings into it."""
        self.folder.mkdir(mode=0o700, parents=True)
        for name in FOLDERS_OF_SERVERS:
            if (self._search_folder / name).is_dir():
                (self.folder / name).symlink_to(self._search_folder / name)
        if not self._settings.get("ray_head_node_address"):
            # The paths of Ray's sockets must stay short, wherever the working folder is.
            self._ray_folder = Path(tempfile.mkdtemp(prefix="rlgym-"))
        write_settings(self._settings, self._settings_file)

    def launch(self) -> None:
        """Start Gym's command.

        Raises:
            GymStartError: it cannot be started.
        """
        environment = gym_environment(
            os.environ,
            self._interpreter,
            run_id=self.run_id,
            folder=self.folder,
            search_folder=self._search_folder,
            ray_folder=self._ray_folder,
        )
        try:
            self.command = GuardedCommand(
                [str(self._interpreter.python), str(self._interpreter.gym), "env", "start"],
                run_id=self.run_id,
                folder=self.folder,
                environment=environment,
                log=self.log,
                remove=self._private_paths(),
                shutdown_timeout_s=self._shutdown_timeout_s,
            )
        except (GuardianFailed, OSError) as error:
            raise GymStartError(
                f"Gym's command cannot be started: {error}",
                component="gym",
                address=str(self._interpreter.gym),
                remedy="check the interpreter and the free memory and processes of this machine",
            ) from error

    def await_head(self, deadline: float, stopping: Callable[[], bool]) -> None:
        """Wait until the head server lists the servers that Gym launches.

        Raises:
            GymStartError: Gym ended or ``deadline`` (of ``time.monotonic``) passed.
            PortTaken: another program has one of the ports.
        """
        url = f"{self.head_url}/server_instances"
        unseen = ""
        for _ in self._waiting(deadline, stopping):
            try:
                self.servers = parse_servers(get_all([url], timeout_s=_PROBE_S)[url], self.run_id)
            except OSError as error:
                unseen = _unseen(error)
            except NotOurs as error:
                raise PortTaken(str(error)) from error
            except BadList as error:
                raise self._failure(str(error), component="head server") from error
            if self.servers:
                return
        raise self._failure(f"the head server listed no servers{unseen}", component="head server")

    def await_servers(self, deadline: float, stopping: Callable[[], bool]) -> None:
        """Wait until every server answers.

        Raises:
            GymStartError: as for :meth:`await_head`; names the servers that were not ready.
            PortTaken: another program has one of the ports.
        """
        waiting = {server.name: server for server in self.servers}
        reasons: dict[str, str] = {}
        unseen = ""
        for _ in self._waiting(deadline, stopping, lambda: [_reason(name, reasons) for name in waiting]):
            try:
                probes = get_all([f"{server.url}/" for server in waiting.values()], timeout_s=_PROBE_S)
                gone = [server.name for server in self.servers if not server.runs]
            except OSError as error:
                unseen = _unseen(error)
                continue
            for name, server in list(waiting.items()):
                probe = probes[f"{server.url}/"]
                if probe.status == 200:
                    del waiting[name]
                else:
                    reasons[name] = probe.complaint
            if gone:
                if port_was_taken(self.log):
                    raise PortTaken(f"{', '.join(gone)} could not listen")
                raise self._failure(f"{', '.join(gone)} ended while starting", component=", ".join(gone))
            if not waiting:
                return
        named = ", ".join(_reason(name, reasons) for name in waiting)
        raise self._failure(f"not ready: {named}{unseen}", component=", ".join(waiting))

    def _waiting(
        self, deadline: float, stopping: Callable[[], bool], unready: Callable[[], list[str]] = list
    ) -> Any:
        """Yield until the deadline, with growing pauses; raise if Gym ended."""
        pause = _FIRST_PAUSE_S
        while time.monotonic() < deadline:
            if stopping():
                raise self._failure("it was shut down while it started", component="gym")
            assert self.command is not None
            problem = self.command.problem()
            # Such a line of a server that goes on is its own affair, but not one about the head's port.
            if port_was_taken(self.log, None if problem else self._head_port):
                raise PortTaken("a server could not listen")
            if problem:
                names = unready()
                missing = f"; not ready: {', '.join(names)}" if names else ""
                raise self._failure(f"{problem} before all servers were ready{missing}", component="gym")
            yield
            time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
            pause = min(pause * 1.3, _LONGEST_PAUSE_S)

    def _failure(self, problem: str, *, component: str) -> GymStartError:
        said = self.excerpt()
        return GymStartError(
            problem + (f"; its log says:\n{said}\n" if said else "; its log is empty"),
            component=component,
            address=self.head_url,
            remedy=f"the whole log is {self.log}",
        )

    def excerpt(self) -> str:
        """Lines of the log that explain a failure, without secrets."""
        return excerpt(self.log, self._secrets)

    def end(self, seconds: float) -> list[Process]:
        """End everything and delete what only Gym needed; returns what survived."""
        left = [] if self.command is None else self.command.end(seconds)
        for path in self._private_paths():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    path.unlink()
        return left

    def _private_paths(self) -> list[Path]:
        return [self._settings_file, *([self._ray_folder] if self._ray_folder else [])]


def _unseen(error: OSError) -> str:
    return f" (at times nothing could be seen: {error.strerror or error})"


def _reason(name: str, reasons: Mapping[str, str]) -> str:
    return f"{name} ({reasons[name]})" if name in reasons else name
