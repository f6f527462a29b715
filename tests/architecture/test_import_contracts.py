"""The contracts of the root pyproject.toml hold, and each one is able to fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.distributions import distributions


def lint(root: Path) -> tuple[int, set[str], str]:
    """Check all contracts of `root`; return the exit code, the ids of the broken ones and the output."""
    sources = [str(path) for path in root.glob("*/*/src")]
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sources]), "COLUMNS": "200"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    output = done.stdout + done.stderr
    broken_names = {match[1] for match in re.finditer(r"^(.*?) BROKEN", output, re.MULTILINE)}
    return done.returncode, {c["id"] for c in contracts(root) if c["name"] in broken_names}, output


def contracts(root: Path) -> list[dict]:
    return tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def test_all_contracts_hold(root: Path) -> None:
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
    plant: Callable[[str, str], Path], contract: str, module: str, line: str
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
    plant: Callable[[str, str], Path], module: str, line: str
) -> None:
    code, broken, output = lint(plant(module, line))
    assert (code, broken) == (0, set()), output


def test_one_application_cannot_import_another(plant: Callable[[str, str], Path]) -> None:
    copy = plant("rl_app_distillation.cli", "import rl_app_grpo")
    settings = copy / "pyproject.toml"
    text = settings.read_text()
    settings.write_text(
        text.replace('    "rl_app_grpo",\n]', '    "rl_app_grpo",\n    "rl_app_distillation",\n]')
    )
    assert settings.read_text() != text
    code, broken, output = lint(copy)
    assert code != 0, output
    assert "layers" in broken, output


def test_every_contract_has_a_planted_violation(root: Path) -> None:
    assert {contract["id"] for contract in contracts(root)} == {contract for contract, _, _ in PLANTED}
