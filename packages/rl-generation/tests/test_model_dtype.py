"""``auto`` is the checkpoint's type, whatever an engine would make of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rl_generation.model_dtype import checkpoint_dtype
from rl_generation.trtllm.llm_arguments import llm_arguments
from rl_generation.trtllm.settings import TrtllmSettings
from rl_generation.vllm.arguments import engine_arguments
from rl_generation.vllm.settings import VllmSettings


def folder_of(path: Path, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"dtype": "float32"}, "float32"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "torch.float16"}, "float16"),
        ({"text_config": {"dtype": "float32"}}, "float32"),
        ({"dtype": "float8_e4m3fn"}, None),
        ({}, None),
    ],
)
def test_the_configuration_names_it(tmp_path: Path, config: dict[str, Any], found: str | None) -> None:
    assert checkpoint_dtype(folder_of(tmp_path, **config)) == found


def test_where_it_does_not_the_weights_say(tmp_path: Path) -> None:
    few, many = torch.zeros(2, dtype=torch.float32), torch.zeros(8, dtype=torch.bfloat16)
    save_file({"norm": few, "matrix": many}, folder_of(tmp_path) / "model.safetensors")
    assert checkpoint_dtype(tmp_path) == "bfloat16"
    assert checkpoint_dtype(tmp_path / "nowhere") is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_both_engines_are_told_it(tmp_path: Path, dtype: str) -> None:
    folder = str(folder_of(tmp_path, dtype=dtype))
    api: Any = SimpleNamespace(kv_cache_config=dict, empties_prefix_cache=True)
    assert engine_arguments(VllmSettings(folder), cpu=True)["dtype"] == dtype
    assert engine_arguments(VllmSettings(folder), cpu=False)["dtype"] == dtype
    assert llm_arguments(TrtllmSettings(folder), api)["dtype"] == dtype
    assert engine_arguments(VllmSettings(folder, dtype="float16"), cpu=True)["dtype"] == "float16"
