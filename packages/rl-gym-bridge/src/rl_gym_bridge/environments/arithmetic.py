"""A calculator for small integers, without ``eval``.

Grammar::

    sum     = product { ("+" | "-") product }
    product = signed { "*" signed }
    signed  = "-" signed | number | "(" sum ")"
"""

from __future__ import annotations

import re

MAX_LENGTH = 64
MAX_DIGITS = 4

_TOKEN = re.compile(r"\s*(?:([0-9]+)|([-+*()]))", re.ASCII)
_SPELLINGS = str.maketrans({"−": "-", "–": "-", "×": "*", "·": "*"})


class ArithmeticFault(ValueError):
    """An expression outside the grammar, and why."""


def evaluate(expression: str) -> int:
    """The value of an expression of ``+``, ``-``, ``*`` and brackets over integers of ≤ 4 digits.

    ``−`` and ``×`` are understood too.

    Raises:
        ArithmeticFault: anything else: other characters, a number too long, more than 64 characters.
    """
    if len(expression) > MAX_LENGTH:
        raise ArithmeticFault(f"the expression is longer than {MAX_LENGTH} characters")
    parser = _Parser(_tokens(expression.translate(_SPELLINGS)))
    value = parser.sum()
    parser.expect_end()
    return value


def _tokens(expression: str) -> list[str]:
    tokens: list[str] = []
    position = 0
    end = len(expression.rstrip())
    while position < end:
        match = _TOKEN.match(expression, position)
        if match is None:
            rest = expression[position:].lstrip()
            raise ArithmeticFault(f"{rest[0]!r} is not allowed; use whole numbers with + - * and brackets")
        token = match.group(1) or match.group(2)
        if match.group(1) and len(token) > MAX_DIGITS:
            raise ArithmeticFault(f"{token} has more than {MAX_DIGITS} digits")
        tokens.append(token)
        position = match.end()
    return tokens


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._next = 0

    def sum(self) -> int:
        value = self._product()
        while operator := self._accept("+", "-"):
            other = self._product()
            value = value + other if operator == "+" else value - other
        return value

    def expect_end(self) -> None:
        if self._next < len(self._tokens):
            raise ArithmeticFault(f"{self._tokens[self._next]!r} is not expected there")

    def _product(self) -> int:
        value = self._signed()
        while self._accept("*"):
            value *= self._signed()
        return value

    def _signed(self) -> int:
        if self._accept("-"):
            return -self._signed()
        if self._accept("("):
            value = self.sum()
            if not self._accept(")"):
                raise ArithmeticFault("a bracket is not closed")
            return value
        if self._next == len(self._tokens):
            raise ArithmeticFault("the expression ends where a number is expected")
        token = self._tokens[self._next]
        if not token.isdigit():
            raise ArithmeticFault(f"{token!r} is not expected there")
        self._next += 1
        return int(token)

    def _accept(self, *wanted: str) -> str | None:
        if self._next < len(self._tokens) and self._tokens[self._next] in wanted:
            self._next += 1
            return self._tokens[self._next - 1]
        return None
