"""From rows to the JSON objects that agents get: everything of the row kept, the run's settings put in."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from rl_gym_bridge.config import EffortLevel
from rl_gym_bridge.dataset import GymRow
from rl_gym_bridge.errors import DatasetError
from rl_gym_bridge.failures import GymConfigError
from rl_gym_bridge.request_body import GenerationOverrides, request_body
from rl_gym_bridge.requests import RolloutRequest
from rl_gym_bridge.rows import NemoGymDataset, collate_rollout_requests, nemo_gym_data_processor

RICH: dict[str, Any] = {
    "responses_create_params": {
        "input": [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "q"}],
        "instructions": "obey",
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0.1,
        "top_p": 0.2,
        "max_output_tokens": 7,
        "max_tool_calls": None,
        "metadata": {"trace": "t-1"},
        "user": "u",
    },
    "agent_ref": {"type": "responses_api_agents", "name": "mcqa"},
    "expected_answer": "B",
    "options": [{"A": "x"}],
    "unicode": "naïve ☃",
}


def row(mapping: dict[str, Any] | None = None, **changes: Any) -> GymRow:
    return GymRow.from_mapping({**(mapping or RICH), **changes})


def with_input(content: Any, **params: Any) -> GymRow:
    return row({"responses_create_params": {"input": content, **params}, "agent_ref": {"name": "a"}})


def body(of: GymRow, generation: GenerationOverrides | None = None, **settings: Any) -> dict[str, Any]:
    chosen = {"effort": None, "seed": None, **settings}
    before = copy.deepcopy(of.to_mapping())
    made = request_body(of, generation or GenerationOverrides(), **chosen)
    assert of.to_mapping() == before
    json.dumps(made, allow_nan=False)
    return made


def params(of: GymRow, generation: GenerationOverrides | None = None, **settings: Any) -> dict[str, Any]:
    return body(of, generation, **settings)["responses_create_params"]


def requests_of(rows: list[GymRow], **changes: Any) -> list[list[RolloutRequest]]:
    settings: dict[str, Any] = {
        "generation": GenerationOverrides(temperature=1.0),
        "group_size": 3,
        "step": 5,
        "seed": 0,
        **changes,
    }
    return collate_rollout_requests(rows, **settings)


def test_without_overrides_the_agent_gets_the_row_as_it_is() -> None:
    assert body(row()) == RICH


def test_overrides_replace_exactly_the_three_sampling_parameters() -> None:
    made = body(row(), GenerationOverrides(temperature=1.0, top_p=0.9, max_new_tokens=512))
    expected = copy.deepcopy(RICH)
    expected["responses_create_params"] |= {"temperature": 1.0, "top_p": 0.9, "max_output_tokens": 512}
    assert made == expected


def test_an_override_of_zero_is_one() -> None:
    assert params(row(), GenerationOverrides(temperature=0.0))["temperature"] == 0.0


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"max_new_tokens": 0},
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        GenerationOverrides(**settings)


def test_extras_travel_as_json_text_beside_the_rows_own() -> None:
    of = row(
        responses_create_params={
            "input": "q",
            "metadata": {"trace": "t", "extra_body": '{"top_k": 5}', "chat_template_kwargs": '{"a": 1}'},
        }
    )
    made = params(
        of,
        GenerationOverrides(extra_body={"min_p": 0.1}, chat_template_kwargs={"enable_thinking": True}),
        seed=9,
    )["metadata"]
    assert made["trace"] == "t"
    assert json.loads(made["extra_body"]) == {"top_k": 5, "min_p": 0.1, "seed": 9}
    assert json.loads(made["chat_template_kwargs"]) == {"a": 1, "enable_thinking": True}


def test_extras_need_no_metadata_in_the_row() -> None:
    for metadata in ({}, {"metadata": None}):
        of = row(responses_create_params={"input": "q", **metadata})
        made = params(of, GenerationOverrides(extra_body={"k": 1}))
        assert made["metadata"] == {"extra_body": '{"k": 1}'}
        assert params(of) == {"input": "q", **metadata}


def test_a_row_and_a_run_that_disagree_on_an_extra_are_refused() -> None:
    of = row(responses_create_params={"input": "q", "metadata": {"extra_body": '{"top_k": 5}'}})
    assert params(of, GenerationOverrides(extra_body={"top_k": 5}))
    with pytest.raises(DatasetError, match=r"sets top_k to 5, the run to 6"):
        body(of, GenerationOverrides(extra_body={"top_k": 6}))


@pytest.mark.parametrize("extras", ["{", "[1]", '{"a": NaN}', {"a": 1}, 5])
def test_extras_of_a_row_that_are_no_json_object_are_refused(extras: Any) -> None:
    of = row(responses_create_params={"input": "q", "metadata": {"extra_body": extras}})
    with pytest.raises(DatasetError, match="extra_body"):
        body(of, GenerationOverrides(extra_body={"k": 1}))


def test_metadata_that_is_no_object_is_refused_when_extras_have_to_go_in() -> None:
    with pytest.raises(DatasetError, match="metadata"):
        body(row(responses_create_params={"input": "q", "metadata": [1]}), seed=1)


# --- effort in the request


LEVEL = EffortLevel(
    "low", instruction="Think little.", max_output_tokens=64, chat_template_kwargs={"budget": "low"}
)


def test_a_level_bounds_the_runs_tokens_but_does_not_raise_them() -> None:
    assert params(row(), GenerationOverrides(max_new_tokens=512), effort=LEVEL)["max_output_tokens"] == 64
    assert params(row(), GenerationOverrides(max_new_tokens=32), effort=LEVEL)["max_output_tokens"] == 32
    assert params(row(), effort=LEVEL)["max_output_tokens"] == 7
    without = row(responses_create_params={"input": "q"})
    assert params(without, effort=LEVEL)["max_output_tokens"] == 64


def test_a_level_that_contradicts_the_run_is_the_settings_fault_and_no_rows() -> None:
    run = {"chat_template_kwargs": {"budget": "high", "other": 1}}
    asked = {"group_size": 1, "step": 0, "seed": 0, "effort_levels": [LEVEL]}
    with pytest.raises(
        GymConfigError, match=r"'low', chat_template_kwargs\.budget.*'low', the run to 'high'"
    ):
        nemo_gym_data_processor(row(), generation=GenerationOverrides(**run), **asked)
    run["chat_template_kwargs"]["budget"] = "low"
    nemo_gym_data_processor(row(), generation=GenerationOverrides(**run), **asked)


DROPPING = {"clear_thinking": True}


@pytest.mark.parametrize(
    "extras",
    [
        {"chat_template_kwargs": DROPPING},
        {"extra_body": {"chat_template_kwargs": DROPPING}},
        {"extra_body": {"chat_template_kwargs": json.dumps(DROPPING)}},
        {"chat_template_kwargs": {"keep_thinking": False}},
    ],
)
def test_b7_a_run_that_drops_old_thinking_is_refused(extras: dict[str, Any]) -> None:
    """B7: the flag is true, training must see the thinking."""
    with pytest.raises(GymConfigError, match="removes the thinking of earlier turns"):
        GenerationOverrides(**extras)
    GenerationOverrides(chat_template_kwargs={"clear_thinking": False})


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"chat_template_kwargs": json.dumps(DROPPING)}},
        {"metadata": {"extra_body": json.dumps({"chat_template_kwargs": DROPPING})}},
        {"chat_template_kwargs": DROPPING},
        {"extra_body": {"chat_template_kwargs": DROPPING}},
    ],
)
def test_b7_a_row_that_drops_old_thinking_is_refused_before_anything_is_sent(fields: dict[str, Any]) -> None:
    """B7: the flag may come in a row, too."""
    of = row(responses_create_params={"input": "q", **fields})
    for refused in (lambda: body(of), lambda: NemoGymDataset([of])):
        with pytest.raises(DatasetError, match=r"responses_create_params\..*clear_thinking: row .*removes"):
            refused()
    kept = json.dumps({"clear_thinking": False})
    body(row(responses_create_params={"input": "q", "metadata": {"chat_template_kwargs": kept}}))


def test_a_levels_template_arguments_are_merged() -> None:
    made = params(row(), effort=LEVEL)["metadata"]
    assert made["trace"] == "t-1"
    assert json.loads(made["chat_template_kwargs"]) == {"budget": "low"}


def test_an_instruction_ends_the_system_message_wherever_it_stands() -> None:
    made = params(row(), effort=LEVEL)
    assert made["input"][0] == {"role": "developer", "content": "be brief\n\nThink little."}
    assert made["instructions"] == "obey"
    assert made["input"][1:] == RICH["responses_create_params"]["input"][1:]
    parts = [{"role": "system", "content": [{"type": "input_text", "text": "x"}]}]
    made = params(with_input(parts), effort=LEVEL)
    assert made["input"][0]["content"][1] == {"type": "input_text", "text": "\n\nThink little."}
    made = params(with_input("q", instructions="obey"), effort=LEVEL)
    assert (made["instructions"], made["input"]) == ("obey\n\nThink little.", "q")
    made = params(with_input("q"), effort=LEVEL)
    assert made["input"] == [
        {"role": "system", "content": "Think little."},
        {"role": "user", "content": "q"},
    ]


# --- ids and order


def test_requests_come_in_order_with_their_ids() -> None:
    rows = [with_input(f"q{index}") for index in range(2)]
    groups = requests_of(rows)
    assert [[request.rollout_id for request in group] for group in groups] == [
        ["train/5/0/0", "train/5/0/1", "train/5/0/2"],
        ["train/5/1/0", "train/5/1/1", "train/5/1/2"],
    ]
    assert [{request.group_id for request in group} for group in groups] == [{"train/5/0"}, {"train/5/1"}]
    assert [group[0].row_id for group in groups] == [rows[0].row_id, rows[1].row_id]
    assert groups[0][0].agent == "a"
    assert requests_of(rows) == groups
    assert requests_of(rows, group_prefix="eval")[0][0].rollout_id == "eval/5/0/0"


def test_only_asked_for_each_rollout_gets_a_seed_of_its_own() -> None:
    same = with_input("q")
    plain = requests_of([same])[0]
    assert all("metadata" not in request.body["responses_create_params"] for request in plain)
    groups = requests_of([same, same], generation=GenerationOverrides(seeded=True))
    seeds = [
        json.loads(request.body["responses_create_params"]["metadata"]["extra_body"])["seed"]
        for group in groups
        for request in group
    ]
    assert len(set(seeds)) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert requests_of([same, same], generation=GenerationOverrides(seeded=True)) == groups
    assert requests_of([same], generation=GenerationOverrides(seeded=True), step=6)[0] != groups[0]


def test_rows_played_before_in_the_step_take_neither_ids_nor_seeds_away() -> None:
    seeded = GenerationOverrides(seeded=True)
    one = row(row_id="x")
    whole = requests_of([one] * 3, generation=seeded, group_size=2)
    later = requests_of([one], generation=seeded, group_size=2, first=2)
    assert later == whole[2:]
    assert len({request.rollout_id for group in whole for request in group}) == 6


def test_a_group_needs_a_rollout() -> None:
    with pytest.raises(ValueError, match="group_size=0"):
        nemo_gym_data_processor(row(), generation=GenerationOverrides(), group_size=0, step=0, seed=0)


# --- shapes of conversations


def test_a3_k9_items_of_every_kind_pass_in_their_order() -> None:
    """A3, K9: what is in the request is what was in the row, at the same place."""
    items = [
        {"role": "system", "content": "s"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "42"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "and?"},
    ]
    assert params(with_input(items))["input"] == items


def test_k9_chat_style_tool_traffic_becomes_items_without_empty_lists_of_calls() -> None:
    """K9: a tool-only assistant turn, the role ``tool``, an empty list of calls."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    other = {"id": "d", "type": "function", "function": {"name": "g", "arguments": '{"x": 1}'}}
    items = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
        {"role": "assistant", "content": "so", "tool_calls": [other]},
        {
            "role": "tool",
            "tool_call_id": "d",
            "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "3"}],
        },
        {"role": "assistant", "content": "done", "tool_calls": []},
        {"role": "user", "content": "and?"},
    ]
    assert params(with_input(items))["input"] == [
        {"role": "user", "content": "q"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "42"},
        {"role": "assistant", "content": "so"},
        {"type": "function_call", "call_id": "d", "name": "g", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "d", "output": "43"},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "and?"},
    ]


@pytest.mark.parametrize(
    "item",
    [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]},
        {"role": "assistant", "content": None, "tool_calls": [5]},
        {"role": "assistant", "content": "x", "tool_calls": {"a": 1}},
        {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "42"},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "image"}]},
    ],
)
def test_incomplete_tool_traffic_is_refused(item: dict[str, Any]) -> None:
    with pytest.raises(DatasetError, match="tool"):
        body(with_input([{"role": "user", "content": "q"}, item]))


@pytest.mark.parametrize("calls", [None, []])
def test_a_turn_of_the_assistant_that_says_and_calls_nothing_is_refused(calls: Any) -> None:
    with pytest.raises(DatasetError, match="content"):
        with_input([{"role": "assistant", "content": None, "tool_calls": calls}])


# --- data sets


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in rows), encoding="utf-8")
    return path


def test_a_data_set_of_a_file_has_positions_ids_and_agents(tmp_path: Path) -> None:
    path = write(
        tmp_path / "rows.jsonl",
        {**RICH, "row_id": "first"},
        {"responses_create_params": {"input": "q"}},
        {"responses_create_params": {"input": "q"}},
    )
    data = NemoGymDataset.from_jsonl(path, default_agent="fallback")
    assert len(data) == 3
    assert data[0].row_id == "first"
    assert data[-1].agent == "fallback"
    assert [entry.row_id for entry in data[0:2]] == ["first", data[1].row_id]
    assert data[2].row_id == f"{data[1].row_id}#2"
    assert data.by_id(data[1].row_id) is data[1]
    assert data.agents == ("mcqa", "fallback")
    again = NemoGymDataset.from_jsonl(path, default_agent="fallback")
    assert [entry.row_id for entry in again] == [entry.row_id for entry in data]
    with pytest.raises(KeyError):
        data.by_id("nobody")


def test_one_id_for_two_rows_is_refused() -> None:
    with pytest.raises(DatasetError, match="rows 0 and 1"):
        NemoGymDataset([row(), row()])
