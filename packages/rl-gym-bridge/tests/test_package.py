"""What importing the package loads, and whether its README tells the truth."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent
FORBIDDEN = ("torch", "ray", "transformers", "nemo_gym", "numpy", "pydantic", "httpx", "aiohttp")


def python(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False, cwd=PACKAGE
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules() -> list[str]:
    source = PACKAGE / "src"
    files = sorted(source.rglob("*.py"))
    return [
        ".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__") for file in files
    ]


# Imports each module in a fork of an interpreter that has imported none of them.
ALONE = """
import json, os, sys, traceback
for module in sys.argv[1:]:
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            __import__(module)
            told = sorted({name.partition(".")[0] for name in sys.modules})
        except BaseException:
            told = traceback.format_exc()
        os.write(writing, json.dumps(told).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as said:
        print(json.dumps([module, json.load(said)]), flush=True)
    os.wait()
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str] | str]:
    """Module -> top-level names that are loaded once it is imported alone, or why it cannot be."""
    return dict(map(json.loads, python("-c", ALONE, *modules()).splitlines()))


@pytest.mark.parametrize("module", modules())
def test_every_module_imports_alone_and_loads_nothing_heavy(
    loaded: dict[str, list[str] | str], module: str
) -> None:
    names = loaded[module]
    assert isinstance(names, list), names
    assert "rl_gym_bridge" in names
    assert not set(names) & set(FORBIDDEN)


def test_what_every_process_of_a_run_imports_is_light() -> None:
    """Trajectories travel everywhere; asyncio alone costs as much as all of the rest."""
    code = f"import sys, rl_gym_bridge.trajectory; print(*set(sys.modules) & set({(*FORBIDDEN, 'asyncio')}))"
    assert python("-c", code).split() == []


def examples() -> list[tuple[str, str]]:
    text = (PACKAGE / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"```python\n(.*?)```\n\nprints\n\n```text\n(.*?)```", text, re.DOTALL)
    assert len(found) + len(gym_examples()) == text.count("```python")
    return found


def gym_examples() -> list[str]:
    """Those that need a Gym and an engine; they say so in their first line."""
    text = (PACKAGE / "README.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(# not run here.*?)```", text, re.DOTALL)


@pytest.mark.parametrize(("code", "output"), examples())
def test_the_readmes_examples_run_and_print_what_it_says(code: str, output: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(code, encoding="utf-8")
    assert python(str(script)) == output


@pytest.mark.parametrize("code", gym_examples())
def test_the_readmes_gym_examples_import_and_make_what_they_need(code: str) -> None:
    before_gym = code.partition("rows = ")[0]
    assert before_gym != code
    assert python("-c", f"{before_gym}\nprint(config.model_name)") == "my-policy\n"
    compile(code, "README.md", "exec")
