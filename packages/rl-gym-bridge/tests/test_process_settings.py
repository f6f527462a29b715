"""What Gym is told, what it inherits, and where it listens."""

from __future__ import annotations

import copy
import json
import os
import random
import socket
from pathlib import Path

import pytest

from rl_gym_bridge.config import DeferredBaseUrls, NemoGymConfig
from rl_gym_bridge.failures import GymConfigError
from rl_gym_bridge.interpreter import GymInterpreter
from rl_gym_bridge.supervision.ports import Ports, choose_ports, is_free
from rl_gym_bridge.supervision.settings import gym_settings, is_loopback, write_settings, yaml_safe_json
from rl_gym_bridge.supervision.variables import gym_environment

PORTS = Ports(12000, 12499, 12345, False)
INTERPRETER = GymInterpreter(Path("/gym/bin/python"), Path("/gym/bin/gym"), "0.4.0", "3.12.1")


def _settings(gym_config=None, interpreter=INTERPRETER, folder=Path("/user"), **more):
    return gym_settings(
        NemoGymConfig("policy", gym_config=gym_config or {}, **more), interpreter, PORTS, folder
    )


def test_the_users_settings_arrive_untouched_and_his_mapping_stays_as_it_was() -> None:
    asked = {
        "mcqa": {"a": [1, 2.5, None, True, "${policy_model_name}"]},
        "x": "=,[]{}'\"",
        "head_server": {"z": 1},
    }
    before = copy.deepcopy(asked)
    told = _settings(asked)
    assert told["mcqa"] == asked["mcqa"]
    assert told["x"] == asked["x"]
    assert told["head_server"] == {"host": "127.0.0.1", "z": 1, "port": 12345}
    assert asked == before
    told["mcqa"]["a"].append("changed")
    assert asked == before


def test_urls_are_one_string_or_a_list_and_absent_without_any() -> None:
    assert "policy_base_url" not in _settings()
    assert _settings(base_urls=("http://a/v1",))["policy_base_url"] == "http://a/v1"
    assert _settings(base_urls=("http://a/v1", "http://b/v1"))["policy_base_url"] == [
        "http://a/v1",
        "http://b/v1",
    ]
    assert "model_endpoint_readiness_timeout_seconds" not in _settings(base_urls=("http://a/v1",))


def test_deferred_urls_give_gym_the_engines_time() -> None:
    deferred = DeferredBaseUrls(("http://a/v1",), ready_timeout_s=90.5)
    told = _settings(base_urls=deferred)
    assert (told["policy_base_url"], told["model_endpoint_readiness_timeout_seconds"]) == ("http://a/v1", 91)
    chosen = {"model_endpoint_readiness_timeout_seconds": 7}
    assert _settings(chosen, base_urls=deferred)["model_endpoint_readiness_timeout_seconds"] == 7


@pytest.mark.parametrize(
    ("name", "value"), [("policy_model_name", "another"), ("policy_base_url", "http://else/v1")]
)
def test_a_setting_that_contradicts_the_trainer_is_refused(name: str, value: str) -> None:
    with pytest.raises(GymConfigError, match="contradicts") as caught:
        _settings({name: value}, base_urls=("http://a/v1",))
    assert caught.value.component == f"gym_config.{name}"


def test_keys_that_the_user_may_choose() -> None:
    assert _settings()["policy_api_key"] == "unused"
    assert _settings({"policy_api_key": "sk"})["policy_api_key"] == "sk"


def test_an_environment_with_servers_beside_it_needs_no_preparation() -> None:
    prepared = GymInterpreter(
        Path("/gym/bin/python"), Path("/gym/bin/gym"), "0.4.0", "3.12.1", Path("/gym/servers")
    )
    told = _settings(interpreter=prepared)
    assert (told["uv_venv_dir"], told["skip_venv_if_present"]) == ("/gym/servers", True)
    told = _settings({"uv_venv_dir": "/mine", "skip_venv_if_present": False}, interpreter=prepared)
    assert (told["uv_venv_dir"], told["skip_venv_if_present"]) == ("/mine", False)
    told = _settings()
    assert (told["uv_venv_dir"], "skip_venv_if_present" in told) == ("/user", False)


def test_config_paths_are_the_users_where_they_exist_and_gyms_otherwise(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("")
    told = _settings(
        {"config_paths": ["mine.yaml", "resources_servers/mcqa/configs/mcqa.yaml"]}, folder=tmp_path
    )
    assert told["config_paths"] == [str(tmp_path / "mine.yaml"), "resources_servers/mcqa/configs/mcqa.yaml"]
    for wrong in ("mine.yaml", [1]):
        with pytest.raises(GymConfigError, match=r"list|path"):
            _settings({"config_paths": wrong})


@pytest.mark.parametrize("value", [float("nan"), {1: 2}, object(), {"a": [b"bytes"]}])
def test_what_cannot_be_written_down_is_refused_by_its_place(value: object) -> None:
    with pytest.raises(GymConfigError) as caught:
        _settings({"outer": {"inner": value}})
    assert caught.value.component.startswith("gym_config.outer.inner")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "::1", "[::1]"])
def test_n4_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", "localhost.example.org", ""])
def test_n4_everything_else_is_wide(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(GymConfigError, match="other machines"):
        _settings({"head_server": {"host": host}})


def test_the_file_is_private_new_and_escapes_what_yaml_would_change(tmp_path: Path) -> None:
    told = {"a": "line\u2028separator\x85\xa0\ufeff\x7f tab\t \U0001f600 ü", "b": 1e-05}
    path = tmp_path / "env.yaml"
    write_settings(told, path)
    assert path.stat().st_mode & 0o777 == 0o600
    text = path.read_text(encoding="utf-8")
    assert json.loads(text) == told
    assert "\\u2028separator\\u0085\\u00a0\\ufeff\\u007f tab\\t \U0001f600 ü" in text
    with pytest.raises(FileExistsError):
        write_settings(told, path)
    with pytest.raises(ValueError, match="JSON"):
        yaml_safe_json(float("inf"))


def test_the_environment_is_the_trainers_without_its_interpreter_and_cluster() -> None:
    base = {
        "PATH": "/venv/bin:/usr/bin",
        "VIRTUAL_ENV": "/venv",
        "PYTHONPATH": "/mine",
        "PYTHONHOME": "/mine",
        "RAY_ADDRESS": "192.0.2.1:6379",
        "RAY_JOB_ID": "01",
        "UV_CONSTRAINT": "dev.txt",
        "RL_GYM_RUN_ID": "outer",
        "HF_TOKEN": "hf",
        "WANDB_MODE": "online",
        "no_proxy": "corp",
        "NEMO_GYM_EXTRA_ROOTS": "/plugins",
    }
    seen = gym_environment(
        base,
        INTERPRETER,
        run_id="id",
        folder=Path("/w"),
        search_folder=Path("/user"),
        ray_folder=Path("/r"),
    )
    assert seen["PATH"] == "/gym/bin:/usr/bin"
    assert not {
        "VIRTUAL_ENV",
        "PYTHONPATH",
        "PYTHONHOME",
        "RAY_ADDRESS",
        "RAY_JOB_ID",
        "UV_CONSTRAINT",
    } & set(seen)
    assert (seen["RL_GYM_RUN_ID"], seen["HF_TOKEN"], seen["WANDB_MODE"]) == ("id", "hf", "online")
    assert (seen["HF_HUB_OFFLINE"], seen["RAY_USAGE_STATS_ENABLED"]) == ("1", "0")
    assert seen["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert seen["no_proxy"] == "corp,127.0.0.1,localhost"
    assert seen["NEMO_GYM_EXTRA_ROOTS"] == f"/w{os.pathsep}/plugins"
    assert (seen["RAY_TMPDIR"], seen["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]) == ("/r", "0")
    assert base["VIRTUAL_ENV"] == "/venv"
    joined = gym_environment(
        base, INTERPRETER, run_id="id", folder=Path("/w"), search_folder=Path("/user"), ray_folder=None
    )
    assert "RAY_TMPDIR" not in joined


def test_ports_are_the_users_range_or_one_below_those_of_outgoing_connections() -> None:
    for seed in range(50):
        ports = choose_ports({}, random.Random(seed))
        assert 11_000 <= ports.low <= ports.head <= ports.high < 32_000
    ports = choose_ports({"port_range_low": 23_000, "port_range_high": 23_010}, random.Random(0))
    assert (ports.low, ports.high) == (23_000, 23_010)
    assert 23_000 <= ports.head <= 23_010
    assert choose_ports({"head_server": {"port": 9}}, random.Random(0)).head_is_fixed


def test_a_port_in_use_is_not_chosen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert not is_free(port)
        asked = {"port_range_low": port - 4, "port_range_high": min(65535, port + 4)}
        heads = {choose_ports(asked, random.Random(seed)).head for seed in range(60)}
        assert port not in heads


@pytest.mark.parametrize(
    "wrong",
    [
        {"port_range_low": "low", "port_range_high": 2},
        {"port_range_low": 20, "port_range_high": 10},
        {"port_range_low": 2, "port_range_high": 70_000},
        {"head_server": {"port": True}},
    ],
)
def test_a_range_that_is_none_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(GymConfigError) as caught:
        choose_ports(wrong, random.Random(0))
    assert caught.value.component.startswith("gym_config.")
