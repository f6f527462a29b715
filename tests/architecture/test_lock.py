"""The tracked lock names no host, is current, and is what the environment installs from."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tools.lock.neutral import REGISTRY, addresses, neutralise
from tools.lock.workspace import EXPORTS, LockError, Workspace

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


def test_an_address_that_cannot_be_made_neutral_is_refused() -> None:
    with pytest.raises(ValueError, match=r"line 1: source = \{ git"):
        neutralise('source = { git = "https://code.example/thing#abc" }')


def test_the_tracked_lock_is_neutral(root: Path) -> None:
    assert addresses((root / "uv.lock").read_text()) == []
    packages = tomllib.loads((root / "uv.lock").read_text())["package"]
    sources = {source for package in packages for source in package["source"].items()}
    assert {kind for kind, _ in sources} == {"registry", "editable", "virtual"}
    assert {value for kind, value in sources if kind == "registry"} == {REGISTRY}


def test_the_tracked_lock_is_current(root: Path) -> None:
    Workspace(root).check()


def test_what_must_not_be_installed_is_not_in_the_lock(root: Path) -> None:
    names = {package["name"] for package in tomllib.loads((root / "uv.lock").read_text())["package"]}
    assert "torch" in names
    assert not names & {"torchvision", "torchaudio", "torchcodec"}


def test_an_address_in_the_lock_is_seen(copied_workspace: Path) -> None:
    lock = copied_workspace / "uv.lock"
    lock.write_text(lock.read_text().replace(f'registry = "{REGISTRY}"', 'registry = "https://i.example"', 1))
    with pytest.raises(LockError, match="names an address on line"):
        Workspace(copied_workspace).check()


def test_a_changed_declaration_is_seen(copied_workspace: Path) -> None:
    declaration = copied_workspace / "packages" / "rl-actor-envs" / "pyproject.toml"
    text = declaration.read_text()
    declaration.write_text(text.replace("dependencies = [", 'dependencies = ["numpy>=1",', 1))
    assert declaration.read_text() != text
    with pytest.raises(LockError, match=r"uv\.lock is not what the declarations give: run `hatch run lock`"):
        Workspace(copied_workspace).check()


@pytest.mark.parametrize("name", EXPORTS)
def test_a_changed_pin_is_seen(copied_workspace: Path, name: str) -> None:
    pins = copied_workspace / name
    pins.write_text(pins.read_text().replace("uv==", "uv==0.", 1))
    with pytest.raises(LockError, match=f"{name} is not what uv.lock gives"):
        Workspace(copied_workspace).check()


def test_every_pin_is_hashed(root: Path) -> None:
    for name in EXPORTS:
        entries = (root / name).read_text().replace("\\\n", " ").splitlines()
        assert entries
        assert [entry for entry in entries if "--hash=sha256:" not in entry] == []


def test_torch_has_one_version_in_the_workspace(root: Path) -> None:
    uv = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["uv"]
    locked = {
        package["name"]: package["version"]
        for package in tomllib.loads((root / "uv.lock").read_text())["package"]
        if "version" in package
    }
    assert uv["constraint-dependencies"] == [f"torch=={locked['torch']}"]
