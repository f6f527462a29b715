"""The distribution that is sampled from, and the draw from it."""

from __future__ import annotations

import math

import pytest
import torch

from rl_generation import SamplingParams
from rl_generation.sampling import draw, greedy, sampling_logprobs, sampling_probabilities

INF = float("inf")


def probabilities(logits: list[float], **settings: float) -> list[float]:
    return sampling_logprobs(torch.tensor([logits]), **settings)[0].exp().tolist()


def test_d5_temperature_is_part_of_the_reported_distribution() -> None:
    """BUGS D5: logits [2, 1, 0] at T = 0.6 give token 0 a log-probability of -0.202573, not -0.407606."""
    logprobs = sampling_logprobs(torch.tensor([[2.0, 1.0, 0.0]]), temperature=0.6)
    assert logprobs[0, 0].item() == pytest.approx(-0.202573, abs=1e-6)


def test_f6_defaults_filter_nothing() -> None:
    """BUGS F6: a request that names no top-p or top-k is sampled from the whole distribution."""
    params = SamplingParams(max_new_tokens=1)
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, 0)
    logits = torch.randn(3, 50)
    assert torch.equal(sampling_logprobs(logits), torch.log_softmax(logits, -1))


@pytest.mark.parametrize("temperature", [1.0, 0.6, torch.tensor([1.0, 0.3, 2.0])])
def test_the_unfiltered_distribution_is_one_whichever_way_it_is_asked_for(temperature: torch.Tensor) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2)) * 5
    logits[:, 40:] = -INF
    probabilities = sampling_probabilities(logits.bfloat16(), temperature)
    torch.testing.assert_close(probabilities, sampling_logprobs(logits.bfloat16(), temperature).exp())
    assert probabilities.dtype == torch.float32


def test_top_k_renormalises_over_the_candidates() -> None:
    p = probabilities([math.log(x) for x in (0.5, 0.1, 0.3, 0.1)], top_k=2)
    assert p == pytest.approx([0.625, 0, 0.375, 0])


def test_top_k_keeps_ties_with_the_last_candidate() -> None:
    assert probabilities([3.0, 1.0, 1.0, 0.0], top_k=2)[1:3] == pytest.approx(
        [math.exp(1) / (math.exp(3) + 2 * math.exp(1))] * 2
    )


def test_top_k_larger_than_the_vocabulary_is_off() -> None:
    assert probabilities([1.0, 2.0], top_k=7) == pytest.approx(probabilities([1.0, 2.0]))


@pytest.mark.parametrize(
    ("mass", "kept"),
    [
        (0.5, [0]),
        (0.51, [0, 2]),
        (0.79, [0, 2]),
        (0.85, [0, 2, 3]),
        (1e-9, [0]),
        (0.999, [0, 1, 2, 3]),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(mass: float, kept: list[int]) -> None:
    p = probabilities([math.log(x) for x in (0.5, 0.08, 0.3, 0.12)], top_p=mass)
    assert [i for i, x in enumerate(p) if x > 0] == kept
    assert sum(p) == pytest.approx(1)


def test_top_p_takes_lower_ids_first_among_equals() -> None:
    assert probabilities([0.0, 0.0, 0.0, 0.0], top_p=0.5) == pytest.approx([0.5, 0.5, 0, 0])
    many = probabilities([float(i % 2) for i in range(4000)], top_p=0.25)
    kept = [i for i, p in enumerate(many) if p > 0]
    assert kept == list(range(1, 2 * len(kept), 2))


def test_top_p_works_on_what_top_k_left() -> None:
    p = probabilities([math.log(x) for x in (0.4, 0.3, 0.2, 0.1)], top_k=2, top_p=0.55)
    assert p == pytest.approx([1, 0, 0, 0])


def test_top_p_is_applied_after_the_temperature() -> None:
    logits = [math.log(x) for x in (0.6, 0.3, 0.1)]
    assert probabilities(logits, temperature=0.5, top_p=0.75) == pytest.approx([1, 0, 0])
    assert probabilities(logits, temperature=1.0, top_p=0.75) == pytest.approx([2 / 3, 1 / 3, 0])


def test_a_row_with_top_p_off_keeps_every_token_beside_a_filtered_one() -> None:
    logits = torch.full((2, 1000), -20.0)
    logits[:, 0] = 20.0
    logprobs = sampling_logprobs(logits, top_p=torch.tensor([0.9, 1.0], dtype=torch.float64))
    assert logprobs[0].isfinite().sum() == 1
    assert logprobs[1].isfinite().all()


def test_mixed_settings_equal_each_row_alone() -> None:
    torch.manual_seed(1)
    logits = torch.randn(5, 40) * 3
    temperature = torch.tensor([1.0, 0.3, 2.0, 1.0, 0.7])
    top_k = torch.tensor([0, 5, 0, 1, 17])
    top_p = torch.tensor([1.0, 1.0, 0.8, 0.9, 0.5], dtype=torch.float64)
    together = sampling_logprobs(logits, temperature, top_k, top_p)
    for row in range(5):
        alone = sampling_logprobs(
            logits[row : row + 1], float(temperature[row]), int(top_k[row]), float(top_p[row])
        )
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-6, atol=1e-6)
    only_k = sampling_logprobs(logits, 1.0, top_k)
    assert only_k.isfinite().sum(dim=1).tolist() == [40, 5, 40, 1, 17]


def test_tiny_temperatures_stay_numbers() -> None:
    p = probabilities([100.0, 99.0, -INF], temperature=1e-37)
    assert p == [1.0, 0.0, 0.0]


def test_half_precision_logits_give_float32() -> None:
    logits = torch.randn(2, 8).bfloat16()
    logprobs = sampling_logprobs(logits, temperature=0.9, top_k=3)
    assert logprobs.dtype == torch.float32
    assert logprobs.exp().sum(-1).tolist() == pytest.approx([1, 1], abs=1e-6)


@pytest.mark.parametrize("u", [0.0, 2.0**-53, 0.5, 1 - 2.0**-40, 1 - 2.0**-53])
def test_the_draw_never_returns_a_token_without_mass(u: float) -> None:
    torch.manual_seed(0)
    for _ in range(200):
        logits = torch.randn(1, 33) * 4
        logits[0, :3] = -INF
        logits[0, 10:14] = -INF
        logits[0, -5:] = -INF
        logprobs = sampling_logprobs(logits)
        token = draw(logprobs.exp(), torch.tensor([u], dtype=torch.float64))
        assert logprobs[0, token].isfinite().all(), (u, token)


def test_the_draw_inverts_the_cumulative_distribution() -> None:
    probabilities = torch.tensor([0.25, 0.0, 0.5, 0.25]).expand(6, 4)
    u = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2.0**-53], dtype=torch.float64)
    assert draw(probabilities, u).tolist() == [0, 0, 2, 2, 3, 3]


def test_rare_tokens_behind_a_likely_one_keep_their_share() -> None:
    """A thousand tokens of 1e-9 each: sums in float32 would merge sixty of them into one."""
    probabilities = torch.full((1, 1001), 1e-9)
    probabilities[0, 0] = 1 - 1e-6
    u = 1 - 1e-6 * (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    tokens = draw(probabilities.expand(4000, -1), u)
    counts = torch.bincount(tokens, minlength=1001)[1:]
    assert (counts > 0).sum() > 900
    assert counts[counts > 0].float().mean() == pytest.approx(4, abs=0.1)


def test_the_draw_stays_below_the_total_of_any_distribution() -> None:
    """The largest number below 1 against totals of many sizes, none of them a power of two."""
    logprobs = torch.cat((torch.randn(5000, 7) * 9, torch.full((5000, 3), -INF)), dim=1)
    u = torch.full((5000,), 1 - 2.0**-53, dtype=torch.float64)
    assert draw(logprobs.exp(), u).max() < 7


def test_the_draw_has_the_right_frequencies() -> None:
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, -3.0, 0.5]])
    logprobs = sampling_logprobs(logits, temperature=1.3, top_p=0.97)
    n = 200_000
    generator = torch.Generator().manual_seed(3)
    u = torch.rand(n, generator=generator, dtype=torch.float64)
    counts = torch.bincount(draw(logprobs.exp().expand(n, -1), u), minlength=6).double()
    p = logprobs[0].double().exp()
    live = p > 0
    assert counts[~live].sum() == 0
    chi2 = ((counts - n * p)[live] ** 2 / (n * p)[live]).sum().item()
    assert chi2 < 20.5  # 99.9 % quantile of five degrees of freedom


def test_greedy_reports_the_untempered_log_probability() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]]).bfloat16()
    tokens, logprobs = greedy(logits)
    assert tokens.tolist() == [1, 0]
    expected = torch.log_softmax(logits.float(), -1).amax(-1)
    torch.testing.assert_close(logprobs, expected)
    assert logprobs.dtype == torch.float32


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -0.1),
        ("temperature", INF),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -1),
        ("seed", -1),
        ("seed", 2**63),
    ],
)
def test_settings_out_of_range_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{"max_new_tokens": 4, field: value})  # type: ignore[arg-type]
