"""What a refit is made of: buckets of tensors in HF layout, who gives them and who takes them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ..protocol import RefitSpec

TransportName = Literal["shared_memory", "cuda_ipc", "collective", "object_store"]


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where one tensor lies within a bucket.

    Attributes:
        name: in HF layout.
        shape: of the tensor.
        dtype: torch's name without the prefix, such as ``float32``.
        offset: of its first byte; a multiple of 64.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """One published part of a refit: small enough to send to every replica, because the bytes are elsewhere.

    Attributes:
        transport: how the bytes are reached.
        location: where they are, in the transport's terms (a path, a handle, an object reference).
        nbytes: size of the whole buffer.
        tensors: what lies in it.
        window: of the buckets handed out so far, all but the last ``window - 1`` have to be loaded before the
            next one is asked for. With 1 that is this one too.
    """

    transport: TransportName
    location: Any
    nbytes: int
    tensors: tuple[TensorPlace, ...]
    window: int = 1


@dataclass(frozen=True, slots=True)
class RefitAck:
    """What a shard says when all of a refit has arrived.

    Attributes:
        replica: who acknowledges.
        version: of the weights that it holds now.
        digest: :func:`manifest_digest` of what it loaded.
    """

    replica: str
    version: int
    digest: str


class WeightSource(Protocol):
    """Where the policy's weights come from; its calls come in the order begin, next …, end."""

    def begin(self, transport: TransportName) -> RefitSpec:
        """Announce everything that this refit will carry."""
        ...

    def next_bucket(self) -> Bucket | None:
        """Publish the next part; ``None`` after the last.

        Of those before, the last ``window - 1`` may still be being loaded, by the window of the last one.
        """
        ...

    def end(self) -> None:
        """Let go of what was published; idempotent, also after a failure in between."""
        ...


class RefitTarget(Protocol):
    """The engine's side. Between ``begin_refit`` and ``finish_refit`` it samples nothing."""

    async def begin_refit(self, spec: RefitSpec, version: int) -> None:
        """Check names, shapes and dtypes against the model before a weight moves; stop sampling.

        Raises:
            RefitError: the announcement does not fit, or requests that have to end first did not in time; the
                engine goes on with its old weights. Silence, or another failure, may end it.
        """
        ...

    async def load_bucket(self, bucket: Bucket) -> None:
        """Take the tensors of one bucket; returning means that they are loaded and the bytes may change.

        Calls may overlap, in the order of the buckets.
        """
        ...

    async def finish_refit(self) -> RefitAck:
        """Check that all announced tensors came, drop every cache of the old weights, sample again.

        Raises:
            RefitError: something is missing; the engine is stale until another refit completes.
        """
        ...

    async def abort_refit(self) -> None:
        """End a refit that will not complete: the engine is stale if any weight moved, else as before."""
        ...


def manifest_digest(spec: RefitSpec) -> str:
    """SHA-256 over sorted names, shapes and dtypes, so that both sides can compare what was moved."""
    lines = sorted(f"{t.name} {tuple(t.shape)} {t.dtype}" for t in spec.tensors)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
