"""Apparent secrets do not leave the task in texts, values or tracebacks."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, JsonValue, ValidationError

from meshpoint.model.secrets import (
    MASK,
    format_traceback,
    is_secret_key,
    json_pointer,
    mask_secrets,
    remove_secrets,
)


@pytest.mark.parametrize(
    "name",
    ["password", "PASSWORD", "db_password", "dbPassword", "OPENAI_API_KEY", "apikey", "x-api-key",
     "accessToken", "aws_secret_access_key", "Authorization", "set-cookie", "cookies",
     "credentials", "secrets", "token2", "pwd", "session_key", "private.key", "api keys",
     "bearer"],
)  # fmt: skip
def test_secret_names_are_recognized(name: str) -> None:
    assert is_secret_key(name)


@pytest.mark.parametrize(
    "name", ["max_tokens", "total_tokens", "key", "monkey", "tokenizer", "token_count", "user", ""]
)
def test_ordinary_names_are_not_secret(name: str) -> None:
    assert not is_secret_key(name)


def test_additional_secret_names_can_be_configured() -> None:
    assert not is_secret_key("account_iban")
    assert is_secret_key("account_iban", ["IBAN"])
    assert is_secret_key("taxId", ("tax-id",))
    assert not is_secret_key("user", ["", "_"])


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("password=hunter2", "password=***"),
        ("password = hunter2, user=ann", "password = ***, user=ann"),
        ("db_password: hunter2 failed", "db_password: *** failed"),
        ("OPENAI_API_KEY=hunter2;", "OPENAI_API_KEY=***;"),
        ('{"api_key": "hunter2", "a": 1}', '{"api_key": "***", "a": 1}'),
        ('{"apiKey":"hun\\"ter2","a":1}', '{"apiKey":"***","a":1}'),
        ("{'secret': 'hunter2', 'a': 1}", "{'secret': '***', 'a': 1}"),
        ("{'secret': b'hunter2'}", "{'secret': b'***'}"),
        (r'"{\"token\": \"hunter2\", \"a\": 1}"', r'"{\"token\": \"***\", \"a\": 1}"'),
        ("Settings(token='hunter2', days=1)", "Settings(token='***', days=1)"),
        ("token='two words', days=1", "token='***', days=1"),
        ("token='hunter2", "token='***'"),
        ("os.environ['DB_PASSWORD'] = 'hunter2'", "os.environ['DB_PASSWORD'] = '***'"),
        ("?user=ann&api_key=hunter2&page=1", "?user=ann&api_key=***&page=1"),
        ("credentials={'user': 'ann', 'pin': 'hunter2'}", "credentials=***"),
        ("postgresql://ann:hunter2@db:5432/x", "postgresql://ann:***@db:5432/x"),
        ("amqp://ann:hun@ter2@mq/%2f", "amqp://ann:***@mq/%2f"),
        ("redis://:hunter2@cache", "redis://:***@cache"),
        ("Authorization: Bearer hunter2", "Authorization: ***"),
        ("Authorization: Basic hunter2==", "Authorization: ***"),
        ("Cookie: a=hunter2; b=hunter2", "Cookie: ***"),
        ("{'cookie': 'a=hunter2; b=2', 'x': 1}", "{'cookie': '***', 'x': 1}"),
        ("with bearer hunter2hunter2", "with bearer ***"),
        ("Cookie: \t hunter2 \t", "Cookie: \t *** \t"),
        ("Cookie :  \xa0hunter2, x", "Cookie :  ***"),
        ("Cookie:\nhunter2", "Cookie:\nhunter2"),
        ("Cookie:   'hunter2', x", "Cookie:   '***', x"),
        ("token: Bearer hunter2, a", "token: ***, a"),
        ("sent sk-proj-hunter2hunter2hunter2.", "sent ***."),
        ("sent ghp_hunter2hunter2hunter2hunter2", "sent ***"),
        ("sent xoxb-123456-hunter2hunter2", "sent ***"),
        ("sent AKIAHUNTER2HUNTER2HU", "sent ***"),
        ("sent eyJhbGciOiJI.eyJodW50ZXIy.hunter2", "sent ***"),
        ("-----BEGIN RSA PRIVATE KEY-----\nhunter2\n-----END RSA PRIVATE KEY-----.", "***."),
        ("iban=hunter2 and IBAN: hunter2", "iban=*** and IBAN: ***"),
        ("taxId=hunter2, tax_id=hunter2", "taxId=***, tax_id=***"),
    ],
)
def test_secrets_are_masked(text: str, hidden: str) -> None:
    assert mask_secrets(text, ["iban", "tax-id"]) == hidden
    assert mask_secrets(hidden, ["iban", "tax-id"]) == hidden


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens=100, total_tokens: 5",
        "KeyError: 'token'",
        "the task-0123456789abcdef0123456789 waits for the disk-0123456789abcdef01234567",
        "https://example.com:8080/a@b",
        "see https://docs.example.com/x?page=1 and mail ann@example.com",
        "user=ann, key=5",
        'File "/srv/app/password_reset.py", line 3, in reset_password',
        "",
    ],
)
def test_other_texts_are_not_masked(text: str) -> None:
    assert mask_secrets(text) == text


def test_a_refused_value_of_a_secret_field_is_masked() -> None:
    class Settings(BaseModel):
        db_password: int
        port: int

    with pytest.raises(ValidationError) as caught:
        Settings.model_validate({"db_password": "hunter2", "port": "many"})
    hidden = mask_secrets(str(caught.value))
    assert "hunter2" not in hidden
    assert "many" in hidden


@given(st.text(alphabet="aptokensecr:='\"\\{}[] \n*#/@-_1", max_size=80))
def test_masking_is_idempotent(text: str) -> None:
    assert mask_secrets(mask_secrets(text)) == mask_secrets(text)


@pytest.mark.parametrize(
    "text",
    ["a" * 200_000, "password" * 25_000, "token=" * 30_000, "://" * 60_000,
     "-----BEGIN PRIVATE KEY-----" * 30_000, 'token="' * 30_000, 'token=\\"' * 25_000,
     "eyJaaaaa." * 20_000, "token " * 30_000, "password\n" * 20_000,
     "cookie:" + " " * 300_000, "authorization=" + "\t" * 300_000, "cookie" + " " * 300_000,
     "cookie:" + "\xa0" * 300_000, "cookie:\v" * 100_000, "password=" + " " * 300_000 + ",",
     "password\n" + "input_value=" * 100_000, "bearer" + " " * 300_000],
    ids=lambda text: repr(text[:20]),
)  # fmt: skip
@pytest.mark.timeout(120)
def test_no_text_takes_quadratic_time(text: str) -> None:
    mask_secrets(text)  # a pattern that backtracks would run for hours


def test_a_pointer_escapes_what_its_syntax_needs() -> None:
    assert json_pointer() == ""
    assert json_pointer("a/b", 0, "c~d", "") == "/a~1b/0/c~0d/"


def test_a_copy_without_secrets_has_null_in_their_place() -> None:
    value: JsonValue = {
        "rows": [{"login": "ann", "pin": "1234"}, {"pin": 5}],
        "a/b": {"~": "x"},
        "db_password": "hunter2",
        "credentials": {"user": "ann"},
        "tokens": {"token": "t", "max_tokens": 5},
    }
    copy, tiers = remove_secrets(value, ["/rows/0/pin", "/a~1b/~0", "/nowhere/0"])
    assert copy == {
        "rows": [{"login": "ann", "pin": None}, {"pin": 5}],
        "a/b": {"~": None},
        "db_password": None,
        "credentials": None,
        "tokens": {"token": None, "max_tokens": 5},
    }
    assert tiers == ("/rows/0/pin", "/a~1b/~0", "/db_password", "/credentials", "/tokens/token")
    assert value["db_password"] == "hunter2"  # type: ignore[index, call-overload]  # a dict


def test_empty_values_are_not_secrets() -> None:
    value: JsonValue = {"password": None, "secret": True, "cookies": {}, "token": ""}
    assert remove_secrets(value, ["/password"]) == (value, ())


def test_the_whole_value_can_be_secret() -> None:
    assert remove_secrets("s", [""]) == (None, ("",))
    assert remove_secrets({"iban": "x"}, (), ["iban"]) == ({"iban": None}, ("/iban",))


E = TypeVar("E", bound=BaseException)


def raise_and_catch(error: E, *, depth: int = 0, cause: BaseException | None = None) -> E:
    try:
        if depth:
            raise_at_depth = raise_and_catch(error, depth=depth - 1, cause=cause)
            raise raise_at_depth
        raise error from cause
    except BaseException:
        return error


def recurse(depth: int) -> None:
    local = "hunter2"
    if depth:
        recurse(depth - 1)
    raise ValueError(f"at the bottom\0 {len(local)}")


def test_a_traceback_shows_causes_and_groups_without_secrets_or_locals() -> None:
    cause = raise_and_catch(OSError("postgresql://ann:hunter2@db is unavailable"))
    group = ExceptionGroup(
        "two",
        [
            raise_and_catch(KeyError("a")),
            raise_and_catch(ValueError("token=hunter2, iban=hunter2")),
        ],
    )
    traceback_text = format_traceback(raise_and_catch(group, cause=cause), ["iban"])
    assert "hunter2" not in traceback_text
    for part in (
        "OSError: postgresql://ann:***@db is unavailable",
        "direct cause",
        "ExceptionGroup: two",
        "token=***, iban=***",
    ):
        assert part in traceback_text
    assert traceback_text.splitlines()[0].startswith("Traceback")


def test_the_innermost_frames_are_kept() -> None:
    with pytest.raises(ValueError, match="bottom") as caught:
        recurse(60)
    traceback_text = format_traceback(caught.value, frames=3)
    assert traceback_text.count('File "') == 3
    assert "raise ValueError(" in traceback_text
    assert "test_the_innermost_frames_are_kept" not in traceback_text
    assert traceback_text.endswith("ValueError: at the bottom\N{REPLACEMENT CHARACTER} 7")
    assert "hunter2" not in traceback_text


@pytest.mark.parametrize("limit", [8000, 1000, 200])
def test_a_long_traceback_is_shortened_in_the_middle(limit: int) -> None:
    traceback_text = format_traceback(
        raise_and_catch(ValueError("\n".join(f"line {n} ä" for n in range(5000)))),
        limit_bytes=limit,
    )
    assert len(traceback_text.encode()) <= limit
    assert len(traceback_text.encode()) > limit * 0.7
    assert traceback_text.startswith("Traceback")
    assert traceback_text.endswith("line 4999 ä")
    [middle] = [line for line in traceback_text.splitlines() if "left out" in line]
    assert middle.startswith("… ")


@pytest.mark.parametrize(
    "message", ["ä" * 1_000_000, "\n" * 1_000_000, "\ud800 surrogate", "x\r\n\x85y" * 10_000, ""]
)
def test_any_message_fits(message: str) -> None:
    traceback_text = format_traceback(raise_and_catch(ValueError(message)), limit_bytes=2000)
    assert 0 < len(traceback_text.encode()) <= 2000
    assert "\0" not in traceback_text


def test_an_unprintable_error_is_named_by_its_class() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert "Mute" in format_traceback(raise_and_catch(Mute()))


def test_an_error_that_was_never_raised_has_no_frames() -> None:
    error: Any = ValueError("token=hunter2")
    assert format_traceback(error) == "ValueError: token=***"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a -----BEGIN PRIVATE KEY-----\nx\n-----END PRIVATE KEY----- b", f"a {MASK} b"),
        ("a -----BEGIN RSA PRIVATE KEY-----\nx", f"a {MASK}"),  # truncated
        ("-----END PRIVATE KEY----- b", "-----END PRIVATE KEY----- b"),
        (
            "-----BEGIN PRIVATE KEY-----1-----BEGIN PRIVATE KEY-----2-----END PRIVATE KEY-----3",
            f"{MASK}3",
        ),
        ("-----BEGIN PRIVATE KEY-----1-----END PRIVATE KEY-----b" * 2, f"{MASK}b{MASK}b"),
    ],
)
def test_private_keys_are_masked(text: str, expected: str) -> None:
    assert mask_secrets(text) == expected
