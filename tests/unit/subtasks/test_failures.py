"""Errors of subtasks, and protection of the process that reads a forged record of one."""

from __future__ import annotations

import json
import sys

import pytest

from meshpoint.errors import SubtaskFailed
from meshpoint.model.error_text import MAX_ERROR_TEXT
from meshpoint.subtasks.failures import rebuild_error, serialize_error


class Refused(ValueError):
    """An error class of the application."""


class Picky(Exception):
    def __init__(self) -> None:
        super().__init__("it takes no arguments")


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("it has no text")


def forged(type_: str, *args: object, message: str = "x") -> str:
    return json.dumps({"type": type_, "args": list(args), "message": message})


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("x"), Refused("x", 1), OSError(2, "x")])
def test_an_error_of_a_loaded_type_is_made_again(error: Exception) -> None:
    again = rebuild_error("fetch", serialize_error(error))
    assert type(again) is type(error)
    assert again.args == error.args


def test_a_long_error_is_made_again_cut() -> None:
    again = rebuild_error("fetch", serialize_error(Refused("x" * 1_000_000)))
    assert type(again) is Refused
    assert str(again).startswith("x" * MAX_ERROR_TEXT + "…")
    assert len(str(again)) < MAX_ERROR_TEXT + 100


def test_the_configured_secrets_of_an_error_are_masked() -> None:
    text = serialize_error(Refused("iban=hunter2, password=hunter2"), ["iban"])
    assert str(rebuild_error("fetch", text)) == "iban=***, password=***"
    assert "hunter2" not in text


def test_an_error_whose_message_cannot_be_read_is_kept() -> None:
    assert isinstance(rebuild_error("fetch", serialize_error(Mute())), SubtaskFailed)


def test_a_record_imports_nothing() -> None:
    assert "antigravity" not in sys.modules
    assert isinstance(rebuild_error("fetch", forged("antigravity:Error")), SubtaskFailed)
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    "type_",
    [
        "os:system",
        "builtins:exec",
        "builtins:SystemExit",
        "builtins:KeyboardInterrupt",
        "json:decoder.JSONDecodeError",  # the module path differs from the class's own
        "meshpoint.subtasks.failures:SubtaskFailed",
        "builtins:ValueError.__init__",
        "no.such:Error",
        "",
        ":",
    ],
)
def test_only_a_loaded_exception_class_is_called(type_: str) -> None:
    assert isinstance(rebuild_error("fetch", forged(type_, "x")), SubtaskFailed)


def test_an_error_that_wants_other_arguments_is_a_failed_subtask() -> None:
    again = rebuild_error("fetch", serialize_error(Picky()))
    assert isinstance(again, SubtaskFailed)
    assert "it takes no arguments" in str(again)
