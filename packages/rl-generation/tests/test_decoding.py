"""The decode loop over a scripted model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rl_generation import GenerationError, SamplingParams
from rl_generation.megatron import decoding
from rl_generation.megatron.decoding import Continuation, decode

CPU = torch.device("cpu")
VOCAB = 12


class CountingSession:
    """Its most likely next token is always the last one plus one; it checks that rows stay together."""

    def __init__(self, first: list[int]) -> None:
        self.last = torch.tensor(first) - 1
        self.widths: list[int] = []

    def _logits(self) -> Tensor:
        self.widths.append(len(self.last))
        logits = torch.zeros(len(self.last), VOCAB + 3)
        logits[torch.arange(len(self.last)), (self.last + 1) % VOCAB] = 5.0
        logits[:, VOCAB:] = 50.0
        return logits

    def prefill(self) -> Tensor:
        return self._logits()

    def step(self, tokens: Tensor) -> Tensor:
        assert tokens.tolist() == ((self.last + 1) % VOCAB).tolist()
        self.last = tokens
        return self._logits()

    def keep(self, rows: Tensor) -> None:
        self.last = self.last[rows]


def run(
    session: CountingSession, params: list[SamplingParams], may_go_on: Callable[[], bool] = lambda: True
) -> list[Continuation]:
    return decode(session, params, [p.max_new_tokens for p in params], VOCAB, CPU, may_go_on)


def cold(tokens: int, *stops: int) -> SamplingParams:
    return SamplingParams(tokens, temperature=0, stop_token_ids=stops)


def test_the_stop_token_is_kept_and_ends_its_row_only() -> None:
    out = run(CountingSession([0, 0, 4]), [cold(9, 2), cold(4, 11), cold(9, 7, 5)])
    assert [c.token_ids for c in out] == [(0, 1, 2), (0, 1, 2, 3), (4, 5)]
    assert [c.stop_reason for c in out] == ["stop", "length", "stop"]
    assert all(len(c.logprobs) == len(c.token_ids) for c in out)


def test_b10_the_reason_is_the_engine_s_own_and_not_read_off_the_last_token() -> None:
    """BUGS B10: a stop token that is sampled as the very last allowed one is a stop; another token's row at
    the limit is a length, whatever that token is to other rows."""
    out = run(CountingSession([0, 0]), [cold(3, 2), cold(3, 9)])
    assert [c.token_ids for c in out] == [(0, 1, 2)] * 2
    assert [c.stop_reason for c in out] == ["stop", "length"]


def test_rows_that_are_done_are_dropped_and_the_others_keep_their_places() -> None:
    lengths = [3, 9, 1, 30, 2, 9, 30, 4]
    session = CountingSession(list(range(8)))
    out = run(session, [cold(n) for n in lengths])
    assert [c.token_ids for c in out] == [
        tuple((first + i) % VOCAB for i in range(n)) for first, n in enumerate(lengths)
    ]
    assert session.widths[0] == 8
    assert session.widths[-1] == 2
    assert len(session.widths) == 30
    # Between compactions at least the given share of the rows that run is alive.
    for step, width in enumerate(session.widths):
        assert sum(n > step for n in lengths) > decoding.COMPACT_AT * width


def test_padding_columns_are_never_sampled() -> None:
    """The scripted model's padding columns have by far the largest logits."""
    out = run(CountingSession([0]), [cold(5)])
    assert max(out[0].token_ids) < VOCAB
    assert out[0].logprobs[0] == pytest.approx(
        torch.log_softmax(torch.tensor([5.0] + [0.0] * (VOCAB - 1)), 0)[0].item()
    )


def test_an_engine_that_must_end_returns_what_there_is_as_aborted() -> None:
    answers = iter([True, True, True, False])
    out = run(CountingSession([0, 5]), [cold(2), cold(9)], may_go_on=lambda: next(answers))
    assert [(c.token_ids, c.stop_reason) for c in out] == [((0, 1), "length"), ((5, 6, 7), "aborted")]


def test_an_abort_before_the_first_token_gives_empty_rows() -> None:
    out = run(CountingSession([0]), [cold(2)], may_go_on=lambda: False)
    assert out == [Continuation((), (), "aborted")]


def test_logits_that_are_not_numbers_are_an_error() -> None:
    for params in (cold(4), SamplingParams(4, seed=1)):
        session = CountingSession([0])
        session.step = lambda tokens: torch.full((1, VOCAB + 3), float("nan"))  # type: ignore[method-assign]
        with pytest.raises(GenerationError, match="not finite"):
            run(session, [params])
