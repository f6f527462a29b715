"""What is a setting of the bridge, what is Gym's, and what is refused."""

from __future__ import annotations

import copy
import logging
import pickle
from collections import UserList
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from rl_gym_bridge.config import (
    DeferredBaseUrls,
    EffortLevel,
    NemoGymConfig,
    RewardPenalties,
    build_nemo_gym_config,
)
from rl_gym_bridge.failures import GymConfigError
from rl_gym_bridge.retry import RetryPolicy

URLS = ["http://127.0.0.1:8000/v1", "http://127.0.0.1:8001/v1"]


def build(section: Any, **changes: Any) -> NemoGymConfig:
    arguments: dict[str, Any] = {
        "base_urls": URLS,
        "model_name": "policy",
        "enable_router_replay": False,
        "use_fastokens": False,
    }
    return build_nemo_gym_config({"nemo_gym": section}, **{**arguments, **changes})


class Frozen(Mapping[str, Any]):
    """A mapping that is no dictionary and cannot be changed, as configuration libraries have them."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = {
            key: Frozen(value)
            if isinstance(value, dict)
            else UserList(value)
            if type(value) is list
            else value
            for key, value in values.items()
        }

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


OURS: dict[str, Any] = {
    "num_gpu_nodes": 2,
    "python": "gym/bin/python",
    "invalid_tool_call_patterns": ["<call>"],
    "thinking_tags": ["<a>", "</a>"],
    "on_discontinuity": "keep_prefix",
    "penalties": {"invalid_tool_call": 0.5},
    "effort_levels": [{"name": "low", "share": 0.25, "token_budget": 100, "token_penalty": 0.001}],
    "retry": {"infra_attempts": 3, "base_s": 0.5},
    "max_concurrency": 64,
    "transport": "httpx",
    "start_timeout_s": 60,
    "rollout_timeout_s": 30.5,
    "shutdown_timeout_s": 5,
    "work_dir": "logs",
    "search_folder": "mine",
    "routed_experts_dtype": "int8",
}
THEIRS: dict[str, Any] = {
    "config_paths": ["a.yaml", "b.yaml"],
    "mcqa": {"resources_servers": {"mcqa": {"entrypoint": "app.py", "judges": [{"name": "x"}]}}},
    "policy_api_key": "secret",
    "port_range_low": 20000,
    "uv_venv_dir": "envs",
    "nothing": None,
}


@pytest.mark.parametrize("wrap", [dict, Frozen], ids=["dict", "other mapping"])
def test_our_keys_become_fields_and_everything_else_is_forwarded_as_it_is(
    wrap: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> None:
    config = build(wrap(copy.deepcopy({**OURS, **THEIRS})))
    # Gym reads this one, too.
    assert config.gym_config == {**THEIRS, "num_gpu_nodes": 2}
    assert type(config.gym_config["mcqa"]) is dict
    assert (config.num_gpu_nodes, config.python, config.work_dir) == (2, "gym/bin/python", "logs")
    assert config.search_folder == "mine"
    assert config.invalid_tool_call_patterns == ("<call>",)
    assert (config.thinking_tags, config.on_discontinuity) == (("<a>", "</a>"), "keep_prefix")
    assert config.penalties == RewardPenalties(invalid_tool_call=0.5)
    assert config.effort_levels == (EffortLevel("low", 0.25, token_budget=100, token_penalty=0.001),)
    assert config.retry == RetryPolicy(infra_attempts=3, base_s=0.5)
    assert (config.max_concurrency, config.transport, config.routed_experts_dtype) == (64, "httpx", "int8")
    assert (config.start_timeout_s, config.rollout_timeout_s, config.shutdown_timeout_s) == (60.0, 30.5, 5.0)
    assert (config.base_urls, config.model_name) == (tuple(URLS), "policy")


def test_without_our_keys_nothing_is_added_for_gym() -> None:
    config = build(THEIRS)
    assert config.gym_config == THEIRS
    assert config == NemoGymConfig("policy", tuple(URLS), THEIRS)


def test_the_callers_mapping_is_neither_changed_nor_shared() -> None:
    section = copy.deepcopy({**OURS, **THEIRS})
    before = copy.deepcopy(section)
    config = build(section)
    assert section == before
    section["mcqa"]["resources_servers"]["mcqa"]["judges"][0]["name"] = "changed"
    section["config_paths"].append("late.yaml")
    assert config.gym_config == {**THEIRS, "num_gpu_nodes": 2}


@pytest.mark.parametrize(("given", "forwarded"), [({}, {}), ({"num_gpu_nodes": 0}, {"num_gpu_nodes": 0})])
def test_num_gpu_nodes_is_forwarded_only_if_it_was_said(given: dict, forwarded: dict) -> None:
    config = build(given)
    assert (config.num_gpu_nodes, config.gym_config) == (0, forwarded)


@pytest.mark.parametrize("on", [False, True])
def test_router_replay_and_fast_tokens_reach_the_config(on: bool) -> None:
    config = build({}, enable_router_replay=on, use_fastokens=not on)
    assert (config.require_routed_experts, config.use_fastokens) == (on, not on)


def test_token_capture_is_copied_into_the_config() -> None:
    capture = {"folder": "capture", "roles": ["policy"]}
    config = build({}, token_capture=capture)
    capture["roles"].append("judge")
    assert config.token_capture == {"folder": "capture", "roles": ["policy"]}
    assert build({}).token_capture is None


def test_effort_levels_may_be_written_by_name() -> None:
    levels = {"low": {"share": 0.5}, "high": None}
    assert build({"effort_levels": levels}).effort_levels == (EffortLevel("low", 0.5), EffortLevel("high"))


def test_a_config_survives_pickling() -> None:
    config = build({**OURS, **THEIRS}, base_urls=DeferredBaseUrls(tuple(URLS), 5.0))
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("max_concurency", "max_concurrency"),
        ("thinking_tag", "thinking_tags"),
        ("rollout_timeout", "rollout_timeout_s"),
        ("num_gpu_node", "num_gpu_nodes"),
    ],
)
def test_a_near_miss_is_forwarded_with_a_warning(
    key: str, meant: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "rl_gym_bridge"):
        assert build({key: 1}).gym_config == {key: 1}
    (record,) = caplog.records
    assert f"env.nemo_gym.{key}" in record.getMessage()
    assert f"did you mean '{meant}'" in record.getMessage()


def test_gyms_own_keys_are_no_near_misses(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rl_gym_bridge"):
        build(
            {
                **THEIRS,
                "head_server": {},
                "policy_base_url": "x",
                "dry_run": False,
                "ray_head_node_address": "",
            }
        )
    assert caplog.records == []


def test_a_key_that_is_an_argument_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rl_gym_bridge"):
        assert build({"model_name": "other"}).model_name == "policy"
    assert "env.nemo_gym.model_name is forwarded" in caplog.text


# --- addresses ---


def test_the_forms_of_addresses() -> None:
    assert build({}, base_urls=[]).base_urls == ()
    assert build({}, base_urls=["https://host.example/v1/"]).base_urls == ("https://host.example/v1",)
    assert build({}, base_urls=UserList(URLS)).base_urls == tuple(URLS)
    deferred = DeferredBaseUrls(tuple(URLS), 3.0)
    assert build({}, base_urls=deferred).base_urls is deferred
    assert DeferredBaseUrls(list(URLS)).urls == tuple(URLS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("urls", "index"), [([None], 0), ([None, None], 0), ([URLS[0], None], 1), ([None, URLS[0]], 0)]
)
def test_none_among_the_addresses_is_refused_for_the_list_as_a_whole(urls: list, index: int) -> None:
    with pytest.raises(GymConfigError) as caught:
        build({}, base_urls=urls)
    message = str(caught.value)
    assert message.startswith(f"base_urls[{index}]: it is None, one of {len(urls)} entries")
    assert "decide for the list as a whole" in message
    with pytest.raises(GymConfigError, match="None"):
        DeferredBaseUrls(tuple(urls))
    with pytest.raises(GymConfigError, match="None"):
        NemoGymConfig("policy", tuple(urls))


@pytest.mark.parametrize(
    ("urls", "said"),
    [
        (URLS[0], "is one string"),
        (None, "not a list of addresses"),
        ({"a": 1}, "not a list of addresses"),
        (["127.0.0.1:8000"], "scheme"),
        (["ftp://h/v1"], "scheme 'ftp'"),
        (["http:///v1"], "names no host"),
        (["http://h:0/v1"], "port 0"),
        (["http://h:65536/v1"], "out of range"),
        (["http://h:x/v1"], "'x'"),
        (["http://[::1/v1"], "base_urls[0]"),
        (["http://h /v1"], "white space"),
        (["http://h/v1\n"], "white space"),
        (["http://h/v1?a=1"], "query"),
        (["http://h/v1#"], "query or fragment"),
        ([8000], "is a int"),
        ([URLS[0], f"{URLS[0]}/"], "is entry 0 already"),
    ],
)
def test_malformed_addresses_are_refused(urls: Any, said: str) -> None:
    with pytest.raises(GymConfigError) as caught:
        build({}, base_urls=urls)
    assert said in str(caught.value)
    assert str(caught.value).startswith("base_urls")


def test_an_address_with_a_password_is_refused_without_showing_it() -> None:
    with pytest.raises(GymConfigError, match="password") as caught:
        build({}, base_urls=["http://user:hunter2@h/v1"])
    assert "hunter2" not in str(caught.value)


def test_deferred_addresses_need_one_and_a_deadline() -> None:
    with pytest.raises(GymConfigError, match="no address is reserved"):
        DeferredBaseUrls(())
    with pytest.raises(GymConfigError, match=r"ready_timeout_s: it is 0"):
        DeferredBaseUrls(tuple(URLS), 0)


# --- values that cannot be used ---

WRONG: list[tuple[Any, str, tuple[str, ...]]] = [
    ({"max_concurrency": "64"}, "max_concurrency", ("'64'", "whole number", "without quotes")),
    ({"max_concurrency": True}, "max_concurrency", ("True", "whole number")),
    ({"max_concurrency": 1.5}, "max_concurrency", ("1.5", "whole number")),
    ({"max_concurrency": 0}, "max_concurrency", ("0", "at least 1")),
    ({"num_gpu_nodes": -1}, "num_gpu_nodes", ("-1", "at least 0")),
    ({"num_gpu_nodes": None}, "num_gpu_nodes", ("None", "whole number")),
    ({"python": 3.12}, "python", ("3.12", "a string")),
    ({"python": " "}, "python", ("' '", "a path")),
    ({"work_dir": ""}, "work_dir", ("''", "a path")),
    ({"search_folder": ""}, "search_folder", ("''", "a path")),
    ({"start_timeout_s": 0}, "start_timeout_s", ("0.0", "above 0")),
    ({"rollout_timeout_s": float("nan")}, "rollout_timeout_s", ("nan", "finite")),
    ({"shutdown_timeout_s": float("inf")}, "shutdown_timeout_s", ("inf", "finite")),
    ({"transport": "http"}, "transport", ("'http'", "auto", "aiohttp", "did you mean 'httpx'?")),
    ({"on_discontinuity": "drop"}, "on_discontinuity", ("'drop'", "'fail'", "'keep_prefix'")),
    ({"routed_experts_dtype": "float16"}, "routed_experts_dtype", ("'float16'", "int16")),
    ({"thinking_tags": ["<think>"]}, "thinking_tags", ("has 1 entries, not 2",)),
    ({"thinking_tags": "<think>"}, "thinking_tags", ("'<think>'", "a list")),
    ({"thinking_tags": ["<t>", "<t>"]}, "thinking_tags", ("<t>", "two different")),
    ({"thinking_tags": ["", "</t>"]}, "thinking_tags", ("''", "not empty")),
    ({"invalid_tool_call_patterns": [""]}, "invalid_tool_call_patterns", ("''", "not empty")),
    ({"invalid_tool_call_patterns": ["a", 1]}, "invalid_tool_call_patterns[1]", ("1", "a string")),
    ({"penalties": 1}, "penalties", ("1", "a mapping")),
    ({"penalties": {"malformed_thinking": -0.5}}, "penalties.malformed_thinking", ("-0.5", ">= 0")),
    ({"penalties": {"invalid_call": 1}}, "penalties", ("'invalid_call'", "did you mean 'invalid_tool_call'")),
    ({"retry": {"infra_attempts": 0}}, "retry", ("infra_attempts=0", "data_attempts=2")),
    ({"retry": {"base_s": 5, "cap_s": 1}}, "retry", ("base_s=5", "cap_s=1")),
    ({"retry": {"infra_attempts": "5"}}, "retry.infra_attempts", ("'5'", "whole number")),
    ({"effort_levels": [{"share": 0.1}]}, "effort_levels[0]", ("name is missing",)),
    ({"effort_levels": [{"name": " "}]}, "effort_levels[0].name", ("' '", "not empty")),
    ({"effort_levels": [{"name": "a", "share": 1.5}]}, "effort_levels[0].share", ("1.5", "from 0 to 1")),
    ({"effort_levels": [{"name": "a", "max_output_tokens": 0}]}, "max_output_tokens", ("0", "at least 1")),
    ({"effort_levels": [{"name": "a", "token_budget": -1}]}, "token_budget", ("-1", "at least 0")),
    ({"effort_levels": [{"name": "a", "token_penalty": -1}]}, "token_penalty", ("-1", ">= 0")),
    ({"effort_levels": [{"name": "a"}, {"name": "a"}]}, "effort_levels", ("levels 0 and 1", "'a'")),
    (
        {"effort_levels": [{"name": "a", "share": 0.6}, {"name": "b", "share": 0.6}]},
        "effort_levels",
        ("'a': 0.6", "'b': 0.6", "at most 1", "1.2"),
    ),
    ({1: "x"}, "env.nemo_gym", ("the key 1", "no string")),
    ([], "env.nemo_gym", ("[]", "a mapping")),
    (None, "env.nemo_gym", ("None", "a mapping")),
]


@pytest.mark.parametrize(("section", "place", "parts"), WRONG, ids=[str(entry[0])[:60] for entry in WRONG])
def test_a_wrong_value_is_refused_with_its_place_both_values_and_what_to_do(
    section: Any, place: str, parts: tuple[str, ...]
) -> None:
    with pytest.raises(GymConfigError) as caught:
        build(section)
    assert place in caught.value.component
    assert caught.value.remedy
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"model_name": ""}, "model_name"),
        ({"model_name": None}, "argument.model_name"),
        ({"enable_router_replay": 1}, "argument.require_routed_experts"),
        ({"use_fastokens": "yes"}, "argument.use_fastokens"),
        ({"token_capture": ["x"]}, "argument.token_capture"),
    ],
)
def test_a_wrong_argument_is_refused(changes: dict, place: str) -> None:
    with pytest.raises(GymConfigError) as caught:
        build({}, **changes)
    assert caught.value.component == place


@pytest.mark.parametrize("env", [{}, {"nemogym": {}}])
def test_without_the_section_it_says_which_is_missing(env: dict) -> None:
    with pytest.raises(GymConfigError, match=r"env\.nemo_gym: None"):
        build_nemo_gym_config(
            env, base_urls=[], model_name="m", enable_router_replay=False, use_fastokens=False
        )


# --- B7 ---

MODEL = "policy_model.responses_api_models.vllm_model"


def at(place: str, value: Any) -> dict[str, Any]:
    for name in reversed(place.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("drop_old_thinking", True),
        ("truncate_history_thinking", True),
        ("clear_thinking", "true"),
        ("drop_thinking", 1),
        ("strip_thinking_from_history", "True"),
        ("preserve_thinking", False),
        ("keep_thinking", "false"),
    ],
)
@pytest.mark.parametrize("place", ["chat_template_kwargs", f"{MODEL}.chat_template_kwargs", MODEL])
def test_b7_a_flag_that_drops_old_thinking_is_refused_with_the_reason(
    flag: str, value: Any, place: str
) -> None:
    with pytest.raises(GymConfigError) as caught:
        build(at(f"{place}.{flag}", value))
    assert caught.value.component == f"env.nemo_gym.{place}.{flag}"
    for part in (repr(value), "thinking of earlier turns", "context that they were not sampled in"):
        assert part in str(caught.value)


def test_b7_it_is_found_in_lists_in_json_and_in_effort_levels() -> None:
    with pytest.raises(GymConfigError, match=r"servers\[1\]\.clear_thinking"):
        build({"servers": [{}, {"clear_thinking": True}]})
    with pytest.raises(GymConfigError, match=r"metadata\.chat_template_kwargs\.clear_thinking"):
        build({"metadata": {"chat_template_kwargs": '{"clear_thinking": true}'}})
    with pytest.raises(GymConfigError, match=r"effort_levels\[0\]\.chat_template_kwargs\.clear_thinking"):
        build({"effort_levels": [{"name": "low", "chat_template_kwargs": {"clear_thinking": True}}]})


@pytest.mark.parametrize(
    "kwargs",
    [
        {"clear_thinking": False, "preserve_thinking": True, "enable_thinking": False},
        {"truncate_history_thinking": None, "clear_thinking": "${policy.clear}"},
        "no json",
    ],
)
def test_b7_other_settings_are_forwarded(kwargs: Any) -> None:
    section = at(f"{MODEL}.chat_template_kwargs", kwargs)
    assert build(section).gym_config == section


def test_b7_a_judge_may_drop_its_thinking() -> None:
    judge = {"return_token_id_information": False, "chat_template_kwargs": {"clear_thinking": True}}
    section = at("judge_model.responses_api_models.vllm_model", judge)
    assert build(section).gym_config == section
