"""Environment variables of Gym: the trainer's, without what belongs to its interpreter and cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ..interpreter import GymInterpreter
from .processes import RUN_ID_VARIABLE

# Another interpreter's paths, another project's constraints, another cluster's addresses.
_FOREIGN_PREFIXES = (
    "PYTHON",
    "VIRTUAL_ENV",
    "CONDA_",
    "RAY_",
    "UV_PROJECT",
    "HATCH_",
    "NEMO_GYM_CONFIG_",
    "HYDRA_",
)
_FOREIGN = frozenset(
    {"UV_CONSTRAINT", "UV_BUILD_CONSTRAINT", "UV_OVERRIDE", "UV_PYTHON", "UV_SYSTEM_PYTHON", "UV_CACHE_DIR"}
    | {"PIP_CONSTRAINT", "PIP_REQUIRE_VIRTUALENV", "COVERAGE_PROCESS_START", "ENTRYPOINT"}
)
_OWN_NAMES = "127.0.0.1,localhost"
_EXTRA_ROOTS = "NEMO_GYM_EXTRA_ROOTS"


def gym_environment(
    base: Mapping[str, str],
    interpreter: GymInterpreter,
    *,
    run_id: str,
    folder: Path,
    search_folder: Path,
    ray_folder: Path | None,
) -> dict[str, str]:
    """The environment for Gym's command.

    Args:
        base: environment of this process.
        interpreter: what runs Gym; its folder comes first on the path.
        run_id: inherited by everything that Gym starts.
        folder: Gym's working folder.
        search_folder: the user's folder, where Gym would keep its caches if it ran there.
        ray_folder: a short path for the files of Gym's own Ray cluster; ``None`` where Gym joins another one.
    """
    environment = {
        name: value
        for name, value in base.items()
        if name not in _FOREIGN and not name.startswith(_FOREIGN_PREFIXES) and name != RUN_ID_VARIABLE
    }
    foreign = {str(Path(base["VIRTUAL_ENV"], "bin"))} if base.get("VIRTUAL_ENV") else set()
    inherited = [entry for entry in base.get("PATH", os.defpath).split(os.pathsep) if entry not in foreign]
    environment["PATH"] = os.pathsep.join([str(interpreter.python.parent), *inherited])
    for name, value in (
        ("WANDB_MODE", "disabled"),
        ("HF_HUB_OFFLINE", "1"),
        ("MLFLOW_DISABLE_TELEMETRY", "true"),
        ("PYTHONUNBUFFERED", "1"),
    ):
        environment.setdefault(name, value)
    environment["RAY_USAGE_STATS_ENABLED"] = "0"
    if ray_folder is not None:
        # Else Gym would join a cluster that the trainer runs on this machine, with another version of Ray.
        environment["RAY_TMPDIR"] = str(ray_folder)
        # Ray listens on every interface unless it believes that it cannot run clusters of several machines.
        environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if not interpreter.checkout:
        for name in ("HF_HOME", "HF_DATASETS_CACHE"):
            environment.setdefault(name, str(search_folder / "cache" / "huggingface"))
    for name in ("NO_PROXY", "no_proxy"):
        # Gym's servers speak to each other through clients that honour proxies.
        environment[name] = ",".join(part for part in (environment.get(name, ""), _OWN_NAMES) if part)
    if environment.get(_EXTRA_ROOTS):
        # Gym takes the first env.yaml that it finds, and these come before the working folder.
        environment[_EXTRA_ROOTS] = os.pathsep.join([str(folder), environment[_EXTRA_ROOTS]])
    environment[RUN_ID_VARIABLE] = run_id
    return environment
