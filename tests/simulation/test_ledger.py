"""The ledger, in particular rows of cancels that arrive before their request."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from meshpoint.adapters.inprocess.rows import CallRow, TaskRow
from meshpoint.model.checkpoint import Requester, TaskState
from meshpoint.model.ids import AgentName, RunId, TaskId
from meshpoint.model.messages import responses_of

from .ledger import DATABASE, Ledger

NOW = datetime(2026, 1, 1, tzinfo=UTC)
EARLY = TaskRow(
    TaskId("t"),
    AgentName("leaf"),
    RunId("cancel"),
    Requester(),
    TaskState.CANCELLED,
    NOW,
    NOW,
    fence=0,
    reply=b"early",
)
ANSWERED = Requester(responses_of(AgentName("root")), AgentName("root"))
KEPT = replace(EARLY, run_id=RunId("run"), requester=ANSWERED, state=TaskState.COMPLETED, reply=b"done")
RUNNING = replace(KEPT, state=TaskState.RUNNING, fence=1, reply=b"")


def noted(*rows: TaskRow) -> list[str]:
    """Violations that the ledger reports after these writes."""
    ledger = Ledger()
    for row in rows:
        ledger.written(DATABASE, row)
    return ledger.broken


@pytest.mark.parametrize("rows", [(EARLY, EARLY), (EARLY, KEPT), (EARLY, KEPT, KEPT)])
def test_a_kept_reply_may_replace_an_early_cancel(rows: tuple[TaskRow, ...]) -> None:
    assert noted(*rows) == []


def test_a_task_that_was_cancelled_early_never_begins() -> None:
    assert noted(EARLY, RUNNING) == ["t: cancelled early, but is running"]


@pytest.mark.parametrize("second", [EARLY, replace(KEPT, reply=b"other")])
def test_a_kept_reply_stays_as_it_is(second: TaskRow) -> None:
    assert noted(EARLY, KEPT, second) == ["t: ended twice"]


def test_a_task_that_ended_never_begins_again() -> None:
    assert "t: ended, but is running again" in noted(KEPT, RUNNING)


def test_a_dropped_reply_excuses_those_that_wait_for_it_and_nobody_else() -> None:
    ledger = Ledger()
    ledger.written("root-1", calling("root", "nested"))
    ledger.written("nested-1", calling("nested", "leaf"))
    ledger.written("root-1", calling("other", "another leaf"))
    assert ledger.excused() == set()
    ledger.dropped(["leaf"])
    assert ledger.excused() == {"leaf", "nested", "root"}


def calling(task_id: str, call: str) -> TaskRow:
    """A task that waits for one call."""
    pending = CallRow(TaskId(call), "0", AgentName("leaf"), 1, b"", {}, NOW, NOW, NOW, None)
    return replace(RUNNING, task_id=TaskId(task_id), state=TaskState.WAITING, calls={pending.sub_task_id: pending})
