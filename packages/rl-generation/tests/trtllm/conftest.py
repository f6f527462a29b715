"""The double of TensorRT-LLM, tiny models for it, and engines on it."""

from __future__ import annotations

import asyncio
import functools
import importlib
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_generation.trtllm import TrtllmEngine, TrtllmSettings

VOCAB, CONTEXT = 61, 48
STOP = 7
DOUBLE = Path(__file__).parent / "double"
RELEASES = ("1.2.1", "1.3.0")


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


@pytest.fixture(params=RELEASES, scope="module")
def release(request: pytest.FixtureRequest) -> str:
    """Each release that the contract tells apart; tests of one of them parametrise it themselves."""
    return request.param


@pytest.fixture(scope="module")
def imported_double(release: str) -> Iterator[Any]:
    """The double as the importable package ``tensorrt_llm``."""
    _forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRTLLM_DOUBLE_RELEASE", release)
        patch.syspath_prepend(str(DOUBLE))
        package = importlib.import_module("tensorrt_llm")
        assert package.IS_A_DOUBLE
        assert package.__version__ == release
        yield package
    _forget()


@pytest.fixture
def quirks(imported_double: Any) -> Iterator[Any]:
    """What this test makes the double do."""
    module = importlib.import_module("tensorrt_llm._double.quirks")
    yield module.QUIRKS
    module.reset()


@pytest.fixture
def double(imported_double: Any, quirks: Any) -> Any:
    """The double, well-behaved."""
    return imported_double


@functools.cache
def _load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@dataclass(frozen=True)
class TinyModel:
    """A random Qwen3 in float32, its folder, and what transformers says of it."""

    folder: Path
    tied: bool

    def load(self) -> Any:
        """The model itself, for reading."""
        return _load(self.folder)

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name, in HF layout, as the folder has them."""
        state = self.load().state_dict()
        return {name: t for name, t in state.items() if not (self.tied and name == "lm_head.weight")}


@torch.inference_mode()
def logprobs_of(
    model: Any, prompt: tuple[int, ...], tokens: tuple[int, ...], temperature: float = 1.0
) -> list[float]:
    """Of ``tokens`` behind ``prompt``, one forward pass of transformers."""
    ids = torch.tensor([[*prompt, *tokens]])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def _write(folder: Path, *, tied: bool, seed: int) -> TinyModel:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        dtype="float32",
        bos_token_id=None,
        eos_token_id=STOP,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return TinyModel(folder, tied)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    """``tied`` and ``untied``, and a second set of weights for each: ``tied-next``, ``untied-next``."""
    pytest.importorskip("transformers")
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("trtllm-models")
    state = torch.get_rng_state()
    made = {
        name + suffix: _write(root / (name + suffix), tied=name == "tied", seed=seed)
        for name in ("tied", "untied")
        for suffix, seed in (("", 1), ("-next", 2))
    }
    torch.set_rng_state(state)
    return made


Scenario = Callable[[TrtllmEngine], Awaitable[Any]]
RunOnEngine = Callable[..., Any]


@pytest.fixture
def on_engine(double: Any, models: dict[str, TinyModel]) -> RunOnEngine:
    """Start an engine on a loop, run a scenario with it, shut it down; returns what the scenario returns."""

    def run(scenario: Scenario, model: str = "untied", *, stale: bool = False, **settings: Any) -> Any:
        async def whole() -> Any:
            chosen = TrtllmSettings(
                str(models[model].folder), max_context=settings.pop("max_context", CONTEXT), **settings
            )
            engine = TrtllmEngine(chosen, check=lambda: None)
            await engine.start(stale=stale)
            try:
                async with asyncio.timeout(30):
                    return await scenario(engine)
            finally:
                await engine.shutdown(2.0)

        return asyncio.run(whole())

    return run
