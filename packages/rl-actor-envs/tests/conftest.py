"""A small workspace with a lock of its own, so that real uv builds real environments without a network."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src"
UV = shutil.which("uv") or shutil.which("uv", path=os.path.dirname(sys.executable))
WORKER = "rl_app_core.workers.ColocatedWorker"

ROOT_PROJECT = """\
[tool.uv.workspace]
members = ["packages/*", "apps/core", "apps/container"]

[tool.uv.sources]
mini-library = { workspace = true }
mini-core = { workspace = true }

[tool.uv]
constraint-dependencies = ["shared-need==1.0"]
"""
CONTAINER_PROJECT = """\
[project]
name = "rl-app-container"
version = "0.1.0"
requires-python = ">=3.10"

[project.optional-dependencies]
mcore = ["mini-core", "tiny==1.0"]
vllm = ["mini-library", "torch==1.0"]
vllm-cpu = ["mini-library", "tiny==1.0"]
gym = ["mini-library"]

[dependency-groups]
driver = ["mini-core"]

[tool.uv]
package = false
"""
TRTLLM_PROJECT = """\
[project]
name = "rl-app-container-trtllm"
version = "0.1.0"
requires-python = ">=3.10"

[project.optional-dependencies]
trtllm = ["mini-library", "tensorrt-llm==1.0", "tiny==2.0"]

[tool.uv]
package = false

[tool.uv.workspace]

[tool.uv.sources]
mini-library = { path = "../../../packages/library", editable = true }
"""
MEMBER_PROJECT = """\
[build-system]
requires = ["mini-backend"]
build-backend = "mini_backend"

[project]
name = "{name}"
version = "0.1.0"
requires-python = ">=3.10"
dependencies = {dependencies}
"""
# Editable wheels with a .pth file; which version of the backend built them is told in the metadata.
BACKEND = """\
import os
import zipfile

VERSION = "{version}"
WHEEL = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"


def get_requires_for_build_editable(config_settings=None):
    return []


def prepare_metadata_for_build_editable(directory, config_settings=None):
    name = _name()
    folder = os.path.join(directory, f"{{name}}-0.1.0.dist-info")
    os.mkdir(folder)
    with open(os.path.join(folder, "METADATA"), "w") as file:
        file.write(_metadata(name))
    return os.path.basename(folder)


def build_editable(directory, config_settings=None, metadata_directory=None):
    name = _name()
    wheel = f"{{name}}-0.1.0-py3-none-any.whl"
    info = f"{{name}}-0.1.0.dist-info"
    with zipfile.ZipFile(os.path.join(directory, wheel), "w") as archive:
        archive.writestr(f"_{{name}}.pth", os.path.join(os.getcwd(), "src") + "\\n")
        archive.writestr(f"{{info}}/METADATA", _metadata(name))
        archive.writestr(f"{{info}}/WHEEL", WHEEL)
        archive.writestr(f"{{info}}/RECORD", "")
    return wheel


def _name():
    with open("pyproject.toml") as file:
        return file.read().split('name = "')[1].split('"')[0].replace("-", "_")


def _metadata(name):
    return f"Metadata-Version: 2.1\\nName: {{name}}\\nVersion: 0.1.0\\nSummary: built by {{VERSION}}\\n"
"""


def write_wheel(
    folder: Path, name: str, version: str, files: Mapping[str, str], requires: Sequence[str] = ()
) -> str:
    """Write a pure wheel; returns its SHA-256 in hex."""
    stem = f"{name.replace('-', '_')}-{version}"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {required}\n" for required in requires)
    info = f"{stem}.dist-info"
    held = {
        **files,
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()},"
        f"{len(text.encode())}\n"
        for path, text in held.items()
    )
    held[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, text in held.items():
            archive.writestr(zipfile.ZipInfo(path), text)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}-py3-none-any.whl").write_bytes(buffer.getvalue())
    return hashlib.sha256(buffer.getvalue()).hexdigest()


def write_index(folder: Path) -> str:
    """A package index with what the small workspace needs; returns the hash of the build backend 1.0."""

    def put(name: str, version: str, requires: Sequence[str] = (), source: str | None = None) -> None:
        module = name.replace("-", "_")
        text = f"VERSION = {version!r}\n" if source is None else source
        digest = write_wheel(folder / name, name, version, {f"{module}.py": text}, requires)
        wheel = f"{module}-{version}-py3-none-any.whl"
        with (folder / name / "index.html").open("a") as page:
            page.write(f'<a href="{wheel}#sha256={digest}">{wheel}</a>\n')
        digests[name, version] = digest

    digests: dict[tuple[str, str], str] = {}
    for version in ("1.0", "2.0"):
        put("tiny", version)
        put("shared-need", version)
        put("mini-backend", version, source=BACKEND.format(version=version))
    put("cuda-only", "1.0")
    put("torch", "1.0", ["cuda-only", "shared-need"])
    put("tensorrt-llm", "1.0", ["shared-need"])
    return digests["mini-backend", "1.0"]


def neutral(lock: str) -> str:
    """A lock without the places it was resolved from, in the form that the real one has."""
    text = re.sub(r'registry = "[^"]*"', 'registry = "wheelhouse"', lock)
    return re.sub(r'\{ (?:url|path) = "[^"]*?([^"/]+\.whl)"', r'{ path = "\1"', text)


class Mini:
    """A copy of the small workspace with everything that a test does with it.

    ``uv`` is the real one behind a script that writes down each call and can be made to stop before one.
    """

    def __init__(self, folder: Path, template: Path) -> None:
        self.folder = folder
        self.root = folder / "workspace"
        shutil.copytree(template / "workspace", self.root)
        self.index = template / "index"
        self.environments = folder / "environments"
        self.log = folder / "uv.log"
        self.log.touch()
        self.started: list[subprocess.Popen[str]] = []
        self.uv = folder / "bin" / "uv"
        self.uv.parent.mkdir()
        self.shim()
        self.settings = {
            "PATH": f"{self.uv.parent}{os.pathsep}{os.defpath}",
            "HOME": str(folder),
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(SOURCE),
            "PYTHONDONTWRITEBYTECODE": "1",
            "RL_ACTOR_ENVS_WORKSPACE": str(self.root),
            "RL_ACTOR_ENVS_DIR": str(self.environments),
            "UV_CACHE_DIR": str(template / "cache"),
            "UV_DEFAULT_INDEX": str(self.index),
            "UV_OFFLINE": "1",
        }

    def shim(self, before: str = "") -> None:
        """Put ``uv`` on PATH; ``before`` is sh code that sees the call's words in ``$*``."""
        lines = ["#!/bin/sh", f'echo "$$ $*" >>{self.log}', before, f'exec {UV} "$@"']
        temporary = self.uv.with_suffix(".new")
        temporary.write_text("\n".join(lines) + "\n")
        temporary.chmod(0o755)
        temporary.replace(self.uv)

    def hold(self, call: str, spoil: str = ":") -> Path:
        """Make the first call with ``call`` in it stop for as long as the returned file exists.

        Before it stops it runs ``spoil`` and writes its process number beside that file, as ``.held``.
        """
        hold = self.folder / "hold"
        hold.touch()
        self.shim(
            f'case "$*" in *"{call}"*) if [ -e {hold} ] && mkdir {hold}.taken 2>/dev/null; then {spoil}; '
            f"echo $$ >{hold}.pid && mv {hold}.pid {hold}.held; "
            f"while [ -e {hold} ]; do sleep 0.05; done; fi;; esac"
        )
        return hold

    def calls(self, words: str) -> int:
        """How many calls of ``uv`` had these words."""
        return sum(words in line for line in self.log.read_text().splitlines())

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make this process see what the children of :meth:`start` see."""
        for name in list(os.environ):
            if name.startswith(("UV_", "RL_ACTOR_ENVS_")) or name == "VIRTUAL_ENV":
                monkeypatch.delenv(name)
        for name, value in self.settings.items():
            if name not in ("HOME", "LANG", "PYTHONPATH"):
                monkeypatch.setenv(name, value)

    def start(self, *words: str, stdin: str | None = None, **settings: str) -> subprocess.Popen[str]:
        """Start a Python with ``words`` and these further variables."""
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd="/",
            env={**self.settings, **settings},
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def cli(self, *words: str, stdin: str | None = None, **settings: str) -> subprocess.CompletedProcess[str]:
        """Run the command line to its end."""
        process = self.start("-m", "rl_actor_envs", *words, stdin=stdin, **settings)
        out, err = process.communicate(stdin, timeout=120)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def ask(self, **settings: str) -> subprocess.Popen[str]:
        """A process that wants the worker's environment, built if need be, and prints its root."""
        return self.start("-c", ASK, **settings)

    def rows(self, *actors: tuple[str, str]) -> str:
        """A file of rows: actor and extras, separated by spaces."""
        path = self.folder / "rows.tsv"
        lines = []
        for actor, extras in actors:
            stage = "trtllm" if "trtllm" in extras.split() else "deps"
            lines.append("\t".join((actor, stage, " ".join(f"--extra {extra}" for extra in extras.split()))))
        path.write_text("".join(f"{line}\n" for line in lines))
        return str(path)

    def only_environment(self) -> Path:
        """The one environment that exists."""
        (found,) = (path for path in self.environments.iterdir() if path.is_dir())
        return found

    @staticmethod
    def installed(environment: Path) -> dict[str, str]:
        """Distribution → version, from the metadata in an environment."""
        found = environment.glob("lib/*/site-packages/*.dist-info")
        pairs = (path.name.removesuffix(".dist-info").rpartition("-") for path in found)
        return {name: version for name, _, version in pairs}

    @staticmethod
    def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
        """Wait until ``condition`` holds.

        Raises:
            AssertionError: it does not within ``seconds``.
        """
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it did not come about in time"
            time.sleep(0.01)


ASK = f"""
from rl_actor_envs.runtime import make_actor_runtime_env
print(make_actor_runtime_env({WORKER!r}, build=True)["env_vars"]["VIRTUAL_ENV"])
"""


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small workspace, locked; its package index; and an empty cache of uv."""
    if UV is None:
        pytest.skip("there is no uv here")
    folder = tmp_path_factory.mktemp("mini")
    root, index = folder / "workspace", folder / "index"
    backend = write_index(index)
    files = {
        "pyproject.toml": ROOT_PROJECT,
        "apps/container/pyproject.toml": CONTAINER_PROJECT,
        "apps/container/trtllm/pyproject.toml": TRTLLM_PROJECT,
        "apps/core/pyproject.toml": MEMBER_PROJECT.format(name="mini-core", dependencies='["mini-library"]'),
        "apps/core/src/mini_core.py": "import mini_library\n",
        "packages/library/pyproject.toml": MEMBER_PROJECT.format(name="mini-library", dependencies="[]"),
        "packages/library/src/mini_library.py": "PLACE = __file__\n",
        "requirements/build.txt": f"mini-backend==1.0 --hash=sha256:{backend}\n",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for project in (root, root / "apps" / "container" / "trtllm"):
        subprocess.run(
            [UV, "lock", "--quiet", "--offline", "--no-config", f"--python={sys.executable}"],
            cwd=project,
            env={"PATH": os.defpath, "HOME": str(folder), "UV_DEFAULT_INDEX": str(index)},
            check=True,
            timeout=60,
        )
        lock = project / "uv.lock"
        lock.write_text(neutral(lock.read_text()))
    return folder


@pytest.fixture
def mini(template: Path, tmp_path: Path) -> Iterator[Mini]:
    """A fresh copy of the small workspace without environments."""
    made = Mini(tmp_path, template)
    yield made
    # What a failed test left: processes, and a uv that would stand still for ever.
    (tmp_path / "hold").unlink(missing_ok=True)
    for process in made.started:
        if process.poll() is None:
            process.kill()
            process.communicate(timeout=60)


@pytest.fixture(scope="session")
def make_wheel() -> Callable[..., str]:
    """:func:`write_wheel`."""
    return write_wheel
