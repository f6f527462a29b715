from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from rl_gym_bridge.supervision.processes import RUN_ID_VARIABLE

# They run where vLLM is: see tests/vllm_environment.
collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_vllm_*.py"]

# No run of these tests takes a quarter of this on an idle machine.
DEADLINE_S = 900


@dataclass(frozen=True)
class Run:
    """A finished ``grpo`` command and its run directory."""

    directory: Path
    process: subprocess.CompletedProcess[str]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.directory / "summary.json").read_text())

    @property
    def metrics(self) -> dict[int, dict[str, float]]:
        lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        return {record["step"]: record for record in map(json.loads, lines)}

    @property
    def rollouts(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "rollouts.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def grpo() -> Callable[..., Run]:
    """Run a ``grpo`` command to its end: ``grpo(*words, directory=RUN_DIR)``."""
    return _run_grpo


@pytest.fixture(scope="session")
def make_run() -> type[Run]:
    """For tests that start a command themselves."""
    return Run


@pytest.fixture(scope="session")
def distill() -> Callable[..., Run]:
    """As ``grpo``, of the command ``distill``."""

    def run(*words: str | Path, directory: Path, expect: int = 0) -> Run:
        return _run_command("rl_app_distillation", words, directory, expect)

    return run


@pytest.fixture(scope="session")
def single_controller() -> Callable[..., Run]:
    """As ``grpo``, of the command ``single-controller``."""

    def run(*words: str | Path, directory: Path, expect: int = 0) -> Run:
        return _run_command("rl_app_single_controller", words, directory, expect)

    return run


def _run_grpo(*words: str | Path, directory: Path, expect: int = 0) -> Run:
    return _run_command("rl_app_grpo", words, directory, expect)


def _run_command(module: str, words: Sequence[str | Path], directory: Path, expect: int) -> Run:
    """Run the command to its end, off a terminal; its output is kept and its exit code checked."""
    process = subprocess.run(
        [sys.executable, "-m", module, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "RL_ACTOR_ENVS_SYSTEM": "1"},
        check=False,
    )
    assert process.returncode == expect, f"{process.stdout}\n{process.stderr}"
    return Run(directory, process)


@dataclass(frozen=True)
class WatchedRun(Run):
    """A run that has ended, with all processes that were seen to run for it."""

    seen: frozenset[psutil.Process]

    def assert_nothing_is_left(self) -> None:
        _, alive = psutil.wait_procs(self.seen, timeout=30)
        assert alive == []
        assert gym_processes(self.directory) == []


def gym_processes(directory: Path) -> list[psutil.Process]:
    """Every process of a run's Gym, also those that have left their session: all inherit its name."""
    names = {folder.name.removeprefix("gym-") for folder in directory.glob("logs/gym/gym-*")}
    found = []
    for process in psutil.process_iter() if names else ():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(RUN_ID_VARIABLE) in names and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


Meanwhile = Callable[[psutil.Process, list[psutil.Process]], None]


@pytest.fixture(scope="session")
def gym_job(gym_python: str) -> Callable[..., WatchedRun]:
    """Run a ``grpo`` command on a real Gym to its end: ``gym_job(*words, directory=RUN_DIR)``.

    ``meanwhile(driver, processes of its Gym)`` is called again and again as long as it runs.
    """

    def job(*words: str | Path, directory: Path, expect: int = 0, meanwhile: Meanwhile | None = None):
        process = subprocess.Popen(
            [sys.executable, "-m", "rl_app_grpo", *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "RL_ACTOR_ENVS_SYSTEM": "1", "RL_GYM_PYTHON": gym_python},
        )
        seen: set[psutil.Process] = set()
        deadline = time.monotonic() + DEADLINE_S / 2
        try:
            driver = psutil.Process(process.pid)
            while process.poll() is None and time.monotonic() < deadline:
                of_gym = gym_processes(directory)
                seen.update(of_gym)
                with contextlib.suppress(psutil.Error):
                    seen.update(driver.children(recursive=True))
                if meanwhile is not None:
                    meanwhile(driver, of_gym)
                time.sleep(0.2)
        finally:
            process.kill()
        out, err = process.communicate(timeout=60)
        assert process.returncode == expect, f"{out}\n{err}"
        done = subprocess.CompletedProcess(list(words), process.returncode, out, err)
        return WatchedRun(directory, done, frozenset(seen))

    return job


@pytest.fixture(scope="session")
def parity_model() -> Callable[[Path, Callable[..., Any]], Path]:
    """``parity_model(directory, build)``: a model that says 0 or 1, or ends its answer, more often than else.

    ``build`` gets ``vocab_size`` and ``eos_token_id`` and returns a model of ``transformers`` with an untied
    head, whose random weights are otherwise kept.
    """
    return _write_parity_model


def _write_parity_model(directory: Path, build: Callable[..., Any]) -> Path:
    import torch
    from safetensors.torch import load_file, save_file

    from rl_app_core.tiny_model import make_tokenizer

    tokenizer = make_tokenizer(["user\nassistant\n", "Is odd ?"], 512)
    tokenizer.save_pretrained(directory)
    torch.manual_seed(5)
    model = build(vocab_size=-(-len(tokenizer) // 16) * 16, eos_token_id=tokenizer.eos_token_id)
    model.float().save_pretrained(directory)
    # The head has no bias. One direction that every embedding shares stands in for it.
    weights = load_file(directory / "model.safetensors")
    likely = [*tokenizer.convert_tokens_to_ids(["0", "1"]), tokenizer.eos_token_id]
    weights["model.embed_tokens.weight"][:, 0] = 3.0
    weights["lm_head.weight"][likely, 0] = 0.8
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="session")
def parity_rows() -> Callable[[int], list[dict[str, Any]]]:
    """``parity_rows(count)``: rows that ask whether a number is odd."""
    return lambda count: [
        {
            "responses_create_params": {"input": [{"role": "user", "content": f"Is {number} odd?"}]},
            "agent_ref": {"name": "final_number"},
            "answer": str(number % 2),
        }
        for number in range(count)
    ]


@pytest.fixture(scope="session")
def learned(tmp_path_factory) -> Run:
    """The default job, half as long as its recipe, with every checkpoint kept."""
    directory = tmp_path_factory.mktemp("default") / "run"
    words = ["run", "-o", directory, "algorithm.steps=15", "checkpointing.every=5", "checkpointing.keep=9"]
    return _run_grpo(*words, directory=directory)


@pytest.fixture
def branch(learned, tmp_path) -> Callable[[int, Sequence[str]], Run]:
    """Continue a copy of the default run from one of its checkpoints with other settings."""

    def resume(step: int, changes: dict[str, Any]) -> Run:
        directory = tmp_path / "branch"
        shutil.copytree(learned.directory, directory)
        # A run with a summary is done, and a resume would leave it as it is.
        (directory / "summary.json").unlink()
        for checkpoint in (directory / "checkpoints").iterdir():
            if checkpoint.name != f"step_{step}":
                shutil.rmtree(checkpoint)
        config = yaml.safe_load((directory / "config.yaml").read_text())
        for key, value in changes.items():
            section, _, name = key.partition(".")
            config[section][name] = value
        (directory / "config.yaml").write_text(yaml.safe_dump(config))
        run = _run_grpo("resume", directory, directory=directory)
        assert f"resumed    after step {step}" in run.process.stdout
        return run

    return resume
