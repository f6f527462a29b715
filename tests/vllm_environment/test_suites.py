"""What needs vLLM runs in the environment that has it, one file at a time.

Always: sampling, refits, and that the engine is on policy. What kills engines, serves HTTP and trains a job
takes minutes more and runs with RL_VLLM_TESTS=all.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUITES = [
    *sorted(ROOT.glob("packages/rl-generation/tests/vllm/**/test_*.py")),
    *sorted(ROOT.glob("tests/e2e/test_vllm_*.py")),
    *sorted(ROOT.glob("tests/faults/controller/test_vllm_*.py")),
]
#: files that every run of the suite takes
ALWAYS = {"test_engine.py", "test_refit.py", "test_vllm_on_policy.py"}
TAKES_ALL = os.environ.get("RL_VLLM_TESTS") == "all"
#: for one file; a single test has pytest's own limit. Many repetitions of a fault take more.
DEADLINE_S = 900 + 60 * int(os.environ.get("RL_FAULTS_N", "0"))
LAST_LINES = 80

# The environment is installed first where it is missing.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(DEADLINE_S + 1600)]


def run(python: str, *words: str | Path) -> tuple[int, str]:
    """Run pytest in the environment of `python`; exit code and output."""
    bin_folder = Path(python).parent
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {
        "PATH": f"{bin_folder}{os.pathsep}{environment['PATH']}",
        "VIRTUAL_ENV": str(bin_folder.parent),
        "OMP_NUM_THREADS": "1",
        "RL_ACTOR_ENVS_SYSTEM": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *map(str, words)],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return done.returncode, done.stdout


def tail(output: str) -> str:
    return "\n".join(output.splitlines()[-LAST_LINES:])


def test_there_is_something_to_run() -> None:
    assert {file.name for file in SUITES} >= ALWAYS
    assert [file.parent.name for file in SUITES].count("vllm") >= 3
    assert [file.parent.name for file in SUITES].count("e2e") >= 2


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(
            file,
            id=file.relative_to(ROOT).as_posix(),
            marks=[
                *([pytest.mark.faults] if "fault" in file.relative_to(ROOT).as_posix() else []),
                *(
                    []
                    if TAKES_ALL or file.name in ALWAYS
                    else [pytest.mark.skip(reason="takes minutes; RL_VLLM_TESTS=all runs it")]
                ),
            ],
        )
        for file in SUITES
    ],
)
def test_it_passes_with_vllm(vllm_python: str, file: Path) -> None:
    code, output = run(vllm_python, file)
    assert code == 0, tail(output)
    # pytest ends with 0 as well where every test of a file was skipped.
    assert re.search(r"^\d+ passed", output.splitlines()[-1]), tail(output)


def test_a_failure_there_is_a_failure_here(vllm_python: str, tmp_path: Path) -> None:
    (tmp_path / "test_planted.py").write_text("def test_it():\n    assert 'planted' == 'found'\n")
    code, output = run(vllm_python, tmp_path / "test_planted.py", f"--rootdir={tmp_path}")
    assert code == 1
    assert "planted" in tail(output)
