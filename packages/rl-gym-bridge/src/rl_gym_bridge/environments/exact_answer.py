"""One question, one answer that has to match exactly, thinking allowed."""

from __future__ import annotations

from ..dataset import GymRow
from ..environment import LocalEnvironment, RolloutResponse, Verdict
from ..errors import DatasetError
from ..trajectory import StopReason

_THINK_OPEN = "<think>"
_THINK_CLOSE = "</think>"


def exact_answer() -> LocalEnvironment:
    """The environment ``exact_answer``; its rows carry the answer in the field ``answer``."""
    return LocalEnvironment("exact_answer", verify_exact_answer, check_row=expected_answer)


def verify_exact_answer(row: GymRow, response: RolloutResponse) -> Verdict:
    """Reward 1 iff the answer equals ``row.verifier["answer"]`` and the policy ended it itself, else 0.

    The answer is the text after the last ``</think>`` (all of it, if there is none), stripped. There is
    no credit for parts. Metric ``thinks``: 1 iff the text has a thinking part.

    Raises:
        DatasetError: the row has no answer, or one that is neither a string nor an integer.
    """
    answer = answer_part(response.text)
    correct = response.stop_reason is StopReason.STOP and answer == expected_answer(row)
    return Verdict(float(correct), metrics={"thinks": thinks(response.text)})


def answer_part(text: str) -> str:
    """The text after the last ``</think>`` (all of it, if there is none), stripped."""
    return text.rpartition(_THINK_CLOSE)[2].strip()


def thinks(text: str) -> float:
    """1 iff the text has a thinking part, else 0."""
    return float(_THINK_OPEN in text or _THINK_CLOSE in text)


def expected_answer(row: GymRow) -> str:
    """The row's field ``answer`` as text, stripped.

    Raises:
        DatasetError: it is missing, or neither a string nor an integer.
    """
    answer = row.verifier.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, (str, int)):
        raise DatasetError(
            f"row {row.row_id!r} has {answer!r}",
            field="answer",
            remedy='write the expected answer as a string, for example "answer": "42"',
        )
    return str(answer).strip()
