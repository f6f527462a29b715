"""Single requests in front of an engine that takes batches."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from rl_generation.batching import RequestBatcher
from rl_generation.failures import DeadlineError, EngineDeadError, InfraError, RequestError
from rl_generation.protocol import Completion, GenerationRequest, SamplingParams


def request(token: int) -> GenerationRequest:
    return GenerationRequest((token,), SamplingParams(1), f"r{token}")


class Engine:
    """Answers with the prompt. A prompt of 13 is refused; what is negative kills the engine.

    Attributes:
        gate: batches wait for it.
        entered: set whenever a batch has begun.
    """

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.short = False

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        tokens = [one.prompt_token_ids[0] for one in requests]
        self.batches.append(tokens)
        self.entered.set()
        assert self.gate.wait(20)
        if 13 in tokens:
            raise RequestError("engine: 13 is not served")
        if min(tokens) < 0:
            raise EngineDeadError("engine: gone")
        answers = [Completion((token,), (0.0,), "stop", 0) for token in tokens]
        return answers[:-1] if self.short else answers


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def batcher(engine: Engine) -> Iterator[RequestBatcher]:
    made = RequestBatcher(engine, max_batch=8, timeout_s=20)
    yield made
    engine.gate.set()
    assert made.close(5)


async def all_of(batcher: RequestBatcher, tokens: Sequence[int]) -> list[Completion | BaseException]:
    return await asyncio.gather(
        *(batcher.generate_async(request(token)) for token in tokens), return_exceptions=True
    )


def outcomes(results: Sequence[Completion | BaseException]) -> list[int | str]:
    return [r.token_ids[0] if isinstance(r, Completion) else type(r).__name__ for r in results]


def test_what_arrives_during_a_batch_forms_the_next(engine: Engine, batcher: RequestBatcher) -> None:
    async def run() -> list[Completion | BaseException]:
        engine.gate.clear()
        first = asyncio.ensure_future(batcher.generate_async(request(0)))
        await asyncio.to_thread(engine.entered.wait, 5)
        rest = asyncio.ensure_future(all_of(batcher, range(1, 11)))
        await asyncio.sleep(0.05)
        engine.gate.set()
        return [await first, *await rest]

    assert outcomes(asyncio.run(run())) == list(range(11))
    assert engine.batches == [[0], [1, 2, 3, 4, 5, 6, 7, 8], [9, 10]]
    assert batcher.batches == 3


def test_a_bad_request_fails_alone(engine: Engine, batcher: RequestBatcher) -> None:
    assert outcomes(asyncio.run(all_of(batcher, [1, 2, 13, 4, 5, 13]))) == [
        1,
        2,
        "RequestError",
        4,
        5,
        "RequestError",
    ]
    assert outcomes(asyncio.run(all_of(batcher, [6]))) == [6]


def test_a_dead_engine_fails_everybody_and_is_not_asked_again(
    engine: Engine, batcher: RequestBatcher
) -> None:
    engine.gate.clear()

    async def run() -> list[Completion | BaseException]:
        asking = asyncio.ensure_future(all_of(batcher, [1, -1, 2]))
        await asyncio.to_thread(engine.entered.wait, 5)
        engine.gate.set()
        return await asking

    assert set(outcomes(asyncio.run(run()))) == {"EngineDeadError"}
    assert sum(map(len, engine.batches)) == 3


def test_an_engine_that_loses_a_completion_is_found_out(engine: Engine, batcher: RequestBatcher) -> None:
    engine.short = True
    assert set(outcomes(asyncio.run(all_of(batcher, [1, 2])))) == {"InfraError"}


def test_who_waits_no_longer_is_not_generated_for(engine: Engine, batcher: RequestBatcher) -> None:
    async def run() -> None:
        engine.gate.clear()
        first = asyncio.ensure_future(batcher.generate_async(request(1)))
        await asyncio.to_thread(engine.entered.wait, 5)
        second = asyncio.ensure_future(batcher.generate_async(request(2)))
        third = asyncio.ensure_future(batcher.generate_async(request(3)))
        await asyncio.sleep(0.02)
        second.cancel()
        # One that is being generated for is only not waited for.
        first.cancel()
        await asyncio.sleep(0.02)
        engine.gate.set()
        assert (await third).token_ids == (3,)

    asyncio.run(run())
    assert engine.batches == [[1], [3]]


def test_a_deadline_ends_the_waiting_in_any_place(engine: Engine) -> None:
    batcher = RequestBatcher(engine, timeout_s=0.1)
    engine.gate.clear()

    async def run() -> list[Completion | BaseException]:
        first = asyncio.ensure_future(all_of(batcher, [1]))
        await asyncio.to_thread(engine.entered.wait, 5)
        return [*await all_of(batcher, [2]), *await first]

    results = asyncio.run(run())
    assert outcomes(results) == ["DeadlineError", "DeadlineError"]
    assert "0.1 s" in str(results[0])
    assert "r2" in str(results[0])
    engine.gate.set()
    time.sleep(0.05)
    assert engine.batches == [[1]]
    assert batcher.close(5)


def test_closing_fails_what_waits_and_refuses_what_comes(engine: Engine) -> None:
    batcher = RequestBatcher(engine, timeout_s=20)
    engine.gate.clear()

    async def run() -> list[Completion | BaseException]:
        first = asyncio.ensure_future(all_of(batcher, [1]))
        await asyncio.to_thread(engine.entered.wait, 5)
        second = asyncio.ensure_future(all_of(batcher, [2]))
        await asyncio.sleep(0.02)
        assert not batcher.close(0.05)
        engine.gate.set()
        return [*await first, *await second]

    assert outcomes(asyncio.run(run())) == [1, "InfraError"]
    assert batcher.close(5)
    with pytest.raises(InfraError, match="close"):
        asyncio.run(batcher.generate_async(request(1)))


def test_any_number_of_loops_may_ask(engine: Engine, batcher: RequestBatcher) -> None:
    answers: list[list[int | str]] = []
    threads = [
        threading.Thread(
            target=lambda i=i: answers.append(outcomes(asyncio.run(all_of(batcher, [i, i + 1]))))
        )
        for i in range(0, 8, 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(answers, key=str) == [[i, i + 1] for i in range(0, 8, 2)]


@pytest.mark.parametrize("limits", [{"max_batch": 0}, {"timeout_s": 0}, {"gather_s": -1}])
def test_limits_that_are_none_are_refused(engine: Engine, limits: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="max_batch"):
        RequestBatcher(engine, **limits)  # type: ignore[arg-type]


def test_the_deadline_is_an_error_of_the_infrastructure() -> None:
    assert DeadlineError.kind == "infra"


def test_a_batch_waits_while_others_keep_coming_and_no_longer(engine: Engine) -> None:
    batcher = RequestBatcher(engine, max_batch=100, timeout_s=20, gather_s=10.0, quiet_s=0.2)

    async def run() -> float:
        tasks = []
        for token in range(5):
            tasks.append(asyncio.ensure_future(batcher.generate_async(request(token))))
            await asyncio.sleep(0.02)
        began = time.monotonic()
        await asyncio.gather(*tasks)
        return time.monotonic() - began

    waited = asyncio.run(run())
    batcher.close(5)
    assert engine.batches == [[0, 1, 2, 3, 4]]
    assert waited < 5.0, "not until gather_s has passed"


def test_callers_in_threads_share_batches_and_get_their_own_answers(engine: Engine) -> None:
    batcher = RequestBatcher(engine, max_batch=100, timeout_s=20, gather_s=2.0, quiet_s=0.2)
    found: dict[int, list[int]] = {}

    def call(first: int) -> None:
        answers = batcher.generate([request(first), request(first + 1)])
        found[first] = [answer.token_ids[0] for answer in answers]

    threads = [threading.Thread(target=call, args=(first,)) for first in (20, 30, 40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    batcher.close(5)
    assert found == {20: [20, 21], 30: [30, 31], 40: [40, 41]}
    assert len(engine.batches) < 3
    with pytest.raises(InfraError, match="used after close"):
        batcher.generate([request(1)])


def test_a_failing_request_fails_its_caller_in_a_thread(engine: Engine) -> None:
    batcher = RequestBatcher(engine, max_batch=8, timeout_s=20)
    with pytest.raises(RequestError, match="13 is not served"):
        batcher.generate([request(1), request(13)])
    batcher.close(5)


@pytest.mark.parametrize("quiet_s", [0.0, 0.3, -1.0])
def test_a_quiet_that_is_none_is_refused(engine: Engine, quiet_s: float) -> None:
    with pytest.raises(ValueError, match="quiet_s must lie in"):
        RequestBatcher(engine, gather_s=0.2, quiet_s=quiet_s)
