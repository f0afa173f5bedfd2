"""A pause writes what a framework has added to its messages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshpoint import Call, IncompatibleState
from meshpoint.frameworks.history import History, ToolCall, ToolCallKind, Turn, lost_part

CALLS = [Call("a", "flights", 1)]
WAITING = ToolCall("id-1", "flights", ToolCallKind.PEER, {"city": "Rome"})


def turn(*messages: Any) -> Turn:
    return Turn(messages, [WAITING], extra={"usage": 7})


def test_a_short_history_is_written_whole() -> None:
    first = History().pause(turn("a"), CALLS, "1.0")
    second = History.read(first.state, ()).pause(turn("a", "b"), CALLS, "1.0")
    assert first.append is second.append is None
    assert json.loads(second.state)["messages"] == ["a", "b"]


def test_a_long_history_is_appended() -> None:
    long = "x" * 3000
    first = History().pause(turn(long), CALLS, "1.0")
    second = History.read(first.state, ()).pause(turn(long, "b"), CALLS, "1.1")
    assert (second.state, second.append is None) == (first.state, False)
    assert len(second.append or b"") < 300
    third = History.read(second.state, [second.append or b""])
    assert third.messages == [long, "b"]
    assert third.calls == [WAITING]
    assert third.extra == {"usage": 7}
    assert third.libraries == {"1.0", "1.1"}
    fourth = third.pause(turn(long, "b", "c"), CALLS, "1.1")
    assert json.loads(fourth.append or b"")["messages"] == ["c"]


def test_a_last_message_that_grows_is_written_again_alone() -> None:
    """A turn has called a tool and a peer. Both results are in one message."""
    long = "x" * 3000
    first = History().pause(turn(long, "tool"), CALLS, "1.0")
    second = History.read(first.state, ()).pause(turn(long, "tool, peer", "b"), CALLS, "1.0")
    assert (second.state, second.append is None) == (first.state, False)
    assert len(second.append or b"") < 300
    third = History.read(second.state, [second.append or b""])
    assert third.messages == [long, "tool, peer", "b"]


@pytest.mark.parametrize("number", ["inf", "-inf", "nan"])
def test_a_number_that_json_cannot_represent_is_kept(number: str) -> None:
    """A person may have approved it."""
    call = ToolCall("id-1", "pay", ToolCallKind.APPROVAL, {"limits": [float(number)]})
    paused = History().pause(Turn(["a"], [call]), CALLS, "1.0")
    (read,) = History.read(paused.state, ()).calls
    assert str(read.arguments["limits"]) == f"[{number}]"


@pytest.mark.parametrize("messages", [["summary"], ["other", "b", "c"], []])
def test_a_changed_history_starts_the_log_again(messages: list[str]) -> None:
    long = "x" * 3000
    first = History().pause(turn(long, "b"), CALLS, "1.0")
    paused = History.read(first.state, ()).pause(turn(*messages), CALLS, "1.0")
    assert paused.append is None
    assert History.read(paused.state, ()).messages == messages


def test_a_damaged_history_is_refused() -> None:
    state = History().pause(turn("a"), CALLS, "1.0").state
    with pytest.raises(IncompatibleState, match="the history cannot be read"):
        History.read(state, [b"{}"])


@pytest.mark.parametrize(
    ("stored", "read", "lost"),
    [
        ({"a": 1}, {"a": 1, "b": None}, None),
        ([{"a": [1, 2]}], [{"a": [1, 2]}], None),
        ([{"a": 1}], [{"b": 1}], "messages.0.a"),
        ([{"a": [1, {"b": 2}]}], [{"a": [1, {"b": 3}]}], "messages.0.a.1.b"),
        ([1, 2], [1], "messages"),
    ],
)
def test_what_reading_would_lose(stored: Any, read: Any, lost: str | None) -> None:
    assert lost_part(stored, read) == lost
