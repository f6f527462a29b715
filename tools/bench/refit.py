"""Time of a refit as a ratio to copying the same bytes, and whether the engine is on policy after it.

    python -m tools.bench.refit [--repeats 10] [--threads 1]

In an environment with vLLM. For each case a policy of megatron-core in this process and a vLLM engine in a
process of its own start from the same checkpoint; the policy's weights change before each refit, which goes
through shared memory. Prints JSON:

* ``ratio``: seconds from the announcement to the acknowledgement, divided by those of copying as many
  tensors of the same sizes in this process. Both are wall seconds, the best of the repeats, which take turns,
  and both begin when the policy's weights have just changed, as after a step of training;
* ``warm_ratio``: the same by the seconds of a copy that follows a refit at once, when neither the processor
  nor its caches have done anything else meanwhile;
* ``difference``: of the log-probabilities that the engine reports for what it samples after the last refit
  and those that the policy gives the same tokens, the largest absolute and the mean one;
* ``difference_without``: the largest one before the last refit, to show that there was something to move.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from rl_generation import GenerationRequest, SamplingParams
from rl_generation.refit.contract import RefitTarget
from rl_generation.refit.publisher import TensorSource
from rl_generation.refit.settings import TransportSettings
from rl_generation.refit.window import LoadingWindow
from rl_generation.vllm import VllmEngine, VllmSettings
from rl_policy_megatron import MegatronPolicy, PolicySettings

ROWS = 64
PROMPT_TOKENS = 8
NEW_TOKENS = 40
CONTEXT = 64


@dataclass(frozen=True)
class Case:
    """A dense Qwen3 with tied embeddings, float32."""

    name: str
    hidden: int
    layers: int
    vocabulary: int


@dataclass(frozen=True)
class Result:
    """See the module."""

    parameters: int
    megabytes: float
    buckets: int
    ratio: float
    refit_ms: float
    median_refit_ms: float
    copy_ms: float
    median_copy_ms: float
    warm_ratio: float
    warm_copy_ms: float
    tokens: int
    difference: float
    mean_difference: float
    difference_without: float


@dataclass(frozen=True)
class Rows:
    """What the policy scores."""

    input_ids: torch.Tensor
    lengths: torch.Tensor

    def select(self, rows: Sequence[int]) -> Rows:
        picked = list(rows)
        return Rows(self.input_ids[picked], self.lengths[picked])


CASES = (
    Case("tiny, as in the default job", 64, 2, 512),
    Case("30 M", 512, 8, 8192),
)


def save_model(case: Case, folder: str) -> None:
    """A checkpoint with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=case.vocabulary,
        hidden_size=case.hidden,
        intermediate_size=3 * case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=case.hidden // 32,
        num_key_value_heads=case.hidden // 64,
        head_dim=32,
        tie_word_embeddings=True,
        initializer_range=0.05,
        max_position_embeddings=2 * CONTEXT,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def change(policy: MegatronPolicy, seed: int) -> None:
    """Give every weight another value."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight += 0.01 * torch.randn(weight.shape, generator=generator)


async def refit(source: TensorSource, engine: RefitTarget, version: int) -> int:
    """From announcement to acknowledgement; the number of buckets."""
    buckets = 0
    try:
        await engine.begin_refit(source.begin("shared_memory"), version)
        async with LoadingWindow() as window:
            # As a fleet asks: in a thread, for its loop has loads to watch.
            while (bucket := await asyncio.to_thread(source.next_bucket)) is not None:
                await window.load(bucket, engine.load_bucket(bucket))
                buckets += 1
        await engine.finish_refit()
    finally:
        source.end()
    return buckets


def differences(policy: MegatronPolicy, engine: VllmEngine, case: Case, seed: int) -> torch.Tensor:
    """``[tokens]`` absolute differences of the log-probabilities of what the engine samples."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(0, case.vocabulary, (ROWS, PROMPT_TOKENS), generator=generator).tolist()
    requests = [
        GenerationRequest(tuple(prompt), SamplingParams(NEW_TOKENS, seed=seed + row))
        for row, prompt in enumerate(prompts)
    ]
    answers = engine.generate(requests)
    ids = torch.tensor([[*prompt, *a.token_ids] for prompt, a in zip(prompts, answers, strict=True)])
    scored = policy.logprobs(Rows(ids, torch.full((ROWS,), ids.size(1))))[:, PROMPT_TOKENS:]
    sampled = torch.tensor([answer.logprobs for answer in answers])
    return (sampled - scored).abs().flatten()


def measure(policy: MegatronPolicy, engine: VllmEngine, case: Case, repeats: int) -> Result:
    """Run one case."""
    source = TensorSource(policy.refit_spec, policy.stream_weights, TransportSettings())
    originals = [tensor.clone() for _, tensor in policy.stream_weights()]
    copies = [torch.empty_like(tensor) for tensor in originals]
    refits: list[float] = []
    copyings: list[float] = []
    warm: list[float] = []
    buckets, without = 0, math.nan

    def copying() -> float:
        start = time.perf_counter()
        for copy, tensor in zip(copies, originals, strict=True):
            copy.copy_(tensor)
        return time.perf_counter() - start

    for version in range(1, repeats + 2):
        change(policy, 2 * version)
        copyings.append(copying())
        change(policy, 2 * version + 1)
        if version > repeats:
            without = float(differences(policy, engine, case, version).max())
        start = time.perf_counter()
        buckets = asyncio.run(refit(source, engine, version))
        refits.append(time.perf_counter() - start)
        warm.append(copying())
    # The first of each touches memory that was never used.
    for seconds in (refits, copyings, warm):
        del seconds[0]
    off = differences(policy, engine, case, 0)
    return Result(
        parameters=policy.parameter_count,
        megabytes=round(sum(copy.numel() * copy.element_size() for copy in copies) / 1e6, 2),
        buckets=buckets,
        ratio=round(min(refits) / min(copyings), 2),
        refit_ms=_ms(min(refits)),
        median_refit_ms=_ms(sorted(refits)[len(refits) // 2]),
        copy_ms=_ms(min(copyings)),
        median_copy_ms=_ms(sorted(copyings)[len(copyings) // 2]),
        warm_ratio=round(min(refits) / min(warm), 2),
        warm_copy_ms=_ms(min(warm)),
        tokens=off.numel(),
        difference=float(f"{off.max():.2e}"),
        mean_difference=float(f"{off.mean():.2e}"),
        difference_without=round(without, 3),
    )


def run_case(case: Case, repeats: int) -> Result:
    """Build policy and engine of one case, and measure."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(case, folder)
        settings = VllmSettings(
            folder, dtype="float32", max_model_len=CONTEXT, kv_cache_bytes=64 << 20, tokenizer=False
        )
        engine = VllmEngine(settings)
        engine.start()
        try:
            with MegatronPolicy(Path(folder), PolicySettings(micro_batch_size=16)) as policy:
                return measure(policy, engine, case, repeats)
        finally:
            engine.shutdown(10.0)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 2)


def main() -> None:
    """Measure all cases and print them as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--case", choices=[case.name for case in CASES], action="append")
    options = parser.parse_args()
    # It would write between our lines.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    torch.set_num_threads(options.threads)
    cases = [case for case in CASES if case.name in (options.case or [case.name])]
    results = {case.name: asdict(run_case(case, options.repeats)) for case in cases}
    print(json.dumps({"threads": options.threads, "cases": results}, indent=2))


if __name__ == "__main__":
    main()
