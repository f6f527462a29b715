"""What vLLM answers, read: tokens, log-probabilities, versions; and what cannot be read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rl_generation.failures import GenerationError, InfraError
from rl_generation.vllm.prompt_scores import prompt_scores
from rl_generation.vllm.results import completion_of


def answer_of(**fields: Any) -> Any:
    answer = SimpleNamespace(token_ids=[], logprobs=None, finish_reason="length")
    vars(answer).update(fields)
    return SimpleNamespace(outputs=[answer])


def flat(tokens: list[int], logprobs: list[float]) -> Any:
    return SimpleNamespace(token_ids=tokens, logprobs=logprobs)


def test_each_token_is_of_the_version_that_was_noted_with_it() -> None:
    spans = [SimpleNamespace(version="4", start=0, end=2), SimpleNamespace(version="6", start=2, end=3)]
    output = answer_of(
        token_ids=[5, 6, 7], logprobs=flat([5, 6, 7], [-1.0, -2.0, -3.0]), weight_versions=spans
    )
    completion = completion_of(output, 9, "vllm-0")
    assert (completion.weight_versions, completion.weight_version) == ((4, 4, 6), 6)
    assert completion.logprobs == (-1.0, -2.0, -3.0)
    output.outputs[0].weight_versions = spans[:1]
    output.outputs[0].token_ids = output.outputs[0].token_ids[:2]
    output.outputs[0].logprobs = flat([5, 6], [-1.0, -2.0])
    assert completion_of(output, 9, "vllm-0").token_versions == ()
    del output.outputs[0].weight_versions
    assert completion_of(output, 9, "vllm-0").weight_versions == (9, 9)
    aborted = completion_of(answer_of(finish_reason="abort", weight_versions=[]), 9, "vllm-0")
    assert (aborted.stop_reason, aborted.weight_version) == ("aborted", 9)


def test_answers_that_do_not_add_up_are_no_completions() -> None:
    for wrong in (None, flat([5, 7], [-1.0, -1.0]), flat([5], [-1.0])):
        with pytest.raises(GenerationError, match="not theirs"):
            completion_of(answer_of(token_ids=[5, 6], logprobs=wrong), 0, "vllm-0")
    with pytest.raises(InfraError, match="'error'"):
        completion_of(answer_of(finish_reason="error"), 0, "vllm-0")
    with pytest.raises(GenerationError, match="2 tokens came with 1 log-prob"):
        completion_of(answer_of(token_ids=[5, 6], logprobs=flat([5, 6], [-1.0])), 0, "vllm-0")
    for missing in (None, [None, {9: SimpleNamespace(logprob=-1.0)}]):
        with pytest.raises(GenerationError, match="1 prompt tokens"):
            prompt_scores(SimpleNamespace(prompt_logprobs=missing), (1, 2), "vllm-0")


@pytest.mark.parametrize("odd", [float("nan"), float("-inf"), float("inf")])
def test_a_log_probability_that_is_no_number_names_its_token(odd: float) -> None:
    with pytest.raises(
        GenerationError, match=f"vllm-0: token 6 at place 1 .* log-probability {odd}; expected"
    ):
        completion_of(answer_of(token_ids=[5, 6], logprobs=flat([5, 6], [-1.0, odd])), 0, "vllm-0")


def test_a_score_may_be_zero_but_must_be_a_number() -> None:
    def scores(value: float) -> tuple[float, ...]:
        candidates = [None, {2: SimpleNamespace(logprob=value)}]
        return prompt_scores(SimpleNamespace(prompt_logprobs=candidates), (1, 2), "vllm-0").logprobs

    assert scores(float("-inf")) == (float("-inf"),)
    with pytest.raises(GenerationError, match="token 2 at place 1 of a prompt"):
        scores(float("nan"))


def test_the_most_likely_tokens_come_by_rank_and_the_given_one_is_no_extra() -> None:
    def candidate(rank: int, logprob: float) -> SimpleNamespace:
        return SimpleNamespace(rank=rank, logprob=logprob)

    places = [None, {9: candidate(2, -1.5), 4: candidate(7, -6.0), 8: candidate(1, -0.5)}]
    found = prompt_scores(SimpleNamespace(prompt_logprobs=places), (1, 4), "vllm-0", top=2)
    assert found.logprobs == (-6.0,)
    assert found.top_ids.tolist() == [[8, 9]]
    assert found.top_logprobs.tolist() == [[-0.5, -1.5]]
    with pytest.raises(GenerationError, match=r"3 candidates came .* 4 were asked for"):
        prompt_scores(SimpleNamespace(prompt_logprobs=places), (1, 4), "vllm-0", top=4)
    alone = prompt_scores(SimpleNamespace(prompt_logprobs=[None]), (1,), "vllm-0", top=2)
    assert (alone.logprobs, alone.top_ids.shape) == ((), (0, 2))
