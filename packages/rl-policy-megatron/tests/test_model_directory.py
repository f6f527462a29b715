"""Model directories that cannot be trained are refused with file, key and remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_policy_megatron import MegatronPolicy, ModelDirectoryError, UnsupportedModelError


@pytest.fixture
def copy_of(model_of: Callable[..., Any], tmp_path: Path) -> Callable[..., Path]:
    """``copy_of(kind, **config_changes)`` → a copy of the model directory; ``None`` removes a key."""

    def copy(kind: str, **changes: Any) -> Path:
        directory = tmp_path / "model"
        shutil.copytree(model_of(kind)[0], directory)
        config = json.loads((directory / "config.json").read_text())
        config.update(changes)
        config = {key: value for key, value in config.items() if value is not None}
        (directory / "config.json").write_text(json.dumps(config))
        return directory

    return copy


def _edit(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, ["model_type 'gpt2'", "llama, qwen2, qwen3"]),
        ({"model_type": None}, ["model_type None"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "SwiGLU"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"mlp_bias": True}, ["mlp_bias"]),
        ({"use_sliding_window": True}, ["use_sliding_window"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, ["rope_parameters.rope_type 'yarn'"]),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, ["rope_scaling.rope_type 'linear'"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope_scaling and rope_parameters differ"]),
        ({"rope_scaling": {"type": "yarn"}}, ["rope_scaling and rope_parameters differ"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
    ],
)
def test_unsupported_models_name_file_key_and_value(
    changes: dict[str, Any], words: list[str], copy_of: Callable[..., Path]
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        MegatronPolicy(copy_of("llama", **changes))
    for word in ["config.json", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, ["hidden_size", "None"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"vocab_size": "61"}, ["vocab_size", "'61'"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads 4", "num_key_value_heads 3"]),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
            ["rope_parameters.low_freq_factor", "None"],
        ),
        ({"rope_parameters": "llama3"}, ["config.json: rope_parameters must be a mapping, got 'llama3'"]),
        ({"rope_parameters": {"rope_theta": "big"}}, ["rope_parameters.rope_theta must be a finite number"]),
        ({"rms_norm_eps": "tiny"}, ["rms_norm_eps must be a finite number > 0, got 'tiny'"]),
        ({"head_dim": "16"}, ["head_dim must be an integer >= 1, got '16'"]),
        ({"tie_word_embeddings": "no"}, ["tie_word_embeddings must be True or False, got 'no'"]),
        ({"vocab_size": 60}, ["model.embed_tokens.weight", "(61, 32)", "(60, 32)"]),
        ({"num_hidden_layers": 1}, ["model.layers.1."]),
        ({"num_hidden_layers": 3}, ["model.layers.2.input_layernorm.weight"]),
        ({"head_dim": 12}, ["self_attn.o_proj.weight", "(32, 32)", "(32, 48)"]),
    ],
)
def test_contradictions_name_file_and_tensor(
    changes: dict[str, Any], words: list[str], copy_of: Callable[..., Path]
) -> None:
    with pytest.raises(ModelDirectoryError) as caught:
        MegatronPolicy(copy_of("llama", **changes))
    for word in words:
        assert word in str(caught.value)


def test_missing_files_are_named(tmp_path: Path, copy_of: Callable[..., Path]) -> None:
    with pytest.raises(ModelDirectoryError, match=r"config\.json does not exist"):
        MegatronPolicy(tmp_path / "nowhere")
    directory = copy_of("llama")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelDirectoryError, match="safetensors format"):
        MegatronPolicy(directory)
    (directory / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ModelDirectoryError, match="cannot be read as safetensors"):
        MegatronPolicy(directory)
    (directory / "config.json").write_text("[]")
    with pytest.raises(ModelDirectoryError, match="JSON object"):
        MegatronPolicy(directory)


@pytest.mark.parametrize("name", ["../outside.safetensors", "absent.safetensors"])
def test_n2_an_index_cannot_point_outside_the_directory(name: str, copy_of: Callable[..., Path]) -> None:
    """N2: a file name found in data is no path."""
    directory = copy_of("llama")
    shutil.move(directory / "model.safetensors", directory.parent / "outside.safetensors")
    index = {"weight_map": {"model.norm.weight": name}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelDirectoryError, match="not beside it"):
        MegatronPolicy(directory)


def test_surplus_tensors_are_refused_but_stored_frequencies_are_not(copy_of: Callable[..., Path]) -> None:
    directory = copy_of("llama")
    _edit(directory, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    MegatronPolicy(directory).shutdown()
    _edit(directory, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}))
    with pytest.raises(ModelDirectoryError, match=r"q_proj\.bias"):
        MegatronPolicy(directory)


def test_h11_tied_config_with_a_head_of_its_own_is_refused(copy_of: Callable[..., Path]) -> None:
    """H11: config.json says tied, the tensors are not: the head must not be lost silently."""
    directory = copy_of("qwen3-tied")
    _edit(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    MegatronPolicy(directory).shutdown()
    _edit(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(ModelDirectoryError, match="set tie_word_embeddings to false"):
        MegatronPolicy(directory)


def test_a_refused_model_leaves_no_process_state(copy_of: Callable[..., Path]) -> None:
    import torch.distributed as dist

    directory = copy_of("llama", vocab_size=60)
    with pytest.raises(ModelDirectoryError):
        MegatronPolicy(directory)
    assert not dist.is_initialized()
