"""Logs of tasks: what pauses append, and how long it is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshpoint.model.ids import TaskId
from meshpoint.model.subtasks import SaveCommitted
from meshpoint.model.tasks import Resumable, Run, TaskState, logged_format
from meshpoint.model.transitions import (
    Append,
    CancelFound,
    Fenced,
    JoinCompleted,
    LogChange,
    Pause,
)
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    FORMAT,
    HERE,
    LEASE,
    SECOND,
    a_call,
    a_cancel,
    a_pause,
    a_replica,
    a_revive,
    an_end,
    begun,
    one,
    operating,
    paused,
    ready,
    resumed,
    write_end,
    write_pause,
)

LOGGED = logged_format(FORMAT)
READER = a_replica("L", formats=[FORMAT, LOGGED])
"""A replica that reads states with logs."""


def logged_pause(
    *entries: bytes, run: Run | None = None, state: bytes = b"state", **change: object
) -> Pause:
    """A pause that appends `entries`. `change` overrides fields of its `LogChange`."""
    log = LogChange(entries, **change)  # type: ignore[arg-type]
    pause = a_pause(run=run, state=state, state_format=LOGGED if entries else FORMAT)
    return replace(pause, log=log)


async def continued(store: CheckpointStore, pause: Pause) -> Resumable:
    """Write `pause` and resume its task."""
    await write_pause(store, pause)
    return await resumed(store, pause, replica=READER)


async def with_log(store: CheckpointStore, *entries: bytes) -> Resumable:
    """A task that has resumed after a pause which appended `entries`."""
    return await continued(store, logged_pause(*entries))


async def log_of_revived(store: CheckpointStore, task_id: TaskId) -> tuple[bytes, ...]:
    """The log of a task that is resumed from its request."""
    await store.revive(a_revive(task_id, without_checkpoint=True))
    return tuple(one(await store.acquire(HERE, 10)).log)


def an_append(run: Run, *entries: bytes, after: int = 0, replaces: bool = False) -> Append:
    """An append by `run`, which has read `after` entries."""
    return Append(run, LogChange(entries, after, replaces=replaces))


async def appended(store: CheckpointStore, append: Append) -> None:
    """Append to a log, which must succeed."""
    assert await store.append([append]) == [SaveCommitted()]


async def rescued(store: CheckpointStore, clock: FakeClock) -> Resumable:
    """The only running task, after its lease has expired."""
    clock.advance(LEASE + SECOND)
    return one(await store.rescue(READER, 10, 10))


class LogSuite:
    """Entries of logs, which only the run that owns the task adds and deletes."""

    async def test_a_new_task_has_no_log(self, store: CheckpointStore) -> None:
        task = await resumed(store)
        assert (task.log, task.log_seq) == ((), 0)

    async def test_what_was_appended_comes_back_in_order(self, store: CheckpointStore) -> None:
        large = bytes(range(256)) * 300
        first = await continued(store, a_pause())
        task = await continued(store, logged_pause(b"a", b"", run=first.run))
        assert (task.log, task.log_seq, task.state_format) == ((b"a", b""), 2, LOGGED)
        task = await continued(store, logged_pause(large, run=task.run, after=2))
        assert (task.log, task.log_seq) == ((b"a", b"", large), 3)

    async def test_a_first_pause_may_append(self, store: CheckpointStore) -> None:
        task = await with_log(store, b"a", b"b")
        assert (task.log, task.log_seq, task.state) == ((b"a", b"b"), 2, b"state")

    @pytest.mark.parametrize("keeps", [True, False])
    async def test_state_is_kept_or_replaced(self, store: CheckpointStore, keeps: bool) -> None:
        first = await with_log(store, b"a")
        pause = logged_pause(b"b", run=first.run, state=b"new", after=1, keeps_state=keeps)
        task = await continued(store, pause)
        assert task.state == (b"state" if keeps else b"new")

    async def test_the_state_of_a_new_row_is_written(self, store: CheckpointStore) -> None:
        task = await continued(store, logged_pause(b"a", keeps_state=True))
        assert task.state == b"state"

    async def test_a_pause_may_replace_the_log(self, store: CheckpointStore) -> None:
        first = await with_log(store, b"a", b"b")
        pause = logged_pause(b"c", run=first.run, after=2, replaces=True)
        task = await continued(store, pause)
        assert (task.log, task.log_seq) == ((b"c",), 3)

    async def test_a_log_may_end_and_begin_again(self, store: CheckpointStore) -> None:
        first = await with_log(store, b"a")
        task = await continued(store, logged_pause(run=first.run, after=1, replaces=True))
        assert task.log == ()
        task = await continued(store, a_pause(run=task.run))
        assert (task.log, task.log_seq) == ((), 1)
        task = await continued(store, logged_pause(b"b", run=task.run, after=1))
        assert (task.log, task.log_seq) == ((b"b",), 2)

    async def test_pauses_of_a_batch_keep_their_logs_apart(self, store: CheckpointStore) -> None:
        first = [await with_log(store, word) for word in (b"a", b"b")]
        plain = await resumed(store)
        pauses = [
            logged_pause(b"+", b"+", run=first[0].run, after=1),
            a_pause(run=plain.run),
            logged_pause(b"-", run=first[1].run, after=1, replaces=True),
        ]
        await store.pause(pauses)
        tasks = [await resumed(store, pause, replica=READER) for pause in pauses]
        assert [task.log for task in tasks] == [(b"a", b"+", b"+"), (), (b"-",)]

    async def test_a_repeated_pause_appends_once(self, store: CheckpointStore) -> None:
        pause = logged_pause(b"b", run=(await with_log(store, b"a")).run, after=1)
        assert await store.pause([pause]) == await store.pause([pause])
        assert (await resumed(store, pause, replica=READER)).log == (b"a", b"b")

    async def test_a_zombie_appends_nothing(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        first = await with_log(store, b"a")
        clock.advance(LEASE + SECOND)
        task = one(await store.rescue(READER, 10, 10))
        assert task.log == (b"a",)
        zombie = logged_pause(b"zombie", run=first.run, after=1)
        assert await store.pause([zombie]) == [Fenced()]
        task = await continued(store, logged_pause(b"b", run=task.run, after=1))
        assert (task.log, task.log_seq) == ((b"a", b"b"), 2)

    async def test_a_run_that_has_read_another_log_is_fenced(self, store: CheckpointStore) -> None:
        first = await with_log(store, b"a")
        for after in (0, 2):
            pause = logged_pause(b"b", run=first.run, after=after)
            assert await store.pause([pause]) == [Fenced()]
        task = await continued(store, logged_pause(b"b", run=first.run, after=1))
        assert task.log == (b"a", b"b")

    async def test_a_state_with_a_log_has_another_format(self, store: CheckpointStore) -> None:
        pause = logged_pause(b"a")
        await write_pause(store, pause)
        await ready(store, pause)
        assert await store.acquire(HERE, 10) == []
        assert one(await store.acquire(READER, 10)).run.task_id == pause.run.task_id

    async def test_every_owner_gets_the_log(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = replace(
            a_pause(a_call("a", timeout=SECOND), state_format=LOGGED), log=LogChange((b"a",))
        )
        await write_pause(store, pause)
        clock.advance(2 * SECOND)
        expired = one(await store.expire(READER, 10, 10)).join_result
        assert isinstance(expired, JoinCompleted)
        assert expired.task.log == (b"a",)
        owned = await store.find_owned(expired.task.run)
        assert owned is not None
        assert (owned.log, owned.log_seq) == ((b"a",), 1)

    async def test_a_log_ends_with_its_task(self, store: CheckpointStore) -> None:
        run = (await with_log(store, b"a")).run
        await write_end(store, an_end(run, TaskState.FAILED, dead_reason="poison"))
        assert await log_of_revived(store, run.task_id) == ()

    async def test_the_log_of_a_failed_operation_is_kept(self, store: CheckpointStore) -> None:
        run = (await continued(store, logged_pause(b"a", run=await operating(store)))).run
        await write_end(store, an_end(run, TaskState.FAILED, reason="no answer"))
        assert await log_of_revived(store, run.task_id) == (b"a",)

    async def test_the_log_of_a_cancelled_operation_is_kept(self, store: CheckpointStore) -> None:
        pause = logged_pause(b"a", run=await operating(store))
        await write_pause(store, pause)
        await store.cancel([a_cancel(pause.run.task_id)])
        assert await log_of_revived(store, pause.run.task_id) == (b"a",)

    @pytest.mark.parametrize("generation", [0, 1])
    async def test_the_next_run_reads_what_a_run_appended(
        self, store: CheckpointStore, clock: FakeClock, generation: int
    ) -> None:
        run = (await resumed(store)).run if generation else await begun(store)
        await appended(store, an_append(run, b"a"))
        await appended(store, an_append(run, b"b", b"", after=1))
        task = await rescued(store, clock)
        assert (task.log, task.log_seq) == ((b"a", b"b", b""), 3)
        assert (task.state, task.run.generation) == (b"state" * generation, generation)

    async def test_entries_follow_those_of_earlier_pauses(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = (await with_log(store, b"a")).run
        await appended(store, an_append(run, b"b", after=1))
        task = await rescued(store, clock)
        assert (task.log, task.log_seq, task.state_format) == ((b"a", b"b"), 2, LOGGED)
        task = await continued(store, logged_pause(b"c", run=task.run, after=2))
        assert task.log == (b"a", b"b", b"c")

    async def test_a_pause_follows_appended_entries(self, store: CheckpointStore) -> None:
        run = (await resumed(store)).run
        await appended(store, an_append(run, b"a"))
        stale = logged_pause(b"b", run=run)
        assert await store.pause([stale]) == [Fenced()]
        task = await continued(store, logged_pause(b"b", run=run, after=1))
        assert task.log == (b"a", b"b")
        task = await continued(store, logged_pause(run=task.run, after=2, replaces=True))
        assert (task.log, task.state_format) == ((), FORMAT)

    async def test_a_state_with_appended_entries_has_another_format(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = (await resumed(store)).run
        await appended(store, an_append(run, b"a"))
        clock.advance(LEASE + SECOND)
        assert await store.rescue(HERE, 10, 10) == []
        assert one(await store.rescue(READER, 10, 10)).state_format == LOGGED

    async def test_an_append_may_replace_the_log(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = (await with_log(store, b"a", b"b")).run
        await appended(store, an_append(run, b"c", after=2, replaces=True))
        task = await rescued(store, clock)
        assert (task.log, task.log_seq) == ((b"c",), 3)

    async def test_a_repeated_append_is_written_once(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = await begun(store)
        append = an_append(run, b"a", b"b")
        assert await store.append([append]) == await store.append([append]) == [SaveCommitted()]
        await store.cancel([a_cancel(run.task_id)])
        assert await store.append([append]) == [CancelFound(run)]
        assert (await rescued(store, clock)).log == (b"a", b"b")

    async def test_appends_of_a_batch_keep_their_logs_apart(self, store: CheckpointStore) -> None:
        first, second = await begun(store), await begun(store)
        unknown = replace(first, task_id=TaskId("unknown"))
        appends = [an_append(run, run.task_id.encode()) for run in (first, unknown, second)]
        assert await store.append(appends) == [SaveCommitted(), Fenced(), SaveCommitted()]
        for run in (first, second):
            task = await store.find_owned(run)
            assert task is not None
            assert task.log == (run.task_id.encode(),)

    async def test_a_zombie_appends_no_entries(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = await begun(store)
        await appended(store, an_append(run, b"a"))
        task = await rescued(store, clock)
        assert await store.append([an_append(run, b"zombie", after=1)]) == [Fenced()]
        await appended(store, an_append(task.run, b"b", after=1))
        assert (await rescued(store, clock)).log == (b"a", b"b")

    async def test_only_the_run_of_an_entry_repeats_it(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        await appended(store, an_append(await begun(store), b"a"))
        task = await rescued(store, clock)
        assert await store.append([an_append(task.run, b"a")]) == [Fenced()]

    async def test_a_run_without_a_running_task_appends_nothing(
        self, store: CheckpointStore
    ) -> None:
        waiting = await paused(store)
        ended = await begun(store)
        await write_end(store, an_end(ended))
        owner = replace(waiting.run, fence=1, generation=1)
        appends = [an_append(run, b"a") for run in (owner, ended)]
        assert await store.append(appends) == [Fenced(), Fenced()]

    @pytest.mark.parametrize("after", [0, 2])
    async def test_an_append_after_other_entries_is_fenced(
        self, store: CheckpointStore, after: int
    ) -> None:
        run = (await with_log(store, b"a")).run
        assert await store.append([an_append(run, b"b", after=after)]) == [Fenced()]

    async def test_an_append_after_a_cancel_is_written_and_reports_it(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = await begun(store)
        await store.cancel([a_cancel(run.task_id)])
        first, second = an_append(run, b"a"), an_append(run, b"b", after=1)
        for append in (first, first, second):
            assert await store.append([append]) == [CancelFound(run)]
        assert (await rescued(store, clock)).log == (b"a", b"b")

    async def test_an_append_is_progress(self, store: CheckpointStore, clock: FakeClock) -> None:
        await begun(store)
        for _ in range(4):
            task = await rescued(store, clock)
        assert (task.attempt, task.rescues) == (5, 4)
        await appended(store, an_append(task.run, b"a"))
        task = await rescued(store, clock)
        assert (task.attempt, task.rescues) == (2, 3)

    async def test_appended_entries_end_with_their_task(self, store: CheckpointStore) -> None:
        run = await begun(store)
        await appended(store, an_append(run, b"a"))
        await write_end(store, an_end(run, TaskState.FAILED, dead_reason="poison"))
        assert await log_of_revived(store, run.task_id) == ()
