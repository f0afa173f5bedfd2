"""Several writers of one SQLite file: stores in one process take turns.

A lock held by another process is retried.
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

from meshpoint.adapters.sql import SqlStore
from meshpoint.adapters.sql.database import Database, Transaction
from meshpoint.errors import StoreUnavailable
from meshpoint.testing.conformance.build import an_end, begun


@pytest.fixture
async def databases(tmp_path: Path) -> AsyncIterator[list[Database]]:
    async with AsyncExitStack() as stack:
        made = []
        for _ in range(3):
            database = Database(
                f"sqlite:///{tmp_path}/tasks.db", command_timeout=timedelta(seconds=60), pool_size=1, clock=None
            )
            stack.push_async_callback(database.close)
            made.append(database)
        await made[0].write(lambda tx: tx.execute("CREATE TABLE written (number INTEGER)"))
        yield made


class Pause:
    """Holds a transaction in its thread until `end` is called."""

    def __init__(self) -> None:
        self._loop, self.begun, self._go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def wait(self) -> None:
        self._loop.call_soon_threadsafe(self.begun.set)
        self._go_on.wait()

    def end(self) -> None:
        self._go_on.set()


def writing(number: int, pause: Pause | None = None) -> Callable[[Transaction], Awaitable[int]]:
    async def write(tx: Transaction) -> int:
        await tx.execute("INSERT INTO written VALUES (:number)", number=number)
        if pause:
            pause.wait()
        return number

    return write


async def numbers(database: Database) -> list[int]:
    rows = await database.read(lambda tx: tx.fetch("SELECT number FROM written ORDER BY rowid"))
    return [row.number for row in rows]


async def test_stores_in_a_process_write_first_come_first_served(databases: list[Database]) -> None:
    pause, asked = Pause(), list[int]()
    for place, database in enumerate(databases):
        event.listen(
            database.writing_engine,
            "before_cursor_execute",
            lambda *args, place=place: asked.append(place) if args[2] == "BEGIN IMMEDIATE" else None,
        )
    first = asyncio.create_task(databases[0].write(writing(0, pause)))
    await pause.begun.wait()
    others = []
    for number in range(1, 30):
        others.append(asyncio.create_task(databases[number % 3].write(writing(number))))
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert asked == [0]  # no other store tries while one writes
    pause.end()
    await asyncio.gather(first, *others)
    assert await numbers(databases[0]) == list(range(30))


async def test_two_names_of_a_file_share_its_turns(databases: list[Database], tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to("tasks.db")
    pause, asked = Pause(), list[str]()
    other = Database(f"sqlite:///{tmp_path}/link.db", command_timeout=timedelta(seconds=60), pool_size=1, clock=None)
    event.listen(other.writing_engine, "before_cursor_execute", lambda *args: asked.append(args[2]))
    await numbers(other)  # connects
    asked.clear()
    first = asyncio.create_task(databases[0].write(writing(0, pause)))
    await pause.begun.wait()
    second = asyncio.create_task(other.write(writing(1)))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not asked
    pause.end()
    await asyncio.gather(first, second)
    await other.close()


async def test_a_writer_that_is_cancelled_lets_the_next_one_write(databases: list[Database]) -> None:
    pause = Pause()
    first = asyncio.create_task(databases[0].write(writing(0, pause)))
    await pause.begun.wait()
    second = asyncio.create_task(databases[1].write(writing(1)))
    third = asyncio.create_task(databases[2].write(writing(2)))
    await asyncio.sleep(0)
    second.cancel()
    pause.end()
    await asyncio.gather(first, third)
    assert await numbers(databases[0]) == [0, 2]
    assert second.cancelled()


async def test_a_writer_that_is_cancelled_twice_keeps_no_lock(databases: list[Database]) -> None:
    """A drain cancels its tasks, and soon after cancels the unfinished ones again."""
    pause = Pause()
    first = asyncio.create_task(databases[0].write(writing(0, pause)))
    await pause.begun.wait()
    for _ in range(2):
        first.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
    pause.end()
    await asyncio.gather(first, return_exceptions=True)
    assert first.cancelled()
    assert await databases[1].write(writing(1)) == 1
    assert await numbers(databases[0]) == [0, 1]


async def test_a_busy_loop_keeps_no_lock(databases: list[Database], tmp_path: Path) -> None:
    """Another process writes while the loop that requested a transaction is blocked."""
    begun = threading.Event()

    async def write(tx: Transaction) -> None:
        begun.set()
        for number in range(5):
            await tx.execute("INSERT INTO written VALUES (:number)", number=number)

    writing_all = asyncio.create_task(databases[0].write(write))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    begun.wait()  # blocks the loop
    with closing(sqlite3.connect(tmp_path / "tasks.db", isolation_level=None, timeout=60)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert other.execute("SELECT count(*) FROM written").fetchone() == (5,)
        other.execute("COMMIT")
    await writing_all


async def test_another_process_that_writes_is_waited_for(databases: list[Database], tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "tasks.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        refused, loop = asyncio.Event(), asyncio.get_running_loop()
        event.listen(
            databases[0].writing_engine, "handle_error", lambda _: loop.call_soon_threadsafe(refused.set) and None
        )
        waiting = asyncio.create_task(databases[0].write(writing(1)))
        await refused.wait()  # SQLite itself has stopped waiting: the statement is repeated here
        assert not waiting.done()
        other.execute("COMMIT")
        assert await waiting == 1
    assert await numbers(databases[0]) == [1]


async def test_another_process_that_writes_for_too_long_counts_as_an_outage(tmp_path: Path) -> None:
    path = tmp_path / "tasks.db"
    database = Database(f"sqlite:///{path}", command_timeout=timedelta(seconds=0.05), pool_size=1, clock=None)
    await database.write(lambda tx: tx.execute("CREATE TABLE written (number INTEGER)"))
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="database is locked"):
            await database.write(writing(1))
        other.execute("COMMIT")
    assert await database.write(writing(2)) == 2
    assert await numbers(database) == [2]
    await database.close()


async def test_a_store_that_writes_for_too_long_counts_as_an_outage_for_the_others(tmp_path: Path) -> None:
    pause = Pause()
    slow, other = (
        Database(f"sqlite:///{tmp_path}/tasks.db", command_timeout=timedelta(seconds=limit), pool_size=1, clock=None)
        for limit in (60, 0.05)
    )
    await slow.write(lambda tx: tx.execute("CREATE TABLE written (number INTEGER)"))
    first = asyncio.create_task(slow.write(writing(1, pause)))
    await pause.begun.wait()
    with pytest.raises(StoreUnavailable, match="timed out waiting"):
        await other.write(writing(2))
    pause.end()
    await first
    assert await other.write(writing(3)) == 3
    assert await numbers(other) == [1, 3]
    for database in (slow, other):
        await database.close()


async def test_closing_ends_the_wait_for_another_process(tmp_path: Path) -> None:
    """A process frozen inside a transaction must not delay the end of a replica."""
    path, loop, refused = tmp_path / "tasks.db", asyncio.get_running_loop(), asyncio.Event()
    database = Database(f"sqlite:///{path}", command_timeout=timedelta(days=1), pool_size=1, clock=None)
    await database.write(lambda tx: tx.execute("CREATE TABLE written (number INTEGER)"))
    event.listen(database.writing_engine, "handle_error", lambda _: loop.call_soon_threadsafe(refused.set) and None)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        waiting = asyncio.create_task(database.write(writing(1)))
        await refused.wait()
        await database.close()
        with pytest.raises(StoreUnavailable):
            await waiting
    with pytest.raises(StoreUnavailable, match="the store is closed"):
        await database.write(writing(2))
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


async def test_the_end_of_the_process_waits_for_no_transaction(tmp_path: Path) -> None:
    """A replica that gave up closing must not outlive its time limit."""
    code = f"""
import asyncio
from datetime import timedelta
from meshpoint.adapters.sql.database import Database

async def main():
    database = Database("sqlite:///{tmp_path}/tasks.db", command_timeout=timedelta(days=1), pool_size=1, clock=None)
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
    said, _ = await process.communicate()
    assert said == b"begun\n"
