"""The servers that the other tests depend on."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import aiormq
import asyncpg
import pytest
from aiormq.exceptions import AMQPConnectionError

from servers import DatabasePool, NamedServer, PostgresServer, RabbitServer, ServerFailed
from servers.database import execute

ENDED = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
"""What asyncpg raises in a session that the server has ended, or is ending."""


async def test_a_new_database_is_empty(empty_postgres_url: str) -> None:
    connection = await asyncpg.connect(empty_postgres_url)
    try:
        assert (
            await connection.fetchval("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'")
            == 0
        )
        await connection.execute("CREATE TABLE kept (n int)")
    finally:
        await connection.close()


@pytest.mark.parametrize("run", [1, 2])
async def test_a_database_with_tables_has_no_rows_of_another_test(
    postgres_url: str, run: int
) -> None:
    connection = await asyncpg.connect(postgres_url)
    try:
        tables = await connection.fetch(
            "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
        )
        assert len(tables) >= 3
        await connection.execute("CREATE TABLE mine (n int)")
    finally:
        await connection.close()


async def test_a_reused_database_has_no_rows_and_only_its_original_tables(
    postgres_server: NamedServer | PostgresServer, empty_postgres_url: str
) -> None:
    await execute(empty_postgres_url, "CREATE TABLE notes (n int)")
    databases = DatabasePool(postgres_server.url, urlsplit(empty_postgres_url).path.strip("/"))
    try:
        async with databases.borrow() as first:
            session = await asyncpg.connect(first)
            await session.execute("INSERT INTO notes VALUES (1)")
        with pytest.raises(ENDED):
            await session.fetch("SELECT 1")
        async with databases.borrow() as second:
            assert second == first
            connection = await asyncpg.connect(second)
            assert await connection.fetchval("SELECT count(*) FROM notes") == 0
            await connection.execute("CREATE INDEX other ON notes (n)")
            await connection.close()
        async with databases.borrow() as third:
            assert third != first
    finally:
        await databases.close()


@pytest.mark.parametrize("stop", ["fast", "immediate", "kill"])
async def test_postgres_keeps_what_was_committed(own_postgres: PostgresServer, stop: str) -> None:
    table = f"kept_{stop}"
    await execute(own_postgres.url, f"CREATE TABLE {table} (n int)")
    await (
        own_postgres.kill() if stop == "kill" else own_postgres.stop(immediate=stop == "immediate")
    )
    with pytest.raises(OSError, match="Connect"):
        await asyncpg.connect(own_postgres.url)
    await own_postgres.start()
    await execute(own_postgres.url, f"INSERT INTO {table} VALUES (1)")


async def test_rabbitmq_can_be_stopped_and_restarted(own_rabbit: RabbitServer) -> None:
    connection = await aiormq.connect(own_rabbit.url)
    await own_rabbit.kill()
    await asyncio.wait({connection.closing})
    with pytest.raises(AMQPConnectionError):
        await aiormq.connect(own_rabbit.url)
    await own_rabbit.start()
    await (await aiormq.connect(own_rabbit.url)).close()


async def test_an_error_of_a_rabbitmq_node_is_reported(own_rabbit: RabbitServer) -> None:
    await own_rabbit.evaluate("true = is_atom(node()).")
    with pytest.raises(ServerFailed, match="failed"):
        await own_rabbit.evaluate("false = is_atom(node()).")


async def test_redis_runs_with_persistence(redis_url: str) -> None:
    address = urlsplit(redis_url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(b"CONFIG GET appendonly\r\n")
    assert (await reader.readuntil(b"yes\r\n")).startswith(b"*2")
    writer.close()
    await writer.wait_closed()
