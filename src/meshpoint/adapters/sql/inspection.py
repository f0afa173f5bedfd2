"""What `meshpoint doctor` reads of a database, in transactions that cannot write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Row

from meshpoint.adapters.sql import catalog_statements as sql
from meshpoint.adapters.sql import key_register, tables
from meshpoint.adapters.sql.codec import Codec
from meshpoint.adapters.sql.failures import is_disk_full
from meshpoint.adapters.sql.fleet import replica_from_row
from meshpoint.adapters.sql.fleet_statements import READ_REPLICAS
from meshpoint.adapters.sql.inventory import PARKED_REASON, REASON
from meshpoint.adapters.sql.read_only import ReadOnlyConnection
from meshpoint.adapters.sql.rows import AgentNames, instant, tried_versions
from meshpoint.errors import StoreUnavailable
from meshpoint.model.ids import AgentName, ReplicaId
from meshpoint.model.replicas import RegisteredReplica
from meshpoint.model.tasks import TaskState
from meshpoint.ports.inspection import (
    AgentTasks,
    Owner,
    ParkedGroup,
    ReasonCount,
    SchemaFacts,
    SuspendedTasks,
    TaskGroup,
)
from meshpoint.ports.sealer import Sealer

_UNENDED = [state.value for state in TaskState if not state.is_final]
_WITH_OPERATIONS, _WITH_PARKING, _WITH_SUSPENDING = "0003", "0008", "0011"
_WITH_REPLICAS, _WITH_KEYS = "0015", "0017"
"""The first revisions with operations, parking, suspending, replicas and sealed values."""
_MAX_REASONS = 10


class SqlInspection:
    """`meshpoint.ports.inspection.DatabaseInspection`.

    Args:
        url: The database.
        namespace: The namespace of the mesh.
        timeout: Limit for connecting, and for each statement.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str,
        timeout: timedelta,
        sealer: Sealer | None = None,
    ) -> None:
        self._codec = Codec(sealer)
        self._names = AgentNames(namespace)
        self._connection = ReadOnlyConnection(url, timeout)
        self._is_sqlite = self._connection.dialect.is_sqlite

    async def open(self) -> None:
        """Connect, and read the revision. A missing SQLite file is not created."""
        await self._connection.open()

    async def close(self) -> None:
        """Disconnect."""
        await self._connection.close()

    async def schema(self) -> SchemaFacts:
        """The schema. Replicas create the tables in a SQLite file without any."""
        return SchemaFacts(self._connection.revision, tables.REVISION, self._is_sqlite)

    async def now(self) -> datetime | None:
        """The database's clock; `None` on SQLite, which uses this host's."""
        if self._is_sqlite:
            return None
        return instant((await self._fetch(sql.READ_CLOCK))[0].now)

    async def problem(self) -> str | None:
        """Why the role could not serve tasks; else `None`."""
        if self._is_sqlite:
            return None
        if (await self._fetch(sql.READ_STANDBY))[0].standby:
            return "the server is a standby, which cannot write"
        names = [
            table.name
            for table in tables.metadata.sorted_tables
            if table is not tables.operator_actions  # only the dashboard uses it
        ]
        for row in await self._fetch(sql.READ_MISSING_PRIVILEGE, names=names):
            return f"the role may not {row.privilege} in the table {row.name}"
        return None

    async def is_disk_full(self) -> bool:
        """Whether the database cannot write to its disk. Reading may work all the same."""
        if self._is_sqlite:
            return False
        await self._connection.begin(*sql.TEMPORARY_FILE_SETTINGS)
        try:
            await self._connection.fetch(sql.WRITE_TEMPORARY_FILE)
        except StoreUnavailable as error:
            return error.__cause__ is not None and is_disk_full(error.__cause__)
        return False

    async def agents(self) -> list[AgentName]:
        """The agents of this namespace that have tasks."""
        if self._connection.revision is None:
            return []
        rows = await self._fetch(sql.READ_AGENTS)
        return [
            self._names.plain(row.name) for row in rows if row.name.startswith(self._names.prefix)
        ]

    async def replicas(self) -> list[RegisteredReplica]:
        """The registered replicas of this namespace."""
        if (self._connection.revision or "") < _WITH_REPLICAS:
            return []
        rows = await self._fetch(READ_REPLICAS, agent=None, prefix=self._names.prefix)
        return [replica_from_row(row, self._names) for row in rows]

    async def tasks(self, agent: AgentName) -> AgentTasks:
        """The tasks of an agent, as far as the revision of the tables has them."""
        if self._connection.revision is None:
            return AgentTasks()
        name, revision = self._names.qualified(agent), self._connection.revision
        groups = await self._fetch(sql.COUNT_TASKS, agent=name, states=_UNENDED)
        waits = await self._fetch(sql.COUNT_WAITS, agent=name)
        dead = await self._fetch(sql.COUNT_DEAD, agent=name, limit=_MAX_REASONS)
        owners = await self._fetch(sql.READ_OWNERS, agent=name)
        parked: Sequence[Row[Any]] = ()
        operations = 0
        keys: Sequence[Row[Any]] = ()
        if revision >= _WITH_KEYS:
            keys = await self._fetch(key_register.READ, agent=name)
        if revision >= _WITH_PARKING:
            parked = await self._fetch(sql.COUNT_PARKED, agent=name)
        suspended: SuspendedTasks | None = None
        if revision >= _WITH_SUSPENDING:
            rows = await self._fetch(sql.COUNT_SUSPENDED, agent=name, states=_UNENDED)
            suspended = _to_suspended(rows[0])
        if revision >= _WITH_OPERATIONS:
            rows = await self._fetch(sql.COUNT_OPERATIONS, agent=name, states=_UNENDED)
            operations = rows[0].tasks
        return AgentTasks(
            tuple(map(_to_group, groups)),
            _parked_groups(parked, self._codec, name),
            _reason_counts(dead, self._codec, name),
            tuple((AgentName(row.peer_agent), row.tasks) for row in waits),
            tuple(Owner(ReplicaId(row.owner), row.tasks, instant(row.until)) for row in owners),
            operations,
            suspended,
            tuple(row.key_id for row in keys),
        )

    async def _fetch(self, template: str, **values: Any) -> Sequence[Row[Any]]:
        """Return the rows of a statement. Each runs in a transaction of its own."""
        await self._connection.begin()
        return await self._connection.fetch(template, **values)


def _to_group(row: Row[Any]) -> TaskGroup:
    return TaskGroup(
        TaskState(row.status), row.state_format, row.app_version, row.tasks, instant(row.oldest)
    )


def _to_suspended(row: Row[Any]) -> SuspendedTasks | None:
    return SuspendedTasks(row.tasks, instant(row.oldest)) if row.tasks else None


def _parked_groups(rows: Sequence[Row[Any]], codec: Codec, agent: str) -> tuple[ParkedGroup, ...]:
    """Groups of parked tasks. A reason sealed with several keys has several rows."""
    counts = Counter[tuple[str, str | None]]()
    for row in rows:
        reason = codec.show_text(row.parked_reason, PARKED_REASON, agent) or "unknown"
        counts[reason, row.tried_versions] += row.tasks
    return tuple(
        ParkedGroup(reason, tried_versions(tried), tasks)
        for (reason, tried), tasks in counts.most_common()
    )


def _reason_counts(rows: Sequence[Row[Any]], codec: Codec, agent: str) -> tuple[ReasonCount, ...]:
    counts = Counter[str]()
    for row in rows:
        counts[codec.show_text(row.dead_reason, REASON, agent) or "unknown"] += row.tasks
    return tuple(ReasonCount(reason, tasks) for reason, tasks in counts.most_common())
