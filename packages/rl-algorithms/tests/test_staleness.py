"""The bound on age: how many groups may be begun, and which step a token's weights belong to."""

from __future__ import annotations

import pytest

from rl_algorithms.staleness import PublishedVersions, StalenessError, admission_capacity, lag


@pytest.mark.parametrize(
    ("max_staleness", "version", "batch", "accepted", "running", "capacity"),
    [
        (0, 0, 8, 0, 0, 8),
        (0, 0, 8, 5, 3, 0),
        (1, 0, 8, 0, 0, 16),
        (1, 30, 8, 248, 0, 8),
        (2, 5, 4, 20, 7, 5),
        (0, 0, 8, 9, 9, 0),
    ],
)
def test_capacity_is_the_formula(max_staleness, version, batch, accepted, running, capacity):
    found = admission_capacity(
        max_staleness=max_staleness, version=version, batch=batch, accepted=accepted, running=running
    )
    assert found == capacity


@pytest.mark.parametrize("max_staleness", range(4))
def test_what_is_begun_within_the_capacity_and_trained_in_order_is_never_too_old(max_staleness):
    batch, accepted, begun_at = 3, 0, []
    for version in range(10):
        room = admission_capacity(
            max_staleness=max_staleness, version=version, batch=batch, accepted=accepted, running=0
        )
        begun_at += [version] * room
        accepted += room
        trained = begun_at[version * batch : (version + 1) * batch]
        assert len(trained) == batch
        assert max(lag(version, begun) for begun in trained) <= max_staleness
    assert max(lag(v, b) for v in range(10) for b in begun_at[v * batch : (v + 1) * batch]) == max_staleness


def test_weights_between_two_steps_are_the_older_for_age_and_the_newer_for_a_checkpoint():
    versions = PublishedVersions(20, step=5)
    versions.publish(23)
    versions.publish(26)
    assert versions.span([20]) == (5, 5)
    assert versions.span([23, 20, 26]) == (5, 7)
    assert versions.span([21]) == (5, 6)
    assert versions.span([24]) == (6, 7)
    assert versions.span([27]) == (7, 8), "weights that are being made belong to the next step"
    assert versions.span([]) is None


def test_weights_that_nobody_published_are_refused():
    versions = PublishedVersions(20, step=5)
    with pytest.raises(StalenessError, match="weights 19, older than the first of this run, 20"):
        versions.span([19, 20])
    with pytest.raises(StalenessError, match="must count up"):
        versions.publish(19)
