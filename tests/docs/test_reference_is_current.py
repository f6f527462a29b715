"""The documents say what is true now."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from rl_app_core.config.reference import reference
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
