from __future__ import annotations

import pytest

from rl_app_core.conversation import ConversationTokenizer
from rl_app_core.demonstrations import tokenizer_texts
from rl_app_core.tiny_model import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer(tokenizer_texts(), 512)


@pytest.fixture
def conversation(tokenizer):
    return ConversationTokenizer(tokenizer)
