"""The documents say what is true now."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rl_algorithms.registry import METHODS, table
from rl_app_core.config import DistillationConfig, GRPOConfig, load_config
from rl_app_core.config.reference import reference
from rl_app_core.distillation import check_settings as check_distillation
from rl_app_core.grpo import check_settings as check_grpo
from rl_app_distillation.recipes import RECIPES as DISTILLATION
from rl_app_grpo.recipes import RECIPES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def test_configuration_lists_every_key_as_it_is():
    assert (DOCS / "configuration.md").read_text().endswith(reference()), (
        "docs/configuration.md is stale: put the output of `python -m rl_app_core.config.reference` "
        "below its introduction"
    )


def test_the_job_page_names_every_recipe_and_command():
    page = (DOCS / "grpo.md").read_text()
    for name in RECIPES.names:
        assert f"| `{name}` |" in page
    shown = subprocess.run(
        [sys.executable, "-m", "rl_app_grpo", "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    commands = set(re.findall(r"^  ([a-z][a-z-]+) ", shown.partition("Commands:")[2], re.MULTILINE))
    assert {"run", "resume", "validate", "show-config", "export-hf"} <= commands
    for command in commands:
        assert f"`grpo {command}" in page


def test_the_examples_of_the_core_readme_run():
    text = (ROOT / "apps/core/README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    subprocess.run([sys.executable, "-c", example], check=True, timeout=120)


def test_the_table_of_algorithms_is_the_registrys():
    assert table() in (DOCS / "algorithms.md").read_text(), (
        "docs/algorithms.md is stale: replace its table by the output of `python -m rl_algorithms.registry`"
    )


@pytest.mark.parametrize("entry", METHODS, ids=lambda entry: entry.name)
def test_every_method_of_the_table_can_be_asked_for_and_has_its_test(entry):
    file, _, name = entry.test.partition("::")
    assert f"\ndef {name}(" in (ROOT / "packages/rl-algorithms/tests" / file).read_text()
    words = [f"{key}={json.dumps(value)}" for key, value in entry.settings.items()]
    if entry.application == "grpo":
        assert words, "what is the recipe's own needs no line"
        check_grpo(load_config(RECIPES.find("cpu"), words, model=GRPOConfig))
    elif entry.application == "distill":
        check_distillation(load_config(DISTILLATION.find("cpu"), words, model=DistillationConfig))
    else:
        assert not words


@pytest.mark.parametrize(
    ("module", "option"),
    [("best_of_group", "advantage=best_of_group:BestOfGroup"), ("quadratic", "loss=quadratic:QuadraticPull")],
)
def test_the_methods_that_the_guide_writes_work(module, option, tmp_path, monkeypatch):
    page = (DOCS / "write-an-algorithm.md").read_text()
    (source,) = re.findall(rf"```python\n# {module}.py\n(.*?)```", page, re.DOTALL)
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    check_grpo(load_config(RECIPES.find("cpu"), [f"algorithm.{option}"], model=GRPOConfig))


def test_the_distillation_page_names_every_recipe():
    page = (DOCS / "distillation.md").read_text()
    for name in DISTILLATION.names:
        assert f"`{name}`" in page
