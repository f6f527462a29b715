"""The servers of a Gym deployment as its head server lists them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from .probing import Probe
from .processes import Process, carries_run_id, is_same, process
from .settings import is_loopback

AGENT_TYPE = "responses_api_agents"


class NotOurs(RuntimeError):
    """The head server that answers belongs to another deployment: our port was taken."""


class BadList(RuntimeError):
    """What the head server lists cannot be used; says why."""


@dataclass(frozen=True, slots=True)
class GymServer:
    """One server of Gym.

    Attributes:
        name: what the configuration calls it.
        kind: ``resources_servers``, ``responses_api_agents``, ``responses_api_models``, …
        url: its address, without a slash at the end.
        process: the process that Gym watches for it.
    """

    name: str
    kind: str
    url: str
    process: Process

    @property
    def runs(self) -> bool:
        """Whether its process runs; costs microseconds.

        Raises:
            OSError: that cannot be told.
        """
        return is_same(self.process)


def parse_servers(probe: Probe, run_id: str) -> tuple[GymServer, ...]:
    """The servers in an answer to ``GET /server_instances``; none while Gym still launches them.

    Raises:
        NotOurs: the processes carry another run's id.
        BadList: an entry without an address or process, or with an address that other machines reach.
        OSError: whose the processes are cannot be told.
    """
    if probe.status != 200:
        return ()
    try:
        entries = json.loads(probe.body)
    except ValueError as error:
        raise BadList(f"the list of servers is no JSON: {error}") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise BadList("the list of servers is no list of objects")
    servers = tuple(_server(entry, run_id) for entry in entries)
    names = [server.name for server in servers]
    if len(set(names)) != len(names):
        raise BadList(f"two servers have one name: {', '.join(sorted(names))}")
    return servers


def _server(entry: dict[str, Any], run_id: str) -> GymServer:
    name = str(entry.get("process_name") or entry.get("config_path") or "")
    url, pid = str(entry.get("url") or "").rstrip("/"), entry.get("pid")
    host = urlsplit(url).hostname
    if not name or not host or not isinstance(pid, int):
        raise BadList(f"server {name or '(unnamed)'} has no address or no process: {url!r}, {pid!r}")
    if not is_loopback(host):
        raise BadList(
            f"server {name} listens on {host}, where other machines reach it: remove `host` from its settings"
        )
    found = process(pid)
    if found is not None and found.runs and not carries_run_id(pid, run_id):
        raise NotOurs(f"process {pid} of server {name} is not of this run")
    if found is None:
        # It died already; an entry that is the same as nothing says so.
        found = Process(pid, 0, 0, "X", -1)
    return GymServer(name=name, kind=str(entry.get("server_type") or ""), url=url, process=found)
