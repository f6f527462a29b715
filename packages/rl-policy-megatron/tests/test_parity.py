"""The policy against transformers on the same weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

KINDS = ["qwen3-tied", "qwen3-untied", "qwen2", "qwen2-tied", "llama", "llama3-rope"]
LENGTHS = [40, 3, 17, 40, 1, 29]


def _reference(model: Any, batch: Any, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and log-probabilities laid out as the policy's."""
    with torch.no_grad():
        logits = model(batch.input_ids).logits
    log_p = (logits / temperature).log_softmax(-1)[:, :-1]
    logprobs = torch.zeros(batch.input_ids.shape)
    logprobs[:, 1:] = log_p.gather(2, batch.input_ids[:, 1:, None])[..., 0]
    return logits, logprobs * batch.mask


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_logprobs_equal_transformers(
    kind: str, model_of: Callable[..., Any], policy_of: Callable[..., Any], rows_of: Callable[..., Any]
) -> None:
    policy, model, batch = (
        policy_of(kind, micro_batch_size=4, temperature=0.7),
        model_of(kind)[1],
        rows_of(LENGTHS),
    )
    logits, logprobs = _reference(model, batch, temperature=0.7)
    real = torch.arange(batch.input_ids.size(1)) < batch.lengths[:, None]
    assert (policy.token_logits(batch) - logits)[real].abs().max() <= 1e-4
    found = policy.logprobs(batch)
    assert found.dtype == torch.float32
    assert (found - logprobs).abs().max() <= 1e-4
    assert not found[:, 0].any()
    assert not found[~real].any()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_make_the_round_trip_to_the_bit(
    kind: str, model_of: Callable[..., Any], policy_of: Callable[..., Any], tmp_path: Path
) -> None:
    policy, model = policy_of(kind), model_of(kind)[1]
    source = model.state_dict()
    if model.config.tie_word_embeddings:
        del source["lm_head.weight"]
    streamed = dict(policy.stream_weights())
    assert streamed.keys() == source.keys()
    assert all(torch.equal(streamed[name], source[name]) for name in source)
    assert [(spec.name, spec.shape, spec.dtype) for spec in policy.refit_spec()] == [
        (name, tuple(tensor.shape), tensor.dtype) for name, tensor in policy.stream_weights()
    ]
    assert policy.parameter_count == sum(tensor.numel() for tensor in source.values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_export_has_the_same_logits_in_transformers(
    kind: str,
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
    tmp_path: Path,
) -> None:
    policy, batch = policy_of(kind), rows_of(LENGTHS)
    before = policy.token_logits(batch)
    policy.train(batch, token_mean_loss, learning_rate=1e-2)
    policy.export_hf(tmp_path / "exported")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    logits, logprobs = _reference(model, batch, temperature=1.0)
    real = torch.arange(batch.input_ids.size(1)) < batch.lengths[:, None]
    assert (policy.token_logits(batch) - logits)[real].abs().max() <= 1e-4
    assert (policy.logprobs(batch) - logprobs).abs().max() <= 1e-4
    assert (policy.token_logits(batch) - before).abs().max() > 1e-2


def test_e3_padding_may_hold_anything(policy_of: Callable[..., Any], rows_of: Callable[..., Any]) -> None:
    """E3: what stands in the padding, and how much of it there is, changes nothing."""
    policy = policy_of("qwen3-tied")
    clean = policy.logprobs(rows_of(LENGTHS))
    for padding in (5, -100, 2**62):
        odd = policy.logprobs(rows_of(LENGTHS, padding=padding, width=50))
        torch.testing.assert_close(odd[:, :40], clean, rtol=0, atol=1e-6)
        assert not odd[:, 40:].any()


def test_d5_policy_and_sampler_agree_under_a_temperature(
    policy_of: Callable[..., Any], rows_of: Callable[..., Any]
) -> None:
    """D5: scoring uses the distribution that was sampled from, so the ratio is 1."""
    batch = rows_of([12, 9])
    policy = policy_of("llama", temperature=0.6)
    sampler = (policy.token_logits(batch) / 0.6).log_softmax(-1)[:, :-1]
    sampled = sampler.gather(2, batch.input_ids[:, 1:, None])[..., 0] * batch.mask[:, 1:]
    ratio = (policy.logprobs(batch)[:, 1:] - sampled).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-5)


def test_chunks_and_micro_batches_do_not_change_logprobs(
    policy_of: Callable[..., Any], rows_of: Callable[..., Any]
) -> None:
    batch = rows_of(LENGTHS)
    whole = policy_of("qwen2", micro_batch_size=100, logprob_chunk_tokens=1000).logprobs(batch)
    pieces = policy_of("qwen2", micro_batch_size=1, logprob_chunk_tokens=3).logprobs(batch)
    torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-5)


def test_bfloat16_is_close_and_scores_in_float32(
    policy_of: Callable[..., Any], rows_of: Callable[..., Any]
) -> None:
    batch = rows_of(LENGTHS)
    exact = policy_of("qwen3-tied").logprobs(batch)
    rounded = policy_of("qwen3-tied", dtype="bfloat16").logprobs(batch)
    assert rounded.dtype == torch.float32
    difference = (rounded - exact).abs()
    assert 1e-4 < float(difference.max()) < 1.0
    assert float(difference.sum() / batch.mask.sum()) < 0.1


def test_sharded_weights_and_older_config_keys_are_read(
    model_of: Callable[..., Any], rows_of: Callable[..., Any], tmp_path: Path
) -> None:
    from rl_policy_megatron import MegatronPolicy

    source, model = model_of("llama3-rope")
    directory = tmp_path / "older"
    model.save_pretrained(directory, max_shard_size="20KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    config = json.loads((directory / "config.json").read_text())
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    config["rope_scaling"] = parameters
    (directory / "config.json").write_text(json.dumps(config))
    batch = rows_of(LENGTHS)
    with MegatronPolicy(directory) as older, MegatronPolicy(source) as newer:
        assert torch.equal(older.logprobs(batch), newer.logprobs(batch))


def test_export_copies_tokenizer_files_and_the_config_as_it_is(
    model_of: Callable[..., Any], tmp_path: Path
) -> None:
    from rl_policy_megatron import MegatronPolicy, PolicySettings

    source = tmp_path / "source"
    shutil.copytree(model_of("qwen3-tied")[0], source)
    (source / "tokenizer.json").write_text('{"tokens": 1}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "secrets.txt").write_text("stays")
    with MegatronPolicy(source) as policy:
        policy.export_hf(tmp_path / "deep" / "copy")
    copied = {path.name: path.read_bytes() for path in (tmp_path / "deep" / "copy").iterdir()}
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert copied.pop(name) == (source / name).read_bytes()
    assert list(copied) == ["model.safetensors"]
    with MegatronPolicy(source, PolicySettings(dtype="bfloat16")) as policy:
        policy.export_hf(tmp_path / "rounded")
    assert json.loads((tmp_path / "rounded" / "config.json").read_text())["dtype"] == "bfloat16"


def test_export_in_shards_is_read_back(policy_of: Callable[..., Any], tmp_path: Path) -> None:
    from rl_policy_megatron import MegatronPolicy
    from rl_policy_megatron.export import publish_model

    policy = policy_of("qwen2")
    publish_model(
        tmp_path / "sharded",
        policy.model_directory,
        policy.stream_weights(),
        torch.float32,
        max_shard_bytes=20_000,
    )
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    with MegatronPolicy(tmp_path / "sharded") as again:
        expected = dict(policy.stream_weights())
        assert all(torch.equal(tensor, expected[name]) for name, tensor in again.stream_weights())
    AutoModelForCausalLM.from_pretrained(tmp_path / "sharded")
