"""Environments that judge what the policy wrote: mathematics, code, choices and short answers."""

from __future__ import annotations

from ..cases import AcceptanceCase, RowPin
from ..scripted_turn import ScriptedTurn

# Decides for every length m whether the positions of the numbers up to m are m in a row.
_CORRECT_PROGRAM = """\
from itertools import accumulate

for _ in range(int(input())):
    size = int(input())
    numbers = list(map(int, input().split()))
    place = sorted(range(size), key=numbers.__getitem__)
    spans = zip(accumulate(place, min), accumulate(place, max))
    print("".join(str(int(last - first == m)) for m, (first, last) in enumerate(spans)))"""

# Calls every number beautiful, which is right for the second permutation only.
_WRONG_PROGRAM = """\
for _ in range(int(input())):
    print("1" * int(input()))
    input()"""


def answer_cases() -> tuple[AcceptanceCase, ...]:
    """Four environments, accepted and rejected."""
    return (*_mathematics(), *_code(), *_choices(), *_short_answers())


def _mathematics() -> tuple[AcceptanceCase, AcceptanceCase]:
    def case(verdict: str, fraction: str, reward: float, judged: int, **expected: object) -> AcceptanceCase:
        return AcceptanceCase(
            name=f"math_with_judge/{verdict}",
            environment="math_with_judge",
            config_path="resources_servers/math_with_judge/configs/math_with_judge.yaml",
            agent="math_with_judge_simple_agent",
            row=RowPin(
                "resources_servers/math_with_judge/data/example.jsonl",
                2,
                "a3602a19d51307a213fd48848720ce11ad2abafeecc06d40480c76bac436f02d",
            ),
            turns=(
                ScriptedTurn(
                    reasoning_content="Turn one root to 1, count the other's angles.",
                    content=f"The probability is \\boxed{{{fraction}}}.",
                ),
            ),
            reward=reward,
            answer={
                "expected_answer": "\\(\\frac{333}{1997}\\)",
                "library_reward": reward,
                **expected,
            },
            absent=() if judged else ("judge_evaluations",),
            judge_calls=judged,
        )

    judge = "judge_evaluations.0"
    return (
        # The verifier recognises it alone: nobody asks the judge.
        case("accepted", r"\frac{333}{1997}", 1.0, 0, extracted_answer="333/1997"),
        case(
            "rejected",
            r"\frac{332}{1997}",
            0.0,
            1,
            extracted_answer="332/1997",
            **{
                f"{judge}.responses_create_params.temperature": 0.0,
                f"{judge}.responses_create_params.max_output_tokens": 64,
                f"{judge}.response.output.0.content.0.text": "Compared. [[A!=B]]",
            },
        ),
    )


def _code() -> tuple[AcceptanceCase, AcceptanceCase]:
    def case(verdict: str, program: str, reward: float, **expected: object) -> AcceptanceCase:
        content = f"Follow the positions.\n```python\n{program}\n```"
        return AcceptanceCase(
            name=f"code_gen/{verdict}",
            environment="code_gen",
            config_path="resources_servers/code_gen/configs/code_gen.yaml",
            agent="code_gen_simple_agent",
            row=RowPin(
                "resources_servers/code_gen/data/example.jsonl",
                4,
                "ceea8ed47c6615783bc9df8140110b2aa86729438448ee04e74c5d4850ebff24",
            ),
            turns=(ScriptedTurn(content=content),),
            reward=reward,
            answer={
                "extracted_model_output": content,
                "extracted_model_code": program,
                "reasoning_format_violation_rate": 0.0,
                **expected,
            },
        )

    return (
        case("accepted", _CORRECT_PROGRAM, 1.0, result=[True, True, True]),
        case(
            "rejected",
            _WRONG_PROGRAM,
            0.0,
            result=[-2],
            **{
                "metadata.error_code": -2,
                "metadata.error_message": "Wrong answer at output_line_idx=0: 111111 != 101011",
            },
        ),
    )


def _choices() -> tuple[AcceptanceCase, AcceptanceCase]:
    def case(verdict: str, letter: str, reward: float) -> AcceptanceCase:
        return AcceptanceCase(
            name=f"mcqa/{verdict}",
            environment="mcqa",
            config_path="resources_servers/mcqa/configs/mcqa.yaml",
            agent="mcqa_simple_agent",
            row=RowPin(
                "resources_servers/mcqa/data/example.jsonl",
                4,
                "43298ec5fc4f39fd3878be9abcf05b24a9e3ee737829e544b9db6912c44ad35d",
            ),
            turns=(
                ScriptedTurn(
                    reasoning_content="Species are told apart by a gene that all of them have.",
                    content=f"\\boxed{{{letter}}}",
                ),
            ),
            reward=reward,
            answer={"expected_answer": "E", "extracted_answer": letter},
        )

    return case("accepted", "E", 1.0), case("rejected", "J", 0.0)


def _short_answers() -> tuple[AcceptanceCase, AcceptanceCase]:
    def case(verdict: str, answer: str, reward: float, judged: int, label: str) -> AcceptanceCase:
        # An accepted answer is shown to the judge a second time, in the other order.
        said = {
            f"judge_evaluations.{index}.{field}": value
            for index in range(judged)
            for field, value in (
                ("verdict_label", label),
                ("responses_create_params.top_p", 1.0),
                ("response.output.0.content.0.text", f"Compared. {label}"),
            )
        }
        return AcceptanceCase(
            name=f"equivalence_llm_judge/{verdict}",
            environment="equivalence_llm_judge",
            config_path="resources_servers/equivalence_llm_judge/configs/equivalence_llm_judge.yaml",
            agent="equivalence_llm_judge_simple_agent",
            row=RowPin(
                "resources_servers/equivalence_llm_judge/data/example.jsonl",
                4,
                "6d3e4009c227b6d40ce88665acb21679053187c82445a28fdcace2a3b798f614",
            ),
            turns=(ScriptedTurn(content=answer),),
            reward=reward,
            answer={"expected_answer": "the sun", **said},
            absent=(f"judge_evaluations.{judged}",),
            judge_calls=judged,
        )

    return (
        case("accepted", "\\boxed{The Sun}", 1.0, 2, "[[A=B]]"),
        case("rejected", "\\boxed{the moon}", 0.0, 1, "[[A!=B]]"),
    )
