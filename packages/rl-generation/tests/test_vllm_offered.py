"""Names that vLLM does not know, and a cache that is too small, are refused before anything loads."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rl_generation.failures import GenerationError
from rl_generation.server.reservation import ListenSettings
from rl_generation.server.settings import ServerSettings
from rl_generation.vllm import VllmEngine, VllmSettings, VllmWorker, engine, offered
from rl_generation.vllm.kv_cache import CacheShape, least_kv_cache_bytes
from rl_generation.vllm.server import VllmServerSettings


@pytest.fixture(autouse=True)
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A vLLM for CPUs that cannot be imported."""
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine/arg_utils.py").write_text(
        "class EngineArgs:\n    seed: int = 0\n\nclass AsyncEngineArgs(EngineArgs):\n    log: bool = True\n"
    )
    older = tmp_path / "entrypoints/openai/tool_parsers"
    older.mkdir(parents=True)
    (older / "__init__.py").write_text("_TOOL_PARSERS_TO_REGISTER: dict = {'hermes': ('a', 'B')}\n")
    (tmp_path / "reasoning").mkdir()
    (tmp_path / "reasoning/__init__.py").write_text("_REASONING_PARSERS_TO_REGISTER = {'qwen3': ()}\n")
    monkeypatch.setattr(offered, "_folders", lambda: [tmp_path])
    monkeypatch.setattr(engine, "is_cpu_build", lambda: True)
    return tmp_path


def test_names_are_read_from_files_that_are_never_imported() -> None:
    assert offered.engine_argument_names() == {"seed", "log"}
    assert offered.tool_parser_names() == {"hermes"}
    assert offered.reasoning_parser_names() == {"qwen3"}


def test_where_the_files_are_others_nothing_is_claimed(files: Path) -> None:
    (files / "engine/arg_utils.py").write_text("def broken(:")
    (files / "reasoning/__init__.py").write_text("TABLE = {}")
    offered._parsed.cache_clear()
    assert offered.engine_argument_names() is None
    assert offered.reasoning_parser_names() is None
    assert offered.unknown_name("anything", None, whole_list=True) is None


def test_an_unknown_argument_ends_the_start_before_vllm_is_imported() -> None:
    one = VllmEngine(VllmSettings("m", engine_arguments={"lod": True}))
    with pytest.raises(GenerationError, match=r"vllm-0: engine_arguments has 'lod'.*did you mean log\?"):
        one.start()


@pytest.mark.parametrize("key", ["tool_parser", "reasoning_parser"])
def test_an_unknown_parser_ends_the_start_before_anything_is_bound_or_loaded(key: str) -> None:
    contract = ServerSettings("policy", 8, 8)
    wrong: dict[str, Any] = {key: "hermez"}
    server = VllmServerSettings(contract, **wrong)
    worker = VllmWorker(VllmSettings("m"), ListenSettings(), server)
    with pytest.raises(GenerationError, match=f"vllm-0: {key}='hermez' is not a parser.*it knows"):
        asyncio.run(worker.start())


@pytest.mark.parametrize(
    ("settings", "tokens", "heads", "bytes_each"),
    [
        ({"dtype": "float32"}, 512, 4, 4),
        ({"dtype": "bfloat16", "max_model_len": 100}, 256, 4, 2),
        ({"dtype": "float16", "engine_arguments": {"block_size": 32}}, 352, 4, 2),
        ({"dtype": "float32", "tensor_parallel_size": 2}, 512, 2, 4),
        ({"dtype": "float32", "tensor_parallel_size": 8}, 512, 1, 4),
    ],
)
def test_the_least_cache_keeps_one_request_in_whole_blocks_beside_vllms_own(
    settings: dict[str, Any], tokens: int, heads: int, bytes_each: int
) -> None:
    shape = CacheShape(layers=3, kv_heads=4, head_dim=32, context=300)
    least = least_kv_cache_bytes(VllmSettings("m", **settings), shape, cpu=True)
    assert least == tokens * 2 * 3 * heads * 32 * bytes_each


def test_a_cache_below_it_ends_the_start_with_the_least(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"dtype": "float32", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64,'
        ' "max_position_embeddings": 128}'
    )
    least = 2 * 128 * 2 * 2 * 4 * 16 * 4
    with pytest.raises(GenerationError, match=f"vllm-0: kv_cache_bytes: 99 is too small.*at least {least}"):
        VllmEngine(VllmSettings(str(tmp_path), kv_cache_bytes=99)).start()
