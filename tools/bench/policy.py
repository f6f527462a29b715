"""Speed of the policy as a ratio to ``transformers`` with SDPA: one model, one batch, one run.

    python -m tools.bench.policy [--repeats 5] [--threads 1]

Prints JSON: seconds of the policy divided by those of ``transformers``, so below 1 is faster. Both sides
get the same rows in the same micro-batches and compute the same numbers; the loss is the mean negative
log-probability of the tokens. Seconds are CPU seconds of the process, the best of the repeats, which take
turns so that a busy machine slows both alike.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rl_policy_megatron import MegatronPolicy, OptimizerSettings, PolicySettings

LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Case:
    """A Qwen3 model and a batch of rows, ``shortest`` to ``longest`` tokens each."""

    name: str
    hidden: int
    layers: int
    vocabulary: int
    rows: int
    shortest: int
    longest: int
    micro_batch: int


@dataclass(frozen=True)
class Ratios:
    """CPU seconds, policy ÷ transformers, and what the policy's step took."""

    parameters: int
    tokens: int
    forward_backward: float
    whole_update: float
    logprobs: float
    update_seconds: float


@dataclass(frozen=True)
class Rows:
    input_ids: torch.Tensor
    lengths: torch.Tensor

    def select(self, rows: Sequence[int]) -> Rows:
        picked = list(rows)
        width = int(self.lengths[picked].max())
        return Rows(self.input_ids[picked, :width], self.lengths[picked])

    def mask(self) -> torch.Tensor:
        places = torch.arange(1, self.input_ids.size(1))
        return places < self.lengths[:, None]


CASES = (
    Case("xs, the default job", 64, 2, 512, rows=256, shortest=38, longest=50, micro_batch=64),
    Case("vocabulary-heavy", 128, 2, 8192, rows=32, shortest=40, longest=120, micro_batch=8),
    Case("small", 256, 6, 2048, rows=16, shortest=100, longest=128, micro_batch=8),
)


def save_model(case: Case, folder: Path) -> Any:
    """The case's model as ``transformers`` has it, also written to ``folder``."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=case.vocabulary,
        hidden_size=case.hidden,
        intermediate_size=3 * case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=max(2, case.hidden // 64),
        num_key_value_heads=max(1, case.hidden // 128),
        head_dim=32,
        tie_word_embeddings=True,
        initializer_range=0.08,
    )
    config._attn_implementation = "sdpa"
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return model


def make_rows(case: Case) -> Rows:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(case.shortest, case.longest + 1, (case.rows,), generator=generator)
    ids = torch.randint(0, case.vocabulary, (case.rows, int(lengths.max())), generator=generator)
    return Rows(ids, lengths)


class Transformers:
    """The same work in plain torch."""

    def __init__(self, model: Any, case: Case, batch: Rows) -> None:
        order = batch.lengths.argsort(descending=True).tolist()
        groups = [order[start : start + case.micro_batch] for start in range(0, len(order), case.micro_batch)]
        self._micro_batches = [batch.select(rows) for rows in groups]
        self._tokens = int(batch.mask().sum())
        self._model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)

    def logprobs(self) -> None:
        self._model.eval()
        with torch.no_grad():
            for rows in self._micro_batches:
                self._score(rows)

    def forward_backward(self) -> None:
        self._model.train()
        self._optimizer.zero_grad()
        for rows in self._micro_batches:
            loss = -(self._score(rows) * rows.mask()).sum() / self._tokens
            loss.backward()

    def update(self) -> None:
        self.forward_backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()

    def _score(self, rows: Rows) -> torch.Tensor:
        logits = self._model(rows.input_ids, use_cache=False).logits[:, :-1]
        return logits.log_softmax(-1).gather(2, rows.input_ids[:, 1:, None])[..., 0]


def best_ratio(ours: Callable[[], object], theirs: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Ratio of the best CPU seconds of both, and ours."""
    best = {0: math.inf, 1: math.inf}
    for repeat in range(repeats + 1):
        for side, work in enumerate((ours, theirs)):
            start = time.process_time()
            work()
            if repeat:
                best[side] = min(best[side], time.process_time() - start)
    return best[0] / best[1], best[0]


def run_case(case: Case, repeats: int) -> Ratios:
    """All ratios of one case."""
    batch = make_rows(case)
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(case, Path(folder))
        settings = PolicySettings(micro_batch_size=case.micro_batch)
        policy = MegatronPolicy(folder, settings, OptimizerSettings(betas=(0.9, 0.999)))
    reference = Transformers(model, case, batch)
    tokens = int(batch.mask().sum())

    def loss_fn(logits: Any, rows: Rows) -> tuple[torch.Tensor, Mapping[str, Any]]:
        mask = torch.nn.functional.pad(rows.mask(), (1, 0))
        return -(logits.logprobs() * mask).sum() / tokens, {}

    with policy:
        forward_backward, _ = best_ratio(
            lambda: policy.gradients(batch, loss_fn), reference.forward_backward, repeats
        )
        whole_update, seconds = best_ratio(
            lambda: policy.train(batch, loss_fn, learning_rate=LEARNING_RATE), reference.update, repeats
        )
        logprobs, _ = best_ratio(lambda: policy.logprobs(batch), reference.logprobs, repeats)
        parameters = policy.parameter_count
    return Ratios(
        parameters=parameters,
        tokens=tokens,
        forward_backward=round(forward_backward, 3),
        whole_update=round(whole_update, 3),
        logprobs=round(logprobs, 3),
        update_seconds=round(seconds, 3),
    )


def main() -> None:
    """Run every case and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results = {case.name: asdict(run_case(case, arguments.repeats)) for case in CASES}
    print(json.dumps({"threads": arguments.threads, "policy_over_transformers": results}, indent=2))


if __name__ == "__main__":
    main()
