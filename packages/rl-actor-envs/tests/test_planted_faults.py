"""Each fault that this package must not have, planted in a copy, turns the copy's tests red."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).resolve().parent.parent
#: The tests that see the faults, and for the slow ones which of them.
QUICK = ("test_table.py", "test_registry.py", "test_rows.py", "test_runtime.py", "test_workspace.py")
ALONE = ("test_fingerprint.py", "test_package.py")
CLI = "test_cli.py::test_j2_prefetch_goes_on_after_a_failure_and_ends_with_1_naming_what_failed"
KILLED = "test_many_builders.py::test_a_builder_killed_half_way_loses_nobody_but_itself"
KILLED_ALONE = f"{KILLED}[goes on- pip sync ]"
KILLED_LATE = f"{KILLED}[dies too- pip install ]"
WAITING = "test_many_builders.py::test_who_waits_too_long_is_told_for_whom_and_where"
DAMAGED = "test_builder.py::test_an_environment_with_a_damaged_mark_is_built_again_from_nothing"


class Fault(NamedTuple):
    """A change of one place in one file, and the tests that have to notice."""

    name: str
    file: str
    sound: str
    faulty: str
    tests: tuple[str, ...]


FAULTS = (
    Fault(
        "only the first extra is emitted",
        "table.py",
        'f"--extra {extra}" for extra in extras)',
        'f"--extra {extra}" for extra in extras[:1])',
        ("test_table.py",),
    ),
    Fault(
        "the stage is always deps",
        "table.py",
        'return "trtllm" if "trtllm" in extras else "deps"',
        'return "deps"',
        ("test_table.py",),
    ),
    Fault(
        "the stage guard is gone",
        "table.py",
        'if stage not in ("all", *STAGES):',
        "if False:",
        ("test_table.py",),
    ),
    Fault("the skip guard is gone", "table.py", "if word not in known:", "if False:", ("test_table.py",)),
    Fault(
        "rows are skipped by name",
        "table.py",
        "not set(extras) & set(skip)",
        "not any(word in actor for word in skip)",
        ("test_table.py",),
    ),
    Fault(
        "an extras value is a tuple",
        "table.py",
        'ColocatedWorker": ["mcore"],',
        'ColocatedWorker": ("mcore",),',
        ("test_table.py",),
    ),
    Fault(
        "the script does not check the extras",
        "table.py",
        "for actor, extra in undeclared_extras(table):",
        "for actor, extra in ():",
        ("test_table.py",),
    ),
    Fault(
        "the registry does not check the extras",
        "registry.py",
        "for _, extra in undeclared_extras({actor: extras}, self._declared):",
        "for _, extra in ():",
        ("test_registry.py",),
    ),
    Fault(
        "the commands do not check the extras of rows",
        "rows.py",
        "registry = ActorRegistry(table)",
        "registry = ActorRegistry(table, [extra for extras in table.values() for extra in extras or ()])",
        ("test_rows.py",),
    ),
    Fault(
        "the fingerprint has the wrong table",
        "fingerprint.py",
        "os.path.abspath(table.__file__)",
        "os.path.abspath(__file__)",
        ("test_fingerprint.py",),
    ),
    Fault(
        "the fingerprint has the wrong file for the lock",
        "fingerprint.py",
        "paths = {name: os.path.join(workspace.root, name)",
        'paths = {name: os.path.join(workspace.root, CONTAINER, "pyproject.toml")',
        ("test_fingerprint.py",),
    ),
    Fault(
        "the fingerprint is ignored for any flag",
        "fingerprint.py",
        'os.environ.get(IGNORE_VARIABLE) == "1"',
        "os.environ.get(IGNORE_VARIABLE)",
        ("test_fingerprint.py",),
    ),
    Fault(
        "the fingerprint is not checked",
        "runtime.py",
        "    check_fingerprint(workspace=workspace)\n",
        "",
        ("test_runtime.py",),
    ),
    Fault(
        "a third-party import", "runtime.py", "import os\n", "import os\nimport ray\n", ("test_package.py",)
    ),
    Fault(
        "a third-party import inside a function",
        "clearing.py",
        "    import shutil\n",
        "    import shutil\n\n    import ray\n",
        ("test_package.py",),
    ),
    Fault(
        "prefetch returns 0 after a failure",
        "cli.py",
        "return 1 if prefetch(table, find_workspace(), options.phase) else 0",
        "return 0 if prefetch(table, find_workspace(), options.phase) else 0",
        (CLI,),
    ),
    Fault(
        "prefetch stops at a failure",
        "prefetch.py",
        "            failed.append(actor)\n",
        "            failed.append(actor)\n            break\n",
        (CLI,),
    ),
    Fault(
        "VIRTUAL_ENV is the interpreter",
        "runtime.py",
        "dict.fromkeys(_DECIDED_HERE, root)",
        "dict.fromkeys(_DECIDED_HERE, environment.interpreter)",
        ("test_runtime.py",),
    ),
    Fault(
        "an environment's name does not depend on the extras",
        "identity.py",
        "json.dumps([actor, list(extras), lock,",
        "json.dumps([actor, lock,",
        ("test_workspace.py",),
    ),
    Fault(
        "a mark may say what it likes",
        "environment.py",
        "if recorded.get(key) != value:",
        "if False:",
        ("test_runtime.py",),
    ),
    Fault(
        "nobody waits for another builder",
        "locking.py",
        "while not self._take():",
        "while False:",
        (WAITING,),
    ),
    Fault("uv does not keep the lock", "uv.py", "pass_fds=(self._lock_fd,)", "pass_fds=()", (KILLED_ALONE,)),
    Fault(
        "remains are not cleared up", "clearing.py", "for name in held:", "for name in ():", (KILLED, DAMAGED)
    ),
    Fault(
        "the second phase keeps the first one's mark",
        "builder.py",
        "        os.replace(os.path.join(environment.root, DEPENDENCIES), "
        "os.path.join(environment.root, BUILDING))\n",
        "        environment.mark(BUILDING)\n",
        (KILLED_LATE,),
    ),
)


def run(package: Path, tests: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run tests of a copy of the package with that copy's source."""
    settings = package / "pytest.ini"
    settings.write_text("[pytest]\nmarkers = slow: x\n")
    words = [
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        str(settings),
        "--import-mode=importlib",
        "-m",
        "not slow",
        # Nobody reads why they are red.
        "--assert=plain",
    ]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *words, *(str(package / "tests" / name) for name in tests)],
        cwd=package,
        env={**os.environ, "PYTHONPATH": str(package / "src"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package and its tests."""
    ignored = shutil.ignore_patterns("__pycache__", Path(__file__).name)
    return shutil.copytree(PACKAGE, tmp_path / "package", ignore=ignored)


@pytest.mark.slow
def test_the_copy_itself_is_green(package: Path) -> None:
    done = run(package, (*QUICK, *ALONE, CLI, KILLED, WAITING, DAMAGED))
    assert done.returncode == 0, done.stdout + done.stderr
    assert {test.partition("[")[0] for fault in FAULTS for test in fault.tests} <= {
        *QUICK,
        *ALONE,
        CLI,
        KILLED,
        WAITING,
        DAMAGED,
    }


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_it_turns_the_tests_red(fault: Fault, package: Path) -> None:
    file = package / "src" / "rl_actor_envs" / fault.file
    text = file.read_text(encoding="utf-8")
    assert text.count(fault.sound) == 1, f"{fault.sound!r} is not once in {fault.file}"
    file.write_text(text.replace(fault.sound, fault.faulty), encoding="utf-8")
    done = run(package, fault.tests)
    # 1: tests failed. Anything else would be a broken run.
    assert done.returncode == 1, done.stdout + done.stderr
    assert " failed" in done.stdout
