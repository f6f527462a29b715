"""How weights travel: sizes, places and deadlines of the transports."""

from __future__ import annotations

from dataclasses import dataclass

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclass(frozen=True, slots=True)
class TransportSettings:
    """Shared by both sides of a refit; what a transport does not use is ignored.

    Attributes:
        bucket_bytes: size of a bucket; a tensor that is larger travels alone.
        folder: of shared-memory files; empty is the system's shared memory, or where a machine has none the
            folder of temporary files.
        receivers: processes that join a collective beside the policy.
        host: address at which the policy accepts the members of a collective.
        token: what members of a collective must know; needed when ``host`` is not loopback.
        timeout_s: the longest that one step waits for the other side.

    Raises:
        ValueError: a value outside its range, naming it.
    """

    bucket_bytes: int = 16 << 20
    folder: str = ""
    receivers: int = 1
    host: str = "127.0.0.1"
    token: str = ""
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, got {self.bucket_bytes}")
        if self.receivers < 1:
            raise ValueError(f"receivers must be at least 1, got {self.receivers}")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0, got {self.timeout_s}")
        if self.host not in LOOPBACK and not self.token:
            raise ValueError(f"a collective at {self.host} needs a token, because it is not loopback")
