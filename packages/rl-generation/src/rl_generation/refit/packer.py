"""Buckets that are packed in a thread before they are asked for, as far as the transport has room."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from ..failures import RefitError
from .buckets import BucketFiller
from .contract import Bucket
from .transports.base import Sender


class Packer:
    """One refit's thread: it packs until the stream ends, fails, or :meth:`stop` is called.

    Args:
        sender: opened, with room for two or more buckets.
        filler: of the stream.
        guard: runs each look at the stream, and says what a failure means.
        name: of the policy.
    """

    def __init__(
        self,
        sender: Sender,
        filler: BucketFiller,
        guard: Callable[[Callable[[], Bucket | None]], Bucket | None],
        name: str,
    ) -> None:
        self._sender = sender
        self._filler = filler
        self._guard = guard
        self._name = name
        self._changed = threading.Condition()
        self._made: deque[Bucket] = deque()
        self._given: deque[int] = deque()
        self._ended = self._stopped = False
        self._failure: BaseException | None = None
        # The current device belongs to a thread, and the stream may ask for it.
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread = threading.Thread(target=self._run, name=f"{name}-packing", daemon=True)
        self._thread.start()

    def take(self, timeout_s: float) -> Bucket | None:
        """The next bucket; ``None`` after the last. What is out of its window is packed over from now on.

        Raises:
            RefitError: it was not packed within the deadline.
            BaseException: what the stream raised.
        """
        with self._changed:
            self._free_all_but(self._given[-1] - 1 if self._given else 0)
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._made or self._ended or self._failure, timeout_s):
                raise RefitError(f"refit: {self._name}: packing a bucket did not end within {timeout_s:g} s")
            if self._made:
                bucket = self._made.popleft()
                self._given.append(bucket.window)
                return bucket
            if self._failure is not None:
                raise self._failure
            return None

    def stop(self, timeout_s: float) -> None:
        """End the thread, which reads the weights; what it does is nobody's concern any more.

        Raises:
            TimeoutError: the stream did not return within the deadline.
        """
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"{self._name}: the packing thread did not end within {timeout_s:g} s")

    def _free_all_but(self, held: int) -> None:
        while len(self._given) > held:
            self._given.popleft()
            self._sender.free()

    def _run(self) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            while (bucket := self._guard(self._pack)) is not None:
                with self._changed:
                    self._made.append(bucket)
                    self._changed.notify_all()
        except BaseException as error:
            self._failure = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _pack(self) -> Bucket | None:
        size = self._filler.next_size()
        if size is None:
            return None
        with self._changed:
            # Engines take as long as their own deadlines let them; whoever gives up calls stop().
            self._changed.wait_for(lambda: self._stopped or self._sender.room(size))
            if self._stopped:
                return None
            buffer = self._sender.buffer(size)
        filled = self._filler.fill(buffer)
        assert filled is not None
        return self._sender.publish(filled)
