"""Speed and memory of the policy, as ratios within one run.

    python -m tools.bench.policy [--repeats 5] [--threads 1] [--parts speed packing memory]

Prints JSON. ``policy_over_transformers``: seconds of the policy divided by those of ``transformers`` with
SDPA, so below 1 is faster; both sides get the same rows in the same micro-batches, read the same tokens and
compute the same numbers, ``transformers`` also those of padding. ``packed_over_padded``: seconds of the
policy with packing divided by those of padded micro-batches with as many tokens, of rows in the order in
which they come, and of rows sorted by length as the policy does. ``chunked_over_naive``: peak memory of
log-probabilities, see :mod:`tools.bench.policy_memory`.

The loss is the mean negative log-probability of the tokens. Seconds are CPU seconds of the process, the best
of the repeats, which take turns so that a busy machine slows all alike. All sides have huge pages, as the
actors of a job do.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rl_app_core.memory import huge_page_variables
from rl_policy_megatron import MegatronPolicy, OptimizerSettings, PolicySettings
from tools.bench.policy_memory import SIDES, measured_in_a_process

PARTS = ("speed", "packing", "memory")
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


MIDDLE = Case("5 M", 256, 6, 2048, rows=16, shortest=100, longest=128, micro_batch=8)
CASES = (
    Case("of the default job", 64, 2, 512, rows=256, shortest=38, longest=50, micro_batch=64),
    Case("0.3 M", 128, 1, 1024, rows=64, shortest=40, longest=120, micro_batch=16),
    MIDDLE,
    Case("30 M", 512, 9, 8192, rows=8, shortest=100, longest=128, micro_batch=4),
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
        # The policy does not read a row's last token either: nothing is predicted from it.
        logits = self._model(rows.input_ids[:, :-1], use_cache=False).logits
        return logits.log_softmax(-1).gather(2, rows.input_ids[:, 1:, None])[..., 0]


def best_seconds(works: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """CPU seconds of each, the best of the repeats after one that is not measured."""
    best = [math.inf] * len(works)
    for repeat in range(repeats + 1):
        for side, work in enumerate(works):
            start = time.process_time()
            work()
            if repeat:
                best[side] = min(best[side], time.process_time() - start)
    return best


def best_ratio(ours: Callable[[], object], theirs: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Ratio of the best CPU seconds of both, and ours."""
    mine, other = best_seconds((ours, theirs), repeats)
    return mine / other, mine


def negative_log_likelihood(tokens: int) -> Callable[..., tuple[torch.Tensor, Mapping[str, Any]]]:
    """The mean over so many tokens, as a loss function of the policy."""

    def loss_fn(logits: Any, rows: Rows) -> tuple[torch.Tensor, Mapping[str, Any]]:
        mask = torch.nn.functional.pad(rows.mask(), (1, 0))
        return -(logits.logprobs() * mask).sum() / tokens, {}

    return loss_fn


def run_case(case: Case, repeats: int) -> Ratios:
    """All ratios of one case."""
    batch = make_rows(case)
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(case, Path(folder))
        settings = PolicySettings(micro_batch_size=case.micro_batch)
        policy = MegatronPolicy(folder, settings, OptimizerSettings(betas=(0.9, 0.999)))
    reference = Transformers(model, case, batch)
    tokens = int(batch.mask().sum())
    loss_fn = negative_log_likelihood(tokens)

    def forward_backward_of_policy() -> None:
        # As in train() before the optimizer; gradients() would also copy what it returns.
        with policy._accumulated(batch, loss_fn):
            pass

    with policy:
        forward_backward, _ = best_ratio(forward_backward_of_policy, reference.forward_backward, repeats)
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


def run_packing(repeats: int) -> dict[str, Any]:
    """Forward and backward over rows as rollouts have them: many short ones, some long."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.empty(64).log_normal_(5.0, 0.9, generator=draw).round().clamp(32, 1024).long()
    ids = torch.randint(0, MIDDLE.vocabulary, (len(lengths), int(lengths.max())), generator=draw)
    batch = Rows(ids, lengths)
    in_order = [
        Rows(ids[start : start + 4], lengths[start : start + 4]) for start in range(0, len(lengths), 4)
    ]
    loss_fn = negative_log_likelihood(int(batch.mask().sum()))
    budget = 4 * int(lengths.max())
    with tempfile.TemporaryDirectory() as folder:
        save_model(MIDDLE, Path(folder))
        packed = MegatronPolicy(folder, PolicySettings(packing=True, micro_batch_tokens=budget))
        padded = MegatronPolicy(folder, PolicySettings(micro_batch_size=4))

    def as_they_come() -> None:
        for rows in in_order:
            padded.gradients(rows, loss_fn)

    with packed, padded:
        works = (
            lambda: packed.gradients(batch, loss_fn),
            as_they_come,
            lambda: padded.gradients(batch, loss_fn),
        )
        ours, unsorted, by_length = best_seconds(works, repeats)
    return {
        "tokens": int(lengths.sum()),
        "padding_in_order": round(
            sum(r.lengths.max().item() * 4 for r in in_order) / int(lengths.sum()) - 1, 2
        ),
        "in_order": round(ours / unsorted, 3),
        "sorted_by_length": round(ours / by_length, 3),
    }


def run_memory() -> dict[str, Any]:
    """2,048 tokens, a vocabulary of 150,000."""
    naive, chunked = (measured_in_a_process(side, 2048, 150_000, 64) for side in SIDES)
    return {"naive_mib": naive >> 20, "chunked_mib": chunked >> 20, "ratio": round(chunked / naive, 3)}


def main() -> None:
    """Run every part and print one JSON object."""
    variables = huge_page_variables()
    if variables:
        # They are read before a process starts.
        arguments = [sys.executable, "-m", "tools.bench.policy", *sys.argv[1:]]
        os.execve(sys.executable, arguments, {**os.environ, **variables})
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found: dict[str, Any] = {"threads": arguments.threads}
    if "speed" in arguments.parts:
        found["policy_over_transformers"] = {
            case.name: asdict(run_case(case, arguments.repeats)) for case in CASES
        }
    if "packing" in arguments.parts:
        found["packed_over_padded"] = run_packing(arguments.repeats)
    if "memory" in arguments.parts:
        found["chunked_over_naive"] = run_memory()
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
