from __future__ import annotations

import random
from typing import Any

import pytest

from rl_gym_bridge.dataset import DatasetError, GymRow
from rl_gym_bridge.environment import (
    EnvironmentDefinitionError,
    LocalEnvironment,
    RolloutResponse,
    Tool,
    ToolError,
    Verdict,
)
from rl_gym_bridge.environments import environment_names, get_environment
from rl_gym_bridge.environments.arithmetic import ArithmeticFault, evaluate
from rl_gym_bridge.trajectory import StopReason


def row(answer: Any = "82") -> GymRow:
    return GymRow({"input": "Calculate 75 + 7."}, {"name": "exact_answer"}, {"answer": answer}, "r1")


def judged(text: str, *, answer: Any = "82", stop_reason: StopReason = StopReason.STOP) -> Verdict:
    verdict = get_environment("exact_answer").verify(row(answer), RolloutResponse(text, (), stop_reason))
    assert isinstance(verdict, Verdict)
    return verdict


@pytest.mark.parametrize(
    ("text", "reward", "thinks"),
    [
        ("82", 1, 0),
        (" 82\n", 1, 0),
        ("<think>7+5+0=12,0+7+1=8</think>82", 1, 1),
        ("7+5</think> 82 ", 1, 1),
        ("<think>1</think>81</think>82", 1, 1),
        ("<think>82", 0, 1),
        ("82<think></think>", 0, 1),
        ("<think>82</think>", 0, 1),
        ("x82", 0, 0),
        ("082", 0, 0),
        ("82.", 0, 0),
        ("8 2", 0, 0),
        ("", 0, 0),
    ],
)
def test_exact_answer_takes_the_whole_answer_or_nothing(text: str, reward: int, thinks: int) -> None:
    verdict = judged(text)
    assert verdict.reward == reward
    assert verdict.metrics == {"thinks": thinks}


@pytest.mark.parametrize("reason", [StopReason.LENGTH, StopReason.TOOL_LIMIT])
def test_a_right_answer_that_was_cut_off_earns_nothing(reason: StopReason) -> None:
    assert judged("82", stop_reason=reason).reward == 0


def test_an_integer_answer_is_compared_as_text() -> None:
    assert judged("82", answer=82).reward == 1


@pytest.mark.parametrize("answer", [None, True, 82.0, ["82"]])
def test_a_row_without_a_proper_answer_is_an_error_and_not_a_reward(answer: Any) -> None:
    with pytest.raises(DatasetError, match="r1"):
        judged("82", answer=answer)


def test_calculator_judges_alike_and_has_one_tool_and_two_turns() -> None:
    calculator, exact = get_environment("calculator"), get_environment("exact_answer")
    assert calculator.verify is exact.verify
    assert [tool.name for tool in calculator.tools] == ["calculator"]
    assert (calculator.max_turns, exact.max_turns) == (2, 1)
    schema = calculator.tools[0].schema()["function"]
    assert schema["parameters"]["required"] == ["expression"]


def test_names_and_suggestions() -> None:
    assert environment_names() == ("calculator", "exact_answer", "final_number")
    for name in environment_names():
        assert get_environment(name).name == name
    with pytest.raises(EnvironmentDefinitionError, match="did you mean 'calculator'"):
        get_environment("calculater")
    with pytest.raises(EnvironmentDefinitionError, match="known: calculator, exact_answer, final_number"):
        get_environment("zzz")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("37*82", "3034"),
        ("99 - 100", "-1"),
        ("2+3*4", "14"),
        ("(2+3)*4", "20"),
        ("10-2-3", "5"),
        ("-5*-5", "25"),
        ("2--3", "5"),
        ("007+1", "8"),
        ("12 × 3 − 1", "35"),
        ("  9999 ", "9999"),
    ],
)
def test_the_calculator_calculates(expression: str, value: str) -> None:
    tool = get_environment("calculator").tools[0]
    assert tool.call({"expression": expression}) == value


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("", "ends where a number"),
        ("3+", "ends where a number"),
        ("10000", "more than 4 digits"),
        ("3/4", "'/' is not allowed"),
        ("2**3", "'*' is not expected"),
        ("3 4", "'4' is not expected"),
        ("(3", "not closed"),
        ("3)", "')' is not expected"),
        ("()", "')' is not expected"),
        ("*3", "'*' is not expected"),
        ("+3", "'+' is not expected"),
        ("__import__('os')", "'_' is not allowed"),
        ("1e3", "'e' is not allowed"),
        ("٣+1", "is not allowed"),
        ("²", "is not allowed"),
        ("1+" * 40 + "1", "longer than 64"),
    ],
)
def test_what_the_calculator_cannot_do_is_told_to_the_policy(expression: str, problem: str) -> None:
    tool = get_environment("calculator").tools[0]
    with pytest.raises(ToolError) as caught:
        tool.call({"expression": expression})
    assert problem in str(caught.value)


@pytest.mark.parametrize("arguments", [{}, {"expr": "1"}, {"expression": "1", "x": 2}, {"expression": 12}])
def test_wrong_arguments_are_told_to_the_policy(arguments: dict[str, Any]) -> None:
    with pytest.raises(ToolError):
        get_environment("calculator").tools[0].call(arguments)


def test_random_expressions_have_the_value_that_they_were_built_with() -> None:
    draw = random.Random(1)

    def build(depth: int) -> tuple[str, int]:
        if depth == 0 or draw.random() < 0.3:
            number = draw.randrange(10_000)
            return str(number), number
        (left, a), (right, b) = build(depth - 1), build(depth - 1)
        operator = draw.choice("+-*")
        return f"({left}{operator}{right})", {"+": a + b, "-": a - b, "*": a * b}[operator]

    built = [build(3) for _ in range(500)]
    short = [(text, value) for text, value in built if len(text) <= 64]
    assert len(short) > 300
    assert all(evaluate(text) == value for text, value in short)


def test_random_garbage_is_a_fault_or_a_number() -> None:
    draw = random.Random(2)
    for _ in range(3000):
        text = "".join(draw.choices("0123+-*() x\n", k=draw.randrange(20)))
        try:
            assert isinstance(evaluate(text), int)
        except ArithmeticFault:
            continue


def test_deep_brackets_do_not_exhaust_the_stack() -> None:
    assert evaluate("(" * 31 + "1" + ")" * 31) == 1


def tool(name: str) -> Tool:
    return Tool(name, "", {}, lambda: "x")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"name": ""}, "needs a name"),
        ({"max_turns": 0}, "max_turns must be >= 1"),
        ({"tools": (tool("a"), tool("a")), "max_turns": 2}, "two tools named 'a'"),
        ({"tools": (tool("a"),)}, "never see"),
        ({"max_turns": 2}, "no tool"),
    ],
)
def test_environments_that_contradict_themselves_are_refused(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(EnvironmentDefinitionError, match=problem):
        LocalEnvironment(**{"name": "e", "verify": lambda row, response: 0.0, **arguments})


def test_a_tool_that_returns_no_text_is_a_fault_of_the_tool() -> None:
    with pytest.raises(TypeError, match="returns text"):
        Tool("a", "", {}, lambda: 3).call({})  # type: ignore[arg-type,return-value]


def test_a_type_error_inside_a_tool_is_not_blamed_on_the_policy() -> None:
    with pytest.raises(TypeError, match="inside"):
        Tool("a", "", {}, lambda: (_ for _ in ()).throw(TypeError("inside"))).call({})


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("82", "82", 1),
        ("75 + 7 = 82", "82", 1),
        ("The sum is 82.", "82", 1),
        ("It is **82**!", "82", 1),
        ("about 1,024 then", "1024", 1),
        ("so 5 - 50 is -45", "-45", 1),
        ("so 5 - 50 is \N{MINUS SIGN}45", "-45", 1),
        ("<think>82</think> 81", "82", 0),
        ("82, or perhaps 83", "82", 0),
        ("82.5", "82", 0),
        ("82.5", "5", 0),
        ("x82", "82", 0),
        ("082", "82", 1),
        ("-0", "0", 1),
        ("9" * 5000, "82", 0),
        ("no idea", "82", 0),
        ("", "82", 0),
    ],
)
def test_final_number_takes_the_last_whole_number(text: str, answer: str, reward: int) -> None:
    verify = get_environment("final_number").verify
    verdict = verify(row(answer), RolloutResponse(text, (), StopReason.STOP))
    assert isinstance(verdict, Verdict)
    assert verdict.reward == reward
    cut = verify(row(answer), RolloutResponse(text, (), StopReason.LENGTH))
    assert isinstance(cut, Verdict)
    assert cut.reward == 0


def test_c2_every_answer_has_one_score_and_numbers_are_whole() -> None:
    """Five answers, two of which hold no number: five scores, and 137 is not its first digit."""
    verify = get_environment("final_number").verify
    answers = ["It is 1.", "no idea", "1", "", "137"]
    verdicts = [verify(row("1"), RolloutResponse(text, (), StopReason.STOP)) for text in answers]
    assert [verdict.reward for verdict in verdicts] == [1, 0, 1, 0, 0]


def test_final_number_refuses_a_row_whose_answer_is_no_whole_number() -> None:
    with pytest.raises(DatasetError, match="exact_answer"):
        get_environment("final_number").verify(row("Paris"), RolloutResponse("Paris", (), StopReason.STOP))


@pytest.mark.parametrize("name", ["exact_answer", "final_number", "calculator"])
def test_a_row_that_could_not_be_played_is_refused_beforehand(name: str) -> None:
    environment = get_environment(name)
    environment.check(row("82"))
    without_answer = GymRow({"input": "Calculate 75 + 7."}, {"name": name}, {}, "r2")
    with pytest.raises(DatasetError, match="'r2'"):
        environment.check(without_answer)
    picture = GymRow(
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"name": name},
        {"answer": "82"},
        "r3",
    )
    with pytest.raises(DatasetError):
        environment.check(picture)
    foreign = GymRow({"input": "?", "tools": [{"name": "browser"}]}, {"name": name}, {"answer": "82"}, "r4")
    with pytest.raises(DatasetError, match="browser"):
        environment.check(foreign)
