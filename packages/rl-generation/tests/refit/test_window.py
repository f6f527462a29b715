"""Which buckets are loaded at the same time, and that none is left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rl_generation.refit.contract import Bucket
from rl_generation.refit.window import LoadingWindow


class Engine:
    """Loads until its gate opens, and writes down what happens."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.gates = {name: asyncio.get_running_loop().create_future() for name in "abc"}

    async def load(self, name: str) -> None:
        self.events.append(f"+{name}")
        try:
            await self.gates[name]
        except BaseException as error:
            self.events.append(f"{'x' if isinstance(error, asyncio.CancelledError) else '!'}{name}")
            raise
        self.events.append(f"-{name}")

    def open_later(self, name: str) -> None:
        asyncio.get_running_loop().call_later(0.05, self.gates[name].set_result, None)


Scene = Callable[[Engine], Coroutine[Any, Any, None]]


def bucket(window: int) -> Bucket:
    return Bucket("shared_memory", None, 0, (), window=window)


def play(scene: Scene, error: type[BaseException] | None = None) -> list[str]:
    """Run a scene and return what happened; nothing may go on after it.

    Args:
        scene: to run.
        error: that it has to raise; written down as ``raised``.
    """

    async def run() -> list[str]:
        engine = Engine()
        expected = pytest.raises(error) if error else contextlib.nullcontext()
        with expected:
            await asyncio.wait_for(scene(engine), 10)
        if error:
            engine.events.append("raised")
        assert len(asyncio.all_tasks()) == 1
        return engine.events

    return asyncio.run(run())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("window", "events"),
    [
        (1, ["+a", "-a", "next", "+b", "-b", "next", "+c", "-c", "next"]),
        (2, ["+a", "next", "+b", "-a", "next", "+c", "-b", "next", "-c"]),
        (3, ["+a", "next", "+b", "next", "+c", "-a", "next", "-b", "-c"]),
    ],
)
def test_the_next_bucket_is_asked_for_as_the_window_allows(window: int, events: list[str]) -> None:
    async def scene(engine: Engine) -> None:
        async def open_gates() -> None:
            for name in "abc":
                while f"+{name}" not in engine.events:
                    await asyncio.sleep(0)
                # By now whoever may go on has done so.
                await asyncio.sleep(0.02)
                engine.gates[name].set_result(None)

        opening = asyncio.ensure_future(open_gates())
        async with LoadingWindow() as loading:
            for name in "abc":
                await loading.load(bucket(window), engine.load(name))
                engine.events.append("next")
        await opening

    assert play(scene) == events


def test_a_failure_is_raised_once_the_others_have_ended() -> None:
    async def scene(engine: Engine) -> None:
        async with LoadingWindow() as loading:
            await loading.load(bucket(4), engine.load("a"))
            await loading.load(bucket(4), engine.load("b"))
            engine.gates["a"].set_exception(ValueError("no room"))
            engine.open_later("b")
            engine.open_later("c")
            await settle()
            await loading.load(bucket(4), engine.load("c"))
            engine.events.append("not noticed")

    assert play(scene, ValueError) == ["+a", "+b", "!a", "+c", "-b", "-c", "raised"]


def test_a_failure_of_the_last_is_raised_by_the_end_of_the_scope() -> None:
    async def scene(engine: Engine) -> None:
        async with LoadingWindow() as loading:
            await loading.load(bucket(2), engine.load("a"))
            asyncio.get_running_loop().call_later(0.01, engine.gates["a"].set_exception, ValueError("late"))

    assert play(scene, ValueError) == ["+a", "!a", "raised"]


def test_a_source_that_fails_waits_for_what_is_being_loaded() -> None:
    async def scene(engine: Engine) -> None:
        async with LoadingWindow() as loading:
            await loading.load(bucket(2), engine.load("a"))
            engine.open_later("a")
            raise OSError("gone")

    assert play(scene, OSError) == ["+a", "-a", "raised"]


@pytest.mark.parametrize(("where", "left"), [("load", {"xa", "xb"}), ("scope", {"xa"}), ("end", {"xa"})])
def test_whoever_gives_up_leaves_no_load_behind(where: str, left: set[str]) -> None:
    async def scene(engine: Engine) -> None:
        async def refit() -> None:
            async with LoadingWindow() as loading:
                await loading.load(bucket(2), engine.load("a"))
                if where == "load":
                    await loading.load(bucket(2), engine.load("b"))
                if where == "scope":
                    await asyncio.sleep(10)

        task = asyncio.ensure_future(refit())
        await settle()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert {event for event in play(scene) if event.startswith("x")} == left
