"""Which images, sounds and files a row may point to: data in the row itself, and allowed hosts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from .errors import DatasetError

_MEDIA_KEYS = frozenset(
    {"image", "image_url", "audio", "audio_url", "video", "video_url", "file", "file_url", "file_data"}
)
# These point to media only within a part that is media, or below one of the keys above.
_PLACE_KEYS = frozenset({"url", "path", "file_path"})
_MEDIA_TYPES = ("image", "audio", "video", "file")
# Gym's model server opens the files that these name, and takes the data of the last one as it is.
_METADATA_KEYS = ("audio_path", "audio_paths", "audio_data")
_SHOWN = 80


def check_media(params: Mapping[str, Any], *, allowed_hosts: Collection[str], row_id: str) -> None:
    """Refuse a request that would make Gym or the engine open a file or fetch from a host nobody allowed.

    ``data:`` URLs are always allowed, ``http`` and ``https`` ones on a host in ``allowed_hosts``. Nothing is
    fetched here: who follows redirects must hold to the same list.

    Args:
        params: the row's ``responses_create_params``.
        allowed_hosts: names without port, compared in lower case.
        row_id: for the error.

    Raises:
        DatasetError: naming the field and the reference.
    """
    hosts = frozenset(host.lower() for host in allowed_hosts)
    for where, reference in _references(params):
        problem = _problem(reference, hosts)
        if problem:
            raise DatasetError(
                f"row {row_id!r} points to {_shown(reference)}, {problem}",
                field=f"responses_create_params.{where}",
                remedy="put the content into the row as a data: URL, or allow the host",
            )


def _references(params: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in ("input", "prompt"):
        if not isinstance(params.get(name), str):
            yield from _walk(params.get(name), name)
    metadata = params.get("metadata")
    if isinstance(metadata, Mapping):
        for name in _METADATA_KEYS:
            values = metadata.get(name)
            for value in values if isinstance(values, list) else [values]:
                if value:
                    yield f"metadata.{name}", value


def _walk(value: Any, where: str, *, media: bool = False) -> Iterator[tuple[str, Any]]:
    """Every reference at or below ``value``; ``media`` says that something above it is media."""
    if isinstance(value, list):
        for index, entry in enumerate(value):
            yield from _walk(entry, f"{where}[{index}]", media=media)
    elif isinstance(value, Mapping):
        kind = str(value.get("type", ""))
        media = media or any(word in kind for word in _MEDIA_TYPES)
        for key, inner in value.items():
            if key == "annotations":
                continue
            points = key in _MEDIA_KEYS or (media and key in _PLACE_KEYS)
            for place, entry in _entries(inner, f"{where}.{key}"):
                if points and isinstance(entry, str):
                    yield place, entry
                else:
                    yield from _walk(entry, place, media=media or points)


def _entries(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list):
        yield from ((f"{where}[{index}]", entry) for index, entry in enumerate(value))
    else:
        yield where, value


def _problem(reference: Any, hosts: frozenset[str]) -> str:
    """Why a reference is refused, empty where it is not."""
    if not isinstance(reference, str):
        return "which is no text"
    if reference[:5].lower() == "data:":
        return ""
    # Parsers disagree on such URLs: one may see an allowed host where another sees a local one.
    if any(character <= " " or character in "\\\x7f" for character in reference):
        return "which holds a blank, a control character or a backslash"
    try:
        parts = urlsplit(reference)
        host = parts.hostname or ""
    except ValueError:
        return "which is no valid URL"
    if parts.scheme.lower() not in ("http", "https"):
        return "which is no data:, http: or https: URL"
    if "@" in parts.netloc:
        return "which names a user"
    return "" if host in hosts else f"whose host {host!r} is not allowed"


def _shown(reference: Any) -> str:
    text = repr(reference)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
