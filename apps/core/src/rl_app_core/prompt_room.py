"""Whether the problems leave room for an answer: one that is cut off would be judged as if it were whole."""

from __future__ import annotations

import json

from rl_gym_bridge.dataset import DatasetError, GymRow

from .config import ConfigError, JobConfig
from .conversation import ConversationTokenizer, load_conversation
from .demonstrations import tokenizer_texts
from .problems import Problems

_LONGEST_ROWS = 16
# More than chat templates add where there are no tools.
_TEMPLATE_BYTES = 512


def check_prompts(config: JobConfig, problems: Problems, context: int) -> None:
    """Refuse problems whose prompt and ``generation.max_new_tokens`` exceed the context.

    Later turns of a conversation are not looked at: nobody knows them before they are played. Nor are prompts
    that only an agent of a Gym can put together, with tools or with more than text.

    Args:
        config: of the run.
        problems: all rows.
        context: the most tokens that the model knows.

    Raises:
        ConfigError: with the numbers, and what to change.
    """
    key, longest = _context(config, context)
    room = longest - config.generation.max_new_tokens
    known = (*problems.train, *problems.held_out)
    if config.environment.gym is not None:
        known = tuple(row for row in known if _is_plain(row))
    rows = sorted(known, key=_size, reverse=True)[:_LONGEST_ROWS]
    # No tokenizer makes more tokens of a text than it has bytes, and making one costs seconds.
    if not rows or _size(rows[0]) + _TEMPLATE_BYTES <= room:
        return
    conversation = _conversation(config)
    lengths = {
        row.row_id: len(conversation.prompt(row.messages, row.responses_create_params.get("tools") or ()))
        for row in rows
    }
    worst = max(lengths, key=lambda row_id: lengths[row_id])
    if lengths[worst] > room:
        raise ConfigError(
            f"{key}={longest}: the prompt of row {worst} has {lengths[worst]} tokens, and with "
            f"generation.max_new_tokens={config.generation.max_new_tokens} its answers would be cut off; "
            f"take a context of {lengths[worst] + config.generation.max_new_tokens} tokens, or fewer new ones"
        )


def _context(config: JobConfig, context: int) -> tuple[str, int]:
    generation = config.generation
    own = None if generation.engine == "megatron" else getattr(generation, generation.engine).max_model_len
    if own is not None:
        return f"generation.{generation.engine}.max_model_len", own
    return "model.tiny.context" if config.model.tiny is not None else "the model's context", context


def _is_plain(row: GymRow) -> bool:
    try:
        return bool(row.messages) and not row.responses_create_params.get("tools")
    except DatasetError:
        return False


def _size(row: GymRow) -> int:
    tools = row.responses_create_params.get("tools")
    return len(json.dumps([row.messages, tools], ensure_ascii=False).encode(errors="surrogatepass"))


def _conversation(config: JobConfig) -> ConversationTokenizer:
    if config.model.path is not None:
        return load_conversation(config.model.path, config.model.chat_template)
    assert config.model.tiny is not None
    from .tiny_model import make_tokenizer

    tokenizer = make_tokenizer(tokenizer_texts(), config.model.tiny.vocab_size)
    if config.model.chat_template is not None:
        tokenizer.chat_template = config.model.chat_template.read_text(encoding="utf-8")
    return ConversationTokenizer(tokenizer)
