"""The README's example does what it says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_the_example_runs(
    model_of: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, README.name, "exec"), {"MODEL": model_of("qwen3-tied")[0], "__name__": "__main__"})
    assert capsys.readouterr().out.endswith("tensor(True)\n")
    assert (tmp_path / "exported" / "model.safetensors").exists()
