"""The server with the queues of a run: RabbitMQ, or the PostgreSQL that also has the tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import aiormq
import asyncpg
from aiormq.exceptions import AMQPError
from pamqp.common import FieldValue

from servers import PrivateServer, RabbitServer

_HEARTBEAT = "heartbeat=5"
"""Bounds how long a frozen replica keeps its messages."""
# aiormq raises a RuntimeError on a closed channel.
UNAVAILABLE_ERRORS = (
    OSError,
    AMQPError,
    RuntimeError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    TimeoutError,
)
"""What a server raises while it is down."""
_PRIVATE_QUEUE_LIMIT = 100_000
"""Messages with which a private queue in a database is full."""


class QueueServer(Protocol):
    """What a run does to the server of its queues."""

    @property
    def broker_url(self) -> str:
        """URL for replicas and clients."""

    @property
    def server(self) -> PrivateServer:
        """The process to stop and start."""

    async def messages(self) -> dict[str, int]:
        """Number of messages per queue, held ones included. Empty queues may be missing."""

    def full_queue(self, namespace: str, address: str) -> AbstractAsyncContextManager[None]:
        """Declare a reply queue that takes no message; delete it at the end."""


@dataclass(frozen=True, slots=True)
class RabbitQueues:
    """A `QueueServer` on RabbitMQ."""

    server: RabbitServer

    @property
    def broker_url(self) -> str:
        return f"{self.server.url}?{_HEARTBEAT}"

    async def messages(self) -> dict[str, int]:
        return await self.server.messages()

    @asynccontextmanager
    async def full_queue(self, namespace: str, address: str) -> AsyncIterator[None]:
        bounded: dict[str, FieldValue] = {
            "x-max-length": 1,
            "x-overflow": "reject-publish",
            "x-expires": 30_000,
        }
        queue = f"{namespace}.{address}"
        connection = await aiormq.connect(self.server.url)
        try:
            channel = await connection.channel()
            await channel.queue_declare(queue, arguments=bounded)
            await channel.queue_bind(queue, f"{namespace}.mesh", address)
            yield
            await channel.queue_delete(queue)
        finally:
            await connection.close()


@dataclass(frozen=True, slots=True)
class PostgresQueues:
    """A `QueueServer` in the database `db_url`."""

    server: PrivateServer
    db_url: str

    @property
    def broker_url(self) -> str:
        return self.db_url

    async def messages(self) -> dict[str, int]:
        connection = await connect(self.db_url)
        try:
            return {row["name"]: row["messages"] for row in await connection.fetch(_COUNT)}
        finally:
            await connection.close()

    @asynccontextmanager
    async def full_queue(self, namespace: str, address: str) -> AsyncIterator[None]:
        queue = f"{namespace}.{address}"
        connection = await asyncpg.connect(self.db_url, timeout=5)
        try:
            await connection.execute(_ADD_FULL_QUEUE, queue, _PRIVATE_QUEUE_LIMIT)
            yield
            await connection.execute(_DELETE_QUEUE, queue)
        finally:
            connection.terminate()


_COUNT = """
SELECT q.name, count(*) AS messages
  FROM meshpoint_queue_message m JOIN meshpoint_queue q ON q.id = m.queue GROUP BY q.name"""
_ADD_FULL_QUEUE = """
WITH added AS (
    INSERT INTO meshpoint_queue (name, agent, dead_letters, is_private)
    VALUES ($1, $1, $1, true) RETURNING id)
INSERT INTO meshpoint_queue_message (queue, properties, body)
SELECT added.id, '{}', '' FROM added, generate_series(1, $2)"""
_DELETE_QUEUE = """
WITH dropped AS (DELETE FROM meshpoint_queue WHERE name = $1 RETURNING id)
DELETE FROM meshpoint_queue_message m USING dropped WHERE m.queue = dropped.id"""


async def connect(db_url: str) -> asyncpg.Connection:
    """Connect, after the server has closed the connections of killed replicas if need be."""
    while True:
        try:
            return await asyncpg.connect(db_url)
        except asyncpg.TooManyConnectionsError:
            await asyncio.sleep(0.5)
