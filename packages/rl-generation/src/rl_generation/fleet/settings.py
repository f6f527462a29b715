"""How patient a fleet is, and how often it tries again."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from ..refit.contract import TransportName
from ..refit.settings import TransportSettings


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often and how soon a dead replica is started again.

    The n-th restart in a row waits ``min(first_delay_s * 2**(n-1), longest_delay_s)`` seconds, shortened by a
    random share of at most ``jitter``, so that replicas that died together do not start together.

    Attributes:
        max_restarts: in a row; the death after the last one retires the replica.
        first_delay_s: before the first restart.
        longest_delay_s: no delay is longer.
        jitter: in [0, 1].
        forgive_after_s: a replica that served this long has all its restarts again.

    Raises:
        ValueError: a value outside its range, naming it.
    """

    max_restarts: int = 5
    first_delay_s: float = 1.0
    longest_delay_s: float = 30.0
    jitter: float = 0.25
    forgive_after_s: float = 600.0

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts must be >= 0, got {self.max_restarts}")
        if not 0 <= self.first_delay_s <= self.longest_delay_s:
            raise ValueError(
                f"first_delay_s must lie in [0, longest_delay_s = {self.longest_delay_s:g}], "
                f"got {self.first_delay_s:g}"
            )
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter must lie in [0, 1], got {self.jitter:g}")
        if self.forgive_after_s < 0:
            raise ValueError(f"forgive_after_s must be >= 0, got {self.forgive_after_s:g}")

    def delay_s(self, restarts: int, draw: float) -> float:
        """Seconds to wait after ``restarts`` restarts in a row; ``draw`` in [0, 1) decides the jitter."""
        doubled = self.first_delay_s * 2.0 ** min(restarts, 60)
        return min(doubled, self.longest_delay_s) * (1 - self.jitter * draw)


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Deadlines and budgets of a fleet; all times in seconds.

    Attributes:
        request_timeout_s: from asking for completions to having all of them, whatever happens in between.
        infra_budget: how often a request may be sent again after a failure that was not its own, and how
            many incidents in a row a replica may have although it answers probes; one more and it is dead.
            Calls that fail before the next probe, or were sent before the last, are one incident.
        replica_wait_s: the longest that a request, or a refit, waits for a replica that can take it.
        start_timeout_s: for one start of one replica.
        probe_interval_s: between rounds of probes.
        probe_timeout_s: for all probes of a round, which run at the same time.
        probe_failures: failed probes in a row that make a replica dead; the first makes it suspect.
        refit_call_timeout_s: for each of a replica's steps in a refit; and for its pause, resume, sleep and
            wake, where an engine may have to wait for requests as long as for a refit. Longer than the
            engine's own deadline for that, so that its answer comes in time.
        refit_timeout_s: for a whole refit.
        source_timeout_s: for each call to the source of the weights.
        control_timeout_s: for health and kill of one replica.
        transport: how the bytes of a refit travel; ``collective`` is for a fleet of one replica only, since
            its members would all have to be alive.
        publishing: of :meth:`~rl_generation.fleet.fleet.Fleet.update_weights`, which publishes a stream of
            this process.
        restarts: of dead replicas.

    Raises:
        ValueError: a value outside its range, naming it.
    """

    request_timeout_s: float = 1800.0
    infra_budget: int = 5
    replica_wait_s: float = 120.0
    start_timeout_s: float = 600.0
    probe_interval_s: float = 5.0
    probe_timeout_s: float = 30.0
    probe_failures: int = 2
    refit_call_timeout_s: float = 120.0
    refit_timeout_s: float = 1800.0
    source_timeout_s: float = 300.0
    control_timeout_s: float = 60.0
    transport: TransportName = "shared_memory"
    publishing: TransportSettings = field(default_factory=TransportSettings)
    restarts: RestartPolicy = field(default_factory=RestartPolicy)

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name.endswith("_s") and not 0 < value < float("inf"):
                raise ValueError(f"{item.name} must be a finite number of seconds > 0, got {value}")
        if self.infra_budget < 0:
            raise ValueError(f"infra_budget must be >= 0, got {self.infra_budget}")
        if self.probe_failures < 1:
            raise ValueError(f"probe_failures must be >= 1, got {self.probe_failures}")
