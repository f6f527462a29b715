from __future__ import annotations

import pytest

from rl_app_core.conversation import ChatTemplateError, ConversationTokenizer

USER = {"role": "user", "content": "What is 37 * 82?"}
CALL = {"role": "assistant", "content": '<tool_call>\n{"name": "calculator"}\n</tool_call>'}
TOOL = {"role": "tool", "content": "3034"}


def test_turn_by_turn_ids_equal_those_of_the_full_render(conversation, tokenizer):
    """B1, B3: pieces tokenised apart, and the text that the template puts behind the end token."""
    ids = conversation.prompt([USER]) + conversation.answer(CALL["content"])
    ids += conversation.continuation([USER, CALL, TOOL], ids[-1])
    full = tokenizer.apply_chat_template([USER, CALL, TOOL], tokenize=False, add_generation_prompt=True)
    assert ids == tuple(tokenizer.encode(full, add_special_tokens=False))


def test_b8_an_answer_that_was_cut_off_gets_its_end_token_from_the_template(conversation, tokenizer):
    sampled = tuple(tokenizer.encode("cut of", add_special_tokens=False))
    cut = conversation.continuation([USER, {"role": "assistant", "content": "cut of"}, TOOL], sampled[-1])
    ended = conversation.continuation(
        [USER, {"role": "assistant", "content": "cut of"}, TOOL], conversation.stop_token_ids[0]
    )
    assert cut == (conversation.stop_token_ids[0], *ended)


def test_a_template_that_rewrites_history_does_not_change_earlier_tokens(tokenizer):
    from copy import deepcopy

    forgetful = deepcopy(tokenizer)
    forgetful.chat_template = (
        "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' }}"
        "{%- if m.role == 'assistant' and not loop.last -%}{{ m.content.split('</think>')[-1] }}"
        "{%- else -%}{{ m.content }}{%- endif -%}{{ '<|im_end|>\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
    )
    conversation = ConversationTokenizer(forgetful)
    thought = {"role": "assistant", "content": "<think>7*2</think>14"}
    tail = conversation.continuation([USER, thought, TOOL], conversation.stop_token_ids[0])
    assert forgetful.decode(tail) == "\n<|im_start|>tool\n3034<|im_end|>\n<|im_start|>assistant\n"


def test_the_turn_ends_with_the_templates_own_token(tokenizer):
    from copy import deepcopy

    other = deepcopy(tokenizer)
    other.chat_template = (
        "{%- for m in messages -%}{{ m.content }}<|im_start|>{%- endfor -%}"
        "{%- if add_generation_prompt -%}<think>{%- endif -%}"
    )
    conversation = ConversationTokenizer(other)
    start, end = other.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert conversation.stop_token_ids == (start, end)
    assert conversation.answer("x")[-1] == start


def test_decoding_drops_the_end_token_only(conversation):
    ids = conversation.answer("<think>1+1+0=2</think>2")
    assert conversation.decode(ids) == "<think>1+1+0=2</think>2"
    assert conversation.decode(ids[:-1]) == "<think>1+1+0=2</think>2"
    assert conversation.decode(()) == ""


def test_tools_reach_the_template(tokenizer):
    from copy import deepcopy

    shown = deepcopy(tokenizer)
    shown.chat_template = (
        "{%- if tools -%}{{ tools[0].function.name }}{%- endif -%}" + tokenizer.chat_template
    )
    conversation = ConversationTokenizer(shown)
    tool = {"type": "function", "function": {"name": "calculator", "description": "", "parameters": {}}}
    assert conversation.decode(conversation.prompt([USER], [tool])).startswith("calculator<|im_start|>")
    assert conversation.decode(conversation.prompt([USER])).startswith("<|im_start|>")


def test_a_tokenizer_without_template_or_end_token_is_refused(tokenizer):
    from copy import deepcopy

    bare = deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(ChatTemplateError, match=r"model\.chat_template"):
        ConversationTokenizer(bare)
    endless = deepcopy(tokenizer)
    endless.eos_token = None
    with pytest.raises(ChatTemplateError, match="end-of-sequence"):
        ConversationTokenizer(endless)


def test_a_template_that_hides_the_answer_is_refused(tokenizer):
    from copy import deepcopy

    deaf = deepcopy(tokenizer)
    deaf.chat_template = "{%- for m in messages -%}{{ m.role }}{%- endfor -%}"
    with pytest.raises(ChatTemplateError, match="changes the assistant's text"):
        ConversationTokenizer(deaf)
