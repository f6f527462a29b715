"""What the model says to the rows of a check, and what must come of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..testing.scripted_turn import ScriptedTurn, ScriptError, turns_from

FIELD = "check"
"""Field of a row that holds its scripts; it is taken out before the row is sent."""

VERDICTS = ("accepted", "rejected")

GENERIC = (ScriptedTurn(content="This is a scripted answer."),)
"""Said to rows without a script."""


@dataclass(frozen=True)
class Expectation:
    """What must come of a rollout; a field that is ``None`` or empty is not looked at.

    Attributes:
        reward: exactly.
        answer: values in Gym's answer, by dotted path.
        policy_calls: how often the policy is asked.
        judge_calls: how often a judge is asked.
    """

    reward: float | None = None
    answer: Mapping[str, Any] = field(default_factory=dict)
    policy_calls: int | None = None
    judge_calls: int | None = None


@dataclass(frozen=True)
class Script:
    """One rollout of a row.

    Attributes:
        verdict: ``accepted`` or ``rejected``, empty for the generic answer.
        turns: what the policy says.
        judge: what a judge says, call by call; the last is repeated.
        expect: what must come of it.
    """

    verdict: str
    turns: tuple[ScriptedTurn, ...]
    judge: tuple[ScriptedTurn, ...] = ()
    expect: Expectation = field(default_factory=Expectation)


def scripts_of(value: Any) -> tuple[Script, ...]:
    """The scripts of a row.

    Args:
        value: ``{"accepted": [turns], "rejected": [turns], "judge": {…}, "expect": {…}}`` or ``None``. A turn
            is a text or the object of a :class:`~rl_gym_bridge.testing.ScriptedTurn`. ``judge`` and
            ``expect`` hold one value per verdict.

    Raises:
        ScriptError: it is something else.
    """
    if value is None:
        return (Script("", GENERIC),)
    if not isinstance(value, Mapping):
        raise ScriptError(f"{FIELD} is a {type(value).__name__}, not an object")
    _known(value, (*VERDICTS, "judge", "expect"), FIELD)
    for name in ("judge", "expect"):
        _known(_object(value.get(name, {}), f"{FIELD}.{name}"), VERDICTS, f"{FIELD}.{name}")
    scripts = tuple(
        Script(
            verdict=verdict,
            turns=_turns(value[verdict], f"{FIELD}.{verdict}"),
            judge=_turns(value["judge"][verdict], f"{FIELD}.judge.{verdict}")
            if verdict in value.get("judge", {})
            else (),
            expect=_expectation(value.get("expect", {}).get(verdict, {}), f"{FIELD}.expect.{verdict}"),
        )
        for verdict in VERDICTS
        if verdict in value
    )
    if not scripts:
        raise ScriptError(f"{FIELD} has neither {' nor '.join(VERDICTS)}")
    for name in ("judge", "expect"):
        for verdict in value.get(name, {}):
            if verdict not in value:
                raise ScriptError(f"{FIELD}.{name}.{verdict} has no {FIELD}.{verdict}")
    return scripts


def _expectation(value: Any, where: str) -> Expectation:
    mapping = _object(value, where)
    _known(mapping, ("reward", "answer", "policy_calls", "judge_calls"), where)
    for name, allowed in (("reward", (int, float)), ("policy_calls", (int,)), ("judge_calls", (int,))):
        given = mapping.get(name)
        if given is not None and (isinstance(given, bool) or not isinstance(given, allowed)):
            raise ScriptError(f"{where}.{name} is {given!r}, not a number")
    return Expectation(
        reward=mapping.get("reward"),
        answer=_object(mapping.get("answer", {}), f"{where}.answer"),
        policy_calls=mapping.get("policy_calls"),
        judge_calls=mapping.get("judge_calls"),
    )


def _turns(value: Any, where: str) -> tuple[ScriptedTurn, ...]:
    try:
        return turns_from(value)
    except ScriptError as error:
        raise ScriptError(f"{where}: {error}") from error


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ScriptError(f"{where} is a {type(value).__name__}, not an object")
    return value


def _known(mapping: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    unknown = sorted(set(mapping) - set(names))
    if unknown:
        raise ScriptError(f"{where} has no {', '.join(map(repr, unknown))}; it has {', '.join(names)}")
