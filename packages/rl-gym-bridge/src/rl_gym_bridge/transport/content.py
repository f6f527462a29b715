"""What an answer's content may look like, whichever library reads it."""

from __future__ import annotations

from collections.abc import AsyncIterable

from ..failures import GymAnswerError


def check_encoding(encoding: str, url: str) -> None:
    """Refuse content that is compressed: none was asked for, and a small one can become a huge one.

    Raises:
        GymAnswerError: ``encoding`` is something.
    """
    if encoding and encoding.lower() != "identity":
        raise GymAnswerError(f"the answer is encoded as {encoding!r}, which was not asked for", address=url)


def check_length(announced: str | None, most: int, url: str) -> None:
    """Refuse an announced length above ``most`` bytes before any of it is read.

    Raises:
        GymAnswerError: it is above.
    """
    if announced is not None and announced.isdecimal() and int(announced[:20]) > most:
        raise too_long(most, url)


async def read_at_most(chunks: AsyncIterable[bytes], most: int, url: str) -> bytes:
    """All of a content whose length nobody announced, or announced truly.

    Raises:
        GymAnswerError: it is above ``most`` bytes; the rest is not read.
    """
    read: list[bytes] = []
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        if size > most:
            raise too_long(most, url)
        read.append(chunk)
    return b"".join(read)


def too_long(most: int, url: str) -> GymAnswerError:
    """The error of an answer above ``most`` bytes."""
    return GymAnswerError(f"the answer is longer than {most} bytes", address=url)
