"""Whether a Ray cluster has room for an actor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..failures import UnschedulableError


def require_room(name: str, actor: str, wanted: Mapping[str, float]) -> None:
    """Raise if no node could ever hold the actor, even when nothing else runs. Blocks for a moment.

    Args:
        name: of the replica.
        actor: class of the actor.
        wanted: resources by Ray's names.

    Raises:
        UnschedulableError: names the actor, what it asks for and what every node has.
    """
    nodes = _nodes()
    if not any(
        all(node.get(key, 0.0) >= amount for key, amount in wanted.items()) for node in nodes.values()
    ):
        raise UnschedulableError(
            f"replica {name}: no node can hold an actor {actor}, which asks for {_text(wanted)}; "
            f"{_described(nodes)}; ask for less, or add such a node (with nodes_may_join it is waited for)"
        )


def no_room_in_time(
    name: str, actor: str, wanted: Mapping[str, float], timeout_s: float
) -> UnschedulableError:
    """The failure of an actor that did not run in time. Blocks for a moment."""
    import ray

    try:
        free = {key: amount for key, amount in ray.available_resources().items() if _countable(key)}
        there = f"{_described(_nodes())}; free in the cluster: {_text(free)}"
    except Exception as error:
        there = f"the cluster does not answer: {error}"
    return UnschedulableError(
        f"replica {name}: an actor {actor}, which asks for {_text(wanted)}, did not run within "
        f"{timeout_s:g} s; {there}; end what holds these resources, or raise schedule_timeout_s if its "
        "environment takes long to start"
    )


def _nodes() -> dict[str, dict[str, float]]:
    import ray

    found: list[dict[str, Any]] = ray.nodes()
    alive = [node for node in found if node["Alive"]]
    return {
        f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})": {
            key: float(amount) for key, amount in node["Resources"].items()
        }
        for node in alive
    }


def _described(nodes: Mapping[str, Mapping[str, float]]) -> str:
    texts = [
        f"node {node} has {_text({key: amount for key, amount in has.items() if _countable(key)})}"
        for node, has in nodes.items()
    ]
    return "; ".join(texts) or "there is no node"


def _countable(key: str) -> bool:
    return not key.startswith("node:") and key not in ("memory", "object_store_memory")


def _text(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {key}" for key, amount in sorted(resources.items())) or "nothing"
