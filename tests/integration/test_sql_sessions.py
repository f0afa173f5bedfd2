"""Server defaults, poolers, and concurrent upgrades."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import asyncpg
import pytest
from sqlalchemy import event
from sqlalchemy.pool import Pool

from meshpoint.adapters.sql import SqlStore, failures, sessions
from meshpoint.adapters.sql.sessions import DatabaseTime, check_session
from meshpoint.errors import ConfigurationError, StoreUnavailable
from meshpoint.model.ids import TaskId, new_id
from meshpoint.model.timeline import TimelineOptions
from meshpoint.model.transitions import (
    BeginCommitted,
    EndCommitted,
    JoinCompleted,
    PauseCommitted,
    StillWaiting,
)
from meshpoint.testing.conformance.build import (
    HERE,
    a_begin,
    a_claim,
    a_pause,
    an_end,
    one,
    paused,
    resumed,
)
from servers import PostgresServer

T = TypeVar("T")

DEFAULTS = {
    "default_transaction_isolation": "serializable",
    "default_transaction_read_only": "on",
    "statement_timeout": "5s",
    "lock_timeout": "1",
    "synchronous_commit": "off",
    "standard_conforming_strings": "off",
}

_FATAL = b"SFATAL\0C57P01\0Mterminating connection due to administrator command\0\0"
END_OF_SESSION = b"E" + (len(_FATAL) + 4).to_bytes(4) + _FATAL
"""What a driver receives before the connection is closed."""


@pytest.fixture
async def unusual_defaults_url(postgres_url: str) -> str:
    """A database with defaults that would break transitions."""
    connection = await asyncpg.connect(postgres_url)
    try:
        database = await connection.fetchval("SELECT current_database()")
        for name, value in DEFAULTS.items():
            await connection.execute(f"ALTER DATABASE {database} SET {name} = '{value}'")
    finally:
        await connection.close()
    return postgres_url


@pytest.fixture
async def store(unusual_defaults_url: str) -> AsyncIterator[SqlStore]:
    store = SqlStore(unusual_defaults_url, namespace="test")
    await store.open()
    yield store
    await store.close()


async def test_sessions_override_settings_that_transitions_depend_on(store: SqlStore) -> None:
    async with store._database.engine.connect() as connection:
        found = {
            name: (await connection.exec_driver_sql(f"SHOW {name}")).scalar_one()
            for name in (*DEFAULTS, "transaction_isolation", "application_name")
        }
    assert found == {
        "default_transaction_isolation": "read committed",
        "transaction_isolation": "read committed",
        "application_name": "meshpoint",
        "default_transaction_read_only": "off",
        "statement_timeout": "30s",
        "lock_timeout": "1s",
        "synchronous_commit": "on",
        "standard_conforming_strings": "on",
    }


async def test_a_stricter_commit_setting_is_kept(postgres_url: str) -> None:
    connection = await asyncpg.connect(postgres_url)
    database = await connection.fetchval("SELECT current_database()")
    await connection.execute(f"ALTER DATABASE {database} SET synchronous_commit = 'remote_apply'")
    await connection.close()
    store = SqlStore(postgres_url, namespace="test")
    await store.open()
    async with store._database.engine.connect() as connection:
        assert (
            await connection.exec_driver_sql("SHOW synchronous_commit")
        ).scalar_one() == "remote_apply"
    await store.close()


async def test_two_replicas_complete_one_join_at_any_default_isolation_level(
    store: SqlStore, unusual_defaults_url: str
) -> None:
    other = SqlStore(unusual_defaults_url, namespace="test")
    await other.open()
    pauses = [await paused(store, "a", "b") for _ in range(10)]
    arrivals = await asyncio.gather(
        *(store.claim([a_claim(pause, "a")], HERE, 10) for pause in pauses),
        *(other.claim([a_claim(pause, "b")], HERE, 10) for pause in pauses),
    )
    assert sum(isinstance(one(arrival), JoinCompleted) for arrival in arrivals) == 10
    await other.close()


async def test_a_pooler_that_drops_prepared_statements_fails_no_task(store: SqlStore) -> None:
    """Like PgBouncer below 1.21 in transaction mode: the session lacks prepared statements."""
    pause = await paused(store)
    run = (await resumed(store)).run
    assert isinstance(one(await store.begin([a_begin()])), BeginCommitted)
    assert store._fast_path is not None
    for connection in store._fast_path._connections:
        if connection._driver is not None:
            await connection._driver.execute("DEALLOCATE ALL")
    async with store._database.engine.connect() as sql_connection:
        driver = (await sql_connection.get_raw_connection()).driver_connection
        assert driver is not None
        await driver.execute("DEALLOCATE ALL")
    claim, end = a_claim(pause), an_end(run)
    assert isinstance(one(await repeat(lambda: store.claim([claim], HERE, 1))), JoinCompleted)
    assert isinstance(one(await repeat(lambda: store.end([end]))), EndCommitted)


@pytest.mark.parametrize("fast_path", [True, False])
async def test_a_session_that_the_server_is_ending_is_replaced(
    postgres_url: str, fast_path: bool
) -> None:
    drivers: list[Any] = []

    def add_driver(connection: Any, record: object) -> None:
        drivers.append(connection.driver_connection)

    event.listen(Pool, "connect", add_driver)
    store = SqlStore(postgres_url, namespace="test", fast_path=fast_path)
    try:
        await store.open()
        pause = await paused(store, "a", "b")
        for driver in drivers:
            driver._protocol.data_received(END_OF_SESSION)
        assert pause.run.task_id in await store.lookup([pause.run.task_id])
        for driver in drivers:
            driver._protocol.data_received(END_OF_SESSION)
        assert isinstance(one(await store.claim([a_claim(pause, "a")], HERE, 1)), StillWaiting)
    finally:
        await store.close()
        event.remove(Pool, "connect", add_driver)


@pytest.mark.parametrize("fast_path", [True, False])
@pytest.mark.parametrize(
    "error",
    [
        asyncpg.InternalClientError("cannot switch to state 11; another operation is in progress"),
        asyncpg.TargetServerAttributeNotMatched("None of the hosts match: read-write"),
    ],
    ids=["ends while it is set up", "no primary"],
)
async def test_a_connection_that_cannot_be_set_up_is_an_outage(
    postgres_url: str, error: Exception, fast_path: bool
) -> None:
    """The server may stop after a connection's first message, and a standby is no primary."""

    def fail(*_: object) -> None:
        raise error

    store = SqlStore(postgres_url, namespace="test", fast_path=fast_path)
    try:
        await store.open()
        await store._database.engine.dispose()
        event.listen(store._database.engine.sync_engine, "connect", fail)
        with pytest.raises(StoreUnavailable):
            await store.lookup([TaskId(new_id())])
        with pytest.raises(StoreUnavailable):
            await store.begin([a_begin()])
        event.remove(store._database.engine.sync_engine, "connect", fail)
        assert isinstance(one(await store.begin([a_begin()])), BeginCommitted)
    finally:
        await store.close()


async def test_connections_to_a_server_that_became_read_only_are_replaced(
    postgres_url: str,
) -> None:
    """As after a failover that keeps the connections to the earlier primary."""
    store = SqlStore(postgres_url, namespace="test")
    await store.open()
    pause = await paused(store)
    assert store._fast_path is not None
    for connection in store._fast_path._connections:
        if connection._driver is not None:
            await connection._driver.execute(
                "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY"
            )
    again = a_pause()
    assert isinstance(one(await repeat(lambda: store.pause([again]))), PauseCommitted)
    assert (await store.lookup([pause.run.task_id])).keys() == {pause.run.task_id}
    await store.pause([a_pause()])
    assert store._fast_path._pauses.losses == 1
    await store.close()


async def repeat(step: Callable[[], Awaitable[T]]) -> T:
    """Repeat a step while the database is unavailable, as the engine does."""
    for _ in range(3):
        with suppress(StoreUnavailable):
            return await step()
    return await step()


class FakePooler:
    """One server session per client; each transaction borrows any free one."""

    def __init__(self, *, keeps_prepared: bool) -> None:
        self.keeps_prepared = keeps_prepared
        self.idle = [1, 2, 3]


class PooledClient:
    """One client of a pooler, as the driver has it."""

    def __init__(self, pooler: FakePooler) -> None:
        self._pooler = pooler
        self._lent: int | None = None

    def get_server_pid(self) -> int:
        return -1

    async def execute(self, statement: str) -> None:
        if statement == "BEGIN":
            self._lent = self._pooler.idle.pop()
        elif self._lent is not None:
            self._pooler.idle.append(self._lent)
            self._lent = None

    def transaction(self) -> PooledClient:
        return self

    async def __aenter__(self) -> None:
        await self.execute("BEGIN")

    async def __aexit__(self, *_: object) -> None:
        await self.execute("COMMIT")

    async def prepare(self, _: str) -> Any:
        client, prepared_on = self, self._lent

        class Statement:
            async def fetchval(self) -> int | None:
                running_on = client._lent or client._pooler.idle[-1]
                if running_on != prepared_on and not client._pooler.keeps_prepared:
                    raise asyncpg.InvalidSQLStatementNameError("prepared statement does not exist")
                return running_on

        return Statement()

    async def fetchval(self, _: str) -> int | None:
        return self._lent

    async def fetchrow(self, _: str, *tables: object) -> dict[str, object] | None:
        if tables:  # no right is missing
            return None
        return {
            "pid": 1,
            "isolation": "read committed",
            "read_only": "off",
            "standby": False,
            "now": 0.0,
        }


@pytest.mark.parametrize("keeps_statements", [True, False])
async def test_a_pooler_is_detected_at_the_start(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch, keeps_statements: bool
) -> None:
    pooler = FakePooler(keeps_prepared=keeps_statements)

    async def client(_: object) -> PooledClient:
        return PooledClient(pooler)

    monkeypatch.setattr(sessions, "_driver", client)
    if keeps_statements:
        await check_session(store._database.engine, DatabaseTime())
    else:
        with pytest.raises(ConfigurationError, match=r"PgBouncer 1\.21"):
            await check_session(store._database.engine, DatabaseTime())
    assert sorted(pooler.idle) == [1, 2, 3]


@pytest.fixture
async def reader_url(postgres_url: str) -> AsyncIterator[str]:
    """The URL of a role that may only read."""
    role = f"reader_{new_id()[-12:]}"
    connection = await asyncpg.connect(postgres_url)
    try:
        await connection.execute(f"CREATE ROLE {role} LOGIN")
        await connection.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}")
        address = urlsplit(postgres_url)
        yield address._replace(netloc=f"{role}@{address.hostname}:{address.port}").geturl()
        await connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
    finally:
        await connection.close()


async def test_a_role_without_write_permission_is_detected_at_the_start(reader_url: str) -> None:
    store = SqlStore(reader_url, namespace="test")
    try:
        with pytest.raises(
            ConfigurationError,
            match=r"may not (INSERT|UPDATE|DELETE) in the table agent_.*; run: GRANT",
        ):
            await store.open()
    finally:
        await store.close()


async def test_rights_to_the_tables_suffice(reader_url: str, postgres_url: str) -> None:
    """Timelines number their entries: a sequence would need a right of its own."""
    connection = await asyncpg.connect(postgres_url)
    await connection.execute(
        "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public "
        f"TO {urlsplit(reader_url).username}"
    )
    await connection.close()
    store = SqlStore(reader_url, namespace="test", timeline=TimelineOptions())
    try:
        await store.open()
        pause = await paused(store)
        assert len(await store.timeline(pause.run.task_id)) == 1
    finally:
        await store.close()


def test_a_silent_server_is_named_in_the_error() -> None:
    assert failures.summarize(TimeoutError()) == "TimeoutError: no answer in time"


async def test_a_standby_is_unavailable_at_the_start(own_postgres: PostgresServer) -> None:
    signal_file = own_postgres.folder.path / "data" / "standby.signal"
    await own_postgres.stop()
    own_postgres.folder.chown(own_postgres.folder.write("data/standby.signal", ""))
    try:
        await own_postgres.start()
        store = SqlStore(own_postgres.url, namespace="test")
        with pytest.raises(StoreUnavailable, match="is a standby"):
            await store.open()
        await store.close()
    finally:
        await own_postgres.stop()
        signal_file.unlink()
        await own_postgres.start()


async def _run_upgrades(url: str) -> list[int | None]:
    command = [sys.executable, "-m", "meshpoint.cli", "db", "upgrade", "--db", url]
    pipe = asyncio.subprocess.PIPE
    upgrades = [
        await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe) for _ in range(4)
    ]
    outputs = await asyncio.gather(*(process.communicate() for process in upgrades))
    assert b"Traceback" not in b"".join(err for _, err in outputs)
    return [each.returncode for each in upgrades]


async def test_concurrent_upgrades_of_one_database_are_serialized(empty_postgres_url: str) -> None:
    connection = await asyncpg.connect(empty_postgres_url)
    database = await connection.fetchval("SELECT current_database()")
    await connection.execute(
        f"ALTER DATABASE {database} SET default_transaction_isolation = 'repeatable read'"
    )
    await connection.close()
    assert await _run_upgrades(empty_postgres_url) == [0, 0, 0, 0]


async def test_concurrent_upgrades_of_one_file_are_serialized(tmp_path: Path) -> None:
    assert await _run_upgrades(f"sqlite:///{tmp_path}/mesh.db") == [0, 0, 0, 0]
