"""What is known to be harmless is not shown while a call runs, and everything else is."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_policy_megatron.quiet import quiet_megatron

_LOGGER = logging.getLogger("megatron.core.models.gpt.gpt_model")
_KNOWN = "GPTModel IS DEPRECATED. Use another."


def test_only_known_records_are_dropped_and_only_within(caplog: pytest.LogCaptureFixture) -> None:
    with quiet_megatron(), quiet_megatron():
        _LOGGER.warning(_KNOWN)
        _LOGGER.warning("GPTModel has %d problems", 3)
        logging.getLogger("megatron.core.other").warning(_KNOWN)
    assert caplog.messages == ["GPTModel has 3 problems", _KNOWN]
    with pytest.raises(KeyError), quiet_megatron():
        raise KeyError
    _LOGGER.warning(_KNOWN)
    assert caplog.messages[2:] == [_KNOWN]


def test_only_known_warnings_are_dropped_and_only_within() -> None:
    known, unknown = "absl.logging is not installed. Using logging.", "the disk is full"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with quiet_megatron():
            warnings.warn(known, stacklevel=1)
            warnings.warn(unknown, stacklevel=1)
        warnings.warn(known, stacklevel=1)
    assert [str(warning.message) for warning in caught] == [unknown, known]


_SCRIPT = """
import sys
from dataclasses import dataclass
from pathlib import Path
import torch
import torch.distributed as dist
from rl_policy_megatron import MegatronPolicy, ParallelLayout, PolicySettings

@dataclass
class Rows:
    input_ids: torch.Tensor
    lengths: torch.Tensor

    def select(self, rows):
        return Rows(self.input_ids[rows], self.lengths[rows])

place, rank, world, policies = (eval(word) for word in sys.argv[1:])
if world > 1:
    dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=world)
for number, (model, layout, settings) in enumerate(policies):
    settings = PolicySettings(layout=ParallelLayout(**layout), **settings)
    with MegatronPolicy(model, settings) as policy:
        rows = Rows(torch.arange(48).view(4, 12), torch.tensor([12, 3, 7, 1]))
        policy.logprobs(rows)
        policy.topk_logits(rows, 2)
        policy.keep_reference()
        policy.train(rows, lambda view, rows: (-view.logprobs().sum(), {}), learning_rate=1e-3)
        policy.reference_logprobs(rows)
        list(policy.stream_weights())
        policy.save(Path(place) / f"saved-{number}")
        policy.load(Path(place) / f"saved-{number}")
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA some of it is advice worth following")
def test_a_plain_script_on_a_cpu_prints_nothing_of_the_libraries(
    tmp_path: Any, model_of: Callable[..., Any]
) -> None:
    """Every layout's own path through megatron, as a user's script runs it."""
    dense, mixture = (str(model_of(kind)[0]) for kind in ("llama", "qwen3-moe"))
    split = {"tensor": 2, "sequence_parallel": True}
    alone = [(mixture, {}, {"recompute": "full"}), (dense, {}, {"dtype": "bfloat16", "packing": True})]
    pair = [
        (dense, {"tensor": 2}, {"packing": True}),
        (dense, split, {"dtype": "bfloat16", "recompute": "full"}),
        (dense, {"pipeline": 2}, {}),
        (mixture, {"expert": 2}, {}),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment.pop("PYTHONWARNINGS", None)
    running = []
    for name, rank, world, policies in (("a", 0, 1, alone), ("b", 0, 2, pair), ("b", 1, 2, pair)):
        (tmp_path / name).mkdir(exist_ok=True)
        words = map(repr, (str(tmp_path / name), rank, world, policies))
        process = subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        running.append(process)
    try:
        for process in running:
            printed = process.communicate(timeout=100)[0]
            assert (printed, process.returncode) == ("", 0)
    finally:
        for process in running:
            process.kill()
            process.wait()
