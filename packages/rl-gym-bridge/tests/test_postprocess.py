"""From Gym's answers to trajectories: exact tokens, why a rollout ended, and answers that are no sample.

``data/gym_0_4_0_answers.json`` holds answers of real Gym 0.4.0 services to a scripted model, with the middle
of long prompts and texts cut out.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from rl_gym_bridge.failures import (
    GymAnswerError,
    GymContinuityError,
    GymInvalidSample,
    GymNoTokensError,
    GymTokenError,
    kind_of,
)
from rl_gym_bridge.postprocess import postprocess_nemo_gym_result
from rl_gym_bridge.trajectory import FailureKind, StopReason, Trajectory

REAL: dict[str, Any] = json.loads(
    (Path(__file__).parent / "data" / "gym_0_4_0_answers.json").read_text("utf-8")
)


def said(
    prompt: list[int], sampled: list[int], text: str = "ok", *, reasoning: str | None = None, **fields: Any
) -> list[dict[str, Any]]:
    """The items of a call that ends in a message."""
    thoughts = [{"type": "reasoning", "summary": [{"type": "summary_text", "text": reasoning}]}]
    message = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": text}],
        "prompt_token_ids": prompt,
        "generation_token_ids": sampled,
        "generation_log_probs": [-0.5] * len(sampled),
    }
    return [*(thoughts if reasoning is not None else []), {**message, **fields}]


def called(prompt: list[int], sampled: list[int], *, outputs: int = 1, **fields: Any) -> list[dict[str, Any]]:
    """The items of a call of tools, and what the tools answer."""
    calls: list[dict[str, Any]] = [
        {"type": "function_call", "call_id": f"c{index}", "name": "f", "arguments": "{}"}
        for index in range(outputs)
    ]
    calls[-1] |= {
        "prompt_token_ids": prompt,
        "generation_token_ids": sampled,
        "generation_log_probs": [-0.5] * len(sampled),
        **fields,
    }
    answers = [
        {"type": "function_call_output", "call_id": f"c{index}", "output": "42"} for index in range(outputs)
    ]
    return [*calls, *answers]


def answer(
    *items: dict[str, Any], reward: Any = 1.0, incomplete: str | None = None, **top: Any
) -> dict[str, Any]:
    details = None if incomplete is None else {"reason": incomplete}
    response = {"output": list(items), "incomplete_details": details, "error": None, "status": None}
    return {"responses_create_params": {"input": "q"}, "response": response, "reward": reward, **top}


def trajectory(result: dict[str, Any], **settings: Any) -> Trajectory:
    before = copy.deepcopy(result)
    made = postprocess_nemo_gym_result(result, group_id="g", rollout_id="g/0", agent="a", **settings)
    assert result == before
    return made


def real(name: str) -> Trajectory:
    return trajectory(REAL[name])


# --- real answers


def test_every_real_answer_gives_the_tokens_that_it_carries() -> None:
    for name, result in REAL.items():
        carriers = [item for item in result["response"]["output"] if item.get("prompt_token_ids")]
        if not carriers:
            continue
        made = trajectory(result)
        last = carriers[-1]
        assert list(made.token_ids) == last["prompt_token_ids"] + last["generation_token_ids"], name
        assert made.sampled_tokens == sum(len(item["generation_token_ids"]) for item in carriers), name
        assert [list(turn.generation_token_ids) for turn in made.turns] == [
            item["generation_token_ids"] for item in carriers
        ], name
        assert [list(turn.generation_logprobs) for turn in made.turns] == [
            item["generation_log_probs"] for item in carriers
        ], name


def test_a_real_accepted_answer() -> None:
    made = real("math_with_judge/accepted")
    assert (made.group_id, made.rollout_id, made.agent) == ("g", "g/0", "a")
    assert made.reward == 1.0
    assert made.stop_reason is StopReason.STOP
    assert made.text == "The answer is \\boxed{32}."
    assert made.metrics == {"turns": 1.0, "tool_calls": 0.0, "truncated": 0.0, "library_reward": 1.0}
    assert made.weight_versions == ()
    assert made.routed_experts is None
    assert real("math_with_judge/rejected").reward == 0.0


def test_a_real_answer_of_several_turns_with_structured_tool_calls() -> None:
    made = real("workplace_assistant/accepted")
    assert (made.metrics["turns"], made.metrics["tool_calls"]) == (3.0, 2.0)
    assert made.text == "Done."
    assert not any(turn.invalid_tool_call or turn.malformed_thinking for turn in made.turns)


@pytest.mark.parametrize(
    ("name", "stop_reason"),
    [
        ("workplace_assistant/accepted", StopReason.STOP),
        ("structured_outputs_v4/accepted", StopReason.STOP),
        ("reasoning_then_text", StopReason.STOP),
        ("bad_args", StopReason.STOP),
        ("empty", StopReason.STOP),
        ("length", StopReason.LENGTH),
        ("length_tool", StopReason.LENGTH),
        ("overflow_later", StopReason.LENGTH),
        ("tool_limit", StopReason.TOOL_LIMIT),
        ("content_filter", StopReason.ABORTED),
    ],
)
def test_why_a_real_rollout_ended(name: str, stop_reason: StopReason) -> None:
    made = real(name)
    assert made.stop_reason is stop_reason
    assert made.metrics["truncated"] == float(stop_reason.truncated)


def test_a_prompt_that_fills_the_context_is_no_sample_and_the_error_says_so() -> None:
    with pytest.raises(GymNoTokensError, match=r"no room for an answer.*max_output_tokens"):
        real("overflow_first")


def test_a_context_that_fills_up_later_keeps_the_turns_before() -> None:
    made = real("overflow_later")
    assert len(made.turns) == 1
    assert made.turns[0].generation_token_ids


def test_real_faults_of_form_are_flagged() -> None:
    assert [turn.invalid_tool_call for turn in real("invalid_tool_text").turns] == [True]
    assert [turn.malformed_thinking for turn in real("malformed").turns] == [True]
    assert [turn.malformed_thinking for turn in real("invalid_tool_text").turns] == [False]


# --- how a rollout ended


def test_a5_the_length_comes_from_incomplete_details_and_no_other_field_is_needed() -> None:
    """A5: four results, one cut off, none with a field ``truncated``."""
    results = [answer(*said([1], [2]), incomplete="max_output_tokens" if i == 2 else None) for i in range(4)]
    assert [trajectory(result).stop_reason.truncated for result in results] == [False, False, True, False]


def test_a8_one_truncation_flag_per_rollout_not_per_turn() -> None:
    """A8: two rollouts of 3 and 2 turns have two flags."""
    turns = [*called([1], [2]), *called([1, 2, 3], [4]), *said([1, 2, 3, 4, 5], [6])]
    shorter = [*called([1], [2]), *said([1, 2, 3], [4])]
    made = [trajectory(answer(*turns, incomplete="max_output_tokens")), trajectory(answer(*shorter))]
    assert [m.metrics["truncated"] for m in made] == [1.0, 0.0]
    assert [len(m.turns) for m in made] == [3, 2]


def test_a9_one_token_answers_near_the_full_context_are_truncated() -> None:
    """A9: the engine answers with one token and ``length``; the last token proves nothing."""
    turns = [*called([1], [7, 2]), *said([1, 7, 2, 3], [2], text="")]
    assert trajectory(answer(*turns, incomplete="max_output_tokens")).stop_reason is StopReason.LENGTH


def test_b10_the_end_token_does_not_decide_whether_an_answer_was_cut() -> None:
    """B10: end token 2; (a) ends with 7 and was not cut, (b) ends with 2 and was."""
    assert trajectory(answer(*said([1], [5, 7]))).stop_reason is StopReason.STOP
    cut = trajectory(answer(*said([1], [5, 2]), incomplete="max_output_tokens"))
    assert cut.stop_reason is StopReason.LENGTH


def test_the_agents_own_word_on_truncation_counts_unless_it_only_echoes_the_row() -> None:
    cut = answer(*said([1], [2]), truncated=True)
    assert trajectory(cut).stop_reason is StopReason.TOOL_LIMIT
    assert trajectory(cut, ignore_metrics={"truncated"}).stop_reason is StopReason.STOP


def test_tool_outputs_at_the_end_are_the_turn_limit_unless_the_environment_ended_the_episode() -> None:
    assert trajectory(answer(*called([1], [2]))).stop_reason is StopReason.TOOL_LIMIT
    assert trajectory(answer(*called([1], [2]), terminated=True)).stop_reason is StopReason.STOP
    not_executed = called([1], [2])[:1]
    assert trajectory(answer(*not_executed)).stop_reason is StopReason.STOP


@pytest.mark.parametrize("details", [{}, {"reason": None}, {"reason": "bored"}, "max_output_tokens", []])
def test_an_end_that_nobody_knows_is_refused(details: Any) -> None:
    result = answer(*said([1], [2]))
    result["response"]["incomplete_details"] = details
    with pytest.raises(GymAnswerError, match="incomplete_details"):
        trajectory(result)


@pytest.mark.parametrize("status", ["incomplete", "in_progress", "queued", ""])
def test_an_answer_that_did_not_complete_and_does_not_say_why_is_no_natural_end(status: str) -> None:
    for response, last in ((status, "completed"), ("completed", status), (None, status)):
        result = answer(*called([1], [2]), *said([1, 2, 3], [4], status=last))
        result["response"]["status"] = response
        with pytest.raises(GymAnswerError, match=rf"status.* is '{status}'.*does not say why"):
            trajectory(result)
        result["response"]["incomplete_details"] = {"reason": "max_output_tokens"}
        assert trajectory(result).stop_reason is StopReason.LENGTH
    unfinished_call = answer(*called([1], [2], status=status))
    with pytest.raises(GymAnswerError, match="last item"):
        trajectory(unfinished_call)


def test_what_completed_is_a_natural_end() -> None:
    result = answer(*said([1], [2], status="completed"))
    result["response"]["status"] = "completed"
    assert trajectory(result).stop_reason is StopReason.STOP


# --- tokens


def test_b5_a_prompt_that_does_not_extend_the_rollout_names_turn_and_index() -> None:
    """B5: accumulated [1,2,3,4], next prompt [1,2,3,9,5]: turn 2, index 3, got 9, want 4."""
    broken = answer(*called([1, 2], [3, 4]), *said([1, 2, 3, 9, 5], [6]))
    with pytest.raises(GymContinuityError, match=r"turn 2 .*index 3 got 9, want 4") as caught:
        trajectory(broken)
    error = caught.value
    assert (error.turn, error.index, error.got, error.want) == (2, 3, 9, 4)
    assert kind_of(error) is FailureKind.DATA


def test_b5_opted_in_the_turns_that_hold_are_kept_and_the_others_counted() -> None:
    """B5: ``keep_prefix`` keeps turn 1 only and says so."""
    broken = answer(
        *called([1, 2], [3, 4]), *called([1, 2, 3, 9, 5], [6]), *said([1, 2, 3, 9, 5, 6, 7], [8]), reward=0.25
    )
    made = trajectory(broken, on_discontinuity="keep_prefix")
    assert [(turn.prompt_token_ids, turn.generation_token_ids) for turn in made.turns] == [((1, 2), (3, 4))]
    assert (made.metrics["turns"], made.metrics["turns_dropped"]) == (1.0, 2.0)
    whole = trajectory(answer(*said([1], [2])), on_discontinuity="keep_prefix")
    assert "turns_dropped" not in whole.metrics
    assert (whole.reward, whole.stop_reason) == (1.0, StopReason.STOP)


def test_b5_nothing_of_the_dropped_end_is_said_of_the_turns_that_are_kept() -> None:
    """B5: the end's text, calls, natural stop, reward, parts and numbers belong to other turns."""
    user = {"type": "message", "role": "user", "content": "go on"}
    broken = answer(
        *called([1], [2], outputs=2),
        *said([1, 2, 3], [4], text="kept"),
        user,
        *called([1, 9], [6]),
        *said([1, 9, 6, 7], [8], text="<tool_call> dropped"),
        reward=0.75,
        reward_components={"form": 0.25, "answer": 0.5},
        score=0.5,
        truncated=False,
    )
    made = trajectory(broken, on_discontinuity="keep_prefix")
    assert (made.text, made.reward, made.reward_components) == ("kept", None, {})
    assert made.stop_reason is StopReason.ABORTED
    assert made.metrics == {"turns": 2.0, "tool_calls": 2.0, "truncated": 1.0, "turns_dropped": 2.0}
    assert not any(turn.invalid_tool_call for turn in made.turns)
    limited = trajectory(
        answer(*said([1], [2]), user, *called([7], [8]), incomplete="max_output_tokens"),
        on_discontinuity="keep_prefix",
    )
    assert limited.stop_reason is StopReason.ABORTED


def test_a_prompt_that_ends_before_the_rollout_does_is_no_extension() -> None:
    with pytest.raises(GymContinuityError, match=r"index 2 the prompt ends there, want 3"):
        trajectory(answer(*called([1, 2], [3, 4]), *said([1, 2], [6])))


def test_b1_b9_only_what_was_sampled_is_trained_and_the_rest_is_there_once() -> None:
    """B1, B9: the joined ids are the whole render, whatever separates turns; the mask is on sampled ones."""
    separator = [90, 91, 92, 93]
    first, second = [1, 2], [3, 4, 5]
    prompt = [10, 11]
    render = prompt + first + separator + second
    made = trajectory(answer(*called(prompt, first), *said(prompt + first + separator, second)))
    assert list(made.token_ids) == render
    assert list(made.token_mask) == [0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1]
    assert sum(made.token_mask) == made.sampled_tokens == 5
    assert list(made.logprobs) == [0, 0, -0.5, -0.5, 0, 0, 0, 0, -0.5, -0.5, -0.5]


def test_b2_what_stands_before_the_first_answer_is_never_trained() -> None:
    """B2: system and user text together are the first prompt."""
    made = trajectory(answer(*said([7, 8, 9], [5])))
    assert made.turns[0].prompt_token_ids == (7, 8, 9)
    assert made.token_mask == (0, 0, 0, 1)


def test_b3_the_newline_that_the_template_puts_after_the_end_token_is_kept_and_masked() -> None:
    """B3: sampled [5,6,2], then the template's [30]."""
    made = trajectory(answer(*called([1], [5, 6, 2]), *said([1, 5, 6, 2, 30, 40], [7])))
    assert made.turns[1].prompt_token_ids == (30, 40)
    assert made.token_mask == (0, 1, 1, 1, 0, 0, 1)


def test_b4_a_history_without_its_tool_call_is_refused() -> None:
    """B4: the tool call [50,51] was dropped before the history was tokenised again."""
    kept = answer(*called([1], [50, 51]), *said([1, 50, 51, 60], [7]))
    assert trajectory(kept).token_ids == (1, 50, 51, 60, 7)
    with pytest.raises(GymContinuityError, match="turn 2"):
        trajectory(answer(*called([1], [50, 51]), *said([1, 60], [7])))


def test_b8_an_end_token_that_the_policy_did_not_sample_is_masked() -> None:
    """B8: sampled [5,6], the end token 2 follows in the next prompt."""
    made = trajectory(answer(*called([1], [5, 6]), *said([1, 5, 6, 2, 9], [7])))
    assert made.token_mask == (0, 1, 1, 0, 0, 1)
    assert made.logprobs[3] == 0.0


def test_several_calls_in_one_answer_are_one_turn() -> None:
    made = trajectory(answer(*called([1], [2, 3], outputs=2), *said([1, 2, 3, 4], [5], reasoning="so")))
    assert len(made.turns) == 2
    assert made.metrics["tool_calls"] == 2.0


def test_what_a_user_says_in_between_is_part_of_the_next_prompt() -> None:
    user = {"type": "message", "role": "user", "content": "go on"}
    made = trajectory(answer(*said([1], [2]), user, *said([1, 2, 3], [4], text="end")))
    assert made.token_ids == (1, 2, 3, 4)
    assert made.text == "end"


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("generation_token_ids", [2, True], r"\[1\] is True"),
        ("generation_token_ids", [2.0, 3], r"\[0\] is 2.0"),
        ("generation_token_ids", [2, -1], r"\[1\] is -1"),
        ("generation_token_ids", [2, "3"], r"\[1\] is '3'"),
        ("generation_token_ids", [2, 2**31], r"\[1\] is 2147483648"),
        ("generation_token_ids", [2, None], r"\[1\] is None"),
        ("generation_token_ids", [2], "1 generation_token_ids but 2 generation_log_probs"),
        ("generation_token_ids", [2, 3, 4], "3 generation_token_ids but 2 generation_log_probs"),
        ("generation_token_ids", None, "generation_token_ids is None"),
        ("generation_token_ids", "23", "generation_token_ids is '23'"),
        ("prompt_token_ids", [], "prompt_token_ids is empty"),
        ("prompt_token_ids", [1.5], r"prompt_token_ids\[0\] is 1.5"),
        ("prompt_token_ids", None, "prompt_token_ids is None"),
        ("prompt_token_ids", {"1": 1}, "prompt_token_ids is {"),
        ("generation_log_probs", [-0.5, float("nan")], r"\[1\] is nan"),
        ("generation_log_probs", [-0.5, 0.01], r"\[1\] is 0.01"),
        ("generation_log_probs", [-0.5, float("-inf")], r"\[1\] is -inf"),
        ("generation_log_probs", [float("inf"), -0.5], r"\[0\] is inf"),
        ("generation_log_probs", [-0.5, None], r"\[1\] is None"),
        ("generation_log_probs", [-0.5, False], r"\[1\] is False"),
        ("generation_log_probs", [-0.5, -(10**400)], r"\[1\] is -1000"),
        ("generation_log_probs", None, "generation_log_probs is None"),
    ],
)
def test_tokens_that_are_malformed_or_do_not_correspond_are_refused(
    field: str, value: Any, words: str
) -> None:
    with pytest.raises(GymTokenError, match=words):
        trajectory(answer(*said([1], [2, 3], **{field: value})))


def test_whole_numbers_are_log_probabilities_too() -> None:
    made = trajectory(answer(*said([1], [2, 3], generation_log_probs=[0, -1])))
    assert made.turns[0].generation_logprobs == (0.0, -1.0)
    assert all(type(value) is float for value in made.turns[0].generation_logprobs)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_the_tokens_of_no_call_may_be_lost(lost: int) -> None:
    """A lost call would be taken for text of the environment, and never trained."""
    calls = [called([1], [2]), called([1, 2, 3], [4]), said([1, 2, 3, 4, 5], [6])]
    for item in calls[lost]:
        for field in ("prompt_token_ids", "generation_token_ids", "generation_log_probs"):
            item.pop(field, None)
    with pytest.raises(GymAnswerError, match="carry no prompt_token_ids"):
        trajectory(answer(*calls[0], *calls[1], *calls[2]))


def test_no_call_with_tokens_says_what_to_switch_on() -> None:
    silent = said([1], [2], reasoning="hm")
    del silent[1]
    with pytest.raises(GymNoTokensError, match="return_token_id_information"):
        trajectory(answer(*silent))


def test_thinking_alone_is_a_sample_if_it_has_tokens() -> None:
    thought = {"type": "reasoning", "summary": [{"text": "hm"}]}
    carrier = {**said([1], [2, 3])[0], **thought}
    del carrier["content"]
    made = trajectory(answer(carrier, incomplete="max_output_tokens"))
    assert (made.sampled_tokens, made.text, made.stop_reason) == (2, "", StopReason.LENGTH)


def test_calls_without_any_sampled_token_are_no_sample() -> None:
    with pytest.raises(GymNoTokensError, match="sampled no token in 1 call"):
        trajectory(answer(*said([1], [])))
    with pytest.raises(GymNoTokensError, match="no item of the model"):
        trajectory(answer())


def test_a_call_without_sampled_tokens_among_others_stays_in_its_place() -> None:
    made = trajectory(answer(*called([1], []), *said([1, 2], [3])))
    assert [turn.generation_token_ids for turn in made.turns] == [(), (3,)]


def test_an_empty_answer_in_the_middle_counts_as_full_context_only_if_nothing_follows() -> None:
    empty = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": ""}]}
    user = {"type": "message", "role": "user", "content": "again"}
    full = answer(*said([1], [2]), user, empty, user, empty, incomplete="max_output_tokens")
    assert trajectory(full).token_ids == (1, 2)
    with pytest.raises(GymTokenError, match="although an earlier call was cut off"):
        trajectory(
            answer(*said([1], [2]), user, empty, user, *said([1, 2, 3], [4]), incomplete="max_output_tokens")
        )
    with pytest.raises(GymTokenError, match="carry no"):
        trajectory(answer(*said([1], [2]), user, empty))


EMPTY = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": ""}]}


def test_a_filter_that_allows_no_further_call_ends_the_rollout_with_the_calls_before() -> None:
    """Gym's server answers so after thinking alone, with ``sequential_reasoning_allowed: false``."""
    thought = {**said([1], [2, 3])[0], "type": "reasoning", "summary": [{"text": "hm"}]}
    del thought["content"]
    made = trajectory(answer(thought, EMPTY, incomplete="content_filter", reward=0.0))
    assert (made.token_ids, len(made.turns), made.reward) == ((1, 2, 3), 1, 0.0)
    assert (made.stop_reason, made.metrics["truncated"]) == (StopReason.ABORTED, 1.0)
    later = answer(*called([1], [2]), *said([1, 2, 3], [4]), EMPTY, incomplete="content_filter")
    assert [turn.generation_token_ids for turn in trajectory(later).turns] == [(2,), (4,)]


def test_a_filtered_answer_that_says_something_must_carry_its_tokens() -> None:
    silent = said([1, 2, 3], [4], text="but it speaks")[0]
    for field in ("prompt_token_ids", "generation_token_ids", "generation_log_probs"):
        del silent[field]
    with pytest.raises(GymTokenError, match="carry no prompt_token_ids"):
        trajectory(answer(*called([1], [2]), silent, incomplete="content_filter"))
    with pytest.raises(GymNoTokensError, match=r"cut off before its first token .*content_filter"):
        trajectory(answer(EMPTY, incomplete="content_filter"))


@pytest.mark.parametrize(
    "item",
    [
        {"type": "function_call_output", "call_id": "c", "output": "x"},
        {"type": "message", "role": "user", "content": "x"},
        {"type": "computer_screenshot"},
    ],
)
def test_only_the_model_samples(item: dict[str, Any]) -> None:
    tokens = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.1]}
    with pytest.raises(GymTokenError, match="only the model samples"):
        trajectory(answer({**item, **tokens}))
    trajectory(answer(item, *said([1], [2])))


def test_versions_of_weights_are_kept_per_token_and_belong_to_all_calls_or_none() -> None:
    versions = answer(
        *called([1], [2, 3], weight_versions=[7, 8]), *said([1, 2, 3, 4], [5], weight_versions=[8])
    )
    assert trajectory(versions).weight_versions == (7, 8, 8)
    with pytest.raises(GymTokenError, match="1 of 2 model calls"):
        trajectory(answer(*called([1], [2], weight_versions=[7]), *said([1, 2, 3], [4])))
    with pytest.raises(GymTokenError, match="2 weight_versions for 1"):
        trajectory(answer(*said([1], [2], weight_versions=[7, 7])))
    with pytest.raises(GymTokenError, match="weight_versions"):
        trajectory(answer(*said([1], [2], weight_versions=[7.5])))


# --- what was said


@pytest.mark.parametrize(
    "content", [None, "", [], [{"type": "output_text", "text": None}], [{"type": "refusal"}]]
)
def test_absent_and_empty_content_is_no_text(content: Any) -> None:
    made = trajectory(answer(*said([1], [2], content=content)))
    assert made.text == ""
    assert not made.turns[0].invalid_tool_call
    assert not made.turns[0].malformed_thinking


@pytest.mark.parametrize("content", [5, {"text": "x"}, ["x"], [{"type": "output_text", "text": 5}]])
def test_content_of_an_unknown_shape_is_refused(content: Any) -> None:
    with pytest.raises(GymAnswerError):
        trajectory(answer(*said([1], [2], content=content)))


@pytest.mark.parametrize(
    ("text", "reasoning", "flagged"),
    [
        ("fine", "fine", False),
        ('<tool_call>{"name": "f"}</tool_call>', None, True),
        ("fine", "I will <function_call>f()", True),
        ("a </tool_call> alone", None, True),
        ("call the tool", None, False),
    ],
)
def test_a_tool_call_written_as_text_is_flagged(text: str, reasoning: str | None, flagged: bool) -> None:
    made = trajectory(answer(*said([1], [2], text, reasoning=reasoning)))
    assert made.turns[0].invalid_tool_call is flagged


def test_a_structured_call_is_never_flagged_even_if_its_arguments_hold_the_pattern() -> None:
    items = called([1], [2])
    items[0]["arguments"] = '{"text": "<tool_call>"}'
    assert not trajectory(answer(*items)).turns[0].invalid_tool_call


def test_the_flag_belongs_to_the_turn_in_which_it_happens() -> None:
    user = {"type": "message", "role": "user", "content": "<tool_call>"}
    made = trajectory(answer(*said([1], [2], "<tool_call>"), user, *said([1, 2, 3], [4])))
    assert [turn.invalid_tool_call for turn in made.turns] == [True, False]


@pytest.mark.parametrize(
    ("text", "reasoning", "flagged"),
    [
        ("fine", "fine", False),
        ("fine", "<think>all of it</think>", False),
        ("fine", "<think>a</think> <think>b</think>", False),
        ("<think>in the answer</think>", None, True),
        ("only </think>", None, True),
        ("fine", "<think>never closed", True),
        ("fine", "closed</think>", True),
        ("fine", "<think>a<think>b</think></think>", True),
        ("fine", "<think>a<think>b</think>", True),
        ("fine", "</think>backwards<think>", True),
    ],
)
def test_thinking_tags_that_do_not_match_or_stand_in_the_answer(
    text: str, reasoning: str | None, flagged: bool
) -> None:
    made = trajectory(answer(*said([1], [2], text, reasoning=reasoning)))
    assert made.turns[0].malformed_thinking is flagged


def test_patterns_and_tags_are_settings() -> None:
    result = answer(*said([1], [2], "<|call|> [THINK]"))
    made = trajectory(result, invalid_tool_call_patterns=("<|call|>",), thinking_tags=("[THINK]", "[/THINK]"))
    assert made.turns[0].invalid_tool_call
    assert made.turns[0].malformed_thinking
    plain = trajectory(result)
    assert not plain.turns[0].invalid_tool_call
    assert not plain.turns[0].malformed_thinking


# --- metrics and answers that are none


def test_numbers_at_the_top_of_the_answer_become_metrics() -> None:
    made = trajectory(
        answer(
            *said([1], [2]),
            score=0.5,
            passed=True,
            turns=9,
            note="x",
            nested={"a": 1},
            broken=float("nan"),
            huge=10**400,
            echoed=3,
            _ng_task_index=4,
        ),
        ignore_metrics={"echoed"},
    )
    assert made.metrics == {
        "score": 0.5,
        "passed": 1.0,
        "verifier/turns": 9.0,
        "turns": 1.0,
        "tool_calls": 0.0,
        "truncated": 0.0,
    }


@pytest.mark.parametrize(
    "result", [None, [], "x", {}, {"response": None}, {"response": []}, {"detail": "no route"}]
)
def test_what_is_no_answer_is_refused(result: Any) -> None:
    with pytest.raises(GymAnswerError, match="holds no response"):
        postprocess_nemo_gym_result(result)


@pytest.mark.parametrize("output", [None, {}, "x", [None], ["x"], [[]]])
def test_an_output_that_is_no_list_of_items_is_refused(output: Any) -> None:
    result = answer()
    result["response"]["output"] = output
    with pytest.raises(GymAnswerError, match=r"response\.output"):
        trajectory(result)


def test_a_message_of_no_known_role_is_refused() -> None:
    with pytest.raises(GymAnswerError, match="role None"):
        trajectory(answer(*said([1], [2], role=None)))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"code": "server_error", "message": "engine fell over"}, FailureKind.INFRA),
        ({"code": "invalid_prompt", "message": "bad"}, FailureKind.DATA),
        ("boom", FailureKind.DATA),
    ],
)
def test_an_error_in_the_response_is_quoted(error: Any, kind: FailureKind) -> None:
    result = answer(*said([1], [2]))
    result["response"]["error"] = error
    with pytest.raises(GymInvalidSample) as caught:
        trajectory(result)
    assert (error if isinstance(error, str) else error["message"]) in str(caught.value)
    assert kind_of(caught.value) is kind


@pytest.mark.parametrize("status", ["failed", "cancelled"])
def test_a_response_that_failed_is_no_sample(status: str) -> None:
    result = answer(*said([1], [2]))
    result["response"]["status"] = status
    with pytest.raises(GymInvalidSample, match=status):
        trajectory(result)
    result["response"]["status"] = "completed"
    trajectory(result)
