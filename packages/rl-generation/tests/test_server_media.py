"""What a message may hold beside text, whatever a part says that it is."""

from __future__ import annotations

from typing import Any

import pytest

from rl_generation.failures import InvalidRequestError

pytest.importorskip("pydantic")

DATA = "data:image/png;base64,AA=="


def check(*parts: dict[str, Any]) -> None:
    from rl_generation.server.media import check_media
    from rl_generation.server.schemas import ChatMessage

    said = ChatMessage.model_validate({"role": "user", "content": "http://in.text/is/fine"})
    check_media([said, ChatMessage.model_validate({"role": "tool", "content": list(parts)})])


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data",
        "https://example.com/x.png",
        "file:///etc/passwd",
        "ftp://example.com/x",
        "//example.com/x",
        " " + DATA,
        "",
        None,
        ["http://example.com/x"],
        {"url": {"url": DATA}},
    ],
)
@pytest.mark.parametrize("name", ["image_url", "audio_url", "video_url"])
def test_only_data_urls_are_taken(name: str, url: Any) -> None:
    # Also where the type is missing or another: vLLM looks at the fields then.
    for kind in ({"type": name}, {}, {"type": "text", "text": "?", "uuid": "x"}, {"type": "input_image"}):
        for value in (url, {"url": url}):
            with pytest.raises(InvalidRequestError, match=f"messages.1.content has an {name}") as refused:
                check({"type": "text", "text": "?"}, {**kind, name: value})
            assert refused.value.parameter == "messages.1.content"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_embeds", "image_embeds": "AA=="},
        {"image_embeds": "AA=="},
        {"type": "prompt_embeds", "data": "AA=="},
        {"type": "image_pil"},
        {"type": "image_url", "image_url": {"url": DATA}, "uuid": "of another"},
        {"type": "file", "file": {"file_id": "x"}},
        {"type": 7},
        {"type": ["text"]},
    ],
)
def test_what_is_neither_text_nor_brought_along_is_refused(part: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\.1\.content has "):
        check(part)


def test_text_and_media_that_are_brought_along_are_taken() -> None:
    check(
        {"type": "text", "text": "see http://example.com"},
        {"text": "without a type"},
        {"type": "thinking", "thinking": "hm"},
        {"type": "image_url", "image_url": {"url": DATA, "detail": "auto"}},
        {"type": "input_image", "image_url": DATA},
        {"image_url": DATA},
        {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
    )
