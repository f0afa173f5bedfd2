"""Every statement that changes a task's state leaves an entry, in its own transaction."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy import event

from meshpoint.adapters.sql import (
    SqlStore,
    batch_statements,
    mailbox_statements,
    operation_statements,
    statements,
    timelines,
)
from meshpoint.adapters.sql.timeline_statements import WRITING_ENTRIES
from meshpoint.adapters.sql.timelines import RECORDED
from meshpoint.model.tasks import TaskState
from meshpoint.model.timeline import Change, TimelineOptions
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.conformance.build import (
    AGENT,
    HERE,
    a_begin,
    a_cancel,
    a_claim,
    a_pause,
    an_end,
    begun,
    paused,
    resumed,
)
from meshpoint.testing.conformance.store_timelines import changes

NOT_RECORDED = {
    "part of another change": {
        "CLEAR_SUSPENSIONS",
        "CLOSE_PENDING",
        "DELETE_CALLS",
        "DELETE_CALLS_NOT_CANCELLING",
        "DELETE_DONE_CALLS",
        "DELETE_JOINS",
        "DETACH_CALLS",
        "INSERT_CALL",
        "INSERT_JOIN",
        "PUT_QUESTION",
        "SET_RECEIVED",
        "UPDATE_ATTEMPT",
        "UPDATE_JOIN",
        "UPDATE_JOINS_ENDED",
        "UPDATE_UNANSWERABLE",
        "UPDATE_WAKE_AT",
    },
    "the task goes on in the same state": {
        "UPDATE_CALL_USAGE",
        "UPDATE_CANCELLERS",
        "UPDATE_KEEP_ALIVE",
        "UPDATE_LEASES",
        "UPDATE_REPLY_ADDRESSES",
        "UPDATE_REQUEST",
        "UPDATE_USAGE",
        "EXTEND_IDLE_DEADLINE",
    },
    "checkpoints and logs have the work within a segment": {
        "APPEND",
        "SAVE",
        "UPDATE_APPENDED",
        "UPDATE_SAVED",
        "UPDATE_TRACKED",
    },
    "the outbox, whose notes a crash may lose": {
        "ADVANCE_CALL",
        "ADVANCE_JOIN",
        "CONFIRM_CALL_DISPATCHED",
        "CONFIRM_CANCEL_SENT",
        "CONFIRM_DISPATCHED",
        "CONFIRM_JOIN_DISPATCHED",
        "CONFIRM_REPLIED",
        "CONFIRM_REPLY_SENT",
        "LEASE_CALL",
        "LEASE_JOIN",
        "LEASE_REPLY",
        "UPDATE_REPLY_DUE",
        "UPDATE_UNROUTABLE",
    },
    "deletion": {
        "DELETE_CANCELLED_CALL",
        "DELETE_OLD_SIGNALS",
        "DELETE_TASKS",
        "UPDATE_EXPIRY",
    },
    "damaged rows": {"POSTPONE_KEEP_ALIVE", "POSTPONE_TASK"},
}
_TABLES = (
    "agent_paused_tasks|agent_peer_sub_tasks|agent_parallel_invocations"
    "|agent_task_signals|agent_task_questions"
)
_WRITES = re.compile(rf"(INSERT INTO|UPDATE|DELETE FROM) ({_TABLES})\b")
_MODULES = (statements, operation_statements, mailbox_statements, batch_statements)


def test_every_statement_that_changes_a_task_is_recorded_or_has_a_reason() -> None:
    writing = {
        (name, text)
        for module in _MODULES
        for name, text in vars(module).items()
        if name.isupper() and not name.startswith("_") and isinstance(text, str)
        if _WRITES.search(text)
    }
    unrecorded = {name for name, text in writing if text not in {*RECORDED, *WRITING_ENTRIES}}
    assert unrecorded == set().union(*NOT_RECORDED.values())
    assert {*RECORDED, *WRITING_ENTRIES} <= {text for _, text in writing}


@pytest.fixture
async def store(sqlite_url: str) -> Any:
    store = SqlStore(sqlite_url, namespace="test", timeline=TimelineOptions(HERE.id))
    await store.open()
    yield store
    await store.close()


async def _pause_running(store: CheckpointStore) -> object:
    return await store.pause([a_pause(run=await begun(store))])


async def _claim(store: CheckpointStore) -> object:
    return await store.claim([a_claim(await paused(store))], HERE, 1)


async def _end(store: CheckpointStore) -> object:
    return await store.end([an_end((await resumed(store)).run)])


async def _cancel(store: CheckpointStore) -> object:
    return await store.cancel([a_cancel((await paused(store)).run.task_id)])


@pytest.mark.parametrize(
    ("change", "last"),
    [
        (_pause_running, Change.PAUSED),
        (_claim, Change.ACQUIRED),
        (_end, Change.COMPLETED),
        (_cancel, Change.CANCELLED),
    ],
)
async def test_a_change_is_undone_if_its_entry_cannot_be_written(
    store: SqlStore,
    change: Callable[[CheckpointStore], Awaitable[object]],
    last: Change,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write = timelines.NewEntries.write

    async def fail(entries: timelines.NewEntries, tx: Any) -> None:
        await write(entries, tx)
        if any(kind is last for _, kind, _ in entries._entries):
            raise RuntimeError("the process dies here")

    monkeypatch.setattr(timelines.NewEntries, "write", fail)
    with pytest.raises(RuntimeError, match="dies here"):
        await change(store)
    (task,) = await store.tasks()
    assert (
        task.state
        is {
            Change.PAUSED: TaskState.RUNNING,
            Change.ACQUIRED: TaskState.WAITING,
            Change.COMPLETED: TaskState.RUNNING,
            Change.CANCELLED: TaskState.WAITING,
        }[last]
    )
    assert last not in await changes(store, task.task_id)


async def test_without_timelines_no_statement_names_them(sqlite_url: str) -> None:
    store = SqlStore(sqlite_url, namespace="test")
    await store.open()
    sent: list[str] = []
    event.listen(
        store._database.writing_engine,
        "before_cursor_execute",
        lambda connection, cursor, statement, *rest: sent.append(statement),
    )
    run = (await resumed(store)).run
    await store.end([an_end(run)])
    assert await store.prune_timelines(AGENT, 10) == 0
    await store.close()
    assert sent
    assert not [each for each in sent if "timeline" in each]


async def test_a_command_records_changes_of_tasks_with_a_timeline(
    store: SqlStore, sqlite_url: str
) -> None:
    recorded, options = await paused(store), TimelineOptions(known_only=True)
    command = SqlStore(sqlite_url, namespace="test", timeline=options)
    await command.open()
    other = a_begin()
    await command.begin([other])
    ids = [recorded.run.task_id, other.run.task_id]
    await command.suspend(ids)
    assert await changes(store, ids[0]) == [Change.PAUSED, Change.SUSPENDED]
    assert await changes(store, ids[1]) == []
    assert [each.replica for each in await store.timeline(ids[0])] == [HERE.id, None]
    await command.close()


async def test_a_timeline_belongs_to_its_namespace(store: SqlStore, sqlite_url: str) -> None:
    pause = await paused(store)
    other = SqlStore(sqlite_url, namespace="other")
    await other.open()
    assert await other.timeline(pause.run.task_id) == []
    await other.close()
