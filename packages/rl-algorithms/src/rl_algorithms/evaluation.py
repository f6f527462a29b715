"""How good a policy is on rows that it was never trained on."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Probability that one of k answers is right, estimated from more of them without bias.

    ``1 − C(n − c, k) / C(n, k)`` for c right ones of n samples, computed as a product so that no binomial
    overflows.

    Raises:
        ValueError: unless 0 ≤ right ≤ samples and 1 ≤ k ≤ samples.

    Source: M. Chen et al., "Evaluating Large Language Models Trained on Code", arXiv:2107.03374, equation 1.
    """
    if not 0 <= right <= samples or not 1 <= k <= samples:
        raise ValueError(
            f"pass@k needs 0 <= right <= samples and 1 <= k <= samples, got {right}, {samples}, {k}"
        )
    wrong = samples - right
    if wrong < k:
        return 1.0
    return 1.0 - prod((wrong - i) / (samples - i) for i in range(k))


def mean_pass_at_k(right: Sequence[int], samples: int, k: int) -> float:
    """The mean over all problems, each with its number of right answers among ``samples``.

    Denominator: exactly the number of problems, none left out.

    Raises:
        ValueError: no problem, or see :func:`pass_at_k`.
    """
    if not right:
        raise ValueError("pass@k of no problem")
    return sum(pass_at_k(samples, count, k) for count in right) / len(right)
