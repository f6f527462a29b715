"""The policy-gradient loss beside TRL's: one model, the same tokens and log-probabilities through both.

TRL computes its log-probabilities, ratio, clip, KL, entropy and normaliser with its own code, in a real
GRPOTrainer; loss and gradient of every weight must agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl_algorithms.batching import TrainBatch
from rl_algorithms.losses import ClippedPGLoss
from rl_app_core.tiny_model import make_tokenizer

PROMPT, ANSWER, ROWS = 4, 7, 6
TEMPERATURE = 0.7


@dataclass
class View:
    """A LogitsView over a dense model's output."""

    everything: torch.Tensor
    ids: torch.Tensor

    def logprobs(self) -> torch.Tensor:
        picked = self.everything[:, :-1].gather(2, self.ids[:, 1:, None]).squeeze(2)
        return torch.nn.functional.pad(picked, (1, 0))

    def entropy(self) -> torch.Tensor:
        entropies = -(self.everything.exp() * self.everything).sum(2)
        return torch.nn.functional.pad(entropies[:, :-1], (1, 0))


@dataclass(frozen=True)
class World:
    """One model and one batch, as TRL and as this project see them."""

    trainer: Any
    model: Any
    inputs: dict[str, torch.Tensor]
    batch: TrainBatch


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    datasets = pytest.importorskip("datasets")
    trl = pytest.importorskip("trl")
    torch.manual_seed(0)
    tokenizer = make_tokenizer(["Calculate 1 + 2."], 300)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=304, initializer_range=0.2, **shape, **heads)).float()
    folder: Path = tmp_path_factory.mktemp("trl")
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=trl.GRPOConfig(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            report_to=[],
            max_completion_length=ANSWER,
            temperature=TEMPERATURE,
            per_device_train_batch_size=ROWS,
            num_generations=ROWS,
            beta=0.0,
        ),
        train_dataset=datasets.Dataset.from_list([{"prompt": "Calculate 1 + 2."}] * ROWS),
        processing_class=tokenizer,
    )
    # Dropout aside, evaluation differs in one thing: no accumulation over micro-batches.
    model.eval()
    return World(trainer, model, *_batches(model))


def _batches(model: Any) -> tuple[dict[str, torch.Tensor], TrainBatch]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 290, (ROWS, PROMPT + ANSWER), generator=generator)
    lengths = torch.tensor([PROMPT + n for n in (7, 3, 5, 1, 6, 4)])
    trained = torch.arange(PROMPT + ANSWER).expand(ROWS, -1) >= PROMPT
    trained = trained & (torch.arange(PROMPT + ANSWER) < lengths.unsqueeze(1))
    with torch.no_grad():
        logits = model(ids).logits / TEMPERATURE
    now = View(logits.log_softmax(-1), ids).logprobs()
    noise = [torch.randn(now.shape, generator=generator) * scale for scale in (0.4, 0.3, 0.2)]
    prev, reference, engine = (now + part for part in noise)
    advantages = torch.tensor([1.0, -0.5, 0.8, -1.2, 0.3, -0.9])
    answers = {name: part[:, PROMPT:] for name, part in (("old", prev), ("ref", reference))}
    mask = trained[:, PROMPT:].long()
    inputs = {
        "prompt_ids": ids[:, :PROMPT],
        "prompt_mask": torch.ones(ROWS, PROMPT, dtype=torch.int64),
        "completion_ids": ids[:, PROMPT:],
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": answers["old"],
        "ref_per_token_logps": answers["ref"],
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": (prev - engine)[:, PROMPT:].exp().clamp(0.8, 1.2),
    }
    batch = TrainBatch.create(
        input_ids=ids,
        lengths=lengths,
        token_mask=trained,
        sample_mask=torch.ones(ROWS, dtype=torch.bool),
        advantages=advantages,
        generation_logprobs=engine,
        prev_logprobs=prev,
        reference_logprobs=reference,
    )
    return inputs, batch


# Its KL is weighted by the ratio unless told not to.
PLAIN: dict[str, Any] = {"epsilon_low": 0.2, "epsilon_high": 0.2, "use_bias_correction_kl": False}
OF_ITS_ARGUMENTS = frozenset({"delta", "use_bias_correction_kl"})

VARIANTS: dict[str, tuple[dict[str, Any], ClippedPGLoss]] = {
    "grpo": ({"loss_type": "grpo"}, ClippedPGLoss(normalization="sequence")),
    "bnpo": ({"loss_type": "bnpo"}, ClippedPGLoss()),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, ClippedPGLoss(clip_high=0.28)),
    "dr_grpo": (
        {"loss_type": "dr_grpo"},
        ClippedPGLoss(normalization="constant", constant_length=ANSWER),
    ),
    "two-sided clip": ({"loss_type": "dapo", "delta": 1.4}, ClippedPGLoss(dual_clip=1.4)),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.05},
        ClippedPGLoss(sequence_ratio=True, normalization="sequence", clip_low=0.05),
    ),
    # TRL's bound is on the ratio itself, and there is none below.
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.3},
        ClippedPGLoss(cispo=True, clip_high=0.3, clip_low=0.999),
    ),
    "kl": ({"loss_type": "dapo", "beta": 0.3}, ClippedPGLoss(kl_coefficient=0.3)),
    "kl by sequences": (
        {"loss_type": "grpo", "beta": 0.3},
        ClippedPGLoss(kl_coefficient=0.3, normalization="sequence"),
    ),
    "entropy": (
        {"loss_type": "bnpo", "entropy_coef": 0.2, "_entropy_bonus_enabled": True},
        ClippedPGLoss(entropy_coefficient=0.2),
    ),
    "importance correction": (
        {"loss_type": "dapo", "use_vllm": True, "vllm_importance_sampling_correction": True},
        ClippedPGLoss(importance_correction="tis", importance_min=0.8, importance_max=1.2),
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradient_are_those_of_trl(
    variant: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, loss_fn = VARIANTS[variant]
    for name, value in {**PLAIN, **options}.items():
        where = world.trainer.args if name in OF_ITS_ARGUMENTS else world.trainer
        assert hasattr(where, name), name
        monkeypatch.setattr(where, name, value)
    theirs = world.trainer._compute_loss(world.model, world.inputs)
    wanted = _gradients(world.model, theirs)

    ids = world.batch.input_ids
    logits = world.model(ids).logits / TEMPERATURE
    ours, metrics = loss_fn(View(logits.log_softmax(-1), ids), world.batch)
    found = _gradients(world.model, ours)

    assert ours.item() == pytest.approx(theirs.item(), abs=1e-5)
    assert max(float(gradient.abs().max()) for gradient in wanted.values()) > 1e-3
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)
    if "clipped_share" in metrics and variant != "cispo":
        assert 0 < metrics["clipped_share"].value() < 1, "the clip binds somewhere, or nothing is compared"
    assert math.isfinite(metrics["loss"].value())


def _gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}
