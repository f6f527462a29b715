"""Prints which of NeMo Gym's servers this environment satisfies, as ``KIND/NAME``; run by its interpreter.

Gym looks for an environment per server. With ``--link`` this one becomes that of every server printed, below
its folder ``servers``; for any other Gym makes one of its own when it starts.
"""

from __future__ import annotations

import sys
import sysconfig
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

KINDS = ("resources_servers", "responses_api_agents", "responses_api_models")


def requirements_of(server: Path) -> list[str]:
    """What a server asks for, as it declares it: a project, or a list of requirements."""
    project, listed = server / "pyproject.toml", server / "requirements.txt"
    if project.exists():
        return tomllib.loads(project.read_text(encoding="utf-8"))["project"].get("dependencies", [])
    return listed.read_text(encoding="utf-8").splitlines() if listed.exists() else []


def satisfied(requirements: list[str]) -> bool:
    """Whether everything of a list but Gym itself, which is here, is installed."""
    for line in requirements:
        text = line.partition("#")[0].strip().removeprefix("-e ")
        if not text or text.startswith("nemo-gym"):
            continue
        try:
            requirement = Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate():
                continue
            if not requirement.specifier.contains(version(requirement.name), prereleases=True):
                return False
        except (InvalidRequirement, PackageNotFoundError):
            return False
    return True


def link(server: str) -> None:
    """Let ``servers/KIND/NAME/.venv`` be this environment."""
    place = Path(sys.prefix, "servers", server, ".venv")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(sys.prefix, target_is_directory=True)


def main() -> None:
    packages = Path(sysconfig.get_path("purelib"))
    for kind in KINDS:
        for app in sorted((packages / kind).glob("*/app.py")):
            if satisfied(requirements_of(app.parent)):
                server = f"{kind}/{app.parent.name}"
                if sys.argv[1:] == ["--link"]:
                    link(server)
                sys.stdout.write(f"{server}\n")


if __name__ == "__main__":
    main()
