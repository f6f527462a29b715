"""The README's examples with vLLM run as they stand."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file


@pytest.fixture
def examples() -> list[str]:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def run(example: str, **names: object) -> None:
    exec(compile(example, "README.md", "exec"), names)


def test_one_engine(
    examples: list[str], model_folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_folder("tied")
    state = load_file(folder / "model.safetensors")
    run(examples[1], folder=folder, weights={name: 1.5 * tensor for name, tensor in state.items()})
    printed = capsys.readouterr().out
    assert re.search(r"\(\d+, .*\) \(-\d\.\d+, .*\) 0\n1\n", printed), printed


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is prepared that a reader would have to know of; what the example started is ended."""
    import ray

    monkeypatch.setenv("RL_ACTOR_ENVS_SYSTEM", "1")
    assert not ray.is_initialized()
    yield
    ray.shutdown()


def test_two_replicas(
    examples: list[str],
    model_folder: Callable[[str], Path],
    no_cluster: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(examples[2], folder=model_folder("tied"))
    printed = capsys.readouterr().out
    assert "'vllm-0': <ReplicaState.HEALTHY" in printed
    assert "'vllm-1': <ReplicaState.HEALTHY" in printed
    assert re.search(r"\} 0$", printed, re.MULTILINE)
