"""The ledger, in particular rows of cancels that arrive before their request."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from meshpoint.adapters.inprocess.rows import CallRow, TaskRow
from meshpoint.model.ids import AgentName, RunId, TaskId
from meshpoint.model.messages import response_queue
from meshpoint.model.tasks import Requester, TaskState

from .ledger import DATABASE, Ledger

NOW = datetime(2026, 1, 1, tzinfo=UTC)
EARLY_CANCEL = TaskRow(
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
ANSWERED = Requester(response_queue(AgentName("root")), AgentName("root"))
STORED_REPLY = replace(
    EARLY_CANCEL, run_id=RunId("run"), requester=ANSWERED, state=TaskState.COMPLETED, reply=b"done"
)
RUNNING = replace(STORED_REPLY, state=TaskState.RUNNING, fence=1, reply=b"")


def violations_after(*rows: TaskRow) -> list[str]:
    """Violations that the ledger reports after these writes."""
    ledger = Ledger()
    for row in rows:
        ledger.check_written(DATABASE, row)
    return ledger.violations


@pytest.mark.parametrize(
    "rows",
    [
        (EARLY_CANCEL, EARLY_CANCEL),
        (EARLY_CANCEL, STORED_REPLY),
        (EARLY_CANCEL, STORED_REPLY, STORED_REPLY),
    ],
)
def test_a_stored_reply_can_replace_an_early_cancel(rows: tuple[TaskRow, ...]) -> None:
    assert violations_after(*rows) == []


def test_a_task_cancelled_before_its_request_never_begins() -> None:
    assert violations_after(EARLY_CANCEL, RUNNING) == ["t: cancelled early, but is running"]


@pytest.mark.parametrize("second", [EARLY_CANCEL, replace(STORED_REPLY, reply=b"other")])
def test_a_stored_reply_must_not_change(second: TaskRow) -> None:
    assert violations_after(EARLY_CANCEL, STORED_REPLY, second) == ["t: ended twice"]


def test_a_task_that_ended_never_begins_again() -> None:
    assert "t: ended, but is running again" in violations_after(STORED_REPLY, RUNNING)


def test_a_dropped_reply_excuses_only_the_tasks_that_wait_for_it() -> None:
    ledger = Ledger()
    ledger.check_written("root-1", waiting_task("root", "nested"))
    ledger.check_written("nested-1", waiting_task("nested", "leaf"))
    ledger.check_written("root-1", waiting_task("other", "another leaf"))
    assert ledger.excused_task_ids() == set()
    ledger.record_dropped(["leaf"])
    assert ledger.excused_task_ids() == {"leaf", "nested", "root"}


def waiting_task(task_id: str, call: str) -> TaskRow:
    """A task that waits for one call."""
    pending = CallRow(TaskId(call), "0", AgentName("leaf"), 1, b"", {}, NOW, NOW, NOW, None)
    return replace(
        RUNNING,
        task_id=TaskId(task_id),
        state=TaskState.WAITING,
        calls={pending.sub_task_id: pending},
    )
