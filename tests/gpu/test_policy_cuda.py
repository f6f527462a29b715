"""The policy on one GPU computes what it computes on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.gpu import policy_numbers

ROOT = Path(__file__).resolve().parents[2]
Numbers = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Numbers]:
    """Of a device and a type; each computed once, in a process of its own."""
    folder = tmp_path_factory.mktemp("policy")
    policy_numbers.write_model(folder / "model")
    known: dict[Any, Numbers] = {}

    def compute(device: str, dtype: str = "float32", threads: int = 1) -> Numbers:
        key = (device, dtype, threads)
        if key not in known:
            output = folder / f"{device}-{dtype}-{threads}.safetensors"
            hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
            subprocess.run(
                [sys.executable, "-m", "tests.gpu.policy_numbers", str(folder / "model"), dtype, str(output)],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": str(threads), **hidden},
                check=True,
                timeout=600,
            )
            known[key] = load_file(output)
        return known[key]

    return compute


def worst(found: Numbers, expected: Numbers, prefix: str) -> float:
    """Largest difference, relative to the largest number of each tensor."""
    names = [name for name in expected if name.startswith(prefix)]
    assert names
    assert found.keys() == expected.keys()
    return max(float((found[n] - expected[n]).abs().max() / expected[n].abs().max()) for n in names)


def test_numbers_on_the_cpu_do_not_depend_on_threads(numbers: Callable[..., Numbers]) -> None:
    """So that what is compared with below is a fact of the policy, and this file works where no GPU is."""
    one, two = numbers("cpu"), numbers("cpu", threads=2)
    assert worst(two, one, "") < 1e-4
    assert float((one["after"] - one["before"]).sum()) > 1.0


needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="NO GPU HERE: the policy on CUDA was not run"
)


@needs_cuda
def test_float32_on_the_gpu_equals_the_cpu(numbers: Callable[..., Numbers]) -> None:
    cpu, cuda = numbers("cpu"), numbers("cuda")
    figures = {prefix: worst(cuda, cpu, prefix) for prefix in ("before", "gradient.", "steps", "after")}
    print(f"relative difference, {torch.cuda.get_device_name()}: {figures}")
    assert figures["before"] < 1e-5
    assert figures["gradient."] < 1e-4
    assert figures["steps"] < 1e-4
    assert figures["after"] < 1e-3


@needs_cuda
def test_bfloat16_on_the_gpu_is_near_float32(numbers: Callable[..., Numbers]) -> None:
    cpu, cuda = numbers("cpu"), numbers("cuda", dtype="bfloat16")
    assert worst(cuda, cpu, "before") < 0.05
    assert worst(cuda, cpu, "after") < 0.2
