"""A saved policy goes on as if nothing had happened, or is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_policy_megatron import (
    CheckpointError,
    MegatronPolicy,
    OptimizerSettings,
    PolicySettings,
    RuntimeStateError,
    checkpoint,
)

LENGTHS = [11, 4, 9, 7]


def _file(directory: Path, group: str) -> Path:
    """The file of a group that one process saved."""
    return directory / f"{group}-{'00' if group == 'random' else '00-00'}.safetensors"


def _noisy(token_mean: Callable[..., Any]) -> Callable[..., Any]:
    """A loss that also depends on the policy's random stream."""

    def loss(logits: Any, batch: Any) -> Any:
        value, metrics = token_mean(logits, batch)
        return value * (1 + 0.5 * torch.rand(())), metrics

    return loss


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen2"])
def test_h13_six_steps_saved_and_four_more_equal_ten(
    kind: str,
    dtype: str,
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """H13: no stale copy of weights or moments survives a load, to the bit."""
    loss = _noisy(token_mean_loss)
    settings = OptimizerSettings(betas=(0.8, 0.9), weight_decay=0.1, grad_clip=0.2)
    rates = [1e-2 / (step + 1) for step in range(10)]
    straight = policy_of(kind, settings, dtype=dtype, micro_batch_size=2)
    straight.keep_reference()
    for step in range(6):
        straight.train(rows_of(LENGTHS, seed=step), loss, learning_rate=rates[step])
    straight.save(tmp_path / "saved")
    # Another seed and other optimizer settings: what was saved must win.
    resumed = policy_of(kind, OptimizerSettings(), dtype=dtype, micro_batch_size=2, seed=77)
    resumed.train(rows_of(LENGTHS), loss, learning_rate=1e-2)
    resumed.load(tmp_path / "saved")
    for step in range(6, 10):
        batch = rows_of(LENGTHS, seed=step)
        assert straight.train(batch, loss, learning_rate=rates[step]) == resumed.train(
            batch, loss, learning_rate=rates[step]
        )
    expected = dict(straight.stream_weights())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.stream_weights())
    batch = rows_of(LENGTHS)
    assert torch.equal(straight.logprobs(batch), resumed.logprobs(batch))
    assert torch.equal(straight.reference_logprobs(batch), resumed.reference_logprobs(batch))
    resumed.save(tmp_path / "again")
    straight.save(tmp_path / "straight")
    for name in ("weights", "optimizer", "random", "reference"):
        first, second = (load_file(_file(tmp_path / at, name)) for at in ("again", "straight"))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_policy_that_never_trained_can_be_saved(
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
    tmp_path: Path,
) -> None:
    fresh, other = policy_of("llama"), policy_of("llama")
    fresh.save(tmp_path / "fresh")
    other.train(rows_of(LENGTHS), token_mean_loss, learning_rate=1e-2)
    other.load(tmp_path / "fresh")
    batch = rows_of(LENGTHS, seed=3)
    assert fresh.train(batch, token_mean_loss, learning_rate=1e-2) == other.train(
        batch, token_mean_loss, learning_rate=1e-2
    )


def test_files_are_safetensors_and_json_only(policy_of: Callable[..., Any], tmp_path: Path) -> None:
    policy = policy_of("llama")
    (tmp_path / "empty").mkdir()
    policy.save(tmp_path / "empty")
    assert sorted(path.name for path in (tmp_path / "empty").iterdir()) == [
        "optimizer-00-00.safetensors",
        "policy.json",
        "random-00.safetensors",
        "weights-00-00.safetensors",
    ]
    with pytest.raises(CheckpointError, match="not empty"):
        policy.save(tmp_path / "empty")


@pytest.fixture
def saved(
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
    tmp_path: Path,
) -> Path:
    policy = policy_of("llama")
    policy.train(rows_of(LENGTHS), token_mean_loss, learning_rate=1e-2)
    policy.save(tmp_path / "saved")
    return tmp_path / "saved"


def _edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def _edit_manifest(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _flip(path: Path) -> None:
    """One bit of the last numbers."""
    content = bytearray(path.read_bytes())
    content[-9] ^= 4
    path.write_bytes(content)


def _forget_digest(path: Path) -> None:
    content = json.loads(path.read_text())
    del content["digests"]["weights-00-00.safetensors"], content["sha256"]
    content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(content))


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


_NORM = "model.norm.weight"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda at: (at / "policy.json").unlink(), "policy.json"),
    "broken manifest": (lambda at: (at / "policy.json").write_text("{"), "JSON"),
    "other format": (lambda at: _edit_manifest(at / "policy.json", format=4), "format 4"),
    "manifest without steps": (lambda at: _edit_manifest(at / "policy.json", steps=None), "complete"),
    "no optimizer": (lambda at: (_file(at, "optimizer")).unlink(), "optimizer-00-00.safetensors"),
    "truncated weights": (lambda at: _truncate(_file(at, "weights")), "weights-00-00.safetensors"),
    "lost moment": (
        lambda at: _edit_tensors(_file(at, "optimizer"), lambda t: t.pop(f"exp_avg.{_NORM}")),
        f"exp_avg.{_NORM}",
    ),
    "surplus weight": (
        lambda at: _edit_tensors(_file(at, "weights"), lambda t: t.update(odd=torch.ones(1))),
        "odd",
    ),
    "other shape": (
        lambda at: _edit_tensors(_file(at, "weights"), lambda t: t.update({_NORM: torch.ones(3)})),
        _NORM,
    ),
    "no random state": (
        lambda at: _edit_tensors(_file(at, "random"), lambda t: t.clear()),
        "random.safetensors",
    ),
    "half a random state": (
        lambda at: _edit_tensors(_file(at, "random"), lambda t: t.update({"0.cpu": t["0.cpu"][:100]})),
        r"0\.cpu of random is no state of a random generator",
    ),
    "random state of another rank": (
        lambda at: _edit_tensors(_file(at, "random"), lambda t: t.update({"3.cpu": torch.ones(5056)})),
        r"3\.cpu of random is no state",
    ),
    "changed weight": (lambda at: _flip(_file(at, "weights")), r"weights-00-00\.safetensors is damaged"),
    "changed moment": (lambda at: _flip(_file(at, "optimizer")), r"optimizer-00-00\.safetensors is damaged"),
    "changed random state": (lambda at: _flip(_file(at, "random")), r"random-00\.safetensors is damaged"),
    "other number of updates": (
        lambda at: _edit_manifest(at / "policy.json", steps=7),
        r"policy\.json is damaged",
    ),
    "file without digest": (lambda at: _forget_digest(at / "policy.json"), "no digest of weights-00-00"),
}


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_damaged_checkpoints_are_refused_and_change_nothing(
    damage: str, saved: Path, policy_of: Callable[..., Any], rows_of: Callable[..., Any]
) -> None:
    breaking, message = DAMAGE[damage]
    breaking(saved)
    policy = policy_of("llama")
    before = policy.logprobs(rows_of(LENGTHS))
    with pytest.raises(CheckpointError, match=message):
        policy.load(saved)
    assert torch.equal(policy.logprobs(rows_of(LENGTHS)), before)


def test_what_others_have_verified_is_not_read_twice(
    saved: Path, policy_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, read = policy_of("llama"), []
    original = checkpoint.file_digest
    monkeypatch.setattr(checkpoint, "file_digest", lambda path: read.append(path.name) or original(path))
    policy.load(saved)
    assert sorted(read) == sorted(path.name for path in saved.glob("*.safetensors"))
    read.clear()
    policy.load(saved, verify=False)
    assert read == []


def test_notes_come_back_as_they_were_at_the_call(saved: Path, policy_of: Callable[..., Any]) -> None:
    policy, notes = policy_of("llama"), {"who": ["me"], "epoch": 3}
    pending = policy.save_async(saved.parent / "noted", notes)
    notes["who"].append("you")
    pending.wait()
    assert policy.load(saved.parent / "noted") == {"who": ["me"], "epoch": 3}
    assert policy.load(saved) == {}
    with pytest.raises(CheckpointError, match="what JSON can hold"):
        policy.save(saved.parent / "never", {"tensor": torch.ones(1)})
    assert not (saved.parent / "never").exists()


def test_a_load_that_fails_half_way_leaves_a_policy_that_only_loads(
    saved: Path,
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    policy, other, batch = policy_of("llama"), policy_of("llama"), rows_of(LENGTHS)
    with monkeypatch.context() as patch:
        patch.setattr("rl_policy_megatron.snapshot.Snapshot.continue_from", lambda *_: tmp_path.read_text())
        with pytest.raises(IsADirectoryError):
            policy.load(saved)
    assert not policy.is_whole
    for ask in (
        lambda: policy.logprobs(batch),
        lambda: policy.train(batch, token_mean_loss, learning_rate=1e-2),
        lambda: policy.save(tmp_path / "never"),
        lambda: policy.export_hf(tmp_path / "never"),
    ):
        with pytest.raises(RuntimeStateError, match="a load failed half-way"):
            ask()
    for each in (policy, other):
        each.load(saved)
    assert policy.is_whole
    first, second = (each.train(batch, token_mean_loss, learning_rate=1e-2) for each in (policy, other))
    assert first == second


def test_checkpoints_of_other_models_and_types_are_refused(
    saved: Path, policy_of: Callable[..., Any]
) -> None:
    with pytest.raises(CheckpointError, match="model_type"):
        policy_of("qwen2").load(saved)
    with pytest.raises(CheckpointError, match="rope"):
        policy_of("llama3-rope").load(saved)
    with pytest.raises(CheckpointError, match="dtype = 'float32'"):
        policy_of("llama", dtype="bfloat16").load(saved)


def test_saving_to_an_impossible_place_is_a_typed_error(
    policy_of: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be saved"):
        policy_of("llama").save(tmp_path / "file" / "below")


def test_export_appears_whole_or_not_at_all(
    model_of: Callable[..., Any],
    policy_of: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = policy_of("llama")
    policy.export_hf(tmp_path / "once")
    with pytest.raises(CheckpointError, match="exists already"):
        policy.export_hf(tmp_path / "once")
    (tmp_path / "empty").mkdir()
    policy.export_hf(tmp_path / "empty")
    source = tmp_path / "source"
    shutil.copytree(model_of("llama")[0], source)
    with MegatronPolicy(source, PolicySettings()) as unlucky:
        (source / "config.json").unlink()
        with pytest.raises(Exception, match=r"config\.json"):
            unlucky.export_hf(tmp_path / "never")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "once", "source"]
