"""Tiny models of each kind, and engines on them that the tests of one file share."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]

tools = importlib.import_module("packages.rl-generation.tests.vllm.lab")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """A process that has computed with several threads could not fork one that computes."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of the tiny models, written once."""
    folders: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in folders:
            folders[kind] = tools.write_model(kind, tmp_path_factory.mktemp(kind))
        return folders[kind]

    return folder


@pytest.fixture(scope="module")
def labs(
    model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Any]]:
    """Engines that the tests of a file share, one for each kind of model, started when first asked for."""
    from rl_generation.vllm import VllmEngine

    running: dict[str, Any] = {}

    def lab(kind: str) -> Any:
        if kind not in running:
            folder = model_folder(kind)
            engine = VllmEngine(tools.settings_for(folder, f"vllm-{kind}"))
            engine.start()
            running[kind] = tools.Lab(
                engine, folder, tools.Reference(folder, tmp_path_factory.mktemp(f"{kind}-states"))
            )
        return running[kind]

    yield lab
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: one.engine.shutdown(20.0), running.values()))
