"""Adapters compute what the formula says, learn alone, and are gone once merged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl_policy_megatron import (
    BatchError,
    CheckpointError,
    LoraSettings,
    MegatronPolicy,
    OptimizerSettings,
    PolicySettings,
    UnsupportedModelError,
)

LENGTHS = [11, 4, 9, 7]
LORA = LoraSettings(rank=3, alpha=7.0)
ATTENTION = LoraSettings(rank=3, alpha=7.0, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
FEW = LoraSettings(rank=2, alpha=2.0, targets=("v_proj", "up_proj"))
# Weight decay and clipping that bite, as the weights' own tests have.
ADAMW = OptimizerSettings(betas=(0.8, 0.9), weight_decay=0.1, grad_clip=0.2)


class PlainLora(torch.nn.Module):
    """y = W x + b + (alpha / rank) · B (A x), written down once more, around transformers' own linear."""

    def __init__(self, base: torch.nn.Linear, lora: LoraSettings, a: torch.Tensor, b: torch.Tensor) -> None:
        super().__init__()
        self.base, self.scale = base, lora.alpha / lora.rank
        self.a, self.b = torch.nn.Parameter(a.clone()), torch.nn.Parameter(b.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.scale * F.linear(F.linear(x, self.a), self.b)


def _plain_model(source: Path, lora: LoraSettings, adapters: dict[str, torch.Tensor]) -> Any:
    """A transformers model with adapters of these values, only they being trained."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval().requires_grad_(False)
    for name, module in list(model.named_modules()):
        if name.rpartition(".")[2] in lora.targets:
            a, b = (adapters[f"{name}.lora_{part}.weight"] for part in "AB")
            model.set_submodule(name, PlainLora(module, lora, a, b))
    return model


def _plain_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, PlainLora):
            found[f"{name}.lora_A.weight"], found[f"{name}.lora_B.weight"] = module.a, module.b
    return found


def _saved_adapters(policy: MegatronPolicy, directory: Path) -> dict[str, torch.Tensor]:
    policy.save(directory)
    return load_file(directory / "adapters-00-00.safetensors")


@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        *((kind, lora) for kind in ("qwen3-tied", "qwen2", "llama") for lora in (LORA, FEW)),
        ("qwen3-moe", ATTENTION),
    ],
)
def test_logits_gradients_and_updates_equal_plain_lora(
    kind: str,
    lora: LoraSettings,
    model_of: Callable[..., Any],
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
    transformers_loss: Callable[..., Any],
    tmp_path: Path,
) -> None:
    policy = policy_of(kind, ADAMW, lora=lora, micro_batch_size=2)
    batch = rows_of(LENGTHS)
    # Away from B = 0, where half of the gradients vanish.
    policy.train(batch, token_mean_loss, learning_rate=5e-2)
    policy.reset_optimizer(ADAMW)
    plain = _plain_model(model_of(kind)[0], lora, _saved_adapters(policy, tmp_path / "adapters"))
    parameters = _plain_parameters(plain)

    real = torch.arange(batch.input_ids.size(1)) < batch.lengths[:, None]
    with torch.no_grad():
        expected = plain(batch.input_ids).logits
    assert (policy.token_logits(batch) - expected)[real].abs().max() < 1e-5
    transformers_loss(plain, batch).backward()
    gradients = policy.gradients(batch, token_mean_loss)
    assert gradients.keys() == parameters.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, parameters[name].grad, rtol=1e-5, atol=1e-5)
    assert min(float(gradient.abs().max()) for gradient in gradients.values()) > 1e-4

    adamw = torch.optim.AdamW(parameters.values(), lr=1e-2, betas=ADAMW.betas, weight_decay=0.1)
    for step in range(3):
        rows = rows_of(LENGTHS, seed=step)
        adamw.zero_grad()
        loss = transformers_loss(plain, rows)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), ADAMW.grad_clip)
        adamw.step()
        metrics = policy.train(rows, token_mean_loss, learning_rate=1e-2)
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    for name, tensor in _saved_adapters(policy, tmp_path / "trained").items():
        torch.testing.assert_close(tensor, parameters[name].data, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_untrained_adapter_adds_nothing_to_the_bit(
    dtype: str, policy_of: Callable[..., Any], rows_of: Callable[..., Any]
) -> None:
    base, adapted = policy_of("qwen2", dtype=dtype), policy_of("qwen2", dtype=dtype, lora=LORA)
    assert torch.equal(adapted.logprobs(rows_of(LENGTHS)), base.logprobs(rows_of(LENGTHS)))
    assert adapted.refit_spec() == base.refit_spec()
    expected = dict(base.stream_weights())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in adapted.stream_weights())


def test_only_adapters_learn(
    policy_of: Callable[..., Any], rows_of: Callable[..., Any], token_mean_loss: Callable[..., Any]
) -> None:
    policy = policy_of("qwen3-untied", lora=LORA)
    before = {name: weight.clone() for name, weight in policy.model.named_parameters()}
    policy.train(rows_of(LENGTHS), token_mean_loss, learning_rate=1e-2)
    policy.train(rows_of(LENGTHS), token_mean_loss, learning_rate=1e-2)
    for name, weight in policy.model.named_parameters():
        is_adapter = ".lora_" in name
        assert weight.requires_grad == is_adapter == hasattr(weight, "main_grad")
        assert torch.equal(weight, before[name]) != is_adapter


def test_initial_values_follow_the_seed_and_the_name_only(
    policy_of: Callable[..., Any], tmp_path: Path
) -> None:
    outer = torch.get_rng_state()
    first, second, other, few = (
        _saved_adapters(policy_of("llama", seed=seed, lora=lora), tmp_path / str(number))
        for number, (seed, lora) in enumerate(
            [(1, LORA), (1, LORA), (2, LORA), (1, LoraSettings(3, 7.0, ("v_proj",)))]
        )
    )
    assert torch.equal(torch.get_rng_state(), outer)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(first[name], few[name]) for name in few)
    drawn = [name for name in first if ".lora_A." in name]
    assert len({tuple(tensors[name][0].tolist()) for tensors in (first, other) for name in drawn}) == 2 * len(
        drawn
    )
    for name in drawn:
        # Source: torch.nn.Linear's own initialisation, uniform within 1 / sqrt(inputs).
        bound = first[name].size(1) ** -0.5
        assert 0.7 * bound < float(first[name].abs().max()) <= bound


def test_merged_weights_are_the_formula_and_export_as_an_ordinary_model(
    model_of: Callable[..., Any],
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
    tmp_path: Path,
) -> None:
    policy, batch = policy_of("qwen2-tied", lora=LORA), rows_of(LENGTHS)
    for _ in range(3):
        policy.train(batch, token_mean_loss, learning_rate=1e-2)
    adapters = _saved_adapters(policy, tmp_path / "adapters")
    streamed = dict(policy.stream_weights())
    base = load_file(model_of("qwen2-tied")[0] / "model.safetensors")
    assert streamed.keys() == base.keys()
    changed = 0
    for name, weight in base.items():
        a, b = (adapters.get(f"{name.removesuffix('.weight')}.lora_{part}.weight") for part in "AB")
        expected = weight if a is None else weight + (LORA.alpha / LORA.rank) * (b @ a)
        torch.testing.assert_close(streamed[name], expected, rtol=0, atol=1e-7)
        changed += not torch.equal(streamed[name], weight)
    assert changed == 2 * 7
    policy.export_hf(tmp_path / "exported")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32).eval()
    real = torch.arange(batch.input_ids.size(1)) < batch.lengths[:, None]
    with torch.no_grad():
        logits = exported(batch.input_ids).logits
    assert (policy.token_logits(batch) - logits)[real].abs().max() < 1e-5
    with MegatronPolicy(tmp_path / "exported") as merged:
        assert (merged.logprobs(batch) - policy.logprobs(batch)).abs().max() < 1e-5


def test_the_reference_is_the_base_without_a_second_model(
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy, batch = policy_of("qwen3-tied", lora=LORA), rows_of(LENGTHS)
    monkeypatch.setattr("rl_policy_megatron.parts.build_model", lambda *_: pytest.fail("a second model"))
    base = policy.logprobs(batch)
    policy.keep_reference()
    policy.train(batch, token_mean_loss, learning_rate=5e-2)
    trained = policy.logprobs(batch)
    assert torch.equal(policy.reference_logprobs(batch), base)
    assert torch.equal(policy.logprobs(batch), trained)
    assert (trained - base).abs().max() > 1e-3
    # A later reference is that of its moment, whatever is learned after it.
    policy.keep_reference()
    policy.train(batch, token_mean_loss, learning_rate=5e-2)
    assert torch.equal(policy.reference_logprobs(batch), trained)
    assert (policy.logprobs(batch) - trained).abs().max() > 1e-3
    with pytest.raises(BatchError):
        policy.reference_logprobs(None)
    assert not torch.equal(policy.logprobs(batch), trained)


def test_recompute_changes_no_gradient(
    policy_of: Callable[..., Any], rows_of: Callable[..., Any], token_mean_loss: Callable[..., Any]
) -> None:
    policies = [policy_of("qwen3-tied", lora=LORA, recompute=recompute) for recompute in ("none", "full")]
    for policy in policies:
        policy.train(rows_of(LENGTHS), token_mean_loss, learning_rate=1e-2)
    kept, recomputed = (policy.gradients(rows_of(LENGTHS), token_mean_loss) for policy in policies)
    assert all(torch.equal(kept[name], recomputed[name]) for name in kept)
    assert all(gradient.any() for gradient in recomputed.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_h13_adapters_resume_to_the_bit_from_files_without_the_base(
    dtype: str,
    policy_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
    tmp_path: Path,
) -> None:
    straight = policy_of("qwen2", ADAMW, dtype=dtype, lora=LORA, micro_batch_size=2)
    for step in range(3):
        straight.train(rows_of(LENGTHS, seed=step), token_mean_loss, learning_rate=1e-2)
        if step == 1:
            straight.keep_reference()
    straight.save(tmp_path / "saved")
    saved = {path.name: path for path in (tmp_path / "saved").glob("*.safetensors")}
    assert sorted(name.partition("-")[0] for name in saved) == [
        "adapters",
        "optimizer",
        "random",
        "reference",
    ]
    for name, path in saved.items():
        assert name.startswith("random") or all(".lora_" in key for key in load_file(path))

    resumed = policy_of("qwen2", dtype=dtype, lora=LORA, micro_batch_size=2, seed=9)
    resumed.train(rows_of(LENGTHS), token_mean_loss, learning_rate=1e-2)
    resumed.load(tmp_path / "saved")
    for step in range(3, 6):
        batch = rows_of(LENGTHS, seed=step)
        expected = straight.train(batch, token_mean_loss, learning_rate=1e-2)
        assert resumed.train(batch, token_mean_loss, learning_rate=1e-2) == expected
    batch = rows_of(LENGTHS)
    assert torch.equal(straight.logprobs(batch), resumed.logprobs(batch))
    assert torch.equal(straight.reference_logprobs(batch), resumed.reference_logprobs(batch))
    straight.save(tmp_path / "straight")
    resumed.save(tmp_path / "resumed")
    for name in saved:
        first, second = (load_file(tmp_path / run / name) for run in ("straight", "resumed"))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first)


def test_adapters_of_another_base_or_shape_are_refused(
    policy_of: Callable[..., Any],
    model_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
    tmp_path: Path,
) -> None:
    weights = policy_of("llama")
    adapted = policy_of("llama", lora=LORA)
    adapted.save(tmp_path / "adapters")
    with pytest.raises(CheckpointError, match="lora"):
        weights.load(tmp_path / "adapters")
    with pytest.raises(CheckpointError, match="lora"):
        policy_of("llama", lora=LoraSettings(rank=3, alpha=8.0)).load(tmp_path / "adapters")
    # The same shapes with other numbers: only the digest can tell.
    weights.train(rows_of(LENGTHS), token_mean_loss, learning_rate=1e-3)
    weights.save(tmp_path / "weights")
    weights.export_hf(tmp_path / "moved")
    with MegatronPolicy(tmp_path / "moved", PolicySettings(lora=LORA)) as moved:
        with pytest.raises(CheckpointError, match="base"):
            moved.load(tmp_path / "adapters")
        with pytest.raises(CheckpointError, match="lora"):
            moved.load(tmp_path / "weights")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, "rank"),
        ({"alpha": 0.0}, "alpha"),
        ({"alpha": float("nan")}, "alpha"),
        ({"targets": ()}, "targets"),
        ({"targets": ("q_proj", "q_proj")}, "targets"),
        ({"targets": ("lm_head",)}, "targets"),
        ({"dropout": 0.1}, "dropout"),
    ],
)
def test_settings_outside_their_range_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoraSettings(**change)


@pytest.mark.parametrize("kind", ["qwen3-moe", "qwen3-moe-mixed"])
def test_adapters_where_a_layer_has_experts_are_refused_before_anything_is_made(
    kind: str, model_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_policy_megatron.runtime.acquire", lambda *_: pytest.fail("was started"))
    for lora in (LORA, FEW):
        with pytest.raises(UnsupportedModelError, match=r"lora\.targets names .*up_proj.* experts") as caught:
            MegatronPolicy(model_of(kind)[0], PolicySettings(lora=lora))
        assert "set lora.targets to some of q_proj, k_proj, v_proj, o_proj" in str(caught.value)


def test_a_model_without_the_linear_is_refused(policy_of: Callable[..., Any]) -> None:
    from rl_policy_megatron.adapters import Adapters
    from rl_policy_megatron.hf_config import read_model_shape

    policy = policy_of("llama")
    shape = read_model_shape(policy.model_directory)
    del policy.model.decoder.layers[1].mlp.linear_fc1
    with pytest.raises(UnsupportedModelError, match=r"layer 1 .* has no mlp\.linear_fc1"):
        Adapters(policy.model, shape, LORA, seed=0)
