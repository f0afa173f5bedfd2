"""Logs that a store has read before, and what other replicas have done with them since."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import text

from meshpoint.adapters.sql import SqlStore, fast_path, log_cache, owning
from meshpoint.adapters.sql.log_cache import CachedLog, LogCache
from meshpoint.model.tasks import Resumable, TaskState
from meshpoint.model.transitions import Append, LogChange, TaskReady
from meshpoint.testing.conformance.build import (
    a_claim,
    a_run,
    an_end,
    one,
    resumed,
    state_of,
    write_end,
    write_pause,
)
from meshpoint.testing.conformance.store_logs import READER, continued, logged_pause, with_log


@pytest.fixture(params=[True, False], ids=["fast path", "transactions"])
async def stores(
    database_url: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[SqlStore, SqlStore]]:
    """The stores of two replicas, which cache all logs."""
    monkeypatch.setattr(LogCache.__init__, "__defaults__", (1_000_000, 0))
    monkeypatch.setattr(fast_path, "INLINE_LOG_BYTES", 0)
    async with AsyncExitStack() as stack:
        opened = list[SqlStore]()
        for _ in range(2):
            store = SqlStore(database_url, namespace="test", fast_path=request.param)
            await store.open()
            stack.push_async_callback(store.close)
            opened.append(store)
        yield opened[0], opened[1]


@pytest.fixture
def whole_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of entries of each log that is read whole."""
    counts, read_log = list[int](), log_cache.read_log

    def count_and_read(rows: Sequence[Any]) -> CachedLog | None:
        counts.append(len(rows))
        return read_log(rows)

    for module in (fast_path, owning):
        monkeypatch.setattr(module, "read_log", count_and_read)
    return counts


async def go_on(store: SqlStore, task: Resumable, *entries: bytes) -> Resumable:
    """Append entries at a pause, and resume the task."""
    return await continued(store, logged_pause(*entries, run=task.run, after=task.log_seq))


async def test_a_log_is_read_once(
    stores: tuple[SqlStore, SqlStore], whole_reads: list[int]
) -> None:
    store, _ = stores
    task = await with_log(store, b"a", b"b")
    assert one(await store.append([Append(task.run, LogChange((b"step",), 2))]))
    task = await continued(store, logged_pause(b"c", run=task.run, after=3))
    assert (task.log, task.log_seq) == ((b"a", b"b", b"step", b"c"), 4)
    task = await go_on(store, task, b"d", b"e")
    assert (task.log, task.log_seq) == ((b"a", b"b", b"step", b"c", b"d", b"e"), 6)
    assert whole_reads == [2]


async def test_what_another_replica_has_appended_is_read(
    stores: tuple[SqlStore, SqlStore], whole_reads: list[int]
) -> None:
    store, other = stores
    task = await with_log(store, b"a")
    task = await go_on(other, task, b"b")
    task = await go_on(other, task, b"c", b"d")
    task = await go_on(store, task, b"e")
    assert (task.log, task.log_seq) == ((b"a", b"b", b"c", b"d", b"e"), 5)
    assert whole_reads == [1, 2]


@pytest.mark.parametrize("replacing", [0, 1])
async def test_a_log_that_was_replaced_is_read_again(
    stores: tuple[SqlStore, SqlStore], replacing: int, whole_reads: list[int]
) -> None:
    store, _ = stores
    task = await with_log(store, b"a", b"b")
    pause = logged_pause(b"c", run=task.run, after=2, replaces=True)
    task = await continued(stores[replacing], pause)
    assert (task.log, task.log_seq) == ((b"c",), 3)
    task = await go_on(store, task, b"d")
    assert (task.log, task.log_seq) == ((b"c", b"d"), 4)
    assert whole_reads == [[2, 1], [2, 1, 2]][replacing]


@pytest.mark.parametrize("writing", [0, 1])
async def test_the_log_of_a_later_task_with_the_same_id_is_read(
    stores: tuple[SqlStore, SqlStore], writing: int, whole_reads: list[int]
) -> None:
    """Its entries have the same numbers."""
    store, _ = stores
    task = await with_log(store, b"a", b"b")
    await write_end(store, an_end(task.run))
    async with store._database.engine.connect() as connection:
        await connection.execute(text("DELETE FROM agent_paused_tasks"))
    pause = logged_pause(b"new", b"newer", b"newest", run=a_run(task.run.task_id))
    await write_pause(stores[writing], pause)
    later = await resumed(store, pause, replica=READER)
    assert (later.log, later.log_seq) == ((b"new", b"newer", b"newest"), 3)
    assert whole_reads == [2, 3]
    assert (await go_on(store, later, b"last")).log == (b"new", b"newer", b"newest", b"last")


async def test_a_log_whose_new_entries_are_too_large_is_read_in_parts(
    stores: tuple[SqlStore, SqlStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = stores
    task = await with_log(store, b"a")
    for module in (fast_path, owning):
        monkeypatch.setattr(module, "PART_BYTES", 1000)
    task = await go_on(other, task, b"b" * 2000)
    task = await go_on(store, task, b"c")
    assert task.log == (b"a", b"b" * 2000, b"c")


async def test_a_log_with_a_missing_end_is_damaged_although_its_beginning_is_known(
    stores: tuple[SqlStore, SqlStore],
) -> None:
    store, _ = stores
    task = await with_log(store, b"a")
    pause = logged_pause(b"b", run=task.run, after=1)
    await write_pause(store, pause)
    async with store._database.engine.connect() as connection:
        await connection.execute(text("DELETE FROM agent_task_log WHERE seq = 2"))
    assert isinstance(one(await store.claim([a_claim(pause)], READER, 1)), TaskReady)
    assert await state_of(store, pause.run.task_id) is TaskState.PARKED


def a_log(size: int, run_id: str = "run") -> CachedLog:
    return CachedLog([b""], 1, run_id, size)


def test_the_logs_that_were_not_used_for_longest_are_forgotten() -> None:
    cache = LogCache(max_bytes=100, min_bytes=10)
    for task_id in ("first", "second"):
        cache.store(task_id, a_log(50))
    cache.store("first", a_log(40))
    cache.store("third", a_log(60))
    assert [task_id for task_id in ("first", "second", "third") if cache.find(task_id)] == [
        "first",
        "third",
    ]


@pytest.mark.parametrize("size", [9, 101])
def test_small_logs_and_those_above_the_limit_are_not_kept(size: int) -> None:
    cache = LogCache(max_bytes=100, min_bytes=10)
    cache.store("other", a_log(90))
    cache.store("task", a_log(10))
    cache.store("task", a_log(size))
    assert cache.find("task") is None
    assert cache.find("other") is not None


def test_a_log_counts_with_all_its_entries() -> None:
    cache = LogCache(max_bytes=3 * 64 + 5, min_bytes=0)
    rows = [SimpleNamespace(seq=1, run_id="a", entry=b"12345")]
    log = log_cache.read_log(rows)
    assert log is not None
    cache.store("task", log)
    for number in range(2, 5):
        end = [*rows[-1:], SimpleNamespace(seq=number, run_id="a", entry=b"")]
        rows, log = end, log.extend(end)
        assert log is not None
        cache.store("task", log)
        assert (cache.find("task") is not None) == (number < 4)
