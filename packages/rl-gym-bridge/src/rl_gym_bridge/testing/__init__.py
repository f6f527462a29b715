"""For tests of environments: a tokenizer without files, models that say what they are told, and the checks of
a rollout through real Gym."""

from .acceptance import case_findings
from .byte_tokenizer import ByteTokenizer
from .cases import AcceptanceCase, CaseError, RowPin
from .contract import contract_findings
from .findings import CaseReport, Finding
from .gym_cases import gym_cases
from .judges import judge_by_equality
from .model_calls import CallKind, ModelCall
from .model_server import CASE_KEY, ScriptedModelServer
from .scripted_model import ScriptedChatModel, in_turns
from .scripted_turn import ScriptedToolCall, ScriptedTurn, ScriptError, turns_from

__all__ = [
    "CASE_KEY",
    "AcceptanceCase",
    "ByteTokenizer",
    "CallKind",
    "CaseError",
    "CaseReport",
    "Finding",
    "ModelCall",
    "RowPin",
    "ScriptError",
    "ScriptedChatModel",
    "ScriptedModelServer",
    "ScriptedToolCall",
    "ScriptedTurn",
    "case_findings",
    "contract_findings",
    "gym_cases",
    "in_turns",
    "judge_by_equality",
    "turns_from",
]
