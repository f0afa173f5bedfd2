"""Several writers of one SQLite file: stores in one process take turns.

A lock held by another process is retried. Reads wait for no writer.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, closing
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import event

from idle_loop import idle
from meshpoint.adapters.sql import SqlStore
from meshpoint.adapters.sql.database import Database, StoreOptions, Transaction
from meshpoint.adapters.sql.rows import AgentNames
from meshpoint.errors import StoreUnavailable
from meshpoint.testing.conformance.build import an_end, begun

OPTIONS = StoreOptions(AgentNames("test"), 5.0, 60.0, 60.0, 60.0, 5, False, False, 1_000_000)


@pytest.fixture
async def databases(tmp_path: Path) -> AsyncIterator[list[Database]]:
    async with AsyncExitStack() as stack:
        databases_ = []
        for _ in range(3):
            database = Database(
                f"sqlite:///{tmp_path}/tasks.db",
                options=OPTIONS,
                command_timeout=timedelta(seconds=60),
                pool_size=1,
                clock=None,
            )
            stack.push_async_callback(database.close)
            databases_.append(database)
        await databases_[0].write(lambda tx: tx.execute("CREATE TABLE written (number INTEGER)"))
        yield databases_


class BlockedWrite:
    """Holds a transaction or a read in its thread until `end` is called."""

    def __init__(self) -> None:
        self._loop, self.started, self._released = (
            asyncio.get_running_loop(),
            asyncio.Event(),
            threading.Event(),
        )

    def wait(self) -> None:
        self._loop.call_soon_threadsafe(self.started.set)
        self._released.wait()

    def end(self) -> None:
        self._released.set()


def write_number(
    number: int, blocked_write: BlockedWrite | None = None
) -> Callable[[Transaction], Awaitable[int]]:
    async def write(tx: Transaction) -> int:
        await tx.execute("INSERT INTO written VALUES (:number)", number=number)
        if blocked_write:
            blocked_write.wait()
        return number

    return write


async def read_numbers(database: Database) -> list[int]:
    rows = await database.read(lambda tx: tx.fetch("SELECT number FROM written ORDER BY rowid"))
    return [row.number for row in rows]


async def test_stores_in_a_process_write_first_come_first_served(
    databases: list[Database],
) -> None:
    blocked_write, order = BlockedWrite(), list[int]()
    for index, database in enumerate(databases):
        event.listen(
            database.writing_engine,
            "before_cursor_execute",
            lambda *args, place=index: (
                order.append(place) if args[2] == "BEGIN IMMEDIATE" else None
            ),
        )
    first = asyncio.create_task(databases[0].write(write_number(0, blocked_write)))
    await blocked_write.started.wait()
    others = []
    for number in range(1, 30):
        others.append(asyncio.create_task(databases[number % 3].write(write_number(number))))
        await idle()
    assert order == [0]  # no other store tries while one writes
    blocked_write.end()
    await asyncio.gather(first, *others)
    assert await read_numbers(databases[0]) == list(range(30))


async def test_two_paths_of_one_file_share_a_writer_queue(
    databases: list[Database], tmp_path: Path
) -> None:
    (tmp_path / "link.db").symlink_to("tasks.db")
    blocked_write, order = BlockedWrite(), list[str]()
    other = Database(
        f"sqlite:///{tmp_path}/link.db",
        options=OPTIONS,
        command_timeout=timedelta(seconds=60),
        pool_size=1,
        clock=None,
    )
    event.listen(
        other.writing_engine, "before_cursor_execute", lambda *args: order.append(args[2])
    )
    await read_numbers(other)  # connects
    order.clear()
    first = asyncio.create_task(databases[0].write(write_number(0, blocked_write)))
    await blocked_write.started.wait()
    second = asyncio.create_task(other.write(write_number(1)))
    await idle()
    assert not order
    blocked_write.end()
    await asyncio.gather(first, second)
    await other.close()


async def test_a_read_waits_for_no_writer(databases: list[Database]) -> None:
    blocked_write = BlockedWrite()
    writing = asyncio.create_task(databases[0].write(write_number(1, blocked_write)))
    await blocked_write.started.wait()
    assert await read_numbers(databases[0]) == []
    assert await databases[0].fetch("SELECT number FROM written") == []
    blocked_write.end()
    await writing
    assert await databases[0].fetch("SELECT number FROM written") == [(1,)]


def blocked_read(block: BlockedWrite) -> Callable[[Transaction], Awaitable[None]]:
    async def read(tx: Transaction) -> None:
        block.wait()
        await tx.fetch("SELECT number FROM written")

    return read


async def test_a_cancelled_read_ends_in_its_thread(databases: list[Database]) -> None:
    block = BlockedWrite()
    first = asyncio.create_task(databases[0].read(blocked_read(block)))
    await block.started.wait()
    second, third = (asyncio.create_task(read_numbers(databases[0])) for _ in range(2))
    await idle()
    for cancelled in (first, second):
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
    block.end()
    assert await third == []


async def test_a_read_that_takes_too_long_is_an_outage(tmp_path: Path) -> None:
    block, database = (
        BlockedWrite(),
        Database(
            f"sqlite:///{tmp_path}/tasks.db",
            options=OPTIONS,
            command_timeout=timedelta(seconds=0.05),
            pool_size=1,
            clock=None,
        ),
    )
    await database.write(lambda tx: tx.execute("CREATE TABLE written (number INTEGER)"))
    first = asyncio.create_task(database.read(blocked_read(block)))
    await block.started.wait()
    with pytest.raises(StoreUnavailable, match="no answer in time"):
        await read_numbers(database)
    with pytest.raises(StoreUnavailable, match="no answer in time"):
        await first
    block.end()
    assert await read_numbers(database) == []
    await database.close()


async def test_a_cancelled_writer_lets_the_next_one_write(databases: list[Database]) -> None:
    blocked_write = BlockedWrite()
    first = asyncio.create_task(databases[0].write(write_number(0, blocked_write)))
    await blocked_write.started.wait()
    second = asyncio.create_task(databases[1].write(write_number(1)))
    third = asyncio.create_task(databases[2].write(write_number(2)))
    await idle()
    second.cancel()
    blocked_write.end()
    await asyncio.gather(first, third)
    assert await read_numbers(databases[0]) == [0, 2]
    assert second.cancelled()


async def test_a_writer_cancelled_twice_holds_no_lock(databases: list[Database]) -> None:
    """A drain cancels its tasks, and soon after cancels the unfinished ones again."""
    blocked_write = BlockedWrite()
    first = asyncio.create_task(databases[0].write(write_number(0, blocked_write)))
    await blocked_write.started.wait()
    for _ in range(2):
        first.cancel()
        await idle()
    blocked_write.end()
    await asyncio.gather(first, return_exceptions=True)
    assert first.cancelled()
    assert await databases[1].write(write_number(1)) == 1
    assert await read_numbers(databases[0]) == [0, 1]


async def test_a_blocked_event_loop_holds_no_lock(
    databases: list[Database], tmp_path: Path
) -> None:
    """Another process writes while the loop that requested a transaction is blocked."""
    started = threading.Event()

    async def write(tx: Transaction) -> None:
        started.set()
        for number in range(5):
            await tx.execute("INSERT INTO written VALUES (:number)", number=number)

    writing_all = asyncio.create_task(databases[0].write(write))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    started.wait()  # blocks the loop
    with closing(
        sqlite3.connect(tmp_path / "tasks.db", isolation_level=None, timeout=60)
    ) as other:
        other.execute("BEGIN IMMEDIATE")
        assert other.execute("SELECT count(*) FROM written").fetchone() == (5,)
        other.execute("COMMIT")
    await writing_all


async def test_a_write_of_another_process_is_awaited(
    databases: list[Database], tmp_path: Path
) -> None:
    with closing(sqlite3.connect(tmp_path / "tasks.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        refused, loop = asyncio.Event(), asyncio.get_running_loop()
        event.listen(
            databases[0].writing_engine,
            "handle_error",
            lambda _: loop.call_soon_threadsafe(refused.set) and None,
        )
        waiting = asyncio.create_task(databases[0].write(write_number(1)))
        await refused.wait()  # SQLite itself has stopped waiting: the statement is repeated here
        assert not waiting.done()
        other.execute("COMMIT")
        assert await waiting == 1
    assert await read_numbers(databases[0]) == [1]


async def test_another_process_that_writes_for_too_long_counts_as_an_outage(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tasks.db"
    database = Database(
        f"sqlite:///{path}",
        options=OPTIONS,
        command_timeout=timedelta(seconds=0.05),
        pool_size=1,
        clock=None,
    )
    await database.write(lambda tx: tx.execute("CREATE TABLE written (number INTEGER)"))
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="database is locked"):
            await database.write(write_number(1))
        other.execute("COMMIT")
    assert await database.write(write_number(2)) == 2
    assert await read_numbers(database) == [2]
    await database.close()


async def test_a_store_that_writes_for_too_long_is_an_outage_for_the_others(
    tmp_path: Path,
) -> None:
    blocked_write = BlockedWrite()
    slow, other = (
        Database(
            f"sqlite:///{tmp_path}/tasks.db",
            options=OPTIONS,
            command_timeout=timedelta(seconds=limit),
            pool_size=1,
            clock=None,
        )
        for limit in (60, 0.05)
    )
    await slow.write(lambda tx: tx.execute("CREATE TABLE written (number INTEGER)"))
    first = asyncio.create_task(slow.write(write_number(1, blocked_write)))
    await blocked_write.started.wait()
    with pytest.raises(StoreUnavailable, match="timed out waiting"):
        await other.write(write_number(2))
    blocked_write.end()
    await first
    assert await other.write(write_number(3)) == 3
    assert await read_numbers(other) == [1, 3]
    for database in (slow, other):
        await database.close()


async def test_closing_ends_the_wait_for_another_process(tmp_path: Path) -> None:
    """A process frozen inside a transaction must not delay the end of a replica."""
    path, loop, refused = tmp_path / "tasks.db", asyncio.get_running_loop(), asyncio.Event()
    database = Database(
        f"sqlite:///{path}",
        options=OPTIONS,
        command_timeout=timedelta(days=1),
        pool_size=1,
        clock=None,
    )
    await database.write(lambda tx: tx.execute("CREATE TABLE written (number INTEGER)"))
    event.listen(
        database.writing_engine,
        "handle_error",
        lambda _: loop.call_soon_threadsafe(refused.set) and None,
    )
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        waiting = asyncio.create_task(database.write(write_number(1)))
        await refused.wait()
        await database.close()
        with pytest.raises(StoreUnavailable):
            await waiting
    with pytest.raises(StoreUnavailable, match="the store is closed"):
        await database.write(write_number(2))
    await database.close()  # a second time


async def test_closing_a_store_ends_the_wait_of_its_batches(tmp_path: Path) -> None:
    path, loop, refused = tmp_path / "tasks.db", asyncio.get_running_loop(), asyncio.Event()
    store = SqlStore(f"sqlite:///{path}", namespace="test", command_timeout=timedelta(days=1))
    await store.open()
    run = await begun(store)
    engine = store._database.writing_engine
    event.listen(engine, "handle_error", lambda _: loop.call_soon_threadsafe(refused.set) and None)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        ending = asyncio.create_task(store.end([an_end(run)]))
        await refused.wait()
        await store.close()
        with pytest.raises(StoreUnavailable):
            await ending


async def test_the_process_exits_without_waiting_for_a_transaction(tmp_path: Path) -> None:
    """A replica that gave up closing must not outlive its time limit."""
    code = f"""
import asyncio
from datetime import timedelta
from meshpoint.adapters.sql.database import Database, StoreOptions
from meshpoint.adapters.sql.rows import AgentNames

async def main():
    database = Database(
        "sqlite:///{tmp_path}/tasks.db",
        options=StoreOptions(
            AgentNames("test"), 5.0, 60.0, 60.0, 60.0, 5, False, False, 1_000_000
        ),
        command_timeout=timedelta(days=1),
        pool_size=1,
        clock=None,
    )
    loop, begun = asyncio.get_running_loop(), asyncio.Event()

    async def never_over(tx):
        loop.call_soon_threadsafe(begun.set)
        await asyncio.Event().wait()

    asyncio.create_task(database.write(never_over)).add_done_callback(lambda _: None)
    await begun.wait()
    print("begun", flush=True)

runner = asyncio.new_event_loop()
runner.run_until_complete(main())
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert output == b"begun\n"
