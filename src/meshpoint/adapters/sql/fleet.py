"""The replicas that serve agents, in a SQL database."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import Row

from meshpoint.adapters.sql import fleet_statements as sql
from meshpoint.adapters.sql import key_register
from meshpoint.adapters.sql.database import Database, Transaction
from meshpoint.adapters.sql.rows import AgentNames, instant
from meshpoint.adapters.sql.sessions import DatabaseTime
from meshpoint.model.ids import AgentName, ReplicaId
from meshpoint.model.replicas import (
    KEPT_WHEN_LOST,
    RegisteredReplica,
    Registration,
    ReplicaState,
)

_PID = " pid "


class SqlFleet:
    """`meshpoint.ports.task_store.Fleet` on a SQL database; a base class of `SqlStore`."""

    _database: Database
    _time: DatabaseTime

    async def register(self, registration: Registration) -> None:
        """Write the replica's row and its key, and delete the rows of replicas lost long ago."""
        agent = self._database.options.names.qualified(registration.agent)

        async def body(tx: Transaction) -> None:
            sent_at = self._time.clock()
            (row,) = await tx.fetch(
                sql.PUT_REPLICA,
                agent=agent,
                replica=registration.id,
                release=registration.release,
                app_version=registration.app_version,
                state_formats=json.dumps(sorted(registration.formats)),
                slots=registration.slots,
                host=_join_process(registration.host, registration.pid),
                is_draining=registration.is_draining,
                valid_for=registration.valid_for.total_seconds(),
            )
            if not self._database.dialect.is_sqlite:
                self._time.observe(row.seen_at, sent_at)
            kept = KEPT_WHEN_LOST.total_seconds()
            await tx.execute(sql.DELETE_LOST_REPLICAS, agent=agent, kept=kept)
            await key_register.record(tx, agent)

        await self._database.transact(body)

    async def unregister(self, agent: AgentName, replica: ReplicaId) -> None:
        """Delete the replica's row."""
        qualified = self._database.options.names.qualified(agent)
        await self._database.transact(
            lambda tx: tx.execute(sql.DELETE_REPLICA, agent=qualified, replica=replica)
        )

    async def replicas(self, agent: AgentName | None = None) -> list[RegisteredReplica]:
        """Read the replicas of one agent or of all agents of the namespace."""
        names = self._database.options.names
        rows = await self._database.fetch(
            sql.READ_REPLICAS,
            agent=None if agent is None else names.qualified(agent),
            prefix=names.prefix,
        )
        return [replica_from_row(row, names) for row in rows]


def replica_from_row(row: Row[Any], names: AgentNames) -> RegisteredReplica:
    """Decode a row of `READ_REPLICAS`."""
    state = ReplicaState.DRAINING if row.is_draining else ReplicaState.LIVE
    host, pid = _split_process(row.host)
    return RegisteredReplica(
        ReplicaId(row.replica_id),
        names.plain(row.agent_name),
        ReplicaState.LOST if row.is_lost else state,
        row.release,
        row.app_version,
        frozenset(json.loads(row.state_formats)),
        row.slots,
        host,
        instant(row.started_at),
        instant(row.seen_at),
        pid,
    )


def _join_process(host: str, pid: int | None) -> str:
    """The text of the column `host`. Earlier releases write only the host, and show all of it."""
    return host if pid is None else f"{host}{_PID}{pid}"


def _split_process(text: str) -> tuple[str, int | None]:
    host, separator, pid = text.rpartition(_PID)
    return (host, int(pid)) if separator and pid.isdecimal() else (text, None)
