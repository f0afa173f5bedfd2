"""Errors of subtasks, and protection of the process that reads a forged record of one."""

from __future__ import annotations

import json
import sys

import pytest

from meshpoint.errors import PeerFailed, SubtaskFailed
from meshpoint.model.error_text import MAX_ERROR_TEXT_LENGTH
from meshpoint.model.outcomes import Failed, FailureKind
from meshpoint.subtasks.failures import rebuild_error, serialize_error


class Refused(ValueError):
    """An error class of the application."""


class PickyError(Exception):
    def __init__(self) -> None:
        super().__init__("it takes no arguments")


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("it has no text")


def forged_error(type_: str, *args: object, message: str = "x") -> str:
    return json.dumps({"type": type_, "args": list(args), "message": message})


@pytest.mark.parametrize(
    "error", [ValueError("x"), KeyError("x"), Refused("x", 1), OSError(2, "x")]
)
def test_an_error_of_a_loaded_type_is_rebuilt(error: Exception) -> None:
    rebuilt = rebuild_error("fetch", serialize_error(error))
    assert type(rebuilt) is type(error)
    assert rebuilt.args == error.args


def test_a_long_error_is_rebuilt_truncated() -> None:
    rebuilt = rebuild_error("fetch", serialize_error(Refused("x" * 1_000_000)))
    assert type(rebuilt) is Refused
    assert str(rebuilt).startswith("x" * MAX_ERROR_TEXT_LENGTH + "…")
    assert len(str(rebuilt)) < MAX_ERROR_TEXT_LENGTH + 100


def test_the_configured_secrets_of_an_error_are_masked() -> None:
    text = serialize_error(Refused("iban=hunter2, password=hunter2"), ["iban"])
    assert str(rebuild_error("fetch", text)) == "iban=***, password=***"
    assert "hunter2" not in text


def test_an_error_with_an_unreadable_message_is_recorded() -> None:
    assert isinstance(rebuild_error("fetch", serialize_error(MuteError())), SubtaskFailed)


def test_a_record_imports_nothing() -> None:
    assert "antigravity" not in sys.modules
    assert isinstance(rebuild_error("fetch", forged_error("antigravity:Error")), SubtaskFailed)
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
    assert isinstance(rebuild_error("fetch", forged_error(type_, "x")), SubtaskFailed)


def test_an_error_with_other_arguments_is_rebuilt_as_a_failed_subtask() -> None:
    rebuilt = rebuild_error("fetch", serialize_error(PickyError()))
    assert isinstance(rebuilt, SubtaskFailed)
    assert "it takes no arguments" in str(rebuilt)


def test_a_failed_peer_call_is_rebuilt_with_its_outcome() -> None:
    error = PeerFailed("flights", Failed(FailureKind.TIMEOUT, "late, password=hunter2"))
    rebuilt = rebuild_error("fetch", serialize_error(error))
    assert isinstance(rebuilt, PeerFailed)
    assert rebuilt.peer == "flights"
    assert rebuilt.outcome == Failed(FailureKind.TIMEOUT, "late, password=***")


@pytest.mark.parametrize("failure", [["flights", "odd", "x"], ["flights"], 1, {}])
def test_a_damaged_record_of_a_peer_call_is_a_failed_subtask(failure: object) -> None:
    record = json.loads(serialize_error(PeerFailed("flights", Failed(FailureKind.TIMEOUT))))
    assert isinstance(
        rebuild_error("fetch", json.dumps({**record, "peer_failure": failure})), SubtaskFailed
    )
