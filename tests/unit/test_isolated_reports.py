"""What a suspect's process reports of an event that does not fit into one atomic write."""

from __future__ import annotations

import json
import os
from typing import Any

from pydantic import JsonValue

from meshpoint.isolated import ParentReporter
from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.ids import AgentName, ReplicaId, TaskId


def reported(**detail: JsonValue) -> dict[str, Any]:
    """The detail of a failed task, as the parent reads it."""
    readable, writable = os.pipe()
    try:
        event = Event(
            Step.TASK_FAILED,
            Phase.INFO,
            AgentName("travel"),
            ReplicaId("replica"),
            (TaskId("t-1"),),
            detail,
        )
        ParentReporter(writable).emit(event)
        report = json.loads(os.read(readable, 100_000))["event"]
    finally:
        os.close(readable)
        os.close(writable)
    assert report["step"] == "task_failed"
    found: dict[str, Any] = report["detail"]
    return found


def test_a_short_event_is_reported_as_it_is() -> None:
    assert reported(kind="error", reason="odd") == {"kind": "error", "reason": "odd"}


def test_a_long_event_keeps_its_kind_and_the_end_of_its_traceback() -> None:
    traceback = "Traceback:\n" + "x" * 8_000 + "\nValueError: odd"
    detail = reported(kind="error", reason="odd" + "y" * 2_000, traceback=traceback)
    assert detail["kind"] == "error"
    assert detail["reason"].startswith("oddyyy")
    assert detail["traceback"].endswith("ValueError: odd")


def test_an_event_that_never_fits_is_reported_without_details() -> None:
    assert reported(**{f"key {number}": "x" * 100 for number in range(100)}) == {}
