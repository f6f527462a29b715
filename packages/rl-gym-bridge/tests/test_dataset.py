from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from rl_gym_bridge.dataset import DatasetError, GymRow, load_rows, write_rows


def mapping(**changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "responses_create_params": {"input": "What is 2 + 2?", "temperature": 0.5},
        "agent_ref": {"type": "responses_api_agents", "name": "simple"},
        "answer": "4",
        "meta": {"level": 1},
    }
    row.update(changes)
    return row


def write(path: Path, *lines: Any) -> Path:
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines),
        encoding="utf-8",
    )
    return path


def refusal(path: Path, **kwargs: Any) -> DatasetError:
    with pytest.raises(DatasetError) as caught:
        load_rows(path, **kwargs)
    assert caught.value.remedy
    assert caught.value.remedy in str(caught.value)
    return caught.value


def test_a_row_is_split_into_request_agent_and_verifier_fields() -> None:
    row = GymRow.from_mapping(mapping(row_id="r1"))
    assert row.responses_create_params == {"input": "What is 2 + 2?", "temperature": 0.5}
    assert row.agent_ref == {"type": "responses_api_agents", "name": "simple"}
    assert row.agent == "simple"
    assert row.verifier == {"answer": "4", "meta": {"level": 1}}
    assert row.row_id == "r1"


@pytest.mark.parametrize("source", [mapping(), mapping(row_id="r1"), mapping(extra=None)])
def test_round_trip_gives_the_same_object(source: dict[str, Any]) -> None:
    row = GymRow.from_mapping(source)
    assert row.to_mapping() == source
    assert GymRow.from_mapping(row.to_mapping()) == row
    assert pickle.loads(pickle.dumps(row)) == row


def test_a_row_shares_nothing_with_the_mapping_it_came_from() -> None:
    source = mapping()
    row = GymRow.from_mapping(source)
    source["meta"]["level"] = 9
    source["responses_create_params"]["input"] = "changed"
    assert row.verifier["meta"] == {"level": 1}
    assert row.responses_create_params["input"] == "What is 2 + 2?"


def test_an_integer_id_is_read_as_text() -> None:
    assert GymRow.from_mapping(mapping(row_id=7)).row_id == "7"


def test_a_derived_id_depends_on_content_and_not_on_key_order() -> None:
    one = GymRow.from_mapping(mapping())
    reordered = GymRow.from_mapping(dict(reversed(list(mapping().items()))))
    assert one.row_id == reordered.row_id
    assert one.row_id != GymRow.from_mapping(mapping(answer="5")).row_id


def test_files_round_trip(tmp_path: Path) -> None:
    rows = [GymRow.from_mapping(mapping(answer=str(n), text="ü\u2028\n")) for n in range(5)]
    rows.append(GymRow.from_mapping(mapping(row_id="named")))
    assert write_rows(tmp_path / "rows.jsonl", rows) == 6
    assert load_rows(tmp_path / "rows.jsonl") == rows
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_blank_lines_a_byte_order_mark_and_windows_line_ends_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf" + json.dumps(mapping()).encode() + b"\r\n\r\n  \n" + json.dumps(mapping(a=1)).encode()
    )
    assert len(load_rows(path)) == 2


def test_equal_rows_without_ids_stay_different_rows(tmp_path: Path) -> None:
    rows = load_rows(write(tmp_path / "rows.jsonl", mapping(), mapping(), mapping()))
    first = rows[0].row_id
    assert [row.row_id for row in rows] == [first, f"{first}#2", f"{first}#3"]
    write_rows(tmp_path / "again.jsonl", rows)
    assert load_rows(tmp_path / "again.jsonl") == rows


def test_a_default_agent_fills_rows_that_name_none(tmp_path: Path) -> None:
    bare = mapping()
    del bare["agent_ref"]
    rows = load_rows(write(tmp_path / "rows.jsonl", bare, mapping(row_id="x")), default_agent="mine")
    assert [row.agent for row in rows] == ["mine", "simple"]


def test_bad_json_names_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", mapping(), "", "{not json}")
    error = refusal(path)
    assert (error.path, error.line) == (path, 3)
    assert str(error).startswith(f"{path}:3: not valid JSON")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"a": NaN}', "NaN"),
        ('{"a": 1e999}', "too large"),
        ('{"a": 1, "a": 2}', "'a' appears twice"),
        ('{"a": "\\udc00"}', "surrogate"),
        ("[1]", "not a JSON object"),
        ("3", "not a JSON object"),
        ("null", "not a JSON object"),
        ("[" * 100_000, "JSON"),
    ],
)
def test_lines_that_are_no_proper_object(tmp_path: Path, line: str, problem: str) -> None:
    error = refusal(write(tmp_path / "rows.jsonl", line))
    assert problem in str(error)
    assert error.line == 1


def test_bytes_that_are_not_utf8_name_their_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps(mapping()).encode() + b'\n{"a": "\xff"}\n')
    assert refusal(path).line == 2


INPUT = "responses_create_params.input"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"responses_create_params": None}, "responses_create_params"),
        ({"responses_create_params": "text"}, "responses_create_params"),
        ({"responses_create_params": {}}, INPUT),
        ({"responses_create_params": {"input": ""}}, INPUT),
        ({"responses_create_params": {"input": []}}, INPUT),
        ({"responses_create_params": {"input": 3}}, INPUT),
        ({"responses_create_params": {"input": ["hello"]}}, f"{INPUT}[0]"),
        ({"responses_create_params": {"input": [{"role": "user", "content": "a"}, {}]}}, f"{INPUT}[1].role"),
        ({"responses_create_params": {"input": [{"role": "usr", "content": "a"}]}}, f"{INPUT}[0].role"),
        ({"responses_create_params": {"input": [{"role": ["user"], "content": "a"}]}}, f"{INPUT}[0].role"),
        ({"responses_create_params": {"input": [{"role": "user"}]}}, f"{INPUT}[0].content"),
        ({"agent_ref": None}, "agent_ref"),
        ({"agent_ref": "simple"}, "agent_ref"),
        ({"agent_ref": {}}, "agent_ref.name"),
        ({"agent_ref": {"name": ""}}, "agent_ref.name"),
        ({"agent_ref": {"name": 3}}, "agent_ref.name"),
        ({"row_id": ""}, "row_id"),
        ({"row_id": True}, "row_id"),
        ({"row_id": [1]}, "row_id"),
        ({"row_id": 1.5}, "row_id"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_with_its_line(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    error = refusal(write(tmp_path / "rows.jsonl", mapping(), mapping(**change)))
    assert (error.line, error.field) == (2, field)
    assert f":2: {field}: " in str(error)


@pytest.mark.parametrize("field", ["responses_create_params", "agent_ref"])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    row = mapping()
    del row[field]
    error = refusal(write(tmp_path / "rows.jsonl", row))
    assert error.field == field
    assert "missing" in str(error)


def test_a_repeated_id_names_both_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path / "rows.jsonl", mapping(row_id="a"), mapping(row_id="b"), mapping(row_id="a", answer="5")
    )
    error = refusal(path)
    assert (error.line, error.field) == (3, "row_id")
    assert "line 1" in str(error)


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_file_without_rows_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    assert "no row" in str(refusal(path))


def test_paths_that_cannot_be_read_are_refused_in_the_same_way(tmp_path: Path) -> None:
    missing = refusal(tmp_path / "missing.jsonl")
    assert missing.path == tmp_path / "missing.jsonl"
    assert isinstance(missing.__cause__, FileNotFoundError)
    assert isinstance(refusal(tmp_path).__cause__, IsADirectoryError)


def test_errors_keep_their_facts_across_processes(tmp_path: Path) -> None:
    error = refusal(write(tmp_path / "rows.jsonl", mapping(agent_ref={})))
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert (again.path, again.line, again.field) == (error.path, error.line, error.field)


@pytest.mark.parametrize("bad", [float("nan"), object(), "\ud800"])
def test_what_cannot_be_written_leaves_no_file(tmp_path: Path, bad: Any) -> None:
    rows = [GymRow.from_mapping(mapping()), GymRow({"input": "x"}, {"name": "a"}, {"bad": bad}, "r")]
    with pytest.raises(DatasetError):
        write_rows(tmp_path / "rows.jsonl", rows)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_write_leaves_the_old_file(tmp_path: Path) -> None:
    rows = [GymRow.from_mapping(mapping(row_id="a"))]
    write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DatasetError, match="twice"):
        write_rows(tmp_path / "rows.jsonl", rows * 2)
    assert load_rows(tmp_path / "rows.jsonl") == rows


def test_writing_into_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="directory"):
        write_rows(tmp_path / "no" / "rows.jsonl", [GymRow.from_mapping(mapping())])


def test_a_write_that_fails_at_its_end_leaves_nothing_beside_the_target(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").mkdir()
    with pytest.raises(DatasetError, match="cannot be written"):
        write_rows(tmp_path / "rows.jsonl", [GymRow.from_mapping(mapping())])
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def messages_of(params: dict[str, Any]) -> tuple[dict[str, str], ...]:
    return GymRow.from_mapping(mapping(responses_create_params=params)).messages


def test_messages_of_a_string_input() -> None:
    assert messages_of({"input": "hi"}) == ({"role": "user", "content": "hi"},)


def test_messages_of_a_list_with_parts_instructions_and_a_developer() -> None:
    params = {
        "instructions": "Be brief.",
        "input": [
            {"role": "developer", "content": "Count."},
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
            },
            {"role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
            {"role": "user", "content": "d"},
        ],
    }
    assert messages_of(params) == (
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "Count."},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    )


@pytest.mark.parametrize(
    "item",
    [
        {"role": "user", "content": [{"type": "input_image", "image_url": "u"}]},
        {"type": "function_call", "name": "f", "arguments": "{}"},
        {"role": "user", "content": [{"type": "input_text"}]},
        {"role": "user", "content": [{"type": "input_file", "text": "name"}]},
        {"role": "user", "content": ["text"]},
    ],
)
def test_input_that_is_not_text_loads_but_has_no_text_messages(item: dict[str, Any]) -> None:
    row = GymRow.from_mapping(mapping(row_id="r9", responses_create_params={"input": [item]}))
    with pytest.raises(DatasetError, match=r"r9.*Gym") as caught:
        _ = row.messages
    assert caught.value.field == "responses_create_params.input[0]"
