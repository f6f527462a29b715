"""One process, several policies, nothing changed for others and nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rl_policy_megatron import MegatronPolicy, ParallelLayout, PolicySettings, RuntimeStateError


def _run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    finished = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=240
    )
    assert finished.returncode == 0, finished.stderr
    return finished


def test_importing_the_package_imports_no_engine_and_changes_nothing() -> None:
    code = """
import sys, warnings
import torch
before = (torch.cuda.current_device, torch.cuda.synchronize, list(warnings.filters))
import rl_policy_megatron
from rl_policy_megatron import OptimizerSettings, PolicySettings
heavy = {"megatron", "ray", "transformers", "safetensors", "vllm"} & set(sys.modules)
assert not heavy, heavy
assert before == (torch.cuda.current_device, torch.cuda.synchronize, list(warnings.filters))
assert not torch.distributed.is_initialized()
try:
    rl_policy_megatron.nonsense
except AttributeError as error:
    assert "nonsense" in str(error)
else:
    raise AssertionError
"""
    assert _run(code).stderr == ""


@pytest.mark.slow
def test_normal_use_prints_nothing_and_listens_on_loopback_only(model_of: Callable[..., Any]) -> None:
    code = """
import gc, os, sys, warnings
from types import SimpleNamespace
import psutil, torch
gc.disable()  # What is left is not freed by chance.
filters, environment, hook = list(warnings.filters), dict(os.environ), sys.excepthook
from rl_policy_megatron import MegatronPolicy

class Rows(SimpleNamespace):
    def select(self, rows):
        return Rows(input_ids=self.input_ids[rows], lengths=self.lengths[rows])

policy = MegatronPolicy(sys.argv[1])
batch = Rows(input_ids=torch.randint(0, 61, (4, 8)), lengths=torch.full((4,), 8))
policy.logprobs(batch)
policy.keep_reference()
policy.reference_logprobs(batch)
policy.train(batch, lambda logits, rows: (-logits.logprobs().mean(), {}), learning_rate=1e-3)
listening = [c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
assert all(address == "127.0.0.1" for address in listening), listening
policy.save(sys.argv[2] + "/saved")
policy.load(sys.argv[2] + "/saved")
policy.export_hf(sys.argv[2] + "/exported")
policy.shutdown()
assert warnings.filters == filters
assert dict(os.environ) == environment
assert sys.excepthook is hook
assert "transformers" not in sys.modules
left = [c for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
# megatron-core 0.16.1 holds on to one group, in a global.
assert len(listening) > 10 and len(left) <= 1, (len(listening), len(left))
"""
    directory = model_of("qwen3-tied")[0]
    finished = _run(code, str(directory), str(directory.parent))
    assert (finished.stdout, finished.stderr) == ("", "")


def test_policies_are_independent_and_the_last_one_clears_up(
    model_of: Callable[..., Any], rows_of: Callable[..., Any], token_mean_loss: Callable[..., Any]
) -> None:
    originals = torch.cuda.current_device, torch.cuda.synchronize
    batch = rows_of([9, 5])
    first, second = MegatronPolicy(model_of("qwen3-tied")[0]), MegatronPolicy(model_of("llama")[0])
    before = second.logprobs(batch)
    first.train(batch, token_mean_loss, learning_rate=1e-2)
    assert torch.equal(second.logprobs(batch), before)
    first.shutdown()
    first.shutdown()
    assert dist.is_initialized()
    second.train(batch, token_mean_loss, learning_rate=1e-2)
    second.shutdown()
    assert not dist.is_initialized()
    assert (torch.cuda.current_device, torch.cuda.synchronize) == originals
    with MegatronPolicy(model_of("llama")[0]) as third:
        assert torch.equal(third.logprobs(batch), before)


def test_a_closed_policy_says_so(
    model_of: Callable[..., Any],
    rows_of: Callable[..., Any],
    token_mean_loss: Callable[..., Any],
    tmp_path: Path,
) -> None:
    policy, batch = MegatronPolicy(model_of("llama")[0]), rows_of([4])
    policy.shutdown()
    for call in (
        lambda: policy.model,
        lambda: policy.parameter_count,
        lambda: policy.logprobs(batch),
        lambda: policy.reference_logprobs(batch),
        lambda: policy.token_logits(batch),
        lambda: policy.train(batch, token_mean_loss, learning_rate=0.0),
        lambda: policy.gradients(batch, token_mean_loss),
        lambda: policy.refit_spec(),
        lambda: policy.save(tmp_path / "never"),
        lambda: policy.load(tmp_path),
        lambda: policy.export_hf(tmp_path / "never"),
        lambda: policy.prepare_for_inference(),
        lambda: policy.prepare_for_training(),
    ):
        with pytest.raises(RuntimeStateError, match="shut down"):
            call()
    assert not (tmp_path / "never").exists()


def test_an_existing_process_group_is_used_and_left_alone(
    model_of: Callable[..., Any], rows_of: Callable[..., Any]
) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with MegatronPolicy(model_of("llama")[0]) as policy:
            policy.logprobs(rows_of([4]))
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(sys.platform != "linux", reason="the loopback interface has another name elsewhere")
def test_gloo_is_kept_on_loopback_unless_told_otherwise(
    model_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []
    original = dist.init_process_group

    def looking(*arguments: Any, **options: Any) -> None:
        seen.append(os.environ.get("GLOO_SOCKET_IFNAME"))
        original(*arguments, **options)

    monkeypatch.setattr(dist, "init_process_group", looking)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    MegatronPolicy(model_of("llama")[0]).shutdown()
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,")
    MegatronPolicy(model_of("llama")[0]).shutdown()
    assert seen == ["lo", "lo,"]


def test_a_layout_that_one_process_cannot_hold_is_refused(model_of: Callable[..., Any]) -> None:
    settings = PolicySettings(layout=ParallelLayout(pipeline=2))
    with pytest.raises(RuntimeStateError, match="world of 1 processes cannot hold"):
        MegatronPolicy(model_of("llama")[0], settings)
    assert not dist.is_initialized()


def test_modes_and_limits(policy_of: Callable[..., Any], rows_of: Callable[..., Any]) -> None:
    policy = policy_of("llama")
    assert (policy.vocab_size, policy.max_context) == (61, 256)
    policy.prepare_for_training()
    policy.prepare_for_inference()
    assert not policy.model.training
    seen: list[bool] = []

    def look(logits: Any, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        seen.append(policy.model.training)
        return logits.logprobs().sum() * 0.0, {}

    policy.train(rows_of([4]), look, learning_rate=0.0)
    assert seen == [True]
    assert not policy.model.training
