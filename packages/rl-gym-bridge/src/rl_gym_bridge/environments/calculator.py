"""The exact-answer task with a calculator to call before answering."""

from __future__ import annotations

from ..environment import LocalEnvironment, Tool, ToolError
from .arithmetic import ArithmeticFault, evaluate
from .exact_answer import expected_answer, verify_exact_answer

CALCULATOR_TOOL_NAME = "calculator"


def calculator() -> LocalEnvironment:
    """The environment ``calculator``: one turn to call the tool, one to answer.

    The final answer is judged as in ``exact_answer``.
    """
    return LocalEnvironment(
        "calculator",
        verify_exact_answer,
        tools=(calculator_tool(),),
        max_turns=2,
        check_row=expected_answer,
    )


def calculator_tool() -> Tool:
    """``calculator(expression)``: the value of an expression of small integers, as text."""
    return Tool(
        CALCULATOR_TOOL_NAME,
        "Evaluates an expression of whole numbers with + - * and brackets.",
        {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "for example 37*82"}},
            "required": ["expression"],
        },
        _calculate,
    )


def _calculate(expression: object) -> str:
    if not isinstance(expression, str):
        raise ToolError("expression must be a string")
    try:
        return str(evaluate(expression))
    except ArithmeticFault as error:
        raise ToolError(str(error)) from error
