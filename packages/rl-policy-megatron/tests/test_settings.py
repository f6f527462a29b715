"""Settings refuse what cannot be meant."""

from __future__ import annotations

import pytest

from rl_policy_megatron import OptimizerSettings, PolicySettings


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "float16"),
        ("micro_batch_size", 0),
        ("logprob_chunk_tokens", 0),
        ("temperature", 0.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("seed", -1),
    ],
)
def test_policy_settings_name_the_wrong_value(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        PolicySettings(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("betas", (0.9, 1.0)),
        ("betas", (0.9,)),
        ("eps", 0.0),
        ("weight_decay", -0.1),
        ("weight_decay", float("nan")),
        ("grad_clip", -1.0),
    ],
)
def test_optimizer_settings_name_the_wrong_value(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        OptimizerSettings(**{field: value})
