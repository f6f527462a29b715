"""Seeded histories with everything that can go wrong; `./hatch run simulate` runs a hundred thousand."""

from __future__ import annotations

import pytest

from tools.simulation.controller import history, run_seeds


@pytest.mark.parametrize("first", range(0, 1000, 250))
def test_no_history_breaks_a_promise_and_everything_happened_in_some(first):
    total = run_seeds(first, 250)
    for name in ("kills", "stops", "jumps", "refits_in_flight", "restored", "infra_retries", "data_retries"):
        assert total[name] > 0, name
    for name in ("timeouts", "stale_rows", "straggler_rows", "stragglers", "late", "overslept_s"):
        assert total[name] > 0, name


@pytest.mark.parametrize("seed", range(0, 60, 7))
def test_the_same_seed_is_the_same_history_event_by_event(seed):
    assert history(seed).run().log == history(seed).run().log
    assert history(seed).run().log != history(seed + 1).run().log
