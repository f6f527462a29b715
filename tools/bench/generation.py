"""Speed of the engines as ratios to ``transformers.generate``: one model, one batch, one run.

    python -m tools.bench.generation [--engines megatron vllm] [--models tiny 30m] [--repeats 7] [--threads 1]

Prints JSON. All sample at temperature 1, make the same number of tokens and never stop early. Each engine is
a process of its own; they take turns, so that a busy machine slows all alike, and a ratio is the median over
the turns. CPU seconds are those of all threads and processes of an engine. vLLM runs under the interpreter of
its own environment, and is left out where there is none. All have huge pages, as the actors of a job do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_app_core.memory import huge_page_variables
from tools.bench.generation_models import MODELS, write_model

ROOT = Path(__file__).resolve().parents[2]
VLLM_PYTHON = ROOT / ".venv-vllm/bin/python"
REFERENCE = "transformers"


@dataclass(frozen=True)
class Case:
    """One batch: ``prompts`` of equal or different lengths, each continued ``rollouts`` times."""

    name: str
    lengths: tuple[int, ...]
    prompts: int
    rollouts: int
    new_tokens: int

    def rows(self, vocabulary: int) -> list[list[int]]:
        """The prompt of every row; the same in every run."""
        rng = random.Random(self.name)
        distinct = [
            [rng.randrange(vocabulary) for _ in range(rng.choice(self.lengths))] for _ in range(self.prompts)
        ]
        return [prompt for prompt in distinct for _ in range(self.rollouts)]


BATCH = Case("64x64", (18,), prompts=64, rollouts=1, new_tokens=64)
GROUPS = Case("groups-256x32", (17, 18, 19), prompts=32, rollouts=8, new_tokens=32)
CASES = {"tiny": (BATCH, GROUPS), "30m": (BATCH,)}


class Side:
    """One engine, with one model, in a process of its own."""

    def __init__(self, engine: str, folder: Path, vocabulary: int, threads: int) -> None:
        python = str(VLLM_PYTHON) if engine == "vllm" else sys.executable
        arguments = [engine, str(folder), str(vocabulary), str(threads)]
        self._process = subprocess.Popen(
            [python, "-m", "tools.bench.generation_side", *arguments],
            cwd=ROOT,
            env={
                **os.environ,
                **huge_page_variables(),
                "OMP_NUM_THREADS": str(threads),
                "HF_HUB_OFFLINE": "1",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.facts = self._answer()

    def run(self, rows: list[list[int]], new_tokens: int) -> dict[str, float]:
        """Generate once: ``wall`` and ``cpu`` seconds."""
        assert self._process.stdin is not None
        print(json.dumps({"rows": rows, "new_tokens": new_tokens}), file=self._process.stdin, flush=True)
        answer = self._answer()
        if answer["tokens"] != len(rows) * new_tokens:
            raise RuntimeError(f"{len(rows)} x {new_tokens} tokens were asked for, got {answer['tokens']}")
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        # It may have died, which the answer that is missing has told already.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        # Libraries print too; answers are the lines that begin with a brace.
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
            sys.stderr.write(line)
        raise RuntimeError(f"{self._process.args} ended with {self._process.wait()}")


def measure(sides: dict[str, Side], case: Case, vocabulary: int, repeats: int) -> dict[str, Any]:
    """Let the sides take turns, once unmeasured and then ``repeats`` times."""
    rows = case.rows(vocabulary)
    turns: list[dict[str, dict[str, float]]] = []
    for _ in range(repeats + 1):
        turns.append({name: side.run(rows, case.new_tokens) for name, side in sides.items()})
    return {name: summary(turns[1:], name, len(rows) * case.new_tokens) for name in sides}


def summary(turns: Sequence[dict[str, dict[str, float]]], name: str, tokens: int) -> dict[str, float]:
    """Medians of one side over the turns."""
    out: dict[str, float] = {}
    for kind in ("cpu", "wall"):
        seconds = statistics.median(turn[name][kind] for turn in turns)
        out[f"{kind}_seconds"] = round(seconds, 4)
        out[f"tokens_per_{kind}_s"] = round(tokens / seconds)
        if name != REFERENCE:
            ratio = statistics.median(turn[REFERENCE][kind] / turn[name][kind] for turn in turns)
            out[f"ratio_{kind}"] = round(ratio, 2)
    return out


def bench(model: str, engines: Sequence[str], repeats: int, threads: int) -> dict[str, Any]:
    """All cases of one model."""
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        folder = Path(place)
        parameters = write_model(folder, MODELS[model])
        vocabulary = MODELS[model].vocab_size
        sides: dict[str, Side] = {}
        for engine in (REFERENCE, *engines):
            sides[engine] = Side(engine, folder, vocabulary, threads)
            stack.callback(sides[engine].close)
        cases = {case.name: measure(sides, case, vocabulary, repeats) for case in CASES[model]}
        versions = {name: side.facts["version"] for name, side in sides.items()}
        return {"parameters": parameters, "versions": versions, "cases": cases}


def main() -> None:
    """Measure all cases and print them as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", nargs="*", choices=("megatron", "vllm"))
    parser.add_argument("--models", nargs="*", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    engines = options.engines or ["megatron", *(["vllm"] if VLLM_PYTHON.exists() else [])]
    models = {name: bench(name, engines, options.repeats, options.threads) for name in options.models}
    print(json.dumps({"threads": options.threads, "repeats": options.repeats, "models": models}, indent=2))


if __name__ == "__main__":
    main()
