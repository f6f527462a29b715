"""What importing the package may and may not bring in."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import importlib, pkgutil, sys
import torch, random, numpy
before = torch.get_rng_state().tolist(), random.getstate(), torch.get_num_threads()
import rl_algorithms
for module in pkgutil.walk_packages(rl_algorithms.__path__, "rl_algorithms."):
    importlib.import_module(module.name)
assert before == (torch.get_rng_state().tolist(), random.getstate(), torch.get_num_threads())
forbidden = "ray vllm megatron tensorrt_llm transformers httpx rl_generation rl_policy_megatron rl_actor_envs"
print([name for name in forbidden.split() if name in sys.modules])
"""


def test_every_module_imports_without_machinery_or_side_effects():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
