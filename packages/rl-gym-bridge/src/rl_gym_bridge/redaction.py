"""Keeps secrets out of logs and error messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

MASK = "***"

# Names are compared word by word, so that `tokenizer` and `num_tokens` are no secrets and `hf_token` is one.
_SECRET_WORDS = frozenset(
    {
        "password",
        "passwd",
        "passphrase",
        "pwd",
        "secret",
        "secrets",
        "credential",
        "credentials",
        "authorization",
    }
    | {"dsn", "apikey", "apikeys", "bearer", "cookie", "cookies"}
)
_KEY_OWNERS = frozenset({"api", "access", "secret", "private", "auth", "encryption", "signing", "account"})
# A `something_key` is a secret, unless it is a key of a mapping or a table.
_KEY_KINDS = (
    frozenset({"primary", "foreign", "sort", "group", "partition", "cache", "dict", "json", "public"})
    | {"input", "output", "prompt", "question", "answer", "label", "reward", "message", "row", "column"}
    | {"missing", "unexpected", "extra", "required", "unknown", "duplicate", "expected", "valid", "invalid"}
    | {"data", "batch", "index", "config", "state", "metric", "task", "field", "image", "name", "all"}
)
_TOKEN_KINDS = frozenset(
    {
        "bos",
        "eos",
        "pad",
        "unk",
        "sep",
        "cls",
        "mask",
        "special",
        "stop",
        "image",
        "audio",
        "video",
        "per",
        "next",
    }
    | {
        "first",
        "last",
        "max",
        "min",
        "num",
        "new",
        "prompt",
        "output",
        "input",
        "generation",
        "think",
        "each",
    }
)
# Several tokens are those of a model, but for these.
_TOKENS_OWNERS = frozenset({"access", "refresh", "auth", "api", "bearer", "session", "secret", "hf", "bot"})
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SHORTEST_LITERAL = 6

# A name, possibly quoted, then `:` or `=`; and a value: quoted, or up to a space, comma, or bracket.
_NAME = re.compile(r"""(?P<name>[A-Za-z_][\w.\-]*)["']?\s*[:=]\s*""")
_VALUE = re.compile(
    r"""(?P<quote>["'])(?:(?!(?P=quote))[^\\]|\\.)*(?P=quote)?|(?:(?:Bearer|Basic|Token)\s+)?[^\s,;&}\])"']+"""
)
# All cookies of a line.
_COOKIES = re.compile(r"""[^\s,;&}\])"']+(?:;\s*[^\s,;="']+=[^\s,;}\])"']*)*""")
_SCHEME = re.compile(r"\b(?P<scheme>Bearer|Basic)\s+(?P<value>[A-Za-z0-9._~+/=\-]{4,})")
_USER_INFO = re.compile(
    r"""(?P<before>\b[a-z][a-z0-9+.\-]*://)(?:[^\s/@:]*:[^\s/@]*|[^\s/@:?#,"']+)(?=@)""", re.IGNORECASE
)


def is_secret_name(name: str) -> bool:
    """Whether a value under this name must not be shown: ``db_password``, ``HF_TOKEN``, ``apiKey``, …"""
    words = [word.lower() for word in _WORD.findall(name)]
    while words and words[-1].isdigit():
        words.pop()
    if _SECRET_WORDS.intersection(words):
        return True
    if any(first in _KEY_OWNERS and second in ("key", "keys") for first, second in pairwise(words)):
        return True
    kind, last = ["", "", *words][-2:]
    return (
        (last == "token" and kind not in _TOKEN_KINDS)
        or (last == "tokens" and kind in _TOKENS_OWNERS)
        or (last in ("key", "keys") and kind not in _KEY_KINDS | {""})
    )


def redacted(value: Any) -> Any:
    """A copy of nested mappings and sequences with every secret replaced by ``***``."""
    if isinstance(value, Mapping):
        return {
            key: MASK if is_secret_name(str(key)) and inner not in (None, "") else redacted(inner)
            for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [redacted(inner) for inner in value]
    return redacted_text(value) if isinstance(value, str) else value


def secret_values(value: Any) -> frozenset[str]:
    """Strings that stand under a secret name somewhere in nested mappings and sequences."""
    found: set[str] = set()
    if isinstance(value, Mapping):
        for key, inner in value.items():
            found |= _strings(inner) if is_secret_name(str(key)) else secret_values(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            found |= secret_values(inner)
    return frozenset(text for text in found if len(text) >= _SHORTEST_LITERAL)


def redacted_text(text: str, secrets: Iterable[str] = ()) -> str:
    """``text`` without the given secrets, values assigned to secret names, and passwords in URLs."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    text = _USER_INFO.sub(rf"\g<before>{MASK}", text)
    return _SCHEME.sub(rf"\g<scheme> {MASK}", _without_assigned(text))


def _without_assigned(text: str) -> str:
    parts: list[str] = []
    done = position = 0
    while name := _NAME.search(text, position):
        position = name.end()
        value = None
        if is_secret_name(name["name"]):
            cookies = _COOKIES.match(text, position) if "cookie" in name["name"].lower() else None
            value = cookies or _VALUE.match(text, position)
        if value is not None:
            quote = value.groupdict().get("quote") or ""
            parts += [text[done:position], quote, MASK, quote]
            done = position = value.end()
    return "".join([*parts, text[done:]])


def _strings(value: Any) -> set[str]:
    if isinstance(value, str):
        return {value}
    if isinstance(value, Mapping):
        return set().union(*(_strings(inner) for inner in value.values()))
    if isinstance(value, (list, tuple)):
        return set().union(*(_strings(inner) for inner in value))
    return set()
