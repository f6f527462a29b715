"""Which servers of a running deployment are dead or hang."""

from __future__ import annotations

from collections.abc import Mapping

from ..failures import GymServerDied
from .deployment import Deployment
from .log_excerpt import ended_servers
from .probing import get_all

WHOLE = "gym"


def dead(deployment: Deployment) -> dict[str, str]:
    """What no longer runs, each with the reason; ``gym`` is Gym's own command. No request is made."""
    problem = "it was never launched" if deployment.command is None else deployment.command.problem()
    problems = {WHOLE: problem} if problem else {}
    problems.update({server.name: "its process ended" for server in deployment.servers if not server.runs})
    return problems


def unwell(deployment: Deployment, timeout_s: float) -> dict[str, str]:
    """What no longer runs or does not answer ``GET /`` with 200 in time, all asked at once."""
    problems = dead(deployment)
    if WHOLE in problems:
        return problems
    addresses = {"head server": f"{deployment.head_url}/"}
    addresses.update(
        {server.name: f"{server.url}/" for server in deployment.servers if server.name not in problems}
    )
    probes = get_all(addresses.values(), timeout_s=timeout_s)
    for name, url in addresses.items():
        if probes[url].status != 200:
            problems[name] = probes[url].problem or f"answers with status {probes[url].status}"
    return problems


def died(deployment: Deployment, problems: Mapping[str, str], *, elapsed_s: float = 0.0) -> GymServerDied:
    """The error for these problems, with the lines of Gym's log that may tell why."""
    named = list(problems)
    if WHOLE in problems:
        # Gym ends itself, and with it every server, when it sees that one of them is gone.
        culprits = ended_servers(deployment.log)
        named = [server.name for server in deployment.servers if server.name in culprits] or [WHOLE]
    urls = [server.url for server in deployment.servers if server.name in named]
    said = deployment.excerpt()
    return GymServerDied(
        "; ".join(f"{name}: {reason}" for name, reason in problems.items())
        + (f"; its log says:\n{said}\n" if said else ""),
        component=", ".join(named),
        address=", ".join(urls) or deployment.head_url,
        elapsed_s=elapsed_s,
        remedy=f"Gym must be started anew; the whole log is {deployment.log}",
    )
