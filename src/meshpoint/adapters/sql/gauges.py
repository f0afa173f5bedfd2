"""What `meshpoint metrics` reads of a database."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import Row

from meshpoint.adapters.sql import catalog_statements, tables
from meshpoint.adapters.sql import gauge_statements as sql
from meshpoint.adapters.sql.fleet import replica_from_row
from meshpoint.adapters.sql.fleet_statements import READ_REPLICAS
from meshpoint.adapters.sql.read_only import ReadOnlyConnection
from meshpoint.adapters.sql.rows import AgentNames, instant
from meshpoint.errors import StoreUnavailable
from meshpoint.model.ids import AgentName
from meshpoint.model.replicas import RegisteredReplica, ReplicaState
from meshpoint.model.tasks import TaskState
from meshpoint.ports.clock import Clock
from meshpoint.ports.gauges import AgentGauges, DatabaseGauges, SessionGauges

MAX_COUNT, MAX_ENDED_COUNT = 1_000_000, 100_000
"""Tasks of one agent and state beyond which they are no longer counted: ended ones sooner."""
_SAMPLE = 1000
"""Rows that are read to find the oldest message or to count stranded tasks."""
_STRANDED_AGE = timedelta(minutes=1)
_ONE_SNAPSHOT = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"
_INDEXES_ONLY = ("SET LOCAL enable_seqscan = off", "SET LOCAL jit = off")
"""A plan for a small table must also fit a large one."""


class SqlGauges:
    """`meshpoint.ports.gauges.DatabaseGaugeReader`.

    Args:
        url: The database.
        namespace: The namespace of the mesh.
        timeout: Limit for connecting, and for each statement.
        agents: Agents to describe even if they have no tasks.
        clock: Replaces the database's clock in tests.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str,
        timeout: timedelta,
        agents: Collection[AgentName] = (),
        clock: Clock | None = None,
    ) -> None:
        self._agents = agents
        self._names = AgentNames(namespace)
        self._connection = ReadOnlyConnection(url, timeout, clock)
        self._is_sqlite = self._connection.dialect.is_sqlite

    async def read(self) -> DatabaseGauges:
        """Read everything in one transaction. Connects first, if not connected."""
        try:
            if not self._connection.is_open:
                await self._connect()
            gauges = await self._read()
            if self._connection.revision is None:  # look for tables again
                await self._connection.close()
            return gauges
        except BaseException:  # also a cancellation: the connection may be in any state
            await self._connection.close()
            raise

    async def close(self) -> None:
        """Disconnect."""
        await self._connection.close()

    async def _connect(self) -> None:
        await self._connection.open()
        if not self._connection.is_open:
            raise StoreUnavailable("the file does not exist: no replica has used it yet")
        revision = self._connection.revision
        if revision is not None and tables.is_outdated(revision):
            raise StoreUnavailable(
                f"the tables are at revision {revision}, this release needs {tables.REVISION}; "
                "run: meshpoint db upgrade"
            )

    async def _read(self) -> DatabaseGauges:
        await self._connection.begin(_ONE_SNAPSHOT, *_INDEXES_ONLY)
        fetch = self._connection.fetch
        replicas = await self._read_replicas()
        agents = {
            agent: await self._read_agent(
                agent, [each for each in replicas if each.agent == agent]
            )
            for agent in await self._find_agents(replicas)
        }
        if self._is_sqlite:
            return DatabaseGauges(agents, (await fetch(sql.READ_SIZE_SQLITE))[0].bytes)
        size = (await fetch(sql.READ_SIZE))[0].bytes
        sessions = (await fetch(sql.READ_SESSIONS))[0]
        now = (await fetch(catalog_statements.READ_CLOCK))[0].now
        return DatabaseGauges(agents, size, instant(now), _to_sessions(sessions))

    async def _read_replicas(self) -> list[RegisteredReplica]:
        if self._connection.revision is None:  # only queues are in this database
            return []
        prefix = self._names.prefix
        rows = await self._connection.fetch(READ_REPLICAS, agent=None, prefix=prefix)
        return [replica_from_row(row, self._names) for row in rows]

    async def _find_agents(self, replicas: Sequence[RegisteredReplica]) -> list[AgentName]:
        if self._connection.revision is None:
            return []
        rows = await self._connection.fetch(catalog_statements.READ_AGENTS)
        stored = [each.name for each in rows if each.name.startswith(self._names.prefix)]
        registered = [each.agent for each in replicas]
        return sorted({*self._agents, *map(self._names.plain, stored), *registered})

    async def _read_agent(
        self, agent: AgentName, replicas: Sequence[RegisteredReplica]
    ) -> AgentGauges:
        (row,) = await self._connection.fetch(
            sql.READ_TASK_GAUGES,
            agent=self._names.qualified(agent),
            most=MAX_COUNT,
            most_ended=MAX_ENDED_COUNT,
            sample=_SAMPLE,
        )
        return AgentGauges(
            tasks={state: getattr(row, state) for state in TaskState},
            suspended=row.suspended,
            dead=row.dead,
            ready_age=_age(row.ready_age),
            waiting_age=_age(row.waiting_age),
            outbox_age=max(map(_age, (row.requests_age, row.calls_age, row.replies_age))),
            open_questions=row.questions,
            stranded=await self._count_stranded(agent, replicas),
            replicas={
                state: sum(each.state is state for each in replicas) for state in ReplicaState
            },
        )

    async def _count_stranded(
        self, agent: AgentName, replicas: Sequence[RegisteredReplica]
    ) -> int:
        """Count ready tasks in formats that no replica reads, once any replica has registered."""
        live = [each.formats for each in replicas if each.state is not ReplicaState.LOST]
        if not live:
            return 0
        rows = await self._connection.fetch(
            sql.COUNT_UNACQUIRED,
            agent=self._names.qualified(agent),
            age=_STRANDED_AGE.total_seconds(),
            sample=_SAMPLE,
        )
        read = frozenset[str]().union(*live)
        return sum(row.tasks for row in rows if row.state_format not in read)


def _to_sessions(row: Row[Any]) -> SessionGauges:
    return SessionGauges(_age(row.snapshot_age), _age(row.query_age), _age(row.lock_wait))


def _age(seconds: float | None) -> float:
    return max(seconds or 0.0, 0.0)
