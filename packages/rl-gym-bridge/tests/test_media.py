"""Rows cannot make anybody open a file or fetch from a host that nobody allowed."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest

from rl_gym_bridge.dataset import GymRow
from rl_gym_bridge.errors import DatasetError
from rl_gym_bridge.media import check_media
from rl_gym_bridge.request_body import GenerationOverrides
from rl_gym_bridge.rows import NemoGymDataset, collate_rollout_requests

DATA = "data:image/png;base64,iVBORw0KGgo="
HOSTS = ("images.example.org",)


def part(reference: Any) -> list[dict[str, Any]]:
    """Every way in which a part of a message may point to media."""
    return [
        {"type": "input_image", "image_url": reference, "detail": "auto"},
        {"type": "image_url", "image_url": {"url": reference}},
        {"type": "input_file", "file_url": reference},
        {"type": "input_file", "file_data": reference, "filename": "a.pdf"},
        {"type": "file", "file": {"file_data": reference}},
        {"type": "video_url", "video_url": {"url": reference}},
        {"type": "audio_url", "audio_url": {"url": reference}},
        {"type": "image", "image": reference},
        {"type": "image", "path": reference},
        {"type": "image", "url": reference},
        {"type": "video", "video": [reference]},
    ]


def params(content: Any, **more: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": content}], **more}


def check(of: dict[str, Any]) -> None:
    check_media(of, allowed_hosts=HOSTS, row_id="r")


REFUSED = [
    "file:///etc/passwd",
    "FILE:///etc/passwd",
    "/etc/passwd",
    "../../x",
    "..\\x",
    "x.png",
    "~/x.png",
    "http://127.0.0.1:8000/x",
    "http://2130706433/x",
    "http://0x7f000001/x",
    "http://[::1]/x",
    "http://[::1",
    "http://localhost/x",
    "http://evil.example.com/x.png",
    "http://images.example.org.evil.com/x",
    "http://evil.com/images.example.org",
    "http://evil.com#images.example.org",
    "http://images.example.org@127.0.0.1/x",
    "http://user@images.example.org/x",
    "http://user:secret@images.example.org/x",
    "http://127.0.0.1\\@images.example.org/x",
    "http://127.0.0.1 @images.example.org/x",
    "http://images.example.org\t.evil.com/x",
    " http://images.example.org/x",
    "//images.example.org/x",
    "ftp://images.example.org/x",
    "gopher://images.example.org/x",
    "javascript:alert(1)",
    "",
]


@pytest.mark.parametrize("reference", REFUSED)
def test_n1_n2_a_reference_to_a_file_or_a_strange_host_is_refused_wherever_it_stands(reference: str) -> None:
    """N1, N2: loopback, decimal addresses, ``file:``, paths, and URLs that parsers read differently."""
    for shape in part(reference):
        with pytest.raises(DatasetError, match="points to"):
            check(params([{"type": "input_text", "text": "look"}, shape]))


@pytest.mark.parametrize(
    "reference",
    [
        DATA,
        "DATA:image/png;base64,AAAA",
        "https://images.example.org/a.png",
        "http://IMAGES.example.org:80/a",
    ],
)
def test_data_in_the_row_and_allowed_hosts_pass(reference: str) -> None:
    for shape in part(reference):
        check(params([shape]))


def test_no_host_is_allowed_by_default() -> None:
    row = GymRow.from_mapping(
        {
            "responses_create_params": params(
                [{"type": "input_image", "image_url": "https://images.example.org/a"}]
            ),
            "agent_ref": {"name": "a"},
        }
    )
    with pytest.raises(DatasetError, match="not allowed"):
        NemoGymDataset([row])
    with pytest.raises(DatasetError, match="not allowed"):
        collate_rollout_requests([row], generation=GenerationOverrides(), group_size=1, step=0, seed=0)
    NemoGymDataset([row], allowed_media_hosts=HOSTS)


def test_the_error_names_row_field_and_reference() -> None:
    with pytest.raises(
        DatasetError, match=r"input\[0\]\.content\[0\]\.image_url.*'r' points to '/etc/passwd'"
    ):
        check(params([{"type": "input_image", "image_url": "/etc/passwd"}]))


@pytest.mark.parametrize(
    "metadata",
    [
        {"audio_path": "/etc/passwd"},
        {"audio_path": "a.wav"},
        {"audio_paths": ["a.wav"]},
        {"audio_paths": [DATA, "a.wav"]},
        {"audio_data": "http://127.0.0.1/a"},
        {"audio_data": 5},
    ],
)
def test_n2_sound_beside_the_messages_is_checked_too(metadata: dict[str, Any]) -> None:
    """N2: Gym's model server opens files that the metadata names."""
    with pytest.raises(DatasetError, match="metadata"):
        check(params("q", metadata=metadata))


def test_what_is_no_media_is_left_alone() -> None:
    check(
        params(
            [
                {"type": "input_text", "text": "see file:///etc/passwd or http://127.0.0.1"},
                {"type": "input_image", "file_id": "file-1", "image_url": None},
            ],
            metadata={"url": "http://x", "audio_path": None},
            tools=[
                {
                    "type": "function",
                    "parameters": {"properties": {"image_url": {"type": "string"}, "url": "x"}},
                }
            ],
        )
    )
    check({"input": "file:///etc/passwd"})
    annotated = {
        "type": "output_text",
        "text": "x",
        "annotations": [{"type": "file_path", "url": "http://x"}],
    }
    check({"input": [{"type": "message", "role": "assistant", "content": [annotated]}]})
    check(
        {
            "input": [
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"url": "http://x"}'}
            ]
        }
    )


def test_media_in_outputs_of_tools_and_in_stored_prompts_are_checked() -> None:
    image = {"type": "input_image", "image_url": "/etc/passwd"}
    with pytest.raises(DatasetError):
        check({"input": [{"type": "function_call_output", "call_id": "c", "output": [image]}]})
    with pytest.raises(DatasetError):
        check({"input": "q", "prompt": {"id": "p", "variables": {"picture": image}}})


def test_n1_checking_fetches_nothing() -> None:
    """N1: a canary on the loopback address is hit neither directly nor by its decimal name."""
    hits: list[str] = []

    class Canary(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hits.append(self.path)
            self.send_response(302)
            self.send_header("Location", f"http://127.0.0.1:{port}/redirected")
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Canary) as server:
        port = server.server_port
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            for host in ("127.0.0.1", "2130706433", "localhost", "[::ffff:127.0.0.1]"):
                with pytest.raises(DatasetError):
                    check(params([{"type": "input_image", "image_url": f"http://{host}:{port}/direct"}]))
        finally:
            server.shutdown()
            thread.join()
    assert hits == []
