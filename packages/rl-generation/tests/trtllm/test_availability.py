"""What is missing is said at once, all of it, before anything is imported."""

from __future__ import annotations

import asyncio
import pickle
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rl_generation.failures import UnavailableBackendError
from rl_generation.trtllm import TrtllmEngine, TrtllmGeneration, TrtllmSettings
from rl_generation.trtllm.api import load_api
from rl_generation.trtllm.availability import ThisMachine, missing, require_available


@dataclass
class Made:
    """A machine that has what it is given."""

    packages: set[str] = field(default_factory=lambda: {"tensorrt_llm", "ray"})
    libraries: set[str] = field(default_factory=lambda: {"libcuda.so.1"})
    devices: int = 1

    def has_package(self, name: str) -> bool:
        return name in self.packages

    def loads_library(self, name: str) -> bool:
        return name in self.libraries

    def gpus(self) -> int:
        return self.devices


def test_nothing_is_missing_where_all_is_there() -> None:
    assert missing(Made()) == []
    require_available(Made())


@pytest.mark.parametrize(
    ("machine", "named"),
    [
        (Made(packages={"ray"}), "tensorrt_llm"),
        (Made(packages={"tensorrt_llm"}), "ray"),
        (Made(libraries=set()), "libcuda.so.1"),
        (Made(devices=0), "GPU"),
    ],
)
def test_what_is_missing_is_named_alone(machine: Made, named: str) -> None:
    (complaint,) = missing(machine)
    assert named in complaint


def test_everything_that_is_missing_is_said_in_one_message() -> None:
    with pytest.raises(UnavailableBackendError) as caught:
        require_available(Made(packages=set(), libraries=set(), devices=0))
    for named in ("tensorrt_llm", "extra `trtllm`", "ray", "libcuda.so.1", "driver", "GPU"):
        assert named in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_this_machine_is_looked_at_without_an_import() -> None:
    before = set(sys.modules)
    missing(ThisMachine())
    assert {name.partition(".")[0] for name in set(sys.modules) - before} <= {"ctypes"}


@pytest.mark.skipif(ThisMachine().has_package("tensorrt_llm"), reason="TensorRT-LLM is installed here")
def test_an_engine_on_this_machine_says_what_is_missing(tmp_path: object) -> None:
    settings = TrtllmSettings(str(tmp_path))
    with pytest.raises(UnavailableBackendError, match="tensorrt_llm"):
        asyncio.run(TrtllmEngine(settings).start())
    with pytest.raises(UnavailableBackendError, match="tensorrt_llm"):
        TrtllmGeneration(settings)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("", "AsyncLLM"),
        ("raise RuntimeError('no driver')", "no driver"),
        ("import not_there", "not_there"),
    ],
)
def test_a_package_that_is_too_old_or_broken_is_unavailable(
    source: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorrt_llm.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tensorrt_llm", raising=False)
    try:
        with pytest.raises(UnavailableBackendError, match=named) as caught:
            load_api()
    finally:
        sys.modules.pop("tensorrt_llm", None)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"max_context": 1}, "max_context"),
        ({"max_batch": 0}, "max_batch"),
        ({"gpu_memory_fraction": 1.0}, "gpu_memory_fraction"),
        ({"worker_gpu_share": 0.0}, "worker_gpu_share"),
        ({"probe_timeout_s": 0.0}, "probe_timeout_s"),
        ({"seed": -1}, "seed"),
        ({"llm_arguments": {"max_seq_len": 9}}, "max_context"),
        ({"llm_arguments": {"sampler_type": "TRTLLMSampler"}}, "not free"),
        ({"llm_arguments": {"speculative_config": None}}, "score"),
        ({"placement_groups": ("group",)}, "bundle_indices"),
        ({"placement_groups": ("group",), "bundle_indices": ((0, 1),)}, "one bundle per worker"),
    ],
)
def test_a_setting_out_of_range_is_named(setting: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        TrtllmSettings("model", **setting)  # type: ignore[arg-type]
