"""The Ray actor that owns a Gym. A plain class: it does not know Ray, and runs without it, too."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any

from .config import NemoGymConfig
from .requests import RolloutRequest, RolloutResult
from .session import GymSession

if TYPE_CHECKING:
    from .session import SessionHealth


class NemoGym:
    """One Gym: its processes, the client that talks to it, and what turns its answers into samples.

    Nothing is started when it is made, because Ray passes on what a method raises, and of a constructor only
    a text. Its methods are coroutines, so that Ray runs them beside each other on one event loop.

    Args:
        config: of Gym and the bridge.
        head_url: head server of a Gym that somebody else runs; ``None`` starts one.
    """

    def __init__(self, config: NemoGymConfig, *, head_url: str | None = None) -> None:
        self._session = GymSession(config, head_url=head_url)
        self._settings = {"use_fastokens": config.use_fastokens, "token_capture": config.token_capture}

    async def settings(self) -> dict[str, Any]:
        """``use_fastokens`` and ``token_capture``, as they arrived here.

        The actor only keeps them, for who asks: Gym has no setting for either, and the bridge reads none.
        """
        return self._settings

    async def start(self) -> dict[str, Any]:
        """Start Gym and wait until it is ready.

        Returns:
            Facts for the log: ``pid`` of this process, ``head_url``, and ``agents``, their names.

        Raises:
            GymError: it did not start; see :meth:`GymSession.start`.
        """
        await self._session.start_async()
        return {
            "pid": os.getpid(),
            "head_url": self._session.head_url,
            "agents": sorted(self._session.agents),
        }

    async def set_tokenizer(self, tokenizer: Any) -> None:
        """Show tokens as text in the answers that are kept; see :meth:`GymSession.set_tokenizer`."""
        self._session.set_tokenizer(tokenizer)

    async def health_check(self) -> SessionHealth:
        """Which servers of Gym live; see :meth:`GymSession.health_check`."""
        return await self._session.health_check()

    async def run_rollouts(self, requests: Sequence[RolloutRequest]) -> AsyncGenerator[RolloutResult, None]:
        """See :class:`~rl_gym_bridge.requests.RolloutRunner`; a streaming generator of Ray."""
        async with contextlib.aclosing(self._session.run_rollouts(requests)) as results:
            async for result in results:
                yield result

    async def shutdown(self, timeout_s: float | None = None) -> None:
        """End Gym within ``timeout_s`` seconds; idempotent, and before :meth:`start` nothing happens."""
        await self._session.shutdown_async(timeout_s)
