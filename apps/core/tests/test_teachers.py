"""Teachers: whose tokens can be compared, and an engine's answers in their places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from rl_algorithms.batching import build_sft_batch
from rl_app_core.config import ConfigError
from rl_app_core.config.sections import TinyModel
from rl_app_core.teachers import EngineTeacher, check_teacher
from rl_app_core.tiny_model import write_tiny_model
from rl_generation.failures import EngineDeadError
from rl_generation.fleet.threads import LoopThread
from rl_generation.vllm.prompt_scores import PromptScores


def model_with(folder: Path, pieces: Sequence[str]) -> Path:
    """A tiny model whose tokenizer's vocabulary is a list, as SentencePiece's are."""
    write_tiny_model(folder, TinyModel(), ["Calculate 1 + 2."], seed=0)
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in ("<unk>", *pieces)], unk_id=0))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<unk>").save_pretrained(folder)
    return folder


def test_vocabularies_are_compared_whatever_their_kind(tmp_path: Path) -> None:
    one, same = model_with(tmp_path / "one", ["a", "b"]), model_with(tmp_path / "same", ["a", "b"])
    other = model_with(tmp_path / "other", ["a", "c"])
    check_teacher("teacher.model", one, same)
    with pytest.raises(ConfigError, match=r"teacher\.model: .* have other vocabularies"):
        check_teacher("teacher.model", other, one)
    (same / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"teacher\.model=.*its tokenizer cannot be read"):
        check_teacher("teacher.model", same, one)


class Replica:
    """Says of token t, at place i, log-probability −t, and that i + 1 and i + 2 are likelier."""

    dead = False

    async def score_all(self, sequences: Sequence[Sequence[int]], top: int) -> list[PromptScores]:
        if self.dead:
            raise EngineDeadError("replica teacher: its process has ended")
        return [
            PromptScores(
                tuple(-float(token) for token in tokens[1:]),
                np.arange(1, len(tokens))[:, None] + np.arange(1, top + 1),
                np.full((len(tokens) - 1, top), -0.5, dtype=np.float32),
            )
            for tokens in sequences
        ]


@pytest.fixture
def teacher() -> Iterator[EngineTeacher]:
    loop = LoopThread("teacher")
    replica: Any = Replica()
    yield EngineTeacher(replica, loop, 5.0)
    loop.close(5.0)


def test_an_engines_answers_lie_at_the_tokens_that_they_score(teacher: EngineTeacher) -> None:
    batch = build_sft_batch([((3, 1, 4), (0, 1, 1)), ((2,), (0,))], pad_token_id=9)
    assert teacher.logprobs(batch, ["", ""]).tolist() == [[0, -1, -4], [0, 0, 0]]
    logprobs, ids = teacher.topk_logprobs(batch, ["", ""], 2)
    assert ids.tolist() == [[[0, 0], [2, 3], [3, 4]], [[0, 0]] * 3]
    assert logprobs.tolist() == [[[0, 0], [-0.5] * 2, [-0.5] * 2], [[0, 0]] * 3]
    assert (logprobs.dtype, ids.dtype) == (torch.float32, torch.int64)


def test_a_dead_engine_is_told_by_its_own_error(teacher: EngineTeacher) -> None:
    teacher.replica.dead = True  # type: ignore[attr-defined]
    with pytest.raises(EngineDeadError, match="its process has ended"):
        teacher.logprobs(build_sft_batch([((3, 1), (0, 1))], pad_token_id=9), [""])
