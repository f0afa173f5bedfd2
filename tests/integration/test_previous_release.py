"""What this release writes, read as the previous one reads it: see `previous_release`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

import previous_release
from meshpoint import FailureKind, Outcomes, Paused, Peer, TaskExecutionContext, agent
from meshpoint.adapters.redis.checkpoint_cache import encode_checkpoint
from meshpoint.adapters.sql import SqlStore
from meshpoint.adapters.sql.engine import async_url
from meshpoint.adapters.sql.rows import FAR_FUTURE
from meshpoint.model.context import A2AContext
from meshpoint.model.ids import AgentName, RunId, TaskId
from meshpoint.model.messages import Address
from meshpoint.model.outcomes import Ok
from meshpoint.model.subtasks import AgentCheckpoint, Child, MemoryWrite, SubtaskStatus
from meshpoint.model.tasks import CallState, Run, TaskFilter, TaskState
from meshpoint.model.transitions import (
    Attach,
    Attached,
    AttachEnded,
    Save,
    SuspendRefused,
)
from meshpoint.model.usage import Tokens
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    AGENT,
    HERE,
    HOUR,
    LEASE,
    NEWER,
    REQUESTER,
    SECOND,
    STRANGER,
    a_call,
    a_checkpoint,
    a_pause,
    a_record,
    a_release,
    a_requester,
    a_revive,
    an_end,
    answered,
    one,
    operating,
    parked,
    paused,
    ready,
    resumed,
    row,
    write_end,
    write_pause,
)

OWN, USES = "src:1f", "RATE=1 helper=2"
RECORDS = (
    a_record("reused", '{"key": 1}').model_copy(
        update={
            "function": f"{OWN} uses {USES}",
            "reused_in": 2,
            "context": "{}",
            "secrets": ("/key\0",),
            "seconds": 1.5,
            "generation": 3,
        }
    ),
    a_record("alone", "[]").model_copy(update={"function": f"{OWN} uses "}),
    a_record("explicit", "1").model_copy(update={"function": "v:what it uses now"}),
    a_record("migrated", "2").model_copy(update={"function": None, "inputs": {}}),
    a_record("broken").model_copy(update={"error": "{}", "again": "why", "retry": 2}),
)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def store(database_url: str, clock: FakeClock) -> AsyncIterator[SqlStore]:
    store = SqlStore(database_url, namespace="test", clock=clock, checkpoint_archive=True)
    await store.open()
    yield store
    await store.close()


async def fetch(url: str, query: str) -> list[Any]:
    engine = create_async_engine(async_url(url))
    async with engine.connect() as connection:
        rows = (await connection.execute(text(query))).all()
    await engine.dispose()
    return list(rows)


async def execute(url: str, statement: str, **values: Any) -> None:
    engine = create_async_engine(async_url(url))
    async with engine.begin() as connection:
        await connection.execute(text(statement), values)
    await engine.dispose()


async def everything_saved(store: SqlStore) -> tuple[Run, AgentCheckpoint]:
    """A checkpoint of a running operation with its own records, in which every field is set."""
    run = await operating(store)
    checkpoint = a_checkpoint(
        run,
        1,
        *RECORDS,
        saved_progress={"broken": "[1]"},
        agent_config={"model": "m"},
        error_details={"trace": ["a", None]},
        failure_reason="broken",
        retry_count=2,
        extra={"odd": "\0"},
        l1_snapshot_hash="digest",
        l1_in_sql="digest",
        memory_writes=[MemoryWrite(digest="d", calls=1, subtasks="reused", seq=1, answers=[1])],
        memory_writes_replace_log=True,
        records_from=None,
    )
    await store.save(Save(run, checkpoint))
    return run, checkpoint


def without_additions(checkpoint: AgentCheckpoint) -> dict[str, Any]:
    """What the previous release knows of `checkpoint`."""
    known = previous_release.AgentCheckpoint.model_fields.keys()
    content = checkpoint.model_dump(include=set(known))
    functions = [OWN, OWN, "v:what it uses now", None, "1"]  # as it computes them itself
    for record, function in zip(content["subtasks"], functions, strict=True):
        record["function"] = function
        del record["reused_in"]
    return content


async def test_it_reads_every_checkpoint(store: SqlStore, database_url: str) -> None:
    _, written = await everything_saved(store)
    (row,) = await fetch(database_url, "SELECT * FROM agent_checkpoints")
    assert previous_release.read_checkpoint(row).model_dump() == without_additions(written)


async def test_this_release_reads_the_additions_too(store: SqlStore) -> None:
    run, written = await everything_saved(store)
    found = await store.latest(run.task_id)
    assert found is not None
    assert found.model_copy(update={"checkpoint_time": None}) == written


async def test_it_reads_a_checkpoint_that_an_end_copied(
    store: SqlStore, database_url: str
) -> None:
    run, written = await everything_saved(store)
    await write_end(store, an_end(run, TaskState.FAILED, reason="no answer"))
    (row,) = await fetch(database_url, "SELECT * FROM agent_checkpoints WHERE seq = 2")
    changes = {"seq": 2, "retry_count": 0, "failure_reason": "no answer", "error_details": None}
    expected = without_additions(written.model_copy(update=changes))
    assert previous_release.read_checkpoint(row).model_dump() == expected
    copied = await store.latest(run.task_id)
    assert copied is not None
    assert copied.subtasks == written.subtasks


async def test_it_takes_a_checkpoint_without_its_own_records_for_another_version(
    store: SqlStore, database_url: str
) -> None:
    """It releases the task for lack of a migration, instead of running its subtasks again."""
    run = await operating(store)
    await store.save(Save(run, a_checkpoint(run, 1, *RECORDS)))
    (row,) = await fetch(database_url, "SELECT * FROM agent_checkpoints")
    seen = previous_release.read_checkpoint(row)
    assert (seen.agent_version, seen.subtasks) == ("7+records", ())
    found = await store.latest(run.task_id)
    assert found is not None
    assert (found.agent_version, found.subtasks) == ("7", RECORDS)


async def test_it_reads_the_archive(store: SqlStore, database_url: str) -> None:
    run, written = await everything_saved(store)
    await write_end(store, an_end(run))
    (row,) = await fetch(database_url, "SELECT * FROM agent_checkpoints_archive")
    assert previous_release.read_checkpoint(row).model_dump() == without_additions(written)
    assert [each.subtasks for each in await store.history(run.task_id)] == [written.subtasks]


async def test_it_reads_children(store: SqlStore, database_url: str) -> None:
    child = Child(id=TaskId("1"), peer=AgentName("p"), digest="d", subtask="s", retry=2)
    run = await operating(store)
    await write_pause(store, replace(a_pause(run=run), children=(child,)))
    (row,) = await fetch(database_url, "SELECT children FROM agent_operations")
    (found,) = previous_release.read_children(row.children)
    assert found.model_dump() == child.model_dump()


async def test_it_does_not_misread_copies_in_redis() -> None:
    """It knows the markers 0 and 1, and falls back to the database for any other."""
    checkpoint = a_checkpoint(Run(TaskId("1"), AgentName("a"), RunId("r")), 1, *RECORDS)
    for size in (0, 10_000):
        larger = checkpoint.model_copy(update={"subject": "x" * size})
        assert (await encode_checkpoint(larger))[0] not in {0, 1}


def test_it_reads_contexts() -> None:
    origin = A2AContext(
        context_id="c",
        session_id="s",
        user_id="u",
        reply_to=Address("r"),
        requester="q",
        parent_task_id="p",
        call_depth=1,
        deadline=datetime(2030, 1, 1, tzinfo=UTC),
        idle_timeout=timedelta(seconds=1),
        user_config={"a": 1},
        metadata={"b": 2},
    )
    ctx = TaskExecutionContext(TaskId("1"), origin, subject="subject")
    ctx.token_usage.record(Tokens(input=1, output=2, cached=3), model="m")
    previous_release.Context.model_validate(ctx.to_checkpoint_dict())


async def test_it_reads_journals() -> None:
    peer = Peer("peer", int, int)

    @agent("plain", version="1")
    async def plain(ctx: TaskExecutionContext, number: int) -> int:
        return await peer(number) + await peer(number)

    ctx = TaskExecutionContext(TaskId("1"))
    first = await plain.start(ctx, 1)
    assert isinstance(first, Paused)
    second = await plain.resume(ctx, first.state, Outcomes({first.calls[0].id: Ok(1)}))
    assert isinstance(second, Paused)
    for state in (first.state, second.state):
        previous_release.Journal.model_validate_json(state)


@pytest.mark.parametrize("deadline", [HOUR, None])
async def test_a_task_that_it_has_parked_ends_in_time(
    store: SqlStore, database_url: str, clock: FakeClock, deadline: timedelta | None
) -> None:
    """It parks a task without a time at which the task is due."""
    requester = a_requester(deadline=None if deadline is None else clock.now() + deadline)
    run = await parked(store, await paused(store, requester=requester))
    await execute(
        database_url,
        "UPDATE agent_paused_tasks SET wake_at = :never, parked_reason = NULL, "
        "tried_versions = NULL, dead_reason = 'no reader'",
        never=FAR_FUTURE,
    )
    clock.advance((deadline or timedelta(days=30)) - SECOND)
    assert await store.acquire_overdue(STRANGER, 10) == []
    clock.advance(SECOND)
    overdue = one(await store.acquire_overdue(STRANGER, 10))
    assert overdue.task.run.task_id == run.task_id
    assert (overdue.past_deadline, overdue.parked_reason) == (deadline is not None, "no reader")


async def test_a_pause_of_its_replicas_forgets_which_versions_have_tried(
    store: SqlStore, database_url: str
) -> None:
    await parked(store)
    run = one(await store.acquire_parked(NEWER, 10)).run
    await execute(database_url, "UPDATE agent_paused_tasks SET incompatible_since = NULL")
    await store.release([a_release(run, parked="call 2", version=NEWER.version)])
    summary, _ = await row(store, run.task_id)
    assert summary.tried_versions == (NEWER.version,)


async def ready_then_suspended(store: SqlStore, clock: FakeClock) -> None:
    await store.suspend([(await ready(store)).run.task_id])


async def suspended_then_answered(store: SqlStore, clock: FakeClock) -> None:
    pause = await paused(store)
    await store.suspend([pause.run.task_id])
    await answered(store, pause)


async def suspended_then_expired(store: SqlStore, clock: FakeClock) -> None:
    await store.suspend([(await paused(store, a_call("a", timeout=SECOND))).run.task_id])
    clock.advance(2 * SECOND)
    await store.expire(HERE, 10, 10)


async def suspended_then_released(store: SqlStore, clock: FakeClock) -> None:
    run = (await resumed(store)).run
    await store.suspend([run.task_id])
    await store.release([a_release(run)])


async def suspended_then_lost(store: SqlStore, clock: FakeClock) -> None:
    await store.suspend([(await resumed(store)).run.task_id])
    clock.advance(LEASE + SECOND)
    await store.rescue(HERE, 10, 10)


async def suspended_then_paused_without_a_call_to_send(store: SqlStore, clock: FakeClock) -> None:
    run = (await resumed(store)).run
    await store.suspend([run.task_id])
    await write_pause(store, a_pause(a_call("a", outcome=Ok(1)), run=run))


@pytest.mark.parametrize(
    "arrange",
    [
        ready_then_suspended,
        suspended_then_answered,
        suspended_then_expired,
        suspended_then_released,
        suspended_then_lost,
        suspended_then_paused_without_a_call_to_send,
    ],
)
async def test_it_does_not_acquire_a_suspended_task_that_is_ready(
    store: SqlStore,
    database_url: str,
    clock: FakeClock,
    arrange: Callable[[SqlStore, FakeClock], Awaitable[None]],
) -> None:
    await arrange(store, clock)
    assert one(await store.tasks()).state is TaskState.READY
    clock.advance(timedelta(days=365))
    due = "SELECT 1 FROM agent_paused_tasks WHERE status = 'ready' AND wake_at <= {now}"
    assert await fetch(database_url, due.format(now=clock.now().timestamp())) == []


async def test_a_suspended_task_that_it_makes_ready_is_held(
    store: SqlStore, database_url: str, clock: FakeClock
) -> None:
    """Its claim makes the task due at once."""
    pause = await ready(store)
    await store.suspend([pause.run.task_id])
    await execute(
        database_url, "UPDATE agent_paused_tasks SET wake_at = :now", now=clock.now().timestamp()
    )
    assert (await store.due(HERE, 10)).ready == 0
    assert await store.acquire(HERE, 10) == []
    await store.unsuspend([pause.run.task_id])
    assert len(await store.acquire(HERE, 10)) == 1


async def test_a_suspended_task_that_it_cancels_ends(
    store: SqlStore, database_url: str, clock: FakeClock
) -> None:
    """Its cancel of a running task, and its release, leave the suspension in the row."""
    run = (await resumed(store)).run
    await store.suspend([run.task_id])
    await execute(database_url, "UPDATE agent_paused_tasks SET cancel_requested = true")
    assert (await row(store, run.task_id))[0].suspended_at is None
    assert await store.unsuspend([run.task_id]) == [False]
    await store.release([a_release(run)])
    assert (await store.due(HERE, 10)).ready == 1
    assert one(await store.acquire(HERE, 10)).cancel_requested


async def test_an_ended_task_that_it_resumes_is_not_suspended(
    store: SqlStore, database_url: str
) -> None:
    """Its cancel and its resume leave the suspension in the row."""
    run = await operating(store)
    await store.save(Save(run, a_checkpoint(run, 1)))
    await write_end(store, an_end(run, TaskState.FAILED, reason="no answer"))
    await store.revive(a_revive(run.task_id))
    await execute(database_url, "UPDATE agent_paused_tasks SET suspended_at = 1")
    assert (await store.due(HERE, 10)).ready == 1
    assert len(await store.acquire(HERE, 10)) == 1
    assert (await row(store, run.task_id))[0].suspended_at is None


async def test_a_task_that_it_has_ended_is_not_suspended(
    store: SqlStore, database_url: str
) -> None:
    run = await operating(store)
    await store.save(Save(run, a_checkpoint(run, 1)))
    await write_end(store, an_end(run, TaskState.FAILED, reason="no answer"))
    await execute(database_url, "UPDATE agent_paused_tasks SET suspended_at = 1")
    assert (await row(store, run.task_id))[0].suspended_at is None
    assert await store.tasks(where=TaskFilter(suspended=True)) == []
    assert await store.suspend([run.task_id]) == [SuspendRefused(TaskState.FAILED)]
    await store.revive(a_revive(run.task_id))
    assert (await row(store, run.task_id))[0].suspended_at is None
    assert len(await store.acquire(HERE, 10)) == 1


async def test_a_reply_that_it_has_sent_is_found_by_a_caller_that_attached(
    store: SqlStore, database_url: str
) -> None:
    """The previous release sends the reply of such a task only to the first address."""
    pause = await paused(store, requester=a_requester(parent_task_id=None))
    task_id = pause.run.task_id
    command = Attach(task_id, AGENT, REQUESTER, Address("client.private.1"))
    assert await store.attach([command]) == [Attached(TaskState.WAITING)]
    committed = await write_end(store, an_end((await resumed(store, pause)).run))
    await execute(
        database_url,
        "UPDATE agent_paused_tasks SET reply_sent = true, wake_at = expires_at",
    )
    assert await store.unsent(AGENT, 10) == []
    (found,) = await store.attach([command])
    assert isinstance(found, AttachEnded)
    assert found.reply.body == committed.reply.body


@pytest.mark.parametrize(
    ("current", "previous"),
    [
        (TaskState, previous_release.TaskState),
        (CallState, previous_release.CallState),
        (SubtaskStatus, previous_release.SubtaskStatus),
        (FailureKind, previous_release.FailureKind),
    ],
)
def test_it_knows_every_value(current: type[StrEnum], previous: type[StrEnum]) -> None:
    assert set(map(str, current)) <= set(map(str, previous))
