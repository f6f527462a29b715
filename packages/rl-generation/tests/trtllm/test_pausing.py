"""Pauses that overlap, and an engine that cannot go on: nothing stays stopped that nobody holds."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from rl_generation.failures import DeadlineError, GenerationError
from rl_generation.trtllm.admission import Flight
from rl_generation.trtllm.pausing import Pauses


class Llm:
    """Stops and goes on after a while; ``trouble`` says how it cannot."""

    def __init__(self) -> None:
        self.stopped = False
        self.trouble: dict[str, Exception | None] = {}

    async def pause_generation(self) -> None:
        await self._do("pause", 0.02)
        self.stopped = True

    async def resume_generation(self) -> None:
        await self._do("resume", 0.01)
        self.stopped = False

    async def _do(self, what: str, takes_s: float) -> None:
        if what in self.trouble:
            error = self.trouble[what]
            if error is not None:
                raise error
            await asyncio.sleep(3600)
        await asyncio.sleep(takes_s)


def made(timeout_s: float = 5.0) -> tuple[Pauses, Llm]:
    pauses, llm = Pauses("trtllm-0", Flight("trtllm-0"), timeout_s), Llm()
    pauses.attach(llm, stops_itself=True)
    return pauses, llm


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


@pytest.mark.parametrize("release_first", [True, False])
def test_the_end_of_one_pause_does_not_hide_the_beginning_of_another(release_first: bool) -> None:
    async def go() -> None:
        pauses, llm = made()
        await pauses.hold("a pause")
        both = [pauses.release("a pause"), pauses.hold("a refit")]
        await asyncio.gather(*(both if release_first else reversed(both)))
        assert (pauses.reasons, llm.stopped) == (("a refit",), True)
        await pauses.release("a refit")
        assert (pauses.reasons, llm.stopped) == ((), False)
        await pauses.pass_through()

    run(go())


def test_pauses_and_refits_in_any_order_end_with_an_engine_that_goes_on() -> None:
    async def go() -> None:
        pauses, llm = made()

        async def times(why: str, after_s: float) -> None:
            for _ in range(4):
                await pauses.hold(why)
                assert llm.stopped
                await asyncio.sleep(after_s)
                assert llm.stopped
                await pauses.release(why)

        await asyncio.gather(times("a pause", 0.0), times("a refit", 0.007), times("a sleep", 0.013))
        assert (pauses.reasons, llm.stopped) == ((), False)

    run(go())


@pytest.mark.parametrize(("error", "kind"), [(OSError("no"), GenerationError), (None, DeadlineError)])
def test_an_engine_that_cannot_go_on_keeps_nobody_waiting_and_is_asked_again(
    error: Exception | None, kind: type[Exception]
) -> None:
    async def go() -> None:
        pauses, llm = made(0.1)
        await pauses.hold("a pause")
        llm.trouble["resume"] = error
        with pytest.raises(kind, match=r"trtllm-0: .*go on"):
            await pauses.release("a pause")
        await pauses.pass_through()
        assert llm.stopped
        llm.trouble.clear()
        await pauses.release("a pause")
        assert not llm.stopped

    run(go())


def test_a_stop_that_fails_says_why_even_where_the_engine_cannot_go_on_either() -> None:
    async def go() -> None:
        pauses, llm = made(0.1)
        llm.trouble |= {"pause": OSError("the first"), "resume": OSError("the second")}
        with pytest.raises(GenerationError, match="cannot stop requests: OSError: the first"):
            await pauses.hold("a pause")
        assert pauses.reasons == ()
        await pauses.pass_through()

    run(go())
