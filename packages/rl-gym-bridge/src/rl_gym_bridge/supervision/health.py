"""Which servers of a running deployment are dead or hang."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping

from ..failures import GymServerDied, GymStateUnknown
from .deployment import Deployment
from .log_excerpt import ended_servers
from .probing import get_all

WHOLE = "gym"


def dead(deployment: Deployment) -> dict[str, str]:
    """What no longer runs, each with the reason; ``gym`` is Gym's own command. No request is made.

    Raises:
        OSError: nothing is known to be dead, and of one process nothing can be told.
    """
    problem = "it was never launched" if deployment.command is None else deployment.command.problem()
    problems = {WHOLE: problem} if problem else {}
    unknown: OSError | None = None
    for server in deployment.servers:
        try:
            if not server.runs:
                problems[server.name] = "its process ended"
        except OSError as error:
            unknown = error
    if unknown is not None and not problems:
        raise unknown
    return problems


@contextlib.contextmanager
def unknown_if_unseen(component: str, address: str = "") -> Generator[None, None, None]:
    """Make an error of this machine inside the block one that says so: what was asked about may be well.

    Raises:
        GymStateUnknown: instead of an :class:`OSError`.
    """
    try:
        yield
    except OSError as error:
        raise GymStateUnknown(
            f"cannot tell whether it runs: {error.strerror or error}",
            component=component,
            address=address,
            remedy="raise the limit of open files (`ulimit -n`), or look for what leaves them open",
        ) from error


def unwell(deployment: Deployment, timeout_s: float) -> dict[str, str]:
    """What no longer runs or does not answer ``GET /`` with 200 in time, all asked at once.

    Raises:
        OSError: that cannot be told.
    """
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
            problems[name] = probes[url].complaint
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
