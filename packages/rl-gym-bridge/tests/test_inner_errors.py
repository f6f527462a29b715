"""What is read in the text with which Gym passes an inner server's error on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_gym_bridge.inner_errors import inner_status

ENGINE = {"object": "error", "message": "the script says so", "type": "Error", "code": 400}
REFUSED = {"detail": [{"type": "missing", "loc": ["body", "answer"], "msg": "Field required", "input": {}}]}


def passed_on(content: bytes, servers: int = 1) -> bytes:
    """As Gym 0.4 answers when it stands ``servers`` deep before the one that answered ``content``."""
    for server in range(servers):
        said = f"Hit an exception in Server{server}___name calling an inner server: {content!r}"
        content = json.dumps(said, ensure_ascii=False).encode()
    return content


#: What Gym 0.4.0 answered where its model, its judge or its verifier did not succeed.
REAL = json.loads((Path(__file__).parent / "doubles" / "gym_error_bodies.json").read_text())


@pytest.mark.parametrize(
    ("case", "status"),
    [
        ("model 400", 400),
        ("model 408", 408),
        ("model 501", 501),
        ("row with bad options", 422),
        # Gym itself asks three times after a 500, and then has nothing left to quote.
        ("model 500", None),
        ("model text", None),
        # It reads the judge's error as an answer, and cuts it.
        ("judge 400", None),
        ("judge 500", None),
    ],
)
def test_what_gym_really_answers(case: str, status: int | None) -> None:
    assert inner_status(REAL[case].encode()) == status


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize(
    ("document", "status"),
    [
        (ENGINE, 400),
        ({**ENGINE, "message": 'it\'s "long" \\ é \n'}, 400),
        ({"error": {"message": "no such model", "code": 404}}, 404),
        ({"error": {"message": "busy", "code": 429}}, 429),
        ({**ENGINE, "code": 500}, 500),
        (REFUSED, 422),
    ],
)
def test_the_innermost_status_is_read(document: object, status: int, servers: int) -> None:
    assert inner_status(passed_on(json.dumps(document).encode(), servers)) == status


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"Internal Server Error",
        b"<html>",
        b"[]",
        b'{"code": true}',
        b'{"code": "400"}',
        b'{"code": 200}',
        b'{"error": null}',
        b'{"detail": "Not Found"}',
        b'{"detail": []}',
        b'{"detail": [{"msg": "x"}, 3]}',
        b'"KeyError(1)"',
        b"\xff\xfe",
    ],
)
def test_content_that_tells_no_status_tells_none(content: bytes) -> None:
    assert inner_status(passed_on(content)) is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"slow down",
        b"\xff",
        # Not quoted: this is the agent's own.
        json.dumps(ENGINE).encode(),
        json.dumps(REFUSED).encode(),
        json.dumps("ValueError('x')").encode(),
        json.dumps("x calling an inner server: {'code': 400}").encode(),
        json.dumps('x calling an inner server: b\'{"code": 400}').encode(),
        json.dumps("x calling an inner server: b'' + b'{}'").encode(),
        json.dumps("x calling an inner server: __import__('os')").encode(),
        passed_on(json.dumps({**ENGINE, "message": "x" * 2**20}).encode()),
        b"[" * 100_000,
        passed_on(b"[" * 100_000),
        passed_on(json.dumps(ENGINE).encode(), 4)[:-20],
    ],
)
def test_a_body_that_quotes_nothing_readable_tells_none(body: bytes) -> None:
    assert inner_status(body) is None
