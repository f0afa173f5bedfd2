"""The ledger: early cancels, attempts at calls, and signals."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from meshpoint.adapters.inprocess.rows import CallRow, SignalRow, TaskRow
from meshpoint.model.call_attempts import CallAttempt, superseded
from meshpoint.model.ids import AgentName, RunId, TaskId
from meshpoint.model.mailbox import MailAccepted, SendSignal
from meshpoint.model.messages import response_queue
from meshpoint.model.outcomes import Failed, FailureKind, encode_outcome
from meshpoint.model.retry_policy import RetryPolicy
from meshpoint.model.tasks import Requester, TaskState
from meshpoint.model.waits import SIGNAL_PREFIX

from .ledger import Ledger
from .retrying_agents import FINAL, RETRYABLE
from .values import DATABASE

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


POLICY = RetryPolicy(max_attempts=2, initial_interval=2, jitter=False)
AGAIN = Failed(FailureKind.ERROR, RETRYABLE)


def attempted(*outcomes: Failed, wait: float = 2, policy: RetryPolicy = POLICY) -> TaskRow:
    """A task that waits for the attempt after those with `outcomes`."""
    row, begun = waiting_task("t", "first"), CallAttempt(policy, None, NOW.timestamp())
    call = next(iter(row.calls.values()))
    row.calls, row.expected, row.generation = {}, 1, 1
    for number, outcome in enumerate([*outcomes, None], 1):
        row.calls[TaskId(f"attempt {number}")] = replace(
            call,
            sub_task_id=TaskId(f"attempt {number}"),
            generation=row.generation if outcome is None else superseded(row.generation),
            attempt=replace(begun, number=number),
            outcome=None if outcome is None else encode_outcome(outcome),
            created_at=NOW,
            send_at=NOW + timedelta(seconds=wait),
        )
    return row


@pytest.mark.parametrize(
    ("row", "violation"),
    [
        (attempted(AGAIN), ""),
        (attempted(AGAIN, AGAIN), "is number 3 of its rows"),
        (attempted(Failed(FailureKind.ERROR, FINAL)), "follows Failed"),
        (attempted(AGAIN, wait=1), "waits only until"),
        (attempted(AGAIN, policy=replace(POLICY, max_elapsed=1)), "begins after 1"),
        (replace(attempted(), completed=1), "counted 1 of 1 outcomes, but has 0 of 1"),
    ],
)
def test_attempts_follow_the_policy(row: TaskRow, violation: str) -> None:
    found = violations_after(row)
    assert violation in " ".join(found) if violation else found == []


def test_an_attempt_is_not_sent_before_it_is_due() -> None:
    ledger = Ledger(lambda: NOW + timedelta(seconds=1))
    ledger.check_written(DATABASE, attempted(AGAIN))
    ledger.attempts.check_sent("attempt 2")
    assert "was sent before" in ledger.violations[0]


ONE, TWO = ("chat", "one"), ("chat", "two")


@pytest.mark.parametrize(
    ("received", "violation"),
    [
        ([], ""),
        ([ONE, TWO], ""),
        ([TWO], "but the database accepted"),
        ([ONE, ONE], "received one twice"),
        ([("chat", "three")], "which nobody sent"),
    ],
)
def test_signals_are_received_once_and_in_order(
    received: list[tuple[str, str]], violation: str
) -> None:
    ledger = Ledger()
    ledger.signals.is_strict = True
    for name, id_ in (ONE, TWO):
        ledger.signals.record_sent("t", name, id_)
        command = SendSignal(TaskId("t"), AgentName("listener"), id_, name, b"1", "ada")
        ledger.signals.check_kept(DATABASE, command, MailAccepted())
        ledger.signals.record_acknowledged("ada", "t", name, id_)
    ledger.signals.check_received("t", received)
    ledger.signals.check_end([])
    assert violation in " ".join(ledger.violations) if violation else not ledger.violations


def test_an_acknowledged_signal_is_in_the_database() -> None:
    ledger = Ledger()
    ledger.signals.is_strict = True
    ledger.signals.record_acknowledged("ada", "t", "chat", "one")
    assert "not in the database" in ledger.violations[0]


def test_a_signal_does_not_wait_next_to_a_wait_for_it() -> None:
    row = waiting_task("t", "wait")
    row.calls[TaskId("wait")].peer = AgentName(f"{SIGNAL_PREFIX}chat")
    row.expected = row.generation = 1
    row.signals.append(SignalRow(1, "one", "chat", "ada", 1, "", NOW, b"1"))
    assert violations_after(row) == ["t waits, and has not received ['one']"]
