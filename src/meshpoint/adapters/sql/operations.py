"""The methods of the SQL store for operations and their checkpoints."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshpoint.adapters.sql import operation_statements as sql
from meshpoint.adapters.sql import reviving, statements, subtasking
from meshpoint.adapters.sql.checkpointing import PackedPause
from meshpoint.adapters.sql.database import Database, Transaction
from meshpoint.adapters.sql.records import (
    STATES_BY_STATUS,
    checkpoint_from_row,
    checkpoint_rows,
    last_pause_from_rows,
    snapshot_from_row,
    summary_from_row,
)
from meshpoint.errors import CommitInDoubt, RowLocked, StoreUnavailable
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.operations import (
    LastPause,
    OperationStatus,
    OperationSummary,
    Revive,
    ReviveResult,
)
from meshpoint.model.subtasks import AgentCheckpoint, Operation, SaveCommitted
from meshpoint.model.tasks import L1Snapshot, Run
from meshpoint.model.transitions import BeginResult, Save, SaveResult

if TYPE_CHECKING:
    from meshpoint.adapters.sql.fast_path import FastPath


class SqlOperations:
    """`meshpoint.ports.task_store.Operations`, a base class of `SqlStore`."""

    _database: Database
    _fast_path: FastPath | None

    async def track(self, run: Run, operation: Operation) -> BeginResult:
        """Make a running task an operation, if it is not one already."""
        return await self._database.write(lambda tx: subtasking.track(tx, run, operation))

    async def save(self, command: Save) -> SaveResult:
        """Write a checkpoint within a segment, through the fast path if possible."""
        options = self._database.options
        rows = checkpoint_rows(command.checkpoint, options.codec, options.names)
        locked_rows = self._database.locked_rows
        if self._fast_path is not None and not locked_rows.recently_locked([command.run.task_id]):
            try:
                if await self._fast_path.save(command, rows):
                    return SaveCommitted()
            except RowLocked:
                locked_rows.record_timeout()
        try:
            return await self._database.write(lambda tx: subtasking.save(tx, command, rows))
        except RowLocked:
            locked_rows.record_locked([command.run.task_id])
            raise
        except CommitInDoubt:
            raise
        except StoreUnavailable as error:
            if self._fast_path is None:
                raise
            # The fast path may have committed the checkpoint and lost the response.
            raise CommitInDoubt(str(error)) from error

    async def latest(
        self, task_id: TaskId, agent: AgentName | None = None
    ) -> AgentCheckpoint | None:
        """Read the operation's last checkpoint. `None` if missing or of another agent."""
        found = await self._checkpoints(sql.READ_LATEST, task_id)
        return next((each for each in found if agent in {None, each.agent}), None)

    async def l1_snapshot(
        self, task_id: TaskId, agent: AgentName | None = None
    ) -> L1Snapshot | None:
        """Read the newest working memory among the operation's checkpoints.

        `None` if missing or of another agent. It may be older than the last checkpoint.
        """
        names = self._database.options.names
        for row in await self._database.fetch(sql.READ_SNAPSHOT, task_id=task_id):
            if row.agent_type.startswith(names.prefix) and agent in {
                None,
                names.plain(row.agent_type),
            }:
                return snapshot_from_row(row, self._database.options.codec)
        return None

    async def history(self, task_id: TaskId) -> list[AgentCheckpoint]:
        """Read the operation's checkpoints, oldest first. Without any, reads archived ones."""
        checkpoints = await self._checkpoints(sql.READ_HISTORY, task_id)
        return checkpoints or await self._checkpoints(sql.READ_ARCHIVE, task_id)

    async def _checkpoints(self, statement: str, task_id: TaskId) -> list[AgentCheckpoint]:
        names = self._database.options.names
        return [
            checkpoint_from_row(row, names, self._database.options.codec)
            for row in await self._database.fetch(statement, task_id=task_id)
            if row.agent_type.startswith(names.prefix)
        ]

    async def revive(self, command: Revive) -> ReviveResult:
        """Make an ended task ready again, for any replica of its agent."""
        options, pause = self._database.options, None
        if command.pause is not None:
            pause = await PackedPause.pack(command.pause, options)
        return await self._database.write(lambda tx: reviving.revive(tx, command, pause))

    async def last_pause(
        self, task_id: TaskId, agent: AgentName | None = None
    ) -> LastPause | None:
        """Read the last pause of a failed or cancelled operation. `None` if missing."""

        async def read(tx: Transaction) -> tuple[Any, Sequence[Any]] | None:
            rows = await tx.fetch(statements.READ_LAST_PAUSE, task_id=task_id)
            calls = await tx.fetch(statements.READ_KEPT_CALLS, ids=[task_id]) if rows else ()
            return (rows[0], calls) if rows else None

        names, found = self._database.options.names, await self._database.read(read)
        if found is None or not found[0].agent_name.startswith(names.prefix):
            return None
        if len(found[1]) != found[0].total_expected:  # an earlier release has deleted some
            return None
        last = await last_pause_from_rows(*found, names, self._database.options.codec)
        return last if agent in {None, last.run.agent} else None

    async def copy_key(self) -> bytes:
        """Read the key that authenticates copies outside the database, or create it."""
        namespace = self._database.options.names.namespace

        async def create_key(tx: Transaction) -> bytes:
            await tx.execute(sql.INSERT_SECRET, namespace=namespace, key=os.urandom(32))
            (row,) = await tx.fetch(sql.READ_SECRET, namespace=namespace)
            return bytes(row.copy_key)

        return await self._database.transact(create_key)

    async def preserve(self, task_id: TaskId, *, preserve: bool = True) -> bool:
        """Exempt an operation from deletion, or end the exemption. `False` if it is unknown."""
        return await self._database.write(
            lambda tx: reviving.preserve(tx, task_id, preserve=preserve)
        )

    async def operation(self, task_id: TaskId) -> OperationSummary | None:
        """Summarize one operation of this namespace, or return `None` if it does not exist."""
        names = self._database.options.names
        for row in await self._database.fetch(sql.SHOW_OPERATION, task_id=task_id):
            if row.agent_name.startswith(names.prefix):
                return summary_from_row(row, names, self._database.options.codec)
        return None

    async def operations(
        self,
        *,
        agent: AgentName | None = None,
        statuses: Sequence[OperationStatus] = (),
        limit: int = 100,
    ) -> list[OperationSummary]:
        """List operations, newest first. Without `statuses`, in every status."""
        states = [
            state.value
            for status in statuses or OperationStatus
            for state in STATES_BY_STATUS[status]
        ]
        names, values = self._database.options.names, {"statuses": states, "limit": limit}
        rows = (
            await self._database.fetch(sql.LIST_OPERATIONS, prefix=names.prefix, **values)
            if agent is None
            else await self._database.fetch(
                sql.LIST_AGENT_OPERATIONS, agent=names.qualified(agent), **values
            )
        )
        codec = self._database.options.codec
        return [summary_from_row(row, names, codec) for row in rows]
