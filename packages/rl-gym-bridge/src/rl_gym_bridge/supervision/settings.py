"""What Gym is told: the user's settings untouched, and the few that only the bridge knows.

They go into ``env.yaml`` in Gym's working folder, readable by this user only. Gym merges that file above all
configuration files, so the user's values win over any of them, and no secret stands on a command line.
"""

from __future__ import annotations

import ipaddress
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config import DeferredBaseUrls, NemoGymConfig
from ..failures import GymConfigError
from ..interpreter import GymInterpreter
from .ports import Ports

# Gym looks for servers and configuration files in its working folder first: the user's own are below these.
FOLDERS_OF_SERVERS = (
    "resources_servers",
    "responses_api_agents",
    "responses_api_models",
    "environment_servers",
    "environments",
    "benchmarks",
)
# Gym wants one where the model server asks for none.
_NO_KEY = "unused"

# YAML takes these literally only if they are escaped, or not at all.
_UNSAFE_IN_YAML = re.compile("[\x7f-\xa0\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")


def gym_settings(
    config: NemoGymConfig, interpreter: GymInterpreter, ports: Ports, search_folder: Path
) -> dict[str, Any]:
    """Everything that Gym is told, as plain JSON values.

    Args:
        config: the bridge's settings.
        interpreter: what runs Gym.
        ports: where Gym listens.
        search_folder: the user's folder, to which relative ``config_paths`` are relative if they exist there.

    Raises:
        GymConfigError: a value that cannot be written down, one that contradicts the bridge's own settings,
            or one that would open Gym to other machines.
    """
    settings: dict[str, Any] = _plain(config.gym_config, "gym_config")
    _check_loopback(settings)
    settings["config_paths"] = _config_paths(settings.get("config_paths"), search_folder)
    head = settings.get("head_server") or {}
    settings["head_server"] = {"host": "127.0.0.1", **head, "port": ports.head}
    settings["port_range_low"], settings["port_range_high"] = ports.low, ports.high
    _set(settings, "policy_model_name", config.model_name)
    deferred = isinstance(config.base_urls, DeferredBaseUrls)
    urls = list(config.base_urls.urls if isinstance(config.base_urls, DeferredBaseUrls) else config.base_urls)
    if urls:
        _set(settings, "policy_base_url", urls[0] if len(urls) == 1 else urls)
    settings.setdefault("policy_api_key", _NO_KEY)
    if isinstance(config.base_urls, DeferredBaseUrls) and deferred:
        # Releases from 0.7 on wait for the model when they start; older ones ignore the key.
        settings.setdefault(
            "model_endpoint_readiness_timeout_seconds", max(1, math.ceil(config.base_urls.ready_timeout_s))
        )
    if interpreter.servers is not None:
        settings.setdefault("uv_venv_dir", str(interpreter.servers))
        settings.setdefault("skip_venv_if_present", True)
    elif not interpreter.checkout:
        # Gym would use its working folder, which is new each time.
        settings.setdefault("uv_venv_dir", str(search_folder))
    if not interpreter.checkout:
        settings.setdefault("uv_cache_dir", str(search_folder / "cache" / "uv"))
    return settings


def write_settings(settings: Mapping[str, Any], path: Path) -> None:
    """Write the settings as JSON that YAML parsers read as the same values; mode 0600, never an old file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(yaml_safe_json(settings))


def yaml_safe_json(value: Any) -> str:
    """JSON text that is the same document in YAML 1.1."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _UNSAFE_IN_YAML.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n"


def _set(settings: dict[str, Any], name: str, value: Any) -> None:
    if settings.get(name, value) not in (value, [value]):
        raise GymConfigError(
            f"{settings[name]!r} contradicts {value!r}, which the trainer serves",
            component=f"gym_config.{name}",
            remedy="leave it out: the bridge sets it",
        )
    settings[name] = value


def _config_paths(value: Any, search_folder: Path) -> list[str]:
    if value is None:
        return []
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise GymConfigError(
            f"{value!r} is no list of files", component="gym_config.config_paths", remedy="write a list"
        )
    paths = []
    for entry in value:
        if not isinstance(entry, str):
            raise GymConfigError(
                f"{entry!r} is no path", component="gym_config.config_paths", remedy="write a list of paths"
            )
        here = search_folder / entry
        paths.append(str(here) if here.exists() else entry)
    return paths


def _check_loopback(settings: Mapping[str, Any]) -> None:
    head = settings.get("head_server") or {}
    if not isinstance(head, Mapping):
        raise GymConfigError(
            f"{head!r} is no mapping", component="gym_config.head_server", remedy="write host and port"
        )
    wide = [
        name
        for name, host in (
            ("head_server.host", head.get("host")),
            ("default_host", settings.get("default_host")),
        )
        if host is not None and not is_loopback(str(host))
    ]
    if settings.get("use_absolute_ip"):
        wide.append("use_absolute_ip")
    if wide:
        raise GymConfigError(
            "Gym would listen where other machines reach it, and its head server shows every setting to all",
            component=f"gym_config.{wide[0]}",
            remedy="leave it out: Gym and its trainer share a machine",
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server on this host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _plain(value: Any, where: str) -> Any:
    """A deep copy in JSON's types."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise GymConfigError(f"the key {key!r} is no text", component=where, remedy="quote it")
        return {key: _plain(inner, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, f"{where}[{index}]") for index, inner in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if (
        value is None
        or isinstance(value, (bool, int, str))
        or (isinstance(value, float) and math.isfinite(value))
    ):
        return value
    raise GymConfigError(
        f"a {type(value).__name__} ({value!r:.60}) cannot be written into a configuration file",
        component=where,
        remedy="use text, numbers, booleans, lists and mappings",
    )
