"""How weights travel: sizes, places and deadlines of the transports."""

from __future__ import annotations

from dataclasses import dataclass

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclass(frozen=True, slots=True)
class TransportSettings:
    """Shared by both sides of a refit; what a transport does not use is ignored.

    Attributes:
        bucket_bytes: size of a bucket; a tensor that is larger travels alone.
        kept_bytes: shared memory of up to this size stays for the next refit, in the policy and mapped in
            each engine; more is given back after each.
        receivers: processes that join a collective beside the policy.
        host: address at which the policy accepts the members of a collective. Whoever reaches it can take
            part: neither the store at which members meet nor the broadcast itself, NCCL's or gloo's, knows
            passwords or encryption. With loopback that is every process on this machine, of other users too.
        trusted_network: only machines and users that may read and replace the policy's weights reach
            ``host``; has to be said where that is not loopback.
        timeout_s: the longest that one step waits for the other side.

    Raises:
        ValueError: a value outside its range, naming it.
    """

    bucket_bytes: int = 16 << 20
    kept_bytes: int = 256 << 20
    receivers: int = 1
    host: str = "127.0.0.1"
    trusted_network: bool = False
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, got {self.bucket_bytes}")
        if self.kept_bytes < 0:
            raise ValueError(f"kept_bytes must be at least 0, got {self.kept_bytes}")
        if self.receivers < 1:
            raise ValueError(f"receivers must be at least 1, got {self.receivers}")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0, got {self.timeout_s}")
        if self.host not in LOOPBACK and not self.trusted_network:
            raise ValueError(
                f"a collective at {self.host} is open to whoever reaches that address: anyone there could "
                "read the policy's weights or send others to its engines, for a collective has no passwords; "
                "set trusted_network=True if only your own machines reach it, or choose the transport "
                "object_store"
            )
