"""A Gym that somebody else started, known by the address of its head server alone."""

from __future__ import annotations

import json
import time
from typing import Any
from urllib.parse import urlsplit

from ..failures import (
    GymAnswerError,
    GymConfigError,
    GymError,
    GymHttpError,
    GymServerDied,
    GymTimeout,
    GymUnavailable,
)
from ..settings.addresses import checked_base_urls
from .health import unknown_if_unseen
from .probing import Probe, get_all
from .servers import AGENT_TYPE
from .settings import is_loopback

_HEAD = "head server"
_PAUSE_S = 0.2
_PROBE_S = 5.0
_SHOWN = 500


class AttachedGym:
    """The same questions that :class:`~rl_gym_bridge.process.GymProcess` answers, without owning a process.

    Args:
        head_url: ``http://host:port`` of the head server.

    Raises:
        GymConfigError: it is no address of plain HTTP.
    """

    def __init__(self, head_url: str) -> None:
        (self.head_url,) = checked_base_urls([head_url], "head_url")
        if urlsplit(self.head_url).scheme != "http":
            raise GymConfigError(
                "Gym's servers speak plain HTTP, and so does the bridge with them",
                component="head_url",
                address=self.head_url,
                remedy="write http://host:port",
            )
        self.servers: dict[str, str] = {}
        self.agents: dict[str, str] = {}

    def start(self, timeout_s: float) -> None:
        """Read which servers there are, and wait until all of them answer.

        Raises:
            GymHttpError: the head server answers with an error.
            GymAnswerError: it answers something else than Gym's list of servers.
            GymUnavailable: it cannot be reached at all within ``timeout_s``.
            GymStateUnknown: this process has no file descriptor left to ask with.
            GymTimeout: it was reached, but there was no server, or one that did not answer, within
                ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        waited_for: GymError
        while True:
            waited_for = self._look(timeout_s)
            if self.servers:
                try:
                    self.health(max(0.1, min(_PROBE_S, deadline - time.monotonic())))
                    return
                except GymServerDied as error:
                    waited_for = error.with_details(elapsed_s=timeout_s)
            if time.monotonic() + _PAUSE_S >= deadline:
                self._forget()
                if isinstance(waited_for, GymUnavailable):
                    raise waited_for
                raise GymTimeout(
                    f"not ready within {timeout_s:g} s: {waited_for.problem}",
                    component=waited_for.component,
                    address=waited_for.address or self.head_url,
                    elapsed_s=timeout_s,
                ) from waited_for
            time.sleep(_PAUSE_S)

    def check(self) -> None:
        """Nothing can be said about processes of others without asking them."""

    def health(self, timeout_s: float = _PROBE_S) -> None:
        """Ask every server at the same time.

        Raises:
            GymServerDied: one does not answer; ``component`` names it, or all of them.
            GymStateUnknown: this process has no file descriptor left to ask with.
        """
        addresses = {_HEAD: self.head_url, **self.servers}
        with unknown_if_unseen(_HEAD, self.head_url):
            probes = get_all([f"{url}/" for url in addresses.values()], timeout_s=timeout_s)
        problems = {
            name: probes[f"{url}/"].complaint
            for name, url in addresses.items()
            # A head server need not have a page there.
            if probes[f"{url}/"].status != 200 and not (name == _HEAD and probes[f"{url}/"].status)
        }
        if problems:
            raise GymServerDied(
                "; ".join(f"{name}: {problem}" for name, problem in problems.items()),
                component=", ".join(problems),
                address=", ".join(addresses[name] for name in problems),
                remedy="whoever started this Gym has to look after it",
            )

    def _forget(self) -> None:
        self.servers.clear()
        self.agents.clear()

    def _look(self, timeout_s: float) -> GymError:
        """Read the list once; what to say if nothing better comes."""
        url = f"{self.head_url}/server_instances"
        with unknown_if_unseen(_HEAD, url):
            probe = get_all([url], timeout_s=min(_PROBE_S, timeout_s))[url]
        if not probe.status:
            return GymUnavailable(probe.problem, component=_HEAD, address=url, elapsed_s=timeout_s)
        if probe.status != 200:
            body = probe.body.decode("utf-8", "replace")[:_SHOWN]
            raise GymHttpError(
                f"answered {probe.status}: {body}",
                status=probe.status,
                body=body,
                component=_HEAD,
                address=url,
            )
        entries = _entries(probe, url)
        self.servers = {entry["process_name"]: entry["url"].rstrip("/") for entry in entries}
        self.agents = {
            entry["process_name"]: self.servers[entry["process_name"]]
            for entry in entries
            if entry.get("server_type") == AGENT_TYPE
        }
        self._check_hosts()
        return GymUnavailable("it lists no server yet", component=_HEAD, address=url, elapsed_s=timeout_s)

    def _check_hosts(self) -> None:
        """Rows go only to the machine that was named, whatever is listed there."""
        allowed = urlsplit(self.head_url).hostname or ""
        for name, url in self.servers.items():
            host = urlsplit(url).hostname or ""
            if host != allowed and not (is_loopback(host) and is_loopback(allowed)):
                raise GymAnswerError(
                    f"the head server lists it at {url}, which is not on {allowed}",
                    component=name,
                    remedy="attach to the address at which Gym's servers listen, too",
                )


def _entries(probe: Probe, url: str) -> list[dict[str, Any]]:
    try:
        entries = json.loads(probe.body)
    except ValueError as error:
        raise GymAnswerError(f"no JSON: {error}", component=_HEAD, address=url) from error
    usable = isinstance(entries, list) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("process_name"), str)
        and isinstance(entry.get("url"), str)
        and urlsplit(entry["url"]).scheme == "http"
        for entry in entries
    )
    if not usable:
        raise GymAnswerError(
            "not a list of servers with process_name and url",
            component=_HEAD,
            address=url,
            remedy="give the address of Gym's head server",
        )
    return entries
