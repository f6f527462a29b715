"""What is missing is said at once, all of it, before anything is imported."""

from __future__ import annotations

import asyncio
import pickle
import sys
from dataclasses import dataclass, field

import pytest

from rl_generation.failures import UnavailableBackendError
from rl_generation.trtllm import TrtllmEngine, TrtllmGeneration, TrtllmSettings
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
    ("setting", "named"),
    [
        ({"max_context": 1}, "max_context"),
        ({"max_batch": 0}, "max_batch"),
        ({"gpu_memory_fraction": 1.0}, "gpu_memory_fraction"),
        ({"worker_gpu_share": 0.0}, "worker_gpu_share"),
        ({"probe_timeout_s": 0.0}, "probe_timeout_s"),
        ({"placement_groups": ("group",)}, "bundle_indices"),
        ({"placement_groups": ("group",), "bundle_indices": ((0, 1),)}, "one bundle per worker"),
    ],
)
def test_a_setting_out_of_range_is_named(setting: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        TrtllmSettings("model", **setting)  # type: ignore[arg-type]
