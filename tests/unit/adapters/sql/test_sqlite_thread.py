"""The thread that owns the connection to a SQLite file: what a failed job leaves, and its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, event

from idle_loop import idle
from meshpoint.adapters.sql.engine import sqlite_engine
from meshpoint.adapters.sql.sqlite_thread import SqliteThread
from meshpoint.errors import RowLocked


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = sqlite_engine(f"sqlite:///{tmp_path}/tasks.db", timedelta(seconds=60))
    yield engine
    engine.dispose()


@pytest.fixture
def connects(engine: Engine) -> list[object]:
    """The connections that were opened."""
    opened = list[object]()
    event.listen(engine, "connect", lambda connection, _: opened.append(connection))
    return opened


async def stop(thread: SqliteThread) -> None:
    thread.stop()
    await thread.wait_stopped()


def count_rows(connection: Connection) -> int:
    return int(connection.exec_driver_sql("SELECT count(*) FROM written").scalar_one())


async def test_a_failed_job_leaves_no_transaction_open(
    engine: Engine, connects: list[object]
) -> None:
    def fail(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        connection.exec_driver_sql("INSERT INTO written VALUES (1)")
        raise ValueError("a bug")

    thread = SqliteThread(engine)
    await thread.run(lambda each: each.exec_driver_sql("CREATE TABLE written (number INTEGER)"))
    for _ in range(2):
        with pytest.raises(ValueError, match="a bug"):
            await thread.run(fail)
        assert await thread.run(count_rows) == 0
    assert len(connects) == 3
    await stop(thread)


async def test_a_locked_row_does_not_cost_the_connection(
    engine: Engine, connects: list[object]
) -> None:
    def find_locked(_: Connection) -> None:
        raise RowLocked("a row is locked")

    thread = SqliteThread(engine)
    for _ in range(2):
        with pytest.raises(RowLocked):
            await thread.run(find_locked)
    assert len(connects) == 1
    await stop(thread)


async def test_a_stopped_thread_has_closed_its_connection(engine: Engine) -> None:
    thread, was_stopped = SqliteThread(engine), list[bool]()
    event.listen(engine, "close", lambda *_: was_stopped.append(thread._stopped.done()))
    await thread.run(lambda each: each.exec_driver_sql("SELECT 1").scalar_one())
    await stop(thread)
    assert was_stopped == [False]


async def test_a_thread_without_jobs_stops_at_once(engine: Engine) -> None:
    await stop(SqliteThread(engine))


async def test_the_end_of_a_thread_can_be_awaited_again_after_a_cancelled_wait(
    engine: Engine,
) -> None:
    thread, released = SqliteThread(engine), threading.Event()
    job = asyncio.ensure_future(thread.run(lambda _: released.wait()))
    await idle()
    thread.stop()
    waiting = asyncio.ensure_future(thread.wait_stopped())
    await idle()
    waiting.cancel()
    await asyncio.wait({waiting})
    released.set()
    assert await job
    await thread.wait_stopped()
