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
    return LocalEnvironment("exact_answer", verify_exact_answer)


def verify_exact_answer(row: GymRow, response: RolloutResponse) -> Verdict:
    """Reward 1 iff the answer equals ``row.verifier["answer"]`` and the policy ended it itself, else 0.

    The answer is the text after the last ``</think>`` (all of it, if there is none), stripped. There is
    no credit for parts. Metric ``thinks``: 1 iff the text has a thinking part.

    Raises:
        DatasetError: the row has no answer, or one that is neither a string nor an integer.
    """
    answer = response.text.rpartition(_THINK_CLOSE)[2].strip()
    correct = response.stop_reason is StopReason.STOP and answer == _expected(row)
    thinks = _THINK_OPEN in response.text or _THINK_CLOSE in response.text
    return Verdict(float(correct), metrics={"thinks": float(thinks)})


def _expected(row: GymRow) -> str:
    answer = row.verifier.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, (str, int)):
        raise DatasetError(
            f"row {row.row_id!r} has {answer!r}",
            field="answer",
            remedy='write the expected answer as a string, for example "answer": "42"',
        )
    return str(answer).strip()
