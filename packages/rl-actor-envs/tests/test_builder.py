"""What is in an environment that real uv built, and what is not accepted as one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rl_actor_envs import builder
from rl_actor_envs.builder import build_environment
from rl_actor_envs.deadline import Deadline
from rl_actor_envs.environment import Environment, actor_environment, driver_environment
from rl_actor_envs.errors import BuildError, UvError, UvMissingError
from rl_actor_envs.uv import Uv, child_environment
from rl_actor_envs.workspace import Workspace

WORKER = "rl_app_core.workers.ColocatedWorker"
MEMBERS = {"mini_core": "0.1.0", "mini_library": "0.1.0"}


@pytest.fixture
def mini(mini: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    mini.apply(monkeypatch)
    return mini


def worker(mini: Any, *extras: str, python: str | None = None) -> Environment:
    return actor_environment("a.Worker", extras or ("mcore",), Workspace(str(mini.root)), python)


def marks(environment: Environment) -> list[str]:
    return sorted(path.name for path in Path(environment.root).glob("*.json"))


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(folder)): (path.lstat().st_mtime_ns, path.lstat().st_size)
        for path in sorted(folder.rglob("*"))
    }


def test_it_holds_what_the_lock_pins_and_the_members_editable(mini: Any) -> None:
    environment = worker(mini)
    assert build_environment(environment) is True
    assert mini.installed(Path(environment.root)) == {"tiny": "1.0", **MEMBERS}
    code = "import mini_core, mini_library, tiny; print(mini_library.PLACE, tiny.VERSION)"
    words = [environment.interpreter, "-I", "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True, cwd="/")
    assert done.stdout == f"{mini.root}/packages/library/src/mini_library.py 1.0\n"
    recorded = json.loads(Path(environment.root, "environment.json").read_text())
    assert recorded.pop("time").endswith("Z")
    assert recorded == {**environment.facts, "torch": None}
    assert marks(environment) == ["environment.json"]


def test_what_is_built_is_only_looked_at(mini: Any) -> None:
    environment = worker(mini)
    build_environment(environment)
    before, calls = contents(mini.environments), mini.calls("")
    for phase in ("all", "dependencies", "members"):
        assert build_environment(environment, phase) is False
    assert (contents(mini.environments), mini.calls("")) == (before, calls)


def test_the_first_phase_needs_no_source_and_the_second_adds_the_members(mini: Any) -> None:
    hidden = [path.rename(path.with_suffix(".hidden")) for path in mini.root.glob("*/*/src")]
    environment = worker(mini)
    assert build_environment(environment, "dependencies") is True
    assert (mini.installed(Path(environment.root)), marks(environment)) == (
        {"tiny": "1.0"},
        ["dependencies.json"],
    )
    assert environment.fault() is not None
    assert build_environment(environment, "dependencies") is False
    for path in hidden:
        path.rename(path.with_suffix(""))
    assert build_environment(environment, "members") is True
    assert mini.installed(Path(environment.root)) == {"tiny": "1.0", **MEMBERS}
    assert (mini.calls(" pip sync "), mini.calls(" pip install "), mini.calls(" venv ")) == (1, 1, 1)


def test_the_second_phase_alone_does_not_install_the_first(mini: Any) -> None:
    with pytest.raises(BuildError, match=r"a\.Worker.*--phase dependencies") as caught:
        build_environment(worker(mini), "members")
    assert caught.value.actor == "a.Worker"
    assert mini.calls("") == 0


def test_an_unknown_phase_is_refused(mini: Any) -> None:
    with pytest.raises(BuildError, match="'later'"):
        build_environment(worker(mini), "later")


def test_every_extra_counts(mini: Any) -> None:
    environment = worker(mini, "gym", "mcore", "vllm")
    build_environment(environment)
    wanted = {"tiny": "1.0", "torch": "1.0", "cuda_only": "1.0", "shared_need": "1.0", **MEMBERS}
    assert mini.installed(Path(environment.root)) == wanted


def test_i5_changed_extras_lock_and_workspace_are_built_beside_the_old_ones(mini: Any) -> None:
    first = worker(mini)
    build_environment(first)
    second = worker(mini, "vllm")
    assert build_environment(second) is True
    lock = mini.root / "uv.lock"
    lock.write_text(lock.read_text() + "\n# changed\n")
    third = worker(mini)
    assert build_environment(third) is True
    shutil.copytree(mini.root, mini.folder / "other")
    fourth = actor_environment("a.Worker", ("mcore",), Workspace(str(mini.folder / "other")))
    assert build_environment(fourth) is True
    assert len({environment.root for environment in (first, second, third, fourth)}) == 4
    assert "tiny" not in mini.installed(Path(second.root))
    pointing = next(Path(fourth.root).glob("lib/*/site-packages/_mini_core.pth")).read_text()
    assert pointing.startswith(str(mini.folder / "other"))


def test_an_environment_for_another_python_is_not_built_by_this_one(mini: Any) -> None:
    with pytest.raises(BuildError, match=r"cpython-3\.9\.1.*of that Python"):
        build_environment(worker(mini, python="cpython-3.9.1"))


def test_tensorrt_llm_comes_from_its_own_lock_pinned_by_version_alone(mini: Any) -> None:
    lock = mini.root / "apps" / "container" / "trtllm" / "uv.lock"
    # Its wheel is another file than the one that the lock was made with.
    text, changed = re.subn(
        r'(tensorrt_llm-1\.0-py3-none-any\.whl", hash = "sha256:)\w{4}', r"\g<1>0000", lock.read_text()
    )
    assert changed == 1
    lock.write_text(text)
    environment = worker(mini, "trtllm")
    build_environment(environment)
    wanted = {"tiny": "2.0", "tensorrt_llm": "1.0", "shared_need": "2.0", "mini_library": "0.1.0"}
    assert mini.installed(Path(environment.root)) == wanted


def test_another_build_of_torch_is_taken_with_what_it_needs_in_the_locks_versions(
    mini: Any, make_wheel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = mini.folder / "wheels"
    make_wheel(wheels, "torch", "1.0+cpu", {"torch.py": ""}, ["shared-need"])
    monkeypatch.setenv("UV_FIND_LINKS", str(wheels))
    environment = worker(mini, "vllm")
    build_environment(environment)
    installed = mini.installed(Path(environment.root))
    assert installed == {"torch": "1.0+cpu", "shared_need": "1.0", "mini_library": "0.1.0"}
    assert json.loads(Path(environment.root, "environment.json").read_text())["torch"] == "1.0+cpu"
    # Used later as well, when nothing is chosen any more.
    monkeypatch.delenv("UV_FIND_LINKS")
    assert build_environment(environment) is False


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_choice_the_locks_own_torch_is_taken(
    value: str | None, mini: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("UV_FIND_LINKS", "UV_TORCH_BACKEND"):
        if value is not None:
            monkeypatch.setenv(name, value)
    environment = worker(mini, "vllm")
    build_environment(environment)
    assert mini.installed(Path(environment.root))["torch"] == "1.0"
    assert "cuda_only" in mini.installed(Path(environment.root))


@pytest.mark.parametrize("chosen", [True, False])
def test_a_file_with_another_hash_than_the_locks_is_refused(
    chosen: bool, mini: Any, make_wheel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = mini.folder / "index"
    shutil.copytree(mini.index, index)
    make_wheel(index / "shared-need", "shared-need", "1.0", {"shared_need.py": "forged = True"})
    (index / "shared-need" / "index.html").write_text('<a href="shared_need-1.0-py3-none-any.whl">x</a>')
    monkeypatch.setenv("UV_DEFAULT_INDEX", str(index))
    monkeypatch.setenv("UV_CACHE_DIR", str(mini.folder / "cache"))
    if chosen:
        make_wheel(mini.folder / "wheels", "torch", "1.0+cpu", {"torch.py": ""}, ["shared-need"])
        monkeypatch.setenv("UV_FIND_LINKS", str(mini.folder / "wheels"))
    environment = worker(mini, "vllm")
    with pytest.raises(UvError, match=r"(?s)shared-need.*[Hh]ash"):
        build_environment(environment)
    assert environment.fault() is not None


def test_members_are_built_by_the_pinned_backend_and_third_party_files_are_hard_links(mini: Any) -> None:
    environment = worker(mini)
    build_environment(environment)
    site = next(Path(environment.root).glob("lib/*/site-packages"))
    assert "Summary: built by 1.0\n" in (site / "mini_core-0.1.0.dist-info" / "METADATA").read_text()
    assert (site / "tiny.py").stat().st_nlink > 1


def test_without_pins_for_the_backend_nothing_is_built(mini: Any) -> None:
    (mini.root / "requirements" / "build.txt").unlink()
    with pytest.raises(UvError, match=r"build\.txt"):
        build_environment(worker(mini))


def test_settings_of_the_surroundings_do_not_shape_it(mini: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pins = mini.folder / "pins.txt"
    pins.write_text("tiny==2.0\nmini-backend==2.0\n")
    other = mini.folder / "other"
    for name in ("UV_CONSTRAINT", "UV_OVERRIDE", "UV_BUILD_CONSTRAINT", "UV_EXCLUDE"):
        monkeypatch.setenv(name, str(pins))
    for name in ("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT", "UV_PROJECT", "UV_WORKING_DIR", "PYTHONHOME"):
        monkeypatch.setenv(name, str(other))
    monkeypatch.setenv("UV_PYTHON", "3.1")
    monkeypatch.setenv("UV_EXCLUDE_NEWER", "2001-01-01T00:00:00Z")
    environment = worker(mini)
    build_environment(environment)
    assert mini.installed(Path(environment.root)) == {"tiny": "1.0", **MEMBERS}
    assert not other.exists()


def test_what_says_where_files_come_from_passes_and_empty_settings_do_not() -> None:
    given = {"UV_INDEX": "i", "UV_CONFIG_FILE": "c", "UV_OFFLINE": "1", "PATH": "p", "HTTPS_PROXY": ""}
    kept = child_environment({**given, "UV_FIND_LINKS": "", "UV_TORCH_BACKEND": "", "VIRTUAL_ENV": "v"})
    assert kept == {**given, "UV_LINK_MODE": "hardlink"}
    assert child_environment({"UV_LINK_MODE": "copy"}) == {"UV_LINK_MODE": "copy"}


def test_the_drivers_environment_holds_its_group(mini: Any) -> None:
    environment = driver_environment(mini.folder / "driver", Workspace(str(mini.root)))
    assert build_environment(environment) is True
    assert mini.installed(mini.folder / "driver") == MEMBERS
    assert build_environment(environment) is False


@pytest.mark.parametrize("kind", ["full", "file", "empty"])
def test_a_folder_that_is_no_environment_is_never_replaced(kind: str, mini: Any) -> None:
    place = mini.folder / "mine"
    if kind == "file":
        place.write_text("precious")
    else:
        place.mkdir()
    if kind == "full":
        (place / "thesis.txt").write_text("precious")
    environment = driver_environment(place, Workspace(str(mini.root)))
    if kind == "empty":
        assert build_environment(environment) is True
        return
    with pytest.raises(BuildError, match=str(place)):
        build_environment(environment)
    assert (place / "thesis.txt" if kind == "full" else place).read_text() == "precious"
    assert mini.calls("") == 0


@pytest.mark.parametrize("text", ["{", '{"actor": "a.Other"}'])
@pytest.mark.parametrize("mark", ["environment.json", "dependencies.json"])
def test_an_environment_with_a_damaged_mark_is_built_again_from_nothing(
    text: str, mark: str, mini: Any
) -> None:
    environment = worker(mini)
    build_environment(environment, "all" if mark == "environment.json" else "dependencies")
    Path(environment.root, mark).write_text(text)
    Path(environment.root, "rubbish").mkdir()
    Path(environment.root, "rubbish", "file").write_text("")
    assert build_environment(environment) is True
    assert (mini.calls(" pip sync "), marks(environment)) == (2, ["environment.json"])
    assert not Path(environment.root, "rubbish").exists()


def test_an_environment_whose_interpreter_is_gone_is_built_again(mini: Any) -> None:
    environment = worker(mini)
    build_environment(environment)
    os.unlink(environment.interpreter)
    os.symlink("/nowhere/python", environment.interpreter)
    assert build_environment(environment) is True
    assert environment.fault() is None


def test_j4_a_read_only_environment_is_used_without_writing(mini: Any) -> None:
    build_environment(actor_environment(WORKER, ("mcore",), Workspace(str(mini.root))))
    subprocess.run(["chmod", "-R", "a-w", str(mini.environments)], check=True)
    before = contents(mini.environments)
    code = (
        "from rl_actor_envs.runtime import make_actor_runtime_env as make\n"
        "import os, subprocess\n"
        f"made = make({WORKER!r}, build=True)\n"
        "root = made['env_vars']['VIRTUAL_ENV']\n"
        "assert not os.access(root, os.W_OK), 'it can be written'\n"
        "subprocess.run([made['py_executable'], '-I', '-c', 'import mini_core, tiny'], check=True)"
    )
    # Without its capabilities root is an owner like any other.
    powerless = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.getuid() == 0 else []
    if powerless and shutil.which("setpriv") is None:
        pytest.skip("running as root without setpriv: nothing is read-only")
    done = subprocess.run(
        [*powerless, sys.executable, "-c", code],
        env={**mini.settings, "PATH": os.defpath, "PYTHONDONTWRITEBYTECODE": ""},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )
    after = contents(mini.environments)
    subprocess.run(["chmod", "-R", "u+w", str(mini.environments)], check=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert after == before


def test_i7_a_missing_uv_is_named_with_the_fix(mini: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mini.uv.unlink()
    monkeypatch.setattr(sys, "executable", str(mini.folder / "python"))
    with pytest.raises(UvMissingError, match=r"uv.*PATH.*pip install uv") as caught:
        build_environment(worker(mini))
    assert caught.value.actor == "a.Worker"
    assert not mini.environments.exists()


def test_the_uv_beside_the_interpreter_is_found(mini: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setattr(sys, "executable", str(mini.uv.parent / "python"))
    assert builder.find_uv() == str(mini.uv)


def test_a_failing_uv_is_quoted_and_leaves_nothing_in_use(mini: Any) -> None:
    mini.shim('case "$*" in *"pip sync"*) echo first >&2; echo the last words >&2; exit 7;; esac')
    environment = worker(mini)
    with pytest.raises(
        UvError, match=r"(?s)`uv pip sync .*` in .* ended with 7:\n.*the last words"
    ) as caught:
        build_environment(environment)
    assert caught.value.actor == "a.Worker"
    assert marks(environment) == ["building.json"]
    mini.shim()
    assert build_environment(environment) is True


def test_a_failure_of_the_second_phase_does_not_pass_for_the_first(mini: Any) -> None:
    environment = worker(mini)
    build_environment(environment, "dependencies")
    mini.shim('case "$*" in *"pip install"*) exit 7;; esac')
    with pytest.raises(UvError):
        build_environment(environment)
    mini.shim()
    with pytest.raises(BuildError, match="--phase all"):
        build_environment(environment, "members")
    assert build_environment(environment) is True
    assert mini.calls(" pip sync ") == 2


class AtWork(Deadline):
    """Up as soon as a file is there, however long the machine takes until then."""

    def __init__(self, seconds: float, file: Path) -> None:
        super().__init__(seconds)
        self._file = file

    @property
    def left_s(self) -> float:
        end = time.monotonic() + 50
        while not self._file.exists():
            assert time.monotonic() < end, "uv did not come to its work"
            time.sleep(0.01)
        return 0.0


def test_a_uv_that_does_not_end_is_ended_with_its_children(
    mini: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = mini.folder / "pids"
    mini.shim(
        f'case "$*" in *"pip sync"*) sleep 300 & echo at work >&2; echo $! $$ >{pids}.new; '
        f"mv {pids}.new {pids}; wait;; esac"
    )
    environment = worker(mini)
    run = Uv.run

    def run_until_at_work(uv: Uv, *arguments: str, folder: str) -> str:
        if "sync" in arguments:
            uv._deadline = AtWork(uv._deadline.seconds, pids)
        return run(uv, *arguments, folder=folder)

    with monkeypatch.context() as patch:
        patch.setenv("RL_ACTOR_ENVS_BUILD_TIMEOUT_S", "60")
        patch.setattr(Uv, "run", run_until_at_work)
        with pytest.raises(UvError, match=r"(?s)`uv pip sync.*60 s.*RL_ACTOR_ENVS_BUILD_TIMEOUT_S.*at work"):
            build_environment(environment)
    for pid in pids.read_text().split():
        mini.wait_for(lambda pid=pid: not _alive(int(pid)))
    mini.shim()
    assert build_environment(environment) is True


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon"])
def test_a_time_limit_that_is_none_is_refused(value: str, mini: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_ACTOR_ENVS_BUILD_TIMEOUT_S", value)
    with pytest.raises(RuntimeError, match="RL_ACTOR_ENVS_BUILD_TIMEOUT_S"):
        build_environment(worker(mini))
    assert mini.calls("") == 0


def test_a_lock_that_changes_meanwhile_is_noticed(mini: Any) -> None:
    mini.shim(f'case "$*" in *"pip sync"*) echo "# changed" >>{mini.root}/uv.lock;; esac')
    environment = worker(mini)
    with pytest.raises(BuildError, match="changed while"):
        build_environment(environment)
    assert environment.fault() is not None


def test_a_place_that_cannot_be_written_is_named(mini: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = mini.folder / "blocked"
    blocked.write_text("")
    monkeypatch.setenv("RL_ACTOR_ENVS_DIR", str(blocked / "environments"))
    with pytest.raises(BuildError, match=str(blocked)) as caught:
        build_environment(worker(mini))
    assert isinstance(caught.value.__cause__, OSError)


def test_a_folder_with_a_file_named_like_a_mark_is_not_ours(mini: Any, tmp_path: Path) -> None:
    place = tmp_path / "mine"
    place.mkdir()
    (place / "environment.json").write_text('{"mine": 1}')
    (place / "thesis.txt").write_text("precious")
    done = mini.cli("driver", str(place), "--phase", "dependencies")
    assert done.returncode == 1
    assert "was not built here, so it is not replaced" in done.stderr + done.stdout
    assert (place / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize("phase", ["dependencies", "all"])
def test_what_a_setting_sends_elsewhere_is_noticed(phase: str, mini: Any, tmp_path: Path) -> None:
    config = tmp_path / "uv.toml"
    config.write_text(f'[pip]\ntarget = "{tmp_path / "elsewhere"}"\n')
    done = mini.cli("prefetch", "--phase", phase, UV_CONFIG_FILE=str(config))
    assert done.returncode == 1
    assert "look for a target, prefix or python in your uv.toml" in done.stderr + done.stdout
    assert not list(mini.environments.glob("*/environment.json"))
