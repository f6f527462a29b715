"""The policy's side of a refit: its stream of tensors, handed out bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from ..failures import GenerationError, RefitError
from ..protocol import RefitSpec, RefitTensor
from .buckets import BucketFiller, capacity_for
from .contract import Bucket, TransportName
from .manifest import Described, Tally, spec_of
from .packer import Packer
from .settings import TransportSettings
from .transports.base import Sender
from .transports.registry import make_sender

SpecFunction = Callable[[], Iterable[Described]]
StreamFunction = Callable[[], Iterable[tuple[str, torch.Tensor]]]


@dataclass(slots=True)
class _Running:
    """A refit between begin and end."""

    sender: Sender
    filler: BucketFiller
    tally: Tally
    packer: Packer | None = None
    ended: bool = False
    failure: BaseException | None = None


class TensorSource:
    """A :class:`~rl_generation.refit.contract.WeightSource` over a policy's own description and stream.

    While engines load one bucket, the next is packed in a thread, if the transport has room for two. So the
    weights must not change between ``begin`` and ``end``. Use one source for all refits: it may keep
    transports' memory, which goes with it.

    Args:
        spec: name, shape and dtype of all that ``stream`` yields; asked once, because a policy may have
            to gather its weights to answer.
        stream: names in HF layout and tensors, in any order; called once for each refit.
        settings: of the transports.
        name: stands in errors.
    """

    def __init__(
        self,
        spec: SpecFunction,
        stream: StreamFunction,
        settings: TransportSettings | None = None,
        name: str = "policy",
    ) -> None:
        self._spec = spec
        self._stream = stream
        self._settings = settings or TransportSettings()
        self._name = name
        self._announcement: RefitSpec | None = None
        self._running: _Running | None = None
        self._senders: dict[TransportName, Sender] = {}

    def begin(self, transport: TransportName) -> RefitSpec:
        """Announce everything, and start to pack.

        Raises:
            RefitError: the last refit was not ended, the announcement is no good, or there is no room.
            UnavailableBackendError: what the transport needs is missing here.
        """
        if self._running is not None:
            raise RefitError(f"{self._name}: begin was called during a refit; call end first")
        if self._announcement is None:
            self._announcement = spec_of(self._spec())
        spec = self._announcement
        tally = Tally(self._name, spec)
        sender = self._senders.get(transport) or make_sender(transport, self._settings)
        self._senders[transport] = sender
        running = _Running(sender, BucketFiller(self._checked(tally)), tally)
        try:
            sender.open(capacity_for(spec, self._settings.bucket_bytes))
        except BaseException:
            sender.close()
            raise
        if sender.slots > 1:
            running.packer = Packer(
                sender, running.filler, lambda work: self._guarded(running, work), self._name
            )
        self._running = running
        return spec

    def next_bucket(self) -> Bucket | None:
        """Hand out the next part; see :class:`~rl_generation.refit.contract.WeightSource`.

        Raises:
            RefitError: called outside a refit, the stream failed or did not yield what was announced, or the
                other side of a collective is silent.
        """
        running = self._running
        if running is None:
            raise RefitError(f"{self._name}: next_bucket was called outside a refit; call begin first")
        if running.failure is not None:
            raise RefitError(
                f"{self._name}: this refit has failed; call end and begin again"
            ) from running.failure
        try:
            return None if running.ended else self._next_bucket(running)
        except BaseException as error:
            running.failure = error
            raise

    def end(self) -> None:
        """Let go of what was published; idempotent, also after a failure in between.

        Raises:
            RefitError: the stream of weights hangs.
        """
        running, self._running = self._running, None
        if running is None:
            return
        try:
            if running.packer is not None:
                running.packer.stop(self._settings.timeout_s)
        except BaseException as error:
            # Whatever it writes yet, it writes to memory that nobody uses.
            self.close()
            if isinstance(error, TimeoutError):
                raise RefitError(f"{self._name}: the stream of weights hangs; restart the policy") from error
            raise
        running.sender.rest()

    def close(self) -> None:
        """Give back what is kept between refits; idempotent, outside a refit."""
        while self._senders:
            _, sender = self._senders.popitem()
            sender.close()

    def _next_bucket(self, running: _Running) -> Bucket | None:
        if running.packer is not None:
            bucket = running.packer.take(self._settings.timeout_s)
        else:
            # Asked for even after the last tensor: a collective says here what became of the last bucket.
            buffer = running.sender.buffer(0)
            bucket = self._guarded(running, lambda: self._pack(running, buffer))
        if bucket is None:
            running.ended = True
            running.tally.require_all()
            return None
        running.sender.send(bucket)
        return bucket

    def _pack(self, running: _Running, buffer: torch.Tensor) -> Bucket | None:
        filled = running.filler.fill(buffer)
        return None if filled is None else running.sender.publish(filled)

    def _guarded(self, running: _Running, work: Callable[[], Bucket | None]) -> Bucket | None:
        try:
            return work()
        except GenerationError:
            raise
        except Exception as error:
            missing = running.tally.missing
            raise RefitError(
                f"{self._name}: the stream of weights failed with {len(missing)} tensors to come"
                f"{f', the next being {missing[0]}' if missing else ''}: {type(error).__name__}: {error}"
            ) from error

    def _checked(self, tally: Tally) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._stream():
            described = [RefitTensor(name, tuple(tensor.shape), tensor.dtype)]
            tally.check(described)
            tally.cross_off(described)
            yield name, tensor
