"""Hundreds of answers that differ from a real one in one respect.

Each is refused by a typed error, or gives the trajectory that the changed answer truly tells of. None becomes
a sample silently.

What an answer truly tells is worked out here a second time, slowly and plainly.
"""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_gym_bridge.failures import GymAnswerError
from rl_gym_bridge.postprocess import postprocess_nemo_gym_result
from rl_gym_bridge.trajectory import StopReason, Trajectory

pytestmark = pytest.mark.faults

Answer = dict[str, Any]
Rng = random.Random

REAL: Answer = json.loads((Path(__file__).parent / "data" / "gym_0_4_0_answers.json").read_text("utf-8"))
BASES = ("workplace_assistant/accepted", "math_with_judge/accepted", "reasoning_then_text", "overflow_later")
TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


def items(answer: Answer) -> list[Any]:
    return answer["response"]["output"]


def carriers(answer: Answer) -> list[dict[str, Any]]:
    return [
        item for item in items(answer) if isinstance(item, dict) and item.get("prompt_token_ids") is not None
    ]


def any_carrier(answer: Answer, rng: Rng) -> dict[str, Any]:
    return rng.choice(carriers(answer))


def position(values: list[Any], rng: Rng) -> int:
    return rng.randrange(len(values))


# --- changes after which there is no sample


def drop_logprob(answer: Answer, rng: Rng) -> None:
    values = any_carrier(answer, rng)["generation_log_probs"]
    del values[position(values, rng)]


def extra_sampled_id(answer: Answer, rng: Rng) -> None:
    values = any_carrier(answer, rng)["generation_token_ids"]
    values.insert(position(values, rng), 1065)


def strange_sampled_id(answer: Answer, rng: Rng) -> None:
    values = any_carrier(answer, rng)["generation_token_ids"]
    values[position(values, rng)] = rng.choice([True, 1.0, -1, "7", None, 2**40, [1]])


def strange_logprob(answer: Answer, rng: Rng) -> None:
    values = any_carrier(answer, rng)["generation_log_probs"]
    values[position(values, rng)] = rng.choice(
        [math.nan, math.inf, -math.inf, 0.5, True, "-1", None, -(10**400)]
    )


def lost_token_field(answer: Answer, rng: Rng) -> None:
    any_carrier(answer, rng)[rng.choice(TOKEN_FIELDS)] = None


def lost_token_fields(answer: Answer, rng: Rng) -> None:
    item = any_carrier(answer, rng)
    for field in TOKEN_FIELDS:
        item.pop(field)


def changed_history(answer: Answer, rng: Rng) -> None:
    before, item = pair(answer, rng)
    seen = len(before["prompt_token_ids"]) + len(before["generation_token_ids"])
    item["prompt_token_ids"][rng.randrange(seen)] += 1


def cut_history(answer: Answer, rng: Rng) -> None:
    before, item = pair(answer, rng)
    seen = len(before["prompt_token_ids"]) + len(before["generation_token_ids"])
    del item["prompt_token_ids"][rng.randrange(seen) :]


def changed_sample_but_not_history(answer: Answer, rng: Rng) -> None:
    before, _ = pair(answer, rng)
    values = before["generation_token_ids"]
    values[position(values, rng)] += 1


def repeated_call(answer: Answer, rng: Rng) -> None:
    item = any_carrier(answer, rng)
    items(answer).insert(items(answer).index(item), copy.deepcopy(item))


def reordered_calls(answer: Answer, rng: Rng) -> None:
    before, item = pair(answer, rng)
    output = items(answer)
    first, second = output.index(before), output.index(item)
    output[first], output[second] = output[second], output[first]


def pair(answer: Answer, rng: Rng) -> tuple[dict[str, Any], dict[str, Any]]:
    """A call and the one after it."""
    found = carriers(answer)
    index = rng.randrange(1, len(found))
    return found[index - 1], found[index]


def strange_reward(answer: Answer, rng: Rng) -> None:
    answer["reward"] = rng.choice([math.nan, math.inf, 1e9, -1e9, True, "1", [1.0, 0.0], {}])


def no_reward(answer: Answer, rng: Rng) -> None:
    del answer["reward"]


def wrong_components(answer: Answer, rng: Rng) -> None:
    answer["reward_components"] = {"a": answer["reward"], "b": rng.choice([0.5, -0.01, math.nan, "0"])}


def masked(answer: Answer, rng: Rng) -> None:
    answer["mask_sample"] = True
    answer["failure_kind"] = rng.choice(["judge_failed", "session_lost", None])


def failed_response(answer: Answer, rng: Rng) -> None:
    answer["response"]["error"] = {"code": rng.choice(["server_error", "x"]), "message": "m"}


def unknown_end(answer: Answer, rng: Rng) -> None:
    answer["response"]["incomplete_details"] = rng.choice([{}, {"reason": "tired"}, "length", [1]])


def sampled_by_somebody_else(answer: Answer, rng: Rng) -> None:
    item = any_carrier(answer, rng)
    item["type"], item["role"] = "message", rng.choice(["user", "system", None, "robot"])


def no_object(answer: Answer, rng: Rng) -> None:
    items(answer)[position(items(answer), rng)] = rng.choice([None, "x", [], 3])


def no_output(answer: Answer, rng: Rng) -> None:
    answer["response"]["output"] = rng.choice([None, [], {}, "x"])


REFUSED: tuple[Callable[[Answer, Rng], None], ...] = (
    drop_logprob,
    extra_sampled_id,
    strange_sampled_id,
    strange_logprob,
    lost_token_field,
    lost_token_fields,
    repeated_call,
    strange_reward,
    no_reward,
    wrong_components,
    masked,
    failed_response,
    unknown_end,
    sampled_by_somebody_else,
    no_object,
    no_output,
)
REFUSED_WITH_TURNS = (changed_history, cut_history, changed_sample_but_not_history, reordered_calls)


# --- changes that only tell another story


def other_new_prompt_token(answer: Answer, rng: Rng) -> None:
    found = carriers(answer)
    found[-1]["prompt_token_ids"][-1] += 1


def other_logprob(answer: Answer, rng: Rng) -> None:
    values = any_carrier(answer, rng)["generation_log_probs"]
    values[position(values, rng)] = rng.choice([0.0, -7.25, -9999.0, 0, -3])


def other_last_sample(answer: Answer, rng: Rng) -> None:
    values = carriers(answer)[-1]["generation_token_ids"]
    values[position(values, rng)] += 1


def other_reward(answer: Answer, rng: Rng) -> None:
    answer["reward"] = rng.choice([0.125, -1, None, 1e6])


def right_components(answer: Answer, rng: Rng) -> None:
    part = rng.random()
    answer["reward_components"] = {"a": part, "b": answer["reward"] - part}


def without_the_last_call(answer: Answer, rng: Rng) -> None:
    if len(carriers(answer)) > 1:
        del items(answer)[items(answer).index(carriers(answer)[-1]) :]


def other_words(answer: Answer, rng: Rng) -> None:
    for item in items(answer):
        if item.get("content") and item.get("prompt_token_ids"):
            item["content"] = rng.choice([None, "other", [{"type": "output_text", "text": "<think>"}], []])


def a_word_of_the_user(answer: Answer, rng: Rng) -> None:
    items(answer).append({"type": "message", "role": "user", "content": "and now?"})


def another_number(answer: Answer, rng: Rng) -> None:
    answer["score"] = rng.choice([0.5, True, 3, "x", None, math.nan])


def unmasked(answer: Answer, rng: Rng) -> None:
    answer["mask_sample"] = rng.choice([False, None])


TOLD: tuple[Callable[[Answer, Rng], None], ...] = (
    other_new_prompt_token,
    other_logprob,
    other_last_sample,
    other_reward,
    right_components,
    without_the_last_call,
    other_words,
    a_word_of_the_user,
    another_number,
    unmasked,
)


def mutants() -> list[tuple[str, int, Callable[[Answer, Rng], None], bool]]:
    found: list[tuple[str, int, Callable[[Answer, Rng], None], bool]] = []
    for base in BASES:
        several = len(carriers(REAL[base])) > 1
        for seed in range(4):
            refused = (*REFUSED, *(REFUSED_WITH_TURNS if several else ()))
            found += [(base, seed, change, True) for change in refused]
            found += [(base, seed, change, False) for change in TOLD]
    return found


MUTANTS = mutants()


def changed(base: str, seed: int, change: Callable[[Answer, Rng], None]) -> Answer:
    answer = copy.deepcopy(REAL[base])
    change(answer, random.Random(f"{base}{seed}{change.__name__}"))
    return answer


@pytest.mark.parametrize(
    ("base", "seed", "change", "refused"), MUTANTS, ids=[f"{c.__name__}-{b}-{s}" for b, s, c, _ in MUTANTS]
)
def test_a_changed_answer_is_refused_or_told_truly(
    base: str, seed: int, change: Callable[[Answer, Rng], None], refused: bool
) -> None:
    answer = changed(base, seed, change)
    if refused:
        with pytest.raises(GymAnswerError) as caught:
            postprocess_nemo_gym_result(answer)
        assert str(caught.value)
    else:
        assert_truly_told(postprocess_nemo_gym_result(answer), answer)


def test_there_are_enough_of_them() -> None:
    assert len(MUTANTS) >= 200


def test_an_unchanged_answer_is_told_truly() -> None:
    for base in BASES:
        assert_truly_told(postprocess_nemo_gym_result(REAL[base]), REAL[base])


@pytest.mark.parametrize("seed", range(300))
def test_junk_anywhere_is_refused_or_told_truly(seed: int) -> None:
    """One random place of the answer is deleted or replaced by a random value."""
    rng = random.Random(seed)
    answer = copy.deepcopy(REAL[rng.choice(BASES)])
    container, key = rng.choice(list(places(answer)))
    junk = [None, True, 0, -1, 1.5, math.nan, "", "x", [], [0], {}, {"type": "message"}, 10**400]
    if isinstance(container, dict) and rng.random() < 0.3:
        del container[key]
    else:
        container[key] = rng.choice(junk)
    try:
        made = postprocess_nemo_gym_result(answer)
    except GymAnswerError:
        return
    assert_truly_told(made, answer)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every place of a JSON value; of a long list of numbers only a few, so as not to drown the others."""
    pairs: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        pairs += [(value, key) for key in value]
    elif isinstance(value, list):
        pairs += [(value, index) for index in range(len(value))][:3]
    for container, key in list(pairs):
        pairs += places(container[key])
    return pairs


# --- what an answer truly tells, once more


def assert_truly_told(made: Trajectory, answer: Answer) -> None:
    spoken = [item for item in answer["response"]["output"] if item.get("generation_token_ids") is not None]
    ids: list[int] = []
    for turn, item in zip(made.turns, spoken, strict=True):
        prompt, sampled = item["prompt_token_ids"], item["generation_token_ids"]
        logprobs = item["generation_log_probs"]
        assert len(sampled) == len(logprobs)
        for token in (*prompt[len(ids) :], *sampled):
            assert type(token) is int
            assert token >= 0
        for index, token in enumerate(ids):
            assert prompt[index] == token
        assert list(turn.prompt_token_ids) == prompt[len(ids) :]
        assert list(turn.generation_token_ids) == sampled
        for kept, told in zip(turn.generation_logprobs, logprobs, strict=True):
            assert type(told) in (int, float)
            assert kept == told
            assert told <= 1e-4
            assert math.isfinite(told)
        ids = prompt + sampled
    assert list(made.token_ids) == ids
    assert made.sampled_tokens > 0
    assert made.reward == answer["reward"]
    assert made.reward is None or (math.isfinite(made.reward) and not isinstance(answer["reward"], bool))
    assert answer.get("mask_sample") in (None, False)
    assert answer["response"].get("error") is None
    assert made.stop_reason is end_of(answer)
    components = answer.get("reward_components") or {}
    assert made.reward_components == components
    for name, value in answer.items():
        if name not in ("reward", "mask_sample", "responses_create_params") and isinstance(
            value, (bool, int, float)
        ):
            finite = abs(value) < 1e300
            assert made.metrics.get(name) == (float(value) if finite else None)


def end_of(answer: Answer) -> StopReason:
    details = answer["response"].get("incomplete_details")
    if details is not None:
        return {"max_output_tokens": StopReason.LENGTH, "content_filter": StopReason.ABORTED}[
            details["reason"]
        ]
    last = answer["response"]["output"][-1]
    return StopReason.TOOL_LIMIT if last.get("type") == "function_call_output" else StopReason.STOP
