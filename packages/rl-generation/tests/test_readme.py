"""The README's first example runs as it stands; those with vLLM run where it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest


def test_the_example_runs(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    example = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    exec(compile(example, "README.md", "exec"), {"model": model})
    printed = capsys.readouterr().out
    assert re.match(r"\(\d+, .*\) \(-\d\.\d+, .*\) (stop|length) 0\n", printed), printed
