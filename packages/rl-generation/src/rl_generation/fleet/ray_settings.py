"""What an engine's actor asks of Ray, and how long its calls may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class RaySettings:
    """Of one actor; times in seconds.

    Attributes:
        num_cpus: that it asks for.
        num_gpus: that it asks for.
        resources: others that it asks for.
        max_concurrency: calls that it works on at once; more wait.
        env_vars: of its process.
        environment: name of the actor whose row in the table of environments it uses; empty is its own.
        scheduling_strategy: passed on to Ray; with one, Ray alone decides whether there is room.
        nodes_may_join: whether room that no node has may still come, as in a cluster that scales by itself.
            Otherwise such an actor is refused at once.
        schedule_timeout_s: until its process runs.
        start_timeout_s: to load the weights.
        generate_timeout_s: for one call of generate.
        refit_timeout_s: for one step of a refit, and for pause, resume, sleep and wake.
        control_timeout_s: for everything else.
        kill_timeout_s: until a killed process is gone.

    Raises:
        ValueError: a value outside its range, naming it.
    """

    num_cpus: float = 1.0
    num_gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    max_concurrency: int = 1000
    env_vars: Mapping[str, str] = field(default_factory=dict)
    environment: str = ""
    scheduling_strategy: Any = None
    nodes_may_join: bool = False
    schedule_timeout_s: float = 120.0
    start_timeout_s: float = 600.0
    generate_timeout_s: float = 1800.0
    refit_timeout_s: float = 120.0
    control_timeout_s: float = 60.0
    kill_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name.endswith("_s") and not 0 < value < float("inf"):
                raise ValueError(f"{item.name} must be a finite number of seconds > 0, got {value}")
        for name, amount in self.wanted.items():
            if amount < 0:
                raise ValueError(f"{name} must be >= 0, got {amount:g}")
        if self.max_concurrency < 2:
            raise ValueError(
                f"max_concurrency must be at least 2, got {self.max_concurrency}: a probe has to get through"
            )

    @property
    def wanted(self) -> dict[str, float]:
        """All resources by Ray's names, those of which it asks nothing left out."""
        everything = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: amount for name, amount in everything.items() if amount}
