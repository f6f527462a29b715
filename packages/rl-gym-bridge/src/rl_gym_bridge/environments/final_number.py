"""One question whose answer is a whole number, given in words of the policy's own."""

from __future__ import annotations

import re

from ..dataset import GymRow
from ..environment import LocalEnvironment, RolloutResponse, Verdict
from ..errors import DatasetError
from ..trajectory import StopReason
from .exact_answer import answer_part, expected_answer, thinks

_NUMBER = re.compile(r"(?<![\w.])[-\N{MINUS SIGN}]?\d(?:[\d,]*\d)?(?!\.?\d)", re.ASCII)


def final_number() -> LocalEnvironment:
    """The environment ``final_number``; its rows carry a whole number in the field ``answer``."""
    return LocalEnvironment("final_number", verify_final_number, check_row=expected_number)


def verify_final_number(row: GymRow, response: RolloutResponse) -> Verdict:
    """Reward 1 iff the last whole number of the answer is the right one and the policy ended it itself.

    The answer is the text after the last ``</think>`` (all of it, if there is none). Commas between
    digits are ignored; a decimal fraction is not a whole number. Metric ``thinks`` as in
    ``exact_answer``; ``answers``: 1 iff there is a whole number at all.

    Raises:
        DatasetError: the row's answer is missing or not a whole number.
    """
    expected = expected_number(row)
    numbers = _NUMBER.findall(answer_part(response.text))
    correct = response.stop_reason is StopReason.STOP and bool(numbers) and _plain(numbers[-1]) == expected
    return Verdict(float(correct), metrics={"thinks": thinks(response.text), "answers": float(bool(numbers))})


def expected_number(row: GymRow) -> str:
    """The row's field ``answer`` as plain digits.

    Raises:
        DatasetError: it is missing or not a whole number.
    """
    expected = expected_answer(row)
    if not re.fullmatch(r"-?\d+", expected, re.ASCII):
        raise DatasetError(
            f"row {row.row_id!r} has {expected!r}",
            field="answer",
            remedy="write a whole number, or use the environment exact_answer",
        )
    return _plain(expected)


def _plain(number: str) -> str:
    """Digits without commas and leading zeros. Compared as text: an answer may be absurdly long."""
    digits = number.replace(",", "").replace("\N{MINUS SIGN}", "-")
    sign, digits = ("-", digits[1:]) if digits.startswith("-") else ("", digits)
    digits = digits.lstrip("0") or "0"
    return digits if digits == "0" else sign + digits
