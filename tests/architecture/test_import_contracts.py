"""The contracts of the root pyproject.toml hold, and each one is able to fail."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tools.distributions import distributions

#: Loads import-linter once, and runs its command for each line (a root and what to search) in a fork.
LINTER = """
import json, os, sys, tempfile
from importlinter.cli import lint_imports_command
for line in sys.stdin:
    root, search = json.loads(line)
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            os.chdir(root)
            sys.path[:0] = search
            lint_imports_command(["--no-cache"])
            os._exit(70)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        print(json.dumps([code, said.read().decode()]), flush=True)
"""
Lint = Callable[[Path], tuple[int, set[str], str]]


@pytest.fixture(scope="module")
def lint() -> Iterator[Lint]:
    """Check all contracts of a root; gives the exit code, the ids of the broken ones and the output."""
    linter = subprocess.Popen(
        [sys.executable, "-c", LINTER],
        env={**os.environ, "COLUMNS": "200"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert linter.stdin is not None
    assert linter.stdout is not None

    def check(root: Path) -> tuple[int, set[str], str]:
        search = [str(path) for path in (root, *root.glob("*/*/src"))]
        print(json.dumps([str(root), search]), file=linter.stdin, flush=True)
        code, output = json.loads(linter.stdout.readline())
        broken_names = {match[1] for match in re.finditer(r"^(.*?) BROKEN", output, re.MULTILINE)}
        return code, {c["id"] for c in contracts(root) if c["name"] in broken_names}, output

    yield check
    linter.kill()
    linter.communicate(timeout=30)


def contracts(root: Path) -> list[dict]:
    return tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def test_all_contracts_hold(lint: Lint, root: Path) -> None:
    code, broken, output = lint(root)
    assert (code, broken) == (0, set()), output


def test_every_distribution_is_under_contract(root: Path) -> None:
    linter = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]
    names = {item.import_name for item in distributions(root)}
    assert set(linter["root_packages"]) == names
    (layers,) = (c["layers"] for c in linter["contracts"] if c["id"] == "layers")
    assert names <= set(re.findall(r"\w+", " ".join(layers)))


PLANTED = [
    ("layers", "rl_actor_envs", "import rl_gym_bridge"),
    ("layers", "rl_gym_bridge.trajectory", "import rl_generation.protocol"),
    ("layers", "rl_gym_bridge.trajectory", "from rl_policy_megatron import __version__"),
    ("layers", "rl_generation.protocol", "from rl_gym_bridge.trajectory import Turn"),
    ("layers", "rl_generation.protocol", "import rl_policy_megatron"),
    ("layers", "rl_policy_megatron", "import rl_gym_bridge.trajectory"),
    ("layers", "rl_policy_megatron", "def f() -> None:\n    import rl_generation"),
    ("layers", "rl_generation.protocol", "import rl_algorithms.metrics"),
    ("layers", "rl_algorithms.metrics", "import rl_app_core"),
    ("layers", "rl_app_core", "import rl_app_grpo"),
    ("one-vocabulary", "rl_algorithms.metrics", "from rl_gym_bridge import __version__"),
    ("one-vocabulary", "rl_algorithms.metrics", "import rl_generation.protocol"),
    ("one-vocabulary", "rl_algorithms.planted.deep", "import rl_policy_megatron"),
    ("leaf-stdlib", "rl_actor_envs", "import httpx"),
    ("leaf-stdlib", "rl_actor_envs", "def f() -> None:\n    import packaging.version"),
    ("light-bridge", "rl_gym_bridge", "import torch"),
    ("light-bridge", "rl_gym_bridge.trajectory", "def f() -> None:\n    import nemo_gym.cli"),
    ("light-bridge", "rl_gym_bridge.trajectory", "import ray"),
    ("light-bridge", "rl_gym_bridge.actor", "def f() -> None:\n    import ray"),
    ("light-bridge", "rl_gym_bridge.trajectory", "from transformers import AutoTokenizer"),
    ("pure-algorithms", "rl_algorithms.metrics", "import ray"),
    ("pure-algorithms", "rl_algorithms.metrics", "from megatron.core import parallel_state"),
    ("pure-algorithms", "rl_algorithms.metrics", "import vllm"),
    ("pure-algorithms", "rl_algorithms.metrics", "import tensorrt_llm"),
    ("vllm-home", "rl_generation.protocol", "import vllm"),
    ("vllm-home", "rl_app_core", "from vllm import LLM"),
    ("vllm-home", "rl_generation.vllm_like", "import vllm"),
    ("tensorrt-llm-home", "rl_generation.protocol", "def f() -> None:\n    import tensorrt_llm"),
    ("megatron-homes", "rl_app_core", "import megatron.core"),
    ("megatron-homes", "rl_generation.protocol", "import megatron.core"),
]


@pytest.mark.parametrize(("contract", "module", "line"), PLANTED)
def test_a_planted_import_breaks_its_contract(
    lint: Lint, plant: Callable[[str, str], Path], contract: str, module: str, line: str
) -> None:
    code, broken, output = lint(plant(module, line))
    assert code != 0, output
    assert contract in broken, output


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("rl_generation.vllm.engine", "import vllm"),
        ("rl_generation.trtllm", "import tensorrt_llm"),
        ("rl_generation.megatron.planted", "import megatron.core"),
        ("rl_algorithms.planted", "from rl_gym_bridge.trajectory import Turn"),
    ],
)
def test_what_the_contracts_allow_stays_allowed(
    lint: Lint, plant: Callable[[str, str], Path], module: str, line: str
) -> None:
    code, broken, output = lint(plant(module, line))
    assert (code, broken) == (0, set()), output


def test_one_application_cannot_import_another(lint: Lint, plant: Callable[[str, str], Path]) -> None:
    copy = plant("rl_app_distillation.cli", "import rl_app_grpo")
    code, broken, output = lint(copy)
    assert code != 0, output
    assert "layers" in broken, output


def test_every_contract_has_a_planted_violation(root: Path) -> None:
    assert {contract["id"] for contract in contracts(root)} == {contract for contract, _, _ in PLANTED}
