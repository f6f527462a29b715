"""Peak memory of log-probabilities, forward and backward, for a large vocabulary: one side in a process.

    python -m tools.bench.policy_memory {naive,chunked} [--tokens 2048] [--vocabulary 150000] [--hidden 64]

Prints the bytes by which the process's largest resident size grew, weights and hidden states not counted.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import torch

from rl_policy_megatron.linear_logprobs import linear_logprobs

ROOT = Path(__file__).resolve().parents[2]
SIDES = ("naive", "chunked")
CHUNK_TOKENS = 512
"""As the policy's setting by default."""


def naive(hidden: torch.Tensor, weight: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """As a model's logits are used when nothing is done about them."""
    logits = (hidden @ weight.t()).float()
    return logits.log_softmax(-1).gather(1, token_ids[:, None])[:, 0]


def chunked(hidden: torch.Tensor, weight: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """As the policy does."""
    scores, _ = linear_logprobs(
        hidden, weight, token_ids[:, None], temperature=1.0, chunk_tokens=CHUNK_TOKENS, with_entropy=False
    )
    return scores[:, 0]


def peak_bytes() -> int:
    """Largest resident size of this process so far; that of getrusage begins with the parent's."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise RuntimeError("/proc/self/status has no VmHWM; this bench needs Linux")
    return int(found[1]) * 1024


def measured_in_a_process(side: str, tokens: int, vocabulary: int, hidden: int) -> int:
    """What :func:`main` prints for these arguments."""
    sizes = ["--tokens", str(tokens), "--vocabulary", str(vocabulary), "--hidden", str(hidden)]
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench.policy_memory", side, *sizes],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    return int(done.stdout)


def main() -> None:
    """Measure one side."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--hidden", type=int, default=64)
    options = parser.parse_args()
    work = {"naive": naive, "chunked": chunked}[options.side]
    torch.manual_seed(0)
    weight = torch.randn(options.vocabulary, options.hidden, requires_grad=True)
    hidden = torch.randn(options.tokens, options.hidden, requires_grad=True)
    token_ids = torch.randint(0, options.vocabulary, (options.tokens,))
    # Libraries take memory for themselves the first time that they are used.
    work(hidden[:8], weight[:100], token_ids[:8] % 100).sum().backward()
    weight.grad = hidden.grad = None
    before = peak_bytes()
    work(hidden, weight, token_ids).sum().backward()
    print(peak_bytes() - before)


if __name__ == "__main__":
    main()
