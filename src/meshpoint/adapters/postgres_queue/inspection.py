"""Facts about queues on PostgreSQL, for `meshpoint doctor`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from meshpoint.adapters.postgres_queue import statements as sql
from meshpoint.adapters.sql.engine import engine_for
from meshpoint.adapters.sql.prepared import PreparedConnection
from meshpoint.errors import BrokerUnavailable, StoreUnavailable
from meshpoint.model.ids import AgentName
from meshpoint.model.messages import Address
from meshpoint.ports.inspection import MissingRight, OtherArguments, QueueFacts, Right

_COUNT_REPLICAS = """
SELECT count(*) AS replicas FROM meshpoint_queue q JOIN meshpoint_queue_holder h ON h.id = q.holder
 WHERE q.agent = $1 AND q.is_private AND h.until > clock_timestamp()"""


class PostgresQueueInspection:
    """`meshpoint.ports.inspection.BrokerInspection`. Only reads."""

    def __init__(self, url: str, *, namespace: str, timeout: timedelta) -> None:
        self._url, self._namespace, self._timeout = url, namespace, timeout
        self._engine: AsyncEngine | None = None
        self._has_tables = False

    async def open(self) -> None:
        """Connect.

        Raises:
            BrokerUnavailable: The database does not answer.
        """
        self._engine = engine_for(
            self._url, command_timeout=self._timeout, pool_size=1, in_key_order=True
        )
        self._connection = PreparedConnection(self._engine)
        self._has_tables = (await self._read(sql.FIND_TABLES))[0].exist

    async def close(self) -> None:
        """Disconnect."""
        if self._engine is not None:
            await self._connection.close()
            await self._engine.dispose()

    async def queue(self, address: Address) -> QueueFacts | None:
        """A queue. Consumers leave no trace in the database: see `replicas`."""
        rows = await self._read_tables(sql.DEPTH, f"{self._namespace}.{address}")
        return QueueFacts(rows[0].messages, 0) if rows else None

    async def replicas(self, agent: AgentName) -> int:
        """Number of processes with a private queue of `agent` and a valid lease."""
        rows = await self._read_tables(_COUNT_REPLICAS, f"{self._namespace}.{agent}")
        return rows[0].replicas if rows else 0

    async def has_database_marker(self, agent: AgentName) -> bool:
        """Whether the marker of `agent` is set."""
        return bool(await self._read_tables(sql.HAS_MARKER, f"{self._namespace}.{agent}"))

    async def missing_rights(self, agent: AgentName, shards: int) -> list[MissingRight]:
        """The tables that the login may not read or write."""
        rows = await self._read_tables(sql.FIND_MISSING_RIGHTS, sql.TABLES)
        missing = {
            (Right.READ if row.privilege == "SELECT" else Right.WRITE, row.name) for row in rows
        }
        return [MissingRight(right, f"table {name}") for right, name in sorted(missing)]

    async def other_arguments(self, agent: AgentName, shards: int) -> list[OtherArguments]:
        """None: limits are not stored with a queue."""
        return []

    async def _read_tables(self, statement: str, *values: Any) -> Sequence[Any]:
        """The rows, or none in a database without the tables."""
        return await self._read(statement, *values) if self._has_tables else []

    async def _read(self, statement: str, *values: Any) -> Sequence[Any]:
        try:
            return await self._connection.read(statement, *values)
        except StoreUnavailable as error:
            raise BrokerUnavailable(str(error)) from error


async def delete_queues(
    url: str, namespace: str, agents: Collection[AgentName], timeout: timedelta
) -> None:
    """Delete all queues of agents that no replica serves any more.

    Raises:
        BrokerUnavailable: The database does not answer.
    """
    engine = engine_for(url, command_timeout=timeout, pool_size=1)
    connection = PreparedConnection(engine)
    try:
        await connection.write(sql.DELETE_QUEUES, [f"{namespace}.{agent}" for agent in agents])
    except StoreUnavailable as error:
        raise BrokerUnavailable(str(error)) from error
    finally:
        await connection.close()
        await engine.dispose()
