"""The JSON object that an agent gets for a rollout: the row as it is, with the run's settings put in."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .chat_items import to_response_items
from .config import EffortLevel
from .dataset import GymRow
from .errors import DatasetError
from .failures import GymConfigError
from .settings.history_flags import refuse_dropped_thinking
from .strict_json import JsonFault, loads_strict

_PARAMS = "responses_create_params"
#: Where a row may set the engine's parameters and the chat template's.
_HOLD_EXTRAS = ("metadata", "extra_body", "chat_template_kwargs")


@dataclass(frozen=True, slots=True)
class GenerationOverrides:
    """How the run samples, whatever a row says; ``None`` leaves the row's own value.

    Attributes:
        temperature: ≥ 0.
        top_p: in (0, 1].
        max_new_tokens: sampled tokens per *model call* at most, ≥ 1; Gym calls it ``max_output_tokens``.
        seeded: whether each rollout's calls carry a seed of their own, for engines that take one.
        extra_body: further parameters of the engine, for every call.
        chat_template_kwargs: given to the model's chat template in every call.

    Raises:
        ValueError: a value out of its range.
        GymConfigError: an extra that takes earlier thinking out of the prompt.
    """

    temperature: float | None = None
    top_p: float | None = None
    max_new_tokens: int | None = None
    seeded: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.temperature is not None and not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be a finite number >= 0")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        refuse_dropped_thinking(self.extra_body, "extra_body")
        refuse_dropped_thinking(self.chat_template_kwargs, "chat_template_kwargs")


def check_levels_fit_the_run(generation: GenerationOverrides, effort_levels: Sequence[EffortLevel]) -> None:
    """See that no effort level contradicts the run, which no row could mend.

    Raises:
        GymConfigError: a level sets an argument of the chat template to another value than the run does.
    """
    for level in effort_levels:
        for name, value in level.chat_template_kwargs.items():
            of_run = generation.chat_template_kwargs.get(name, value)
            if of_run != value:
                raise GymConfigError(
                    f"the level sets it to {value!r}, the run to {of_run!r}",
                    component=f"effort level {level.name!r}, chat_template_kwargs.{name}",
                    remedy="take it out of the level or of the run's settings",
                )


def check_history_is_kept(row: GymRow) -> None:
    """Refuse a row whose extras take earlier thinking out of the prompt.

    Raises:
        DatasetError: naming the field.
    """
    extras = {name: row.responses_create_params.get(name) for name in _HOLD_EXTRAS}
    try:
        refuse_dropped_thinking(extras, _PARAMS)
    except GymConfigError as error:
        raise DatasetError(
            f"row {row.row_id!r}: {error.problem}", field=error.component, remedy=error.remedy
        ) from error


def request_body(
    row: GymRow, generation: GenerationOverrides, *, effort: EffortLevel | None, seed: int | None
) -> dict[str, Any]:
    """The row's JSON object with the overrides in it; the row is not changed, but shares its unchanged parts.

    Args:
        row: the task.
        generation: the run's settings.
        effort: the level of the rollout, if it has one.
        seed: for the engine; ``None`` sends none.

    Raises:
        DatasetError: the row and the run set one extra to different values, the row's extras are no JSON, or
            they drop earlier thinking.
    """
    check_history_is_kept(row)
    params = dict(row.responses_create_params)
    params["input"] = to_response_items(params["input"], row_id=row.row_id)
    if generation.temperature is not None:
        params["temperature"] = generation.temperature
    if generation.top_p is not None:
        params["top_p"] = generation.top_p
    if generation.max_new_tokens is not None:
        params["max_output_tokens"] = generation.max_new_tokens
    if effort is not None and effort.max_output_tokens is not None:
        # A level asks for less; it never gives more room than there would be without it.
        given = params.get("max_output_tokens")
        bound = effort.max_output_tokens
        params["max_output_tokens"] = min(given, bound) if isinstance(given, (int, float)) else bound
    if effort is not None and effort.instruction:
        _instruct(params, effort.instruction)
    seeds = {} if seed is None else {"seed": seed}
    _merge_extras(params, "extra_body", {**generation.extra_body, **seeds}, row.row_id)
    of_level = effort.chat_template_kwargs if effort else {}
    template = {**generation.chat_template_kwargs, **of_level}
    _merge_extras(params, "chat_template_kwargs", template, row.row_id)
    return {**row.to_mapping(), _PARAMS: params}


def extras_of(row: GymRow) -> dict[str, Any]:
    """The engine's parameters that a row or its run puts into the metadata, ``chat_template_kwargs`` as one.

    Raises:
        DatasetError: they are no JSON.
    """
    metadata = row.responses_create_params.get("metadata")
    if not isinstance(metadata, Mapping):
        return {}
    where = f"{_PARAMS}.metadata"
    extras = dict(_parsed(metadata.get("extra_body"), f"{where}.extra_body", row.row_id))
    name = "chat_template_kwargs"
    template = _parsed(metadata.get(name), f"{where}.{name}", row.row_id)
    return {**extras, name: dict(template)} if template else extras


def _instruct(params: dict[str, Any], instruction: str) -> None:
    """Append to the system message, wherever it stands; begin the prompt with one where there is none."""
    content = params["input"]
    items = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
    for index, item in enumerate(items):
        if item.get("role") in ("system", "developer"):
            items[index] = {**item, "content": _appended(item["content"], instruction)}
            params["input"] = items
            return
    if isinstance(params.get("instructions"), str) and params["instructions"]:
        params["instructions"] = _appended(params["instructions"], instruction)
        return
    params["input"] = [{"role": "system", "content": instruction}, *items]


def _appended(content: Any, instruction: str) -> Any:
    if isinstance(content, str):
        return f"{content}\n\n{instruction}" if content else instruction
    return [*content, {"type": "input_text", "text": f"\n\n{instruction}"}]


def _merge_extras(params: dict[str, Any], name: str, extras: Mapping[str, Any], row_id: str) -> None:
    """Put extras where Gym's model server looks for them: as JSON text in the request's metadata."""
    if not extras:
        return
    where = f"{_PARAMS}.metadata"
    metadata = params.get("metadata") or {}
    if not isinstance(metadata, Mapping):
        raise DatasetError(
            f"row {row_id!r}: it is a {type(metadata).__name__}, not an object",
            field=where,
            remedy="write an object of texts",
        )
    own = _parsed(metadata.get(name), f"{where}.{name}", row_id)
    for key, value in extras.items():
        if key in own and own[key] != value:
            raise DatasetError(
                f"row {row_id!r} sets {key} to {own[key]!r}, the run to {value!r}",
                field=f"{where}.{name}",
                remedy="take it out of the row or of the run's settings",
            )
    text = json.dumps({**own, **extras}, ensure_ascii=False, allow_nan=False)
    params["metadata"] = {**metadata, name: text}


def _parsed(text: Any, where: str, row_id: str) -> Mapping[str, Any]:
    if text is None:
        return {}
    try:
        parsed = loads_strict(text) if isinstance(text, str) else None
    except JsonFault as error:
        raise _no_object(where, row_id, f"is not JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise _no_object(where, row_id, "is no JSON text of an object")
    return parsed


def _no_object(where: str, row_id: str, problem: str) -> DatasetError:
    return DatasetError(
        f"row {row_id!r}: it {problem}", field=where, remedy='write it as text, such as "{\\"seed\\": 1}"'
    )
