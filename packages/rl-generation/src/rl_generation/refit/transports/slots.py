"""Which buffers of a transport are in use: some of equal size, and one for a tensor that is larger."""

from __future__ import annotations

from collections import deque

LARGE = -1
"""Number of the buffer for a tensor that travels alone."""


class Slots:
    """Buffers that are taken in any size and given back in the order in which they were taken.

    Args:
        count: of the equal ones.
        nbytes: of each of them.
    """

    def __init__(self, count: int, nbytes: int) -> None:
        self._nbytes = nbytes
        self._free: deque[int] = deque(range(count))
        self._taken: deque[int] = deque()

    def room(self, nbytes: int) -> bool:
        """Whether a buffer that holds so many bytes is free."""
        return LARGE not in self._taken if nbytes > self._nbytes else bool(self._free)

    def take(self, nbytes: int) -> int:
        """The number of a buffer that holds so many bytes; there must be :meth:`room`."""
        number = LARGE if nbytes > self._nbytes else self._free.popleft()
        self._taken.append(number)
        return number

    def free(self) -> None:
        """Give back the one that was taken longest ago; nothing if none is taken."""
        if self._taken:
            number = self._taken.popleft()
            if number != LARGE:
                # Used again at once, while a processor still has it in its cache.
                self._free.appendleft(number)
