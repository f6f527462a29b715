"""What cannot work is refused by a group before it asks Ray for a rank, as one process refuses it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_policy_megatron import (
    LoraSettings,
    MegatronPolicy,
    ModelDirectoryError,
    ParallelLayout,
    PolicyError,
    PolicySettings,
    UnsupportedModelError,
)
from rl_policy_megatron.fit import fitting_shape

# No rank can be started: what asks Ray for its class ends there. Without CUDA, whatever this machine has.
SCRIPT = """
import json, sys
import ray, torch
from rl_policy_megatron import LoraSettings, ParallelLayout, PolicySettings
from rl_policy_megatron.group import GroupSettings, MegatronPolicyGroup, RankSettings


class Asked(BaseException):
    pass


def asked(*_, **__):
    raise Asked


ray.is_initialized = lambda: True
ray.cluster_resources = lambda: {"CPU": 4.0}
ray.remote = asked
torch.cuda.is_available = lambda: False
for line in sys.stdin:
    directory, world, layout, targets, gpus = json.loads(line)
    lora = LoraSettings(targets=tuple(targets)) if targets else None
    policy = PolicySettings(layout=ParallelLayout(**layout), lora=lora)
    try:
        MegatronPolicyGroup(RankSettings(directory, policy, world=world), GroupSettings(num_gpus=gpus))
    except Asked:
        told = "asked"
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    heavy = [name for name in ("megatron", "megatron.core") if name in sys.modules]
    print(json.dumps([told, heavy]), flush=True)
"""

MISFITS: dict[str, tuple[str, int, dict[str, Any], list[str]]] = {
    "num_attention_heads is 4": ("qwen2", 3, {"tensor": 3}, []),
    "num_key_value_heads is 2": ("qwen2", 4, {"tensor": 4}, []),
    "num_hidden_layers is 2": ("qwen2", 3, {"pipeline": 3}, []),
    "a qwen2 model has no experts": ("qwen2", 2, {"expert": 2}, []),
    "num_experts is 4": ("qwen3-moe", 3, {"expert": 3}, []),
    "with layout.tensor = 2 needs CUDA": ("qwen3-moe", 2, {"tensor": 2, "sequence_parallel": True}, []),
    "lora.targets names up_proj": ("qwen3-moe", 2, {}, ["up_proj"]),
    "model_type 'gpt9'": ("unknown", 2, {}, []),
    "cannot be read as JSON": ("broken", 2, {}, []),
    "config.json does not exist": ("empty", 2, {}, []),
}


def directory_of(kind: str, model_of: Callable[..., Any], folder: Path) -> str:
    contents = {"unknown": '{"model_type": "gpt9"}', "broken": "{", "empty": None}
    if kind not in contents:
        return str(model_of(kind)[0])
    (folder / kind).mkdir()
    if (content := contents[kind]) is not None:
        (folder / kind / "config.json").write_text(content)
    return str(folder / kind)


def test_a_misfit_is_refused_without_a_rank_and_without_megatron_in_the_words_of_one_process(
    model_of: Callable[..., Any], tmp_path: Path
) -> None:
    asked = [
        (directory_of(kind, model_of, tmp_path), world, layout, targets, 0)
        for kind, world, layout, targets in MISFITS.values()
    ]
    moe, dense = str(model_of("qwen3-moe")[0]), str(model_of("qwen2")[0])
    whole = {"tensor": 2, "sequence_parallel": True}
    fitting = [
        (dense, 4, {"tensor": 2, "pipeline": 2}, [], 0),
        (moe, 2, {"expert": 2}, ["q_proj"], 0),
        # Its ranks have GPUs, whatever this machine has.
        (moe, 2, whole, [], 1),
        # Ranks of other machines may have it.
        (str(tmp_path / "elsewhere"), 2, {}, [], 0),
    ]
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input="".join(json.dumps(line) + "\n" for line in [*asked, *fitting]),
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "RL_ACTOR_ENVS_SYSTEM": "1"},
        check=False,
    )
    told = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(told) == len(asked) + len(fitting), ran.stderr
    for (text, (directory, _, layout, targets, _)), (found, heavy) in zip(
        zip(MISFITS, asked, strict=True), told, strict=False
    ):
        lora = LoraSettings(targets=tuple(targets)) if targets else None
        with pytest.raises(PolicyError) as caught:
            MegatronPolicy(directory, PolicySettings(layout=ParallelLayout(**layout), lora=lora))
        assert text in found
        assert found == f"{type(caught.value).__name__}: {caught.value}"
        assert not heavy
    assert [found for found, _ in told[len(asked) :]] == ["asked"] * len(fitting)


def test_with_cuda_experts_and_tensor_parallelism_need_sequence_parallelism(
    model_of: Callable[..., Any],
) -> None:
    """megatron raises a ValueError of its own for it, but only in the first update."""
    directory = model_of("qwen3-moe")[0]

    def settings(**layout: Any) -> PolicySettings:
        return PolicySettings(layout=ParallelLayout(**layout))

    with pytest.raises(UnsupportedModelError, match=r"set layout\.sequence_parallel"):
        fitting_shape(directory, settings(tensor=2), cuda=True)
    assert fitting_shape(directory, settings(tensor=2, sequence_parallel=True), cuda=True).experts
    assert fitting_shape(model_of("qwen2")[0], settings(tensor=2), cuda=False).experts is None
    with pytest.raises(ModelDirectoryError, match=r"config\.json does not exist"):
        fitting_shape(directory / "nowhere", settings(), cuda=True)
