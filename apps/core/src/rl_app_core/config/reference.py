"""The table of all settings, written from the sections themselves."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from .asynchronous import SingleControllerConfig
from .distillation import DistillationConfig
from .job import GRPOConfig, JobConfig
from .loading import section_of


def reference() -> str:
    """Markdown: one heading per section, one line per key with its default and meaning.

    The sections of ``grpo`` first, then those of ``distill`` and ``single-controller`` that are others.
    """
    lines = list(_lines(GRPOConfig, ""))
    for model in (DistillationConfig, SingleControllerConfig):
        lines += [f"# Sections of `{model.command}` alone", "", *_others(model)]
    return "\n".join(lines)


def _others(model: type[JobConfig]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        known = GRPOConfig.model_fields.get(name)
        if section is not None and (known is None or section_of(known.annotation) is not section):
            yield from _lines(section, f"{field.alias or name}.")
        elif known is None:
            meaning = " ".join((field.description or "").split())
            yield from (f"`{name}`: {meaning}", "")


def _lines(model: type[BaseModel], prefix: str) -> Iterator[str]:
    sections: list[tuple[str, type[BaseModel]]] = []
    rows: list[str] = []
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        section = section_of(field.annotation)
        if section is not None:
            sections.append((path, section))
            continue
        meaning = " ".join((field.description or "").split())
        rows.append(f"| `{path}` | {_default(field.get_default(call_default_factory=True))} | {meaning} |")
    if rows:
        yield f"## {prefix.rstrip('.') or 'General'}"
        yield ""
        if prefix and model.__doc__:
            yield " ".join(model.__doc__.split())
            yield ""
        yield "| key | default | meaning |"
        yield "|---|---|---|"
        yield from rows
        yield ""
    for path, section in sections:
        yield from _lines(section, f"{path}.")


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    sys.stdout.write(reference())
