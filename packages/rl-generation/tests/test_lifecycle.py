"""Pausing, sleeping and closing an engine from other threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from rl_generation import GenerationError
from rl_generation.lifecycle import Lifecycle


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    out: list[object] = []

    def run() -> None:
        try:
            out.append(work())
        except GenerationError as error:
            out.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, out


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_pause_holds_the_next_step_until_resume() -> None:
    life = Lifecycle("engine", 5)
    life.pause()
    assert life.state == "paused"
    thread, out = in_thread(life.may_go_on)
    time.sleep(0.05)
    assert out == []
    life.resume()
    thread.join(5)
    assert out == [True]
    assert life.state == "running"


def test_a_pause_without_resume_ends_in_a_typed_error() -> None:
    life = Lifecycle("engine", 0.05)
    life.pause()
    with pytest.raises(GenerationError, match=r"engine: paused for more than 0\.05 s.*resume"):
        life.may_go_on()


def test_one_generation_at_a_time_with_a_deadline() -> None:
    life = Lifecycle("engine", 0.05)
    with life.generating():
        assert life.busy
        thread, out = in_thread(lambda: life.generating().__enter__())
        thread.join(5)
    assert isinstance(out[0], GenerationError)
    assert "waited 0.05 s" in str(out[0])
    assert not life.busy


def test_an_error_inside_a_generation_frees_the_engine() -> None:
    life = Lifecycle("engine", 0.05)
    with pytest.raises(KeyError), life.generating():
        raise KeyError("x")
    with life.generating():
        pass


def test_changes_meet_no_generation() -> None:
    life = Lifecycle("engine", 5)
    with life.generating():
        with (
            pytest.raises(GenerationError, match="cannot swap while a generation is in flight"),
            life.idle("swap"),
        ):
            pass
        with pytest.raises(GenerationError, match="cannot sleep"):
            life.sleep()
    with life.idle("swap"):
        pass


def test_sleep_refuses_generations_until_wake() -> None:
    life = Lifecycle("engine", 5)
    life.sleep()
    assert life.state == "asleep"
    with pytest.raises(GenerationError, match="asleep; call wake"), life.generating():
        pass
    life.wake()
    with life.generating():
        pass


def test_close_ends_a_paused_generation_and_every_later_use() -> None:
    life = Lifecycle("engine", 5)
    life.pause()
    thread, out = in_thread(lambda: _one_step(life))
    wait_until(lambda: life.busy)
    assert life.close(5)
    thread.join(5)
    assert out == [False]
    for use in (life.pause, life.resume, life.sleep, life.wake, lambda: life.generating().__enter__()):
        with pytest.raises(GenerationError, match="used after shutdown"):
            use()
    assert life.close(5)
    assert life.state == "closed"


def test_close_returns_within_its_timeout() -> None:
    life = Lifecycle("engine", 5)
    with life.generating():
        begin = time.monotonic()
        assert not life.close(0.05)
        assert time.monotonic() - begin < 1


def _one_step(life: Lifecycle) -> bool:
    with life.generating():
        return life.may_go_on()
