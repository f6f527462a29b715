"""Checkpoints of every released format, and of several ranks, are read by one process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rl_policy_megatron import CheckpointError, MegatronPolicy, OptimizerSettings, PolicySettings

FORMAT_1 = Path(__file__).parent / "fixtures" / "format_1"
LENGTHS = [11, 4, 9, 7]
GROUPS = ("weights", "optimizer", "random", "reference")


def test_h9_format_1_still_loads(tmp_path: Path) -> None:
    """H9: the fixture is what the first released version wrote: bfloat16, two updates, a reference."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(FORMAT_1)).save_pretrained(tmp_path / "model")
    with MegatronPolicy(tmp_path / "model", PolicySettings(dtype="bfloat16")) as policy:
        policy.load(FORMAT_1 / "checkpoint")
        policy.save(tmp_path / "again")
    manifest = json.loads((tmp_path / "again" / "policy.json").read_text())
    assert (manifest["format"], manifest["steps"]) == (3, 2)
    assert manifest["optimizer"]["weight_decay"] == 0.1
    for group in GROUPS:
        old = load_file(FORMAT_1 / "checkpoint" / f"{group}.safetensors")
        new = load_file(tmp_path / "again" / manifest["files"][group][0])
        if group == "random":
            new = {name.removeprefix("0."): tensor for name, tensor in new.items()}
        assert old.keys() == new.keys()
        assert old, group
        assert all(old[name].dtype == new[name].dtype and torch.equal(old[name], new[name]) for name in old)


@pytest.fixture
def saved(
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
    tmp_path: Path,
) -> tuple[Any, Path]:
    policy = policy_of("qwen3-tied", OptimizerSettings(weight_decay=0.1))
    policy.keep_reference()
    policy.train(rows_of(LENGTHS), token_mean_loss, learning_rate=1e-2)
    policy.save(tmp_path / "saved")
    return policy, tmp_path / "saved"


def test_h9_checkpoints_from_before_digests_load_and_so_do_their_notes(
    saved: tuple[Any, Path], policy_of: Callable[..., Any]
) -> None:
    policy, directory = saved

    def older(content: dict[str, Any]) -> None:
        for key in ("sha256", "digests", "notes"):
            del content[key]
        content["format"] = 2

    _edit_manifest(directory, older)
    (directory / "worker.json").write_text('{"weight_version": 5}')
    other = policy_of("qwen3-tied")
    assert other.load(directory) == {"weight_version": 5}
    assert other.updates == policy.updates == 1


@pytest.mark.parametrize("lost", [["sha256"], ["sha256", "digests"]])
def test_a_manifest_that_lost_its_digest_is_damaged(
    lost: list[str], saved: tuple[Any, Path], policy_of: Callable[..., Any]
) -> None:
    def lose(content: dict[str, Any]) -> None:
        for key in lost:
            del content[key]

    _edit_manifest(saved[1], lose)
    with pytest.raises(CheckpointError, match="its own digest is missing"):
        policy_of("qwen3-tied").load(saved[1])


def _edit_manifest(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = directory / "policy.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_tensors_are_found_in_whichever_file_has_them(
    saved: tuple[Any, Path],
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
) -> None:
    policy, directory = saved
    manifest = json.loads((directory / "policy.json").read_text())
    for group in ("weights", "optimizer", "reference"):
        tensors = load_file(directory / f"{group}-00-00.safetensors")
        parts: list[dict[str, torch.Tensor]] = [{}, {}, {}]
        for number, name in enumerate(sorted(tensors)):
            parts[number % 3][name] = tensors[name]
        # A matrix that two stages hold, as that of tied embeddings, may be in both stages' files.
        shared = next(iter(parts[1]))
        parts[2][shared] = parts[1][shared]
        for number, part in enumerate(parts):
            save_file(part, directory / f"{group}-{number:02d}-00.safetensors")
        manifest["files"][group] = [f"{group}-{number:02d}-00.safetensors" for number in range(3)]
    # As before there were any.
    del manifest["sha256"], manifest["digests"]
    manifest["format"] = 2
    (directory / "policy.json").write_text(json.dumps(manifest))
    other = policy_of("qwen3-tied")
    other.load(directory)
    batch = rows_of(LENGTHS, seed=2)
    assert torch.equal(other.reference_logprobs(batch), policy.reference_logprobs(batch))
    expected = policy.train(batch, token_mean_loss, learning_rate=1e-2)
    assert other.train(batch, token_mean_loss, learning_rate=1e-2) == expected
    assert torch.equal(other.logprobs(batch), policy.logprobs(batch))


def test_a_manifest_may_only_name_files_beside_it(
    saved: tuple[Any, Path], policy_of: Callable[..., Any]
) -> None:
    _, directory = saved
    shutil.copyfile(directory / "weights-00-00.safetensors", directory.parent / "weights.safetensors")
    _edit_manifest(directory, lambda content: content["files"].update(weights=["../weights.safetensors"]))
    with pytest.raises(CheckpointError, match="not beside it"):
        policy_of("qwen3-tied").load(directory)


@pytest.mark.parametrize("group", ["weights", "optimizer", "random"])
def test_a_group_without_files_is_refused(
    group: str, saved: tuple[Any, Path], policy_of: Callable[..., Any]
) -> None:
    _, directory = saved
    _edit_manifest(directory, lambda content: content["files"].pop(group))
    with pytest.raises(CheckpointError, match=f"no files of {group}"):
        policy_of("qwen3-tied").load(directory)


@pytest.mark.parametrize(
    "changes", [{"format": None}, {"format": "1"}, {"files": None}, {"files": ["weights"]}]
)
def test_manifests_of_no_known_form_are_refused(
    changes: dict[str, Any], saved: tuple[Any, Path], policy_of: Callable[..., Any]
) -> None:
    _, directory = saved
    _edit_manifest(directory, lambda content: content.update(changes))
    with pytest.raises(CheckpointError, match=r"format|complete"):
        policy_of("qwen3-tied").load(directory)
