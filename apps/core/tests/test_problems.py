from __future__ import annotations

import json

import pytest

from rl_app_core.config import ConfigError
from rl_app_core.config.sections import Data, HeldOutData, TrainData
from rl_app_core.problems import load_problems

OPTIONS = {
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 2,
    "max_digits": 2,
    "operators": ["+"],
    "allow_parentheses": False,
    "allow_negation": False,
}


def generated(**changes) -> TrainData:
    return TrainData(**{"dataset_name": "basic_arithmetic", "size": 3000, "options": OPTIONS, **changes})


def contents(rows):
    return [json.dumps(row.to_mapping()["responses_create_params"]) for row in rows]


def write_rows(path, count, start=0):
    rows = [
        {
            "responses_create_params": {"input": [{"role": "user", "content": f"say {number}"}]},
            "agent_ref": {"name": "exact_answer"},
            "answer": str(number),
        }
        for number in range(start, start + count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_sides_are_disjoint_by_content_and_hold_each_problem_once():
    problems = load_problems(Data(train=generated()), "exact_answer")
    train, held_out = contents(problems.train), contents(problems.held_out)
    assert not set(train) & set(held_out)
    assert len(set(train)) == len(train)
    assert len(held_out) == 256


def test_generated_rows_carry_question_answer_and_environment():
    row = load_problems(Data(train=generated()), "exact_answer").train[0]
    question = row.messages[0]["content"]
    left, right = question.removeprefix("Calculate ").removesuffix(".").split(" + ")
    assert row.verifier["answer"] == str(int(left) + int(right))
    assert row.agent == "exact_answer"


def test_a_prompt_template_can_use_the_metadata():
    problems = load_problems(Data(train=generated(prompt="What is {expression}?")), "exact_answer")
    assert problems.train[0].messages[0]["content"].startswith("What is ")
    with pytest.raises(ConfigError, match=r"fields are .*expression"):
        load_problems(Data(train=generated(prompt="What is {formula}?")), "exact_answer")


def test_a11_the_held_out_side_depends_on_nothing_but_the_content():
    few = load_problems(Data(train=generated(), held_out=HeldOutData(size=50)), "exact_answer")
    many = load_problems(Data(train=generated(), held_out=HeldOutData(size=100)), "exact_answer")
    assert contents(many.held_out)[:50] == contents(few.held_out)
    assert contents(few.train) == contents(many.train)


def test_rows_of_a_file_are_split_the_same_way(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", 200)
    problems = load_problems(Data(train=TrainData(path=path)), "unused")
    assert len(problems.train) + len(problems.held_out) == 200
    assert 20 <= len(problems.held_out) <= 60
    assert {row.agent for row in problems.train} == {"exact_answer"}


def test_a_held_out_file_that_repeats_a_training_problem_is_refused(tmp_path):
    train = write_rows(tmp_path / "train.jsonl", 10)
    apart = write_rows(tmp_path / "apart.jsonl", 5, start=10)
    mixed = write_rows(tmp_path / "mixed.jsonl", 5, start=8)
    held_out = HeldOutData(path=apart)
    assert len(load_problems(Data(train=TrainData(path=train), held_out=held_out), "x").train) == 10
    with pytest.raises(ConfigError, match=r"data\.held_out\.path: 2 of its problems are also in data\.train"):
        load_problems(Data(train=TrainData(path=train), held_out=HeldOutData(path=mixed)), "x")


@pytest.mark.parametrize(
    ("train", "told"),
    [
        (generated(dataset_name="basic_arithmetc"), "did you mean basic_arithmetic"),
        (generated(options={"min_term": 2}), "data.train.options: basic_arithmetic refuses them"),
        (generated(options={"min_terms": 3, "max_terms": 2}), "data.train.options"),
        (TrainData(path="nowhere.jsonl"), "data.train.path"),
    ],
)
def test_a_source_that_cannot_be_used_names_its_key(train, told):
    with pytest.raises(ConfigError) as caught:
        load_problems(Data(train=train), "exact_answer")
    assert told in str(caught.value)


def test_an_empty_side_is_refused(tmp_path):
    path = write_rows(tmp_path / "one.jsonl", 1)
    with pytest.raises(ConfigError, match="problem is left of 1"):
        load_problems(Data(train=TrainData(path=path)), "x")


def test_the_same_question_in_another_form_is_the_same_problem(tmp_path):
    path = write_rows(tmp_path / "train.jsonl", 10)
    row = {
        "responses_create_params": {"input": "say 3"},
        "agent_ref": {"name": "exact_answer"},
        "answer": "3",
    }
    (tmp_path / "same.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match=r"1 of its problems are also in data\.train"):
        load_problems(
            Data(train=TrainData(path=path), held_out=HeldOutData(path=tmp_path / "same.jsonl")), "x"
        )


def test_the_same_input_under_other_instructions_is_another_problem_and_repeats_are_counted(tmp_path):
    def row(instructions):
        return {
            "responses_create_params": {"input": "say 3", "instructions": instructions},
            "agent_ref": {"name": "exact_answer"},
            "answer": "3",
        }

    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row(text)) + "\n" for text in ("loud", "soft", "loud")))
    held_out = HeldOutData(path=write_rows(tmp_path / "held_out.jsonl", 2))
    problems = load_problems(Data(train=TrainData(path=path), held_out=held_out), "x")
    assert len(problems.train) == 2
    assert problems.repeated == 1


def test_the_digest_changes_with_any_row(tmp_path):
    digests = set()
    for count in (10, 11):
        train = TrainData(path=write_rows(tmp_path / f"{count}.jsonl", count))
        held_out = HeldOutData(path=write_rows(tmp_path / "apart.jsonl", 2, start=100))
        digests.add(load_problems(Data(train=train, held_out=held_out), "x").digest)
    assert len(digests) == 2
