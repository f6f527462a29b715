"""What must not be shown is masked, and nothing else."""

from __future__ import annotations

import pytest

from rl_gym_bridge.redaction import is_secret_name, redacted, redacted_text, secret_values

SECRET = (
    "password",
    "db_password",
    "client_secret",
    "credential",
    "aws_credentials",
    "sentry_dsn",
    "SENTRY_DSN",
    "HF_TOKEN",
    "token",
    "hfToken",
    "accessToken",
    "policy_api_key",
    "OPENAI_API_KEY",
    "apiKey",
    "apikey",
    "aws_secret_access_key",
    "Authorization",
    "ssh.private-key",
    "openai_key",
    "ssh_key",
    "license_keys",
    "cookies",
    "refresh_tokens",
    "accessTokens",
    "x_api_token_2",
)
PLAIN = (
    "tokenizer",
    "num_tokens",
    "max_output_tokens",
    "prompt_token_ids",
    "return_token_id_information",
    "token_capture",
    "eos_token",
    "use_fastokens",
    "key",
    "keys",
    "tokens",
    "max_tokens",
    "stop_tokens",
    "key_value_cache",
    "primary_key",
    "missing_keys",
    "keys_2",
    "monkey",
    "policy_model_name",
    "keyword",
    "secretary",
    "passwordless",
)


@pytest.mark.parametrize("name", SECRET)
def test_n5_secret_names(name: str) -> None:
    assert is_secret_name(name)
    assert redacted({"outer": [{name: "hunter2hunter2"}]}) == {"outer": [{name: "***"}]}
    for text in (f"{name}: hunter2", f"{name}=hunter2", f'"{name}": "hunter2, too"', f"'{name}' = 'hunter2'"):
        assert "hunter2" not in redacted_text(text)
        assert name in redacted_text(text)


@pytest.mark.parametrize("name", PLAIN)
def test_n5_names_that_only_look_like_secrets(name: str) -> None:
    assert not is_secret_name(name)
    assert redacted({name: "value"}) == {name: "value"}
    assert redacted_text(f"{name}=17, {name}: seventeen") == f"{name}=17, {name}: seventeen"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Authorization: Bearer abc.def-ghi", "Authorization: ***"),
        ("headers={'Authorization': 'Bearer abc.def'}", "headers={'Authorization': '***'}"),
        ("sent Bearer abcdefgh to it", "sent Bearer *** to it"),
        ("dsn postgres://me:pw@host:5432/db is down", "dsn postgres://***@host:5432/db is down"),
        ("GET http://h/?api_key=abc&n=1", "GET http://h/?api_key=***&n=1"),
        ("GET https://s3cr3t@host/x", "GET https://***@host/x"),
        ("http://h/x?mail=a@b and http://h?mail=a@b", "http://h/x?mail=a@b and http://h?mail=a@b"),
        ("Cookie: a=b1; c=d2; e=f3 password='x y' end", "Cookie: *** password='***' end"),
        ("{'cookie': 'a=b1; c=d2', 'n': 1}", "{'cookie': '***', 'n': 1}"),
        ("Set-Cookie: a=b1; Path=/x; HttpOnly", "Set-Cookie: ***; HttpOnly"),
        ("http://127.0.0.1:8000/v1 refused", "http://127.0.0.1:8000/v1 refused"),
    ],
)
def test_n5_text(text: str, shown: str) -> None:
    assert redacted_text(text) == shown


def test_n5_known_values_are_masked_wherever_they_stand() -> None:
    settings = {
        "policy_api_key": "sk-12345678",
        "judge": [{"auth": {"token": "tok-987654"}}],
        "n_tokens": "plain-text",
    }
    values = secret_values(settings)
    assert values == {"sk-12345678", "tok-987654"}
    assert redacted_text("sk-12345678/tok-987654/plain-text", values) == "***/***/plain-text"


def test_n5_short_values_do_not_tear_the_text_apart() -> None:
    assert secret_values({"api_key": "k", "token": ""}) == frozenset()
    assert redacted({"api_key": "", "token": None}) == {"api_key": "", "token": None}
