"""Speed of the megatron engine as a ratio to ``transformers.generate``: one model, one batch, one run.

    python -m tools.bench.generation [--repeats 5] [--threads 1]

Prints JSON. Both sides sample at temperature 1 and never stop early. Seconds are CPU seconds of the process,
the best of the repeats, which take turns so that a busy machine slows both alike.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from rl_generation import GenerationRequest, SamplingParams
from rl_generation.megatron import MegatronGeneration
from rl_policy_megatron import MegatronPolicy

VOCAB = 512
Prompts = list[tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """One batch: ``prompts`` of equal or different lengths, each continued ``rollouts`` times."""

    name: str
    lengths: tuple[int, ...]
    prompts: int
    rollouts: int
    new_tokens: int

    def rows(self) -> Prompts:
        """The prompt of every row; the same in every run."""
        rng = random.Random(self.name)
        distinct = [
            tuple(rng.randrange(VOCAB) for _ in range(rng.choice(self.lengths))) for _ in range(self.prompts)
        ]
        return [prompt for prompt in distinct for _ in range(self.rollouts)]


@dataclass(frozen=True)
class Result:
    """Tokens per CPU second of both sides, and the engine's wall seconds."""

    rows: int
    new_tokens: int
    engine_tokens_per_s: float
    transformers_tokens_per_s: float
    ratio: float
    engine_seconds: float


CASES = (
    Case("64x64", (18,), prompts=64, rollouts=1, new_tokens=64),
    Case("groups-256x32", (17, 18, 19), prompts=32, rollouts=8, new_tokens=32),
)


def build_model(folder: Path) -> torch.nn.Module:
    """The tiny model of the default job, saved in ``folder`` and as a ``transformers`` model."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        tie_word_embeddings=True,
        initializer_range=0.08,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def with_engine(engine: MegatronGeneration, rows: Prompts, new_tokens: int) -> int:
    """Sample with the engine; the number of new tokens."""
    requests = [
        GenerationRequest(prompt, SamplingParams(new_tokens, seed=row)) for row, prompt in enumerate(rows)
    ]
    return sum(len(answer.token_ids) for answer in engine.generate(requests))


def with_transformers(model: torch.nn.Module, rows: Prompts, new_tokens: int) -> int:
    """Sample with ``transformers``, prompts padded on the left; the number of new tokens."""
    longest = max(map(len, rows))
    tokens = torch.tensor([[*[0] * (longest - len(row)), *row] for row in rows])
    mask = torch.tensor([[*[0] * (longest - len(row)), *[1] * len(row)] for row in rows])
    generate: Callable[..., torch.Tensor] = model.generate  # type: ignore[assignment]
    out = generate(
        tokens,
        attention_mask=mask,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new_tokens,
        pad_token_id=0,
    )
    return (out.shape[1] - longest) * len(rows)


def best_seconds(sides: list[Callable[[], int]], repeats: int) -> list[tuple[float, float]]:
    """Least CPU and wall seconds of each side over repeats in turn, after one warm-up."""
    best = [(float("inf"), float("inf"))] * len(sides)
    for repeat in range(repeats + 1):
        for index, side in enumerate(sides):
            cpu, wall = time.process_time(), time.perf_counter()
            side()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            if repeat:
                best[index] = (min(best[index][0], cpu), min(best[index][1], wall))
    return best


def measure(engine: MegatronGeneration, model: torch.nn.Module, case: Case, repeats: int) -> Result:
    """Run one case on both sides."""
    rows = case.rows()
    sides = [
        lambda: with_engine(engine, rows, case.new_tokens),
        lambda: with_transformers(model, rows, case.new_tokens),
    ]
    tokens = [side() for side in sides]
    if tokens[0] != tokens[1]:
        raise RuntimeError(f"{case.name}: the sides made {tokens[0]} and {tokens[1]} tokens")
    (ours, wall), (theirs, _) = best_seconds(sides, repeats)
    return Result(
        rows=len(rows),
        new_tokens=case.new_tokens,
        engine_tokens_per_s=round(tokens[0] / ours),
        transformers_tokens_per_s=round(tokens[0] / theirs),
        ratio=round(theirs / ours, 2),
        engine_seconds=round(wall, 3),
    )


def main() -> None:
    """Measure all cases and print them as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        model = build_model(Path(folder))
        with MegatronPolicy(folder) as policy:
            engine = MegatronGeneration(policy.model, vocab_size=VOCAB, max_context=512)
            results = {case.name: asdict(measure(engine, model, case, options.repeats)) for case in CASES}
            engine.shutdown(1.0)
    print(json.dumps({"threads": options.threads, "cases": results}, indent=2))


if __name__ == "__main__":
    main()
