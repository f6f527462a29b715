"""Every model family against transformers: logits, gradients, files, and mixtures of experts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rl_policy_megatron import (
    MegatronPolicy,
    ModelDirectoryError,
    OptimizerSettings,
    PolicyError,
    UnsupportedModelError,
)
from rl_policy_megatron.hf_config import read_model_shape
from rl_policy_megatron.mapping import WeightMap
from rl_policy_megatron.placement import Placement
from rl_policy_megatron.sharding import WeightShards

MIXTURES = ["qwen3-moe", "qwen3-moe-tied", "qwen3-moe-mixed", "qwen3-moe-one"]
TIED = ["llama3-rope-tied", "qwen2-tied", "qwen3-tied", "qwen3-moe-tied"]
KINDS = [
    "llama",
    "llama3-rope",
    "qwen2",
    "qwen3-untied",
    "qwen3-moe",
    "qwen3-moe-mixed",
    "qwen3-moe-one",
    *TIED,
]
LENGTHS = [40, 3, 17, 40, 1, 29]


def _as_in_files(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """transformers holds the experts of a layer in two tensors, and writes one per expert and projection."""
    for name, tensor in named:
        if name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                yield f"{prefix}{expert}.gate_proj.weight", gate
                yield f"{prefix}{expert}.up_proj.weight", up
        elif name.endswith("experts.down_proj"):
            prefix = name.removesuffix("down_proj")
            for expert, down in enumerate(tensor):
                yield f"{prefix}{expert}.down_proj.weight", down
        else:
            yield name, tensor


@pytest.mark.parametrize("kind", KINDS)
def test_logits_gradients_and_files_equal_transformers(
    kind: str,
    model_of: Callable[..., Any],
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
    transformers_loss: Callable[..., Any],
    tmp_path: Path,
) -> None:
    directory, model = model_of(kind)
    policy, batch = policy_of(kind, micro_batch_size=4), rows_of(LENGTHS)
    real = torch.arange(batch.input_ids.size(1)) < batch.lengths[:, None]
    with torch.no_grad():
        expected = model(batch.input_ids).logits
    assert (policy.token_logits(batch) - expected)[real].abs().max() <= 1e-4

    model.zero_grad()
    transformers_loss(model, batch).backward()
    found = policy.gradients(batch, token_mean_loss)
    gradients = dict(_as_in_files((name, weight.grad) for name, weight in model.named_parameters()))
    assert found.keys() == gradients.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-6, msg=name)

    policy.export_hf(tmp_path / "exported")
    source, exported = (load_file(path / "model.safetensors") for path in (directory, tmp_path / "exported"))
    assert exported.keys() == source.keys()
    assert all(torch.equal(exported[name], source[name]) for name in source)
    assert (tmp_path / "exported/config.json").read_bytes() == (directory / "config.json").read_bytes()


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_trained_mixture_has_the_same_logits_in_transformers(
    kind: str,
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
    tmp_path: Path,
) -> None:
    policy, batch = policy_of(kind, OptimizerSettings(weight_decay=0.0)), rows_of(LENGTHS)
    before = {name: tensor.clone() for name, tensor in policy.stream_weights()}
    for _ in range(3):
        policy.train(batch, token_mean_loss, learning_rate=1e-2)
    still = {name for name, tensor in policy.stream_weights() if torch.equal(tensor, before[name])}
    # The only expert of a token has weight 1 whatever the router thinks, so nothing teaches the router.
    routers = {name for name in before if name.endswith("mlp.gate.weight")}
    assert still == (routers if kind == "qwen3-moe-one" else set())
    policy.export_hf(tmp_path / "exported")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    with torch.no_grad():
        expected = model(batch.input_ids).logits
    real = torch.arange(batch.input_ids.size(1)) < batch.lengths[:, None]
    assert (policy.token_logits(batch) - expected)[real].abs().max() <= 1e-4


@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_router_decides_as_transformers_does_to_the_bit(
    kind: str, dtype: torch.dtype, model_of: Callable[..., Any], policy_of: Callable[..., Any]
) -> None:
    """In bfloat16 logits collide often: then the same expert must win."""
    policy = policy_of(kind, dtype=str(dtype).removeprefix("torch."))
    model = AutoModelForCausalLM.from_pretrained(model_of(kind)[0], dtype=dtype)
    layer = next(n for n, part in enumerate(model.model.layers) if hasattr(part.mlp, "gate"))
    hidden = torch.randn(150, 2, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad():
        weights, chosen = policy.model.decoder.layers[layer].mlp.router(hidden)
        logits, scores, experts = model.model.layers[layer].mlp.gate(hidden.flatten(0, 1))
    expected = torch.zeros_like(logits).scatter(1, experts, scores)
    assert weights.dtype == dtype
    assert torch.equal(weights, expected)
    assert torch.equal(chosen, expected > 0)
    if dtype is torch.bfloat16:
        assert any(len(row.unique()) < len(row) for row in logits)


def test_d16_experts_see_the_same_gradient_however_tokens_are_cut(
    policy_of: Callable[..., Any], rows_of: Callable[..., Any], token_mean_loss: Callable[..., Any]
) -> None:
    """D16: nothing in the loss is normalised by what a micro-batch happens to hold."""
    whole = rows_of([6, 2, 4, 4, 4, 4])
    results = []
    for size in (1, 2, 6):
        results.append(policy_of("qwen3-moe", micro_batch_size=size).gradients(whole, token_mean_loss))
    for other in results[1:]:
        for name, gradient in other.items():
            torch.testing.assert_close(gradient, results[0][name], rtol=1e-5, atol=1e-7, msg=name)


def test_an_expert_without_tokens_has_no_gradient_and_stays(
    policy_of: Callable[..., Any], rows_of: Callable[..., Any], token_mean_loss: Callable[..., Any]
) -> None:
    policy = policy_of("qwen3-moe-one")
    batch = rows_of([2])
    gradients = policy.gradients(batch, token_mean_loss)
    prefix = "model.layers.0.mlp.experts."
    idle = [n for n in range(4) if not gradients[f"{prefix}{n}.up_proj.weight"].any()]
    # Two tokens reach two experts at most, and the last token's prediction is not scored.
    assert len(idle) == 3
    before = {name: tensor.clone() for name, tensor in policy.stream_weights()}
    policy.train(batch, token_mean_loss, learning_rate=1e-2)
    after = dict(policy.stream_weights())
    for expert in range(4):
        name = f"{prefix}{expert}.up_proj.weight"
        assert torch.equal(before[name], after[name]) == (expert in idle)


def test_a_mixture_resumes_to_the_bit(
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
    weights_hash: Callable[[Any], str],
    tmp_path: Path,
) -> None:
    policy, batch = policy_of("qwen3-moe-mixed"), rows_of(LENGTHS)
    policy.train(batch, token_mean_loss, learning_rate=1e-2)
    policy.save(tmp_path / "saved")
    expected = policy.train(batch, token_mean_loss, learning_rate=1e-2)
    other = policy_of("qwen3-moe-mixed")
    other.load(tmp_path / "saved")
    assert other.train(batch, token_mean_loss, learning_rate=1e-2) == expected
    assert weights_hash(other) == weights_hash(policy)


@pytest.mark.parametrize("kind", TIED)
def test_h11_tied_config_with_a_head_of_its_own_is_refused(
    kind: str, model_of: Callable[..., Any], tmp_path: Path
) -> None:
    """H11: config.json says tied, the tensors are not: the head must not be lost silently."""
    source, model = model_of(kind)
    model.config.save_pretrained(tmp_path)
    tensors = load_file(source / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelDirectoryError, match="set tie_word_embeddings to false"):
        MegatronPolicy(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with MegatronPolicy(tmp_path) as policy:
        streamed = dict(policy.stream_weights())
    assert torch.equal(streamed["lm_head.weight"], tensors["lm_head.weight"])


@pytest.mark.parametrize(
    ("error", "changes", "words"),
    [
        (ModelDirectoryError, {"num_local_experts": None}, ["num_local_experts", "None"]),
        (ModelDirectoryError, {"num_experts": 0}, ["num_experts", "0"]),
        (ModelDirectoryError, {"num_experts_per_tok": None}, ["num_experts_per_tok", "None"]),
        (ModelDirectoryError, {"num_experts_per_tok": 5}, ["num_experts_per_tok 5", "4 experts"]),
        (ModelDirectoryError, {"moe_intermediate_size": None}, ["moe_intermediate_size"]),
        (ModelDirectoryError, {"decoder_sparse_step": 0}, ["decoder_sparse_step", "0"]),
        (ModelDirectoryError, {"mlp_only_layers": [2]}, ["mlp_only_layers", "0 to 1", "[2]"]),
        (ModelDirectoryError, {"mlp_only_layers": ["0"]}, ["mlp_only_layers", "['0']"]),
        (ModelDirectoryError, {"mlp_only_layers": [1]}, ["model.layers.1.mlp.experts.0"]),
        (ModelDirectoryError, {"num_local_experts": 5}, ["mlp.gate.weight", "(4, 32)", "(5, 32)"]),
        (UnsupportedModelError, {"mlp_only_layers": [0, 1]}, ["leave no layer with experts"]),
        (UnsupportedModelError, {"decoder_sparse_step": 3}, ["leave no layer with experts"]),
        (UnsupportedModelError, {"shared_expert_intermediate_size": 8}, ["shared_expert_intermediate_size"]),
    ],
)
def test_mixtures_that_cannot_be_trained_are_refused(
    error: type[Exception],
    changes: dict[str, Any],
    words: list[str],
    model_of: Callable[..., Any],
    tmp_path: Path,
) -> None:
    source, _ = model_of("qwen3-moe")
    (tmp_path / "model.safetensors").hardlink_to(source / "model.safetensors")
    config = {**json.loads((source / "config.json").read_text()), **changes}
    config = {key: value for key, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(error) as caught:
        MegatronPolicy(tmp_path)
    for word in [str(tmp_path), *words]:
        assert word in str(caught.value)


def test_both_names_of_the_number_of_experts_are_read(model_of: Callable[..., Any], tmp_path: Path) -> None:
    source, _ = model_of("qwen3-moe")
    config = json.loads((source / "config.json").read_text())
    expected = read_model_shape(source)
    config["num_experts"] = config.pop("num_local_experts")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model_shape(tmp_path) == expected
    assert expected.experts is not None
    assert (expected.experts.count, expected.experts.renormalise) == (4, True)
    del config["norm_topk_prob"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain = read_model_shape(tmp_path).experts
    assert plain == replace(expected.experts, renormalise=False)


# How megatron's Transformer Engine layers spell what the plain layers call otherwise.
_FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def _spelled_by_transformer_engine(name: str, mixture: bool) -> str:
    prefix, _, last = name.rpartition("layers.")
    number, _, rest = last.partition(".")
    if not prefix:
        return name
    if rest in _FUSED and not (mixture and rest.startswith("pre_mlp")):
        return f"{prefix}layers.{number}.{_FUSED[rest]}"
    if "local_experts" in rest:
        expert, part, kind = rest.removeprefix("mlp.experts.local_experts.").split(".")
        return f"{prefix}layers.{number}.mlp.experts.{part}.{kind}{expert}"
    return name


@pytest.mark.parametrize("kind", ["llama", "qwen2-tied", "qwen3-untied", "qwen3-moe-mixed"])
def test_the_table_knows_the_names_of_transformer_engines_layers(
    kind: str, model_of: Callable[..., Any], policy_of: Callable[..., Any]
) -> None:
    policy, source = policy_of(kind), model_of(kind)[0]
    table = WeightMap(read_model_shape(source))
    tensors = load_file(source / "model.safetensors")
    dense = {n for n in range(4) if f"model.layers.{n}.mlp.up_proj.weight" in tensors}
    fused = {}
    for name, weight in policy.model.named_parameters():
        layer = int(name.split("layers.")[1].split(".")[0]) if "layers." in name else -1
        empty = torch.nn.Parameter(torch.zeros_like(weight))
        fused[_spelled_by_transformer_engine(name, layer not in dense)] = empty
    assert any("layer_norm_weight" in name for name in fused)
    assert ("decoder.layers.1.mlp.experts.linear_fc1.weight3" in fused) == (kind == "qwen3-moe-mixed")
    shards = WeightShards(table, fused.items(), Placement())
    shards.fill(fused, tensors.__getitem__, source)
    streamed = dict(shards.gather(fused.items()))
    assert streamed.keys() == tensors.keys()
    assert all(torch.equal(streamed[name], tensors[name]) for name in tensors)


def test_transformer_engines_names_are_those_that_megatron_saves_under() -> None:
    """megatron renames its plain layers' norms to the fused ones in its own checkpoints."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    renamed = get_gpt_layer_local_spec().submodules.sharded_state_dict_keys_map
    assert {f"{old}weight": f"{new}weight" for old, new in renamed.items()} == _FUSED


def test_a_parameter_of_neither_spelling_and_one_under_both_are_refused(
    model_of: Callable[..., Any], policy_of: Callable[..., Any]
) -> None:
    policy, source = policy_of("llama"), model_of("llama")[0]
    table = WeightMap(read_model_shape(source))
    named = dict(policy.model.named_parameters())
    norm = named["decoder.layers.0.input_layernorm.weight"]
    twice = {**named, "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": norm}
    with pytest.raises(PolicyError, match=r"layers\.0\.input_layernorm\.weight"):
        WeightShards(table, twice.items(), Placement())
    with pytest.raises(PolicyError, match=r"no parameter decoder\.layers\.9"):
        table.entry("decoder.layers.9.input_layernorm.weight")
