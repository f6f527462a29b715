from __future__ import annotations

import random

import pytest

from rl_app_core.config import ConfigError
from rl_app_core.demonstrations import check_maker, demonstrate
from rl_gym_bridge.dataset import GymRow
from rl_gym_bridge.environments import get_environment
from rl_gym_bridge.local import run_local_rollouts
from rl_gym_bridge.trajectory import StopReason


def row(expression: str, answer: str, agent: str = "exact_answer") -> GymRow:
    return GymRow.from_mapping(
        {
            "responses_create_params": {"input": [{"role": "user", "content": f"Calculate {expression}."}]},
            "agent_ref": {"name": agent},
            "answer": answer,
            "metadata": {"expression": expression},
        }
    )


def shown(maker, problem, share, conversation, rng=None):
    environment = get_environment(problem.agent)
    return demonstrate(maker, problem, environment, share, rng or random.Random(0), conversation)


def said(ids, mask, tokenizer) -> str:
    return tokenizer.decode([token for token, flag in zip(ids, mask, strict=True) if flag])


@pytest.mark.parametrize(
    ("expression", "answer", "text"),
    [
        ("37 + 45", "82", "<think>7+5+0=12,3+4+1=8</think>82<|im_end|>"),
        ("5 + 33", "38", "<think>5+3+0=8,0+3+0=3</think>38<|im_end|>"),
        ("99 + 100", "199", "<think>9+0+0=9,9+0+0=9,0+1+0=1</think>199<|im_end|>"),
    ],
)
def test_additions_are_thought_through_from_the_right_with_the_carry(
    expression, answer, text, conversation, tokenizer
):
    ids, mask = shown("addition", row(expression, answer), 1.0, conversation)
    assert said(ids, mask, tokenizer) == text
    ids, mask = shown("addition", row(expression, answer), 0.0, conversation)
    assert said(ids, mask, tokenizer) == f"{answer}<|im_end|>"


def test_tool_answers_are_shown_and_not_learnt(conversation, tokenizer):
    ids, mask = shown("calculator", row("37 - 82", "-45", "calculator"), 1.0, conversation)
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "37-82"}}\n</tool_call>'
    assert said(ids, mask, tokenizer) == f"{call}<|im_end|>-45<|im_end|>"
    assert "<tool_response>\n-45\n</tool_response>" in tokenizer.decode(ids)


class Replay:
    """Says what the demonstration says, to see that the environment plays the same conversation."""

    def __init__(self, ids, mask, conversation):
        self.ids, self.mask, self.conversation, self.prompts = ids, mask, conversation, []

    def chat(self, requests):
        from rl_gym_bridge.chat import ChatReply

        (request,) = requests
        seen = request.prefix_token_ids
        prompt = (
            (*seen, *self.conversation.continuation(request.messages, seen[-1]))
            if seen
            else self.conversation.prompt(request.messages, request.tools)
        )
        self.prompts.append(prompt)
        rest = list(zip(self.ids, self.mask, strict=True))[len(prompt) :]
        sampled = []
        for token, flag in rest:
            if not flag:
                break
            sampled.append(token)
        return [
            ChatReply(
                prompt_token_ids=prompt,
                generation_token_ids=tuple(sampled),
                generation_logprobs=(-1.0,) * len(sampled),
                text=self.conversation.decode(sampled),
                stop_reason=StopReason.STOP,
                weight_version=0,
            )
        ]


@pytest.mark.parametrize(("maker", "agent"), [("addition", "exact_answer"), ("calculator", "calculator")])
def test_a_demonstration_is_token_for_token_a_rollout_of_the_environment(maker, agent, conversation):
    problem = row("37 + 82", "119", agent)
    ids, mask = shown(maker, problem, 1.0, conversation)
    model = Replay(ids, mask, conversation)
    (trajectory,) = run_local_rollouts(
        [problem], {agent: get_environment(agent)}, model, group_size=1, step=1, seed=0, max_new_tokens=64
    )
    assert list(trajectory.token_ids) == ids
    assert list(trajectory.token_mask) == mask
    assert trajectory.reward == 1.0


def test_the_share_decides_how_often_the_long_way_is_shown(conversation, tokenizer):
    rng = random.Random(0)
    problem = row("12 + 34", "46")
    thoughts = [
        "<think>" in said(*shown("addition", problem, 0.3, conversation, rng), tokenizer) for _ in range(1000)
    ]
    assert abs(sum(thoughts) / 1000 - 0.3) < 0.05


def test_a_maker_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="did you mean addition"):
        check_maker("additon", [row("1 + 2", "3")])
    with pytest.raises(ConfigError, match=r"cannot demonstrate row .* operator is \*"):
        check_maker("addition", [row("1 + 2", "3"), row("3 * 4", "12")])
    with pytest.raises(ConfigError, match="not two numbers"):
        check_maker("calculator", [row("1 + 2 + 3", "6")])


def test_a_demonstration_opens_as_the_rollouts_of_its_environment_do(tokenizer):
    """A template that shows tools and a system prompt shows the same ones in both."""
    from copy import deepcopy
    from dataclasses import replace

    from rl_app_core.conversation import ConversationTokenizer

    telling = deepcopy(tokenizer)
    telling.chat_template = "{%- for t in tools or [] -%}{{ t.function.name }}{%- endfor -%}" + str(
        tokenizer.chat_template
    )
    conversation = ConversationTokenizer(telling)
    environment = replace(get_environment("calculator"), system_prompt="Be exact.")
    problem = row("37 + 82", "119", "calculator")
    ids, mask = demonstrate("calculator", problem, environment, 1.0, random.Random(0), conversation)
    model = Replay(ids, mask, conversation)
    (trajectory,) = run_local_rollouts(
        [problem], {"calculator": environment}, model, group_size=1, step=1, seed=0, max_new_tokens=64
    )
    assert list(trajectory.token_ids) == ids
    text = telling.decode(ids)
    assert text.startswith("calculator<|im_start|>system\nBe exact.")
