from __future__ import annotations

from itertools import combinations

import pytest

from rl_algorithms.evaluation import mean_pass_at_k, pass_at_k


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_pass_at_k_counts_subsets_with_a_right_answer(samples):
    for right in range(samples + 1):
        answers = [True] * right + [False] * (samples - right)
        for k in range(1, samples + 1):
            subsets = list(combinations(answers, k))
            assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_many_samples_do_not_overflow():
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)
    assert pass_at_k(10_000, 0, 9_999) == 0.0


def test_e8_the_mean_is_over_all_problems():
    """Five problems of two samples: 1, 1, ½, 0, 0 at k = 1."""
    assert mean_pass_at_k([2, 2, 1, 0, 0], 2, 1) == pytest.approx(0.5)
    assert mean_pass_at_k([2, 2, 1, 0, 0], 2, 2) == pytest.approx(0.6)


@pytest.mark.parametrize(("samples", "right", "k"), [(3, 4, 1), (3, -1, 1), (3, 1, 0), (3, 1, 4)])
def test_refuses(samples, right, k):
    with pytest.raises(ValueError, match="pass@k needs"):
        pass_at_k(samples, right, k)
    with pytest.raises(ValueError, match="no problem"):
        mean_pass_at_k([], 1, 1)
