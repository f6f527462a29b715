"""How old a group may be when it is trained, and how many may be begun for that.

Versions count trained steps: version v are the weights after v steps. A group is as old as the oldest
weights that sampled any of its tokens.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable


class StalenessError(ValueError):
    """A version that nobody published."""


def admission_capacity(*, max_staleness: int, version: int, batch: int, accepted: int, running: int) -> int:
    """How many more groups may be begun now: ``(max_staleness + version + 1)·batch − (accepted + running)``.

    Never below 0. Groups that are trained in the order in which they were begun are then never older than
    ``max_staleness`` steps: before the last one that was begun lie at most ``(max_staleness + 1)·batch − 1``
    others, which are ``max_staleness`` further steps and the one that it is trained in.

    Args:
        max_staleness: the bound, ≥ 0, in steps.
        version: that the engine samples from now. Not the trainer's: what is begun while new weights are on
            their way is sampled from the old ones.
        batch: groups of a step.
        accepted: groups that were ever finished under this numbering, trained ones included; one that was
            given up is not among them.
        running: groups that are begun and not finished.

    Source: AReaL, arXiv:2505.24298, section 5.1.
    """
    return max(0, (max_staleness + version + 1) * batch - (accepted + running))


def lag(step: int, oldest_version: int) -> int:
    """Age of a group that is trained in the step which begins with version ``step``."""
    return step - oldest_version


class PublishedVersions:
    """Which step's weights a policy's own counter of weights stands for.

    A policy counts every update, those of a supervised warm start and each of several in a step. Weights
    between two steps count as the older for the bound on age, as the newer for what a checkpoint has seen.

    Args:
        counter: of the weights at ``step``.
        step: trained steps so far.
    """

    def __init__(self, counter: int, step: int) -> None:
        self._counters = [counter]
        self._first = step

    def publish(self, counter: int) -> None:
        """One more step is trained; its weights have this counter.

        Raises:
            StalenessError: the counter went back.
        """
        if counter < self._counters[-1]:
            raise StalenessError(
                f"weights of step {self._first + len(self._counters)} have counter {counter}, those before "
                f"them {self._counters[-1]}: the policy must count up"
            )
        self._counters.append(counter)

    def span(self, counters: Iterable[int]) -> tuple[int, int] | None:
        """Oldest and newest step of tokens that were sampled by these weights; ``None`` for no tokens.

        Raises:
            StalenessError: some are older than all that are known.
        """
        distinct = set(counters)
        if not distinct:
            return None
        oldest = bisect_right(self._counters, min(distinct)) - 1
        if oldest < 0:
            raise StalenessError(
                f"a token was sampled by weights {min(distinct)}, older than the first of this run, "
                f"{self._counters[0]}: the engine was not given the policy's weights"
            )
        return self._first + oldest, self._first + bisect_left(self._counters, max(distinct))
