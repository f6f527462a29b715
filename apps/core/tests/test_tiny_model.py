from __future__ import annotations

import json

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_app_core.config.sections import TinyModel
from rl_app_core.demonstrations import tokenizer_texts
from rl_app_core.tiny_model import MARKUP, make_tokenizer, write_tiny_model


def test_the_directory_is_one_that_transformers_loads_whole(tmp_path):
    write_tiny_model(tmp_path, TinyModel(), tokenizer_texts(), seed=0)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert sum(weight.numel() for weight in model.parameters()) < 130_000
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert model.config.vocab_size % 16 == 0
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert len(tokenizer) <= model.config.vocab_size


def test_the_same_seed_makes_the_same_files_and_another_seed_other_weights(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_tiny_model(tmp_path / name, TinyModel(), tokenizer_texts(), seed=seed)
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in "ac")
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert (tmp_path / "a/tokenizer.json").read_bytes() == (tmp_path / "c/tokenizer.json").read_bytes()


def test_weights_have_the_spread_that_was_asked_for(tmp_path):
    write_tiny_model(tmp_path, TinyModel(initializer_range=0.05), tokenizer_texts(), seed=0)
    weights = load_file(tmp_path / "model.safetensors")
    assert abs(float(weights["model.layers.0.mlp.up_proj.weight"].std()) - 0.05) < 0.002
    assert bool((weights["model.norm.weight"] == 1).all())
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is True


def test_digits_and_markup_are_single_tokens(tokenizer):
    text = "<think>7+5+0=12</think>82"
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode(text))
    assert tokens == ["<think>", "7", "+", "5", "+", "0", "=", "1", "2", "</think>", "8", "2"]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    for mark in MARKUP:
        assert len(tokenizer.encode(mark)) == 1
    assert not set(MARKUP) & set(tokenizer.all_special_tokens)


def test_digits_stay_apart_however_often_a_number_was_seen():
    tokenizer = make_tokenizer(["37 is 37 and 37"] * 50, 512)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("37 is")) == ["3", "7", "Ġis"]
