"""Saves that go on while training does, and what is left of those that were killed."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rl_policy_megatron.checkpoint as checkpoint
from rl_policy_megatron import CheckpointError, MegatronPolicy
from rl_policy_megatron.saver import PendingSave

LENGTHS = [11, 4, 9, 7]
KILLED_SAVES = Path(__file__).with_name("killed_saves.py")


class Gate:
    """Holds the writing thread before its first file, and can make it fail there."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original
        self._open = threading.Event()
        self.error: Exception | None = None

    def __call__(self, *arguments: Any) -> Any:
        assert self._open.wait(30)
        if self.error is not None:
            raise self.error
        return self._original(*arguments)

    def open(self, error: Exception | None = None) -> None:
        self.error = error
        self._open.set()

    def close(self) -> None:
        self.error = None
        self._open.clear()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(checkpoint.write_tensors)
    monkeypatch.setattr(checkpoint, "write_tensors", gate)
    yield gate
    gate.open()


def _contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_saved_is_the_state_at_the_call(
    dtype: str,
    gate: Gate,
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
    tmp_path: Path,
) -> None:
    policy = policy_of("qwen2", dtype=dtype)
    policy.train(rows_of(LENGTHS), token_mean_loss, learning_rate=1e-2)
    policy.keep_reference()
    gate.open()
    policy.save(tmp_path / "expected")
    gate.close()
    pending = policy.save_async(tmp_path / "later")
    for seed in range(3):
        policy.train(rows_of(LENGTHS, seed=seed), token_mean_loss, learning_rate=1e-2)

    def drawing(logits: Any, _: Any) -> Any:
        return logits.logprobs().sum() * torch.rand(()), {}

    policy.train(rows_of(LENGTHS), drawing, learning_rate=1e-2)
    policy.keep_reference()
    assert not pending.done
    with pytest.raises(CheckpointError, match=r"policy\.json"):
        policy_of("qwen2", dtype=dtype).load(tmp_path / "later")
    with pytest.raises(CheckpointError, match="takes longer than"):
        pending.wait(timeout_s=0.05)
    gate.open()
    pending.wait()
    assert pending.done
    assert _contents(tmp_path / "later") == _contents(tmp_path / "expected")


def test_one_save_at_a_time_and_everything_waits_for_it(
    gate: Gate, policy_of: Callable[..., Any], tmp_path: Path
) -> None:
    policy = policy_of("llama")
    calls: list[Callable[[], Any]] = [
        lambda: policy.save_async(tmp_path / "next"),
        lambda: policy.load(tmp_path / "next"),
        lambda: policy.save(tmp_path / "third"),
        lambda: policy.shutdown(),
    ]
    for number, follow in enumerate(calls):
        gate.close()
        pending = policy.save_async(tmp_path / str(number))
        opened = threading.Timer(0.2, gate.open)
        opened.start()
        following = follow()
        assert pending.done
        assert (tmp_path / str(number) / "policy.json").exists()
        if isinstance(following, PendingSave):
            following.wait()
        opened.join()


def test_a_failed_save_is_told_once_with_its_first_cause(
    gate: Gate, policy_of: Callable[..., Any], tmp_path: Path
) -> None:
    policy = policy_of("llama")
    full = OSError(errno.ENOSPC, "No space left on device")

    def fail() -> Any:
        gate.close()
        pending = policy.save_async(tmp_path / "full")
        gate.open(full)
        deadline = time.monotonic() + 30
        while not pending.done and time.monotonic() < deadline:
            time.sleep(0.01)
        return pending

    pending = fail()
    for _ in range(2):
        with pytest.raises(CheckpointError, match="No space left") as caught:
            pending.wait()
        assert caught.value.__cause__ is full
    gate.open()
    # It was told, and what it left is in nobody's way.
    policy.save(tmp_path / "full")
    policy.load(tmp_path / "full")

    (tmp_path / "full" / "policy.json").unlink()
    fail()
    with pytest.raises(CheckpointError, match="No space left"):
        policy.load(tmp_path / "full")
    fail()
    with pytest.raises(CheckpointError, match="No space left"):
        policy.save(tmp_path / "other")
    assert not (tmp_path / "other").exists()
    fail()
    with pytest.raises(CheckpointError, match="No space left"):
        policy.shutdown()
    policy.shutdown()
    assert policy._made is None


def test_h7_foreign_files_are_never_removed(policy_of: Callable[..., Any], tmp_path: Path) -> None:
    policy = policy_of("llama")
    for name in ("notes.txt", "model.safetensors", "weights.safetensors.bak", "policy.json"):
        directory = tmp_path / name.replace(".", "-")
        directory.mkdir()
        (directory / name).write_text("mine")
        (directory / "weights-00-00.safetensors").write_text("left")
        with pytest.raises(CheckpointError, match="not empty"):
            policy.save(directory)
        assert len(_contents(directory)) == 2


def test_h7_a_save_killed_at_any_moment_neither_loads_nor_blocks_the_next(
    model_of: Callable[..., Any], tmp_path: Path
) -> None:
    """H7: SIGKILL between any two steps of a save, and in the middle of a file."""
    source = model_of("llama")[0]
    command = [sys.executable, str(KILLED_SAVES), str(source), str(tmp_path / "saves")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    moments = json.loads(ran.stdout.splitlines()[-1])
    killed = [moment for moment in moments if moment["status"] == -signal.SIGKILL]
    # Three files, written and flushed, and a manifest that is written, flushed, renamed, and flushed again.
    assert len(killed) >= 10
    assert moments[-1]["status"] == 0, "the last moment must be after the save"
    for moment in killed:
        directory = tmp_path / "saves" / str(moment["moment"])
        assert moment["next"] == ("complete" if moment["had_manifest"] else "saved"), moment
        assert moment["loaded"] == moment["had_manifest"], moment
        names = {path.name for path in directory.iterdir()}
        assert names == {path.name for path in (tmp_path / "saves" / str(moments[-1]["moment"])).iterdir()}
    partial = [moment for moment in killed if not moment["had_manifest"] and moment["files"]]
    assert len(partial) >= 6
    assert any(name.startswith(".tmp") for moment in partial for name in moment["files"])
    with MegatronPolicy(source) as policy:
        for moment in killed:
            policy.load(tmp_path / "saves" / str(moment["moment"]))
