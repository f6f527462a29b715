"""For tests of environments: a tokenizer without files and a model that says what it is told."""

from .byte_tokenizer import ByteTokenizer
from .scripted_model import ScriptedChatModel, in_turns

__all__ = ["ByteTokenizer", "ScriptedChatModel", "in_turns"]
