"""The methods of the SQL store for operations and their checkpoints."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from meshpoint.adapters.sql import operation_statements as sql
from meshpoint.adapters.sql import reviving, subtasking
from meshpoint.adapters.sql.codec import pack
from meshpoint.adapters.sql.database import Database, Transaction
from meshpoint.adapters.sql.locked_rows import LockedRows
from meshpoint.adapters.sql.locking import StoreOptions
from meshpoint.adapters.sql.records import (
    STATES_BY_STATUS,
    checkpoint_columns,
    checkpoint_from_row,
    snapshot_from_row,
    summary_from_row,
)
from meshpoint.errors import CommitInDoubt, RowLocked, StoreUnavailable
from meshpoint.model.checkpoint import BeginResult, L1Snapshot, Save, SaveResult, Track
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.operations import OperationStatus, OperationSummary, Revive, ReviveResult
from meshpoint.model.subtasks import AgentCheckpoint, Saved

if TYPE_CHECKING:
    from meshpoint.adapters.sql.fast_path import FastPath

T = TypeVar("T")


class SqlOperations:
    """`meshpoint.ports.operations.Operations` on a SQL database; a base class of `SqlStore`."""

    _database: Database
    _fast_path: FastPath | None
    _options: StoreOptions
    _locked_rows: LockedRows

    async def _write(self, body: Callable[[Transaction], Awaitable[T]]) -> T:
        """Run `body` in a transaction, commit, and return its result.

        If a lock wait times out, the transaction is repeated and skips locked rows.
        """
        if not self._locked_rows.skip_locked:
            try:
                return await self._database.write(body)
            except RowLocked:
                self._locked_rows.record_timeout()
        return await self._database.write(body, skip_locked=True)

    async def track(self, command: Track) -> BeginResult:
        """Make a running task an operation, if it is not one already."""
        return await self._write(lambda tx: subtasking.track(tx, command))

    async def save(self, command: Save) -> SaveResult:
        """Write a checkpoint within a segment, through the fast path if possible."""
        columns = checkpoint_columns(command.checkpoint)
        if self._fast_path is not None and not self._locked_rows.recently_locked([command.run.task_id]):
            try:
                if await self._fast_path.save(command, columns):
                    return Saved()
            except RowLocked:
                self._locked_rows.record_timeout()
        try:
            return await self._write(lambda tx: subtasking.save(tx, command, columns, self._options))
        except RowLocked:
            self._locked_rows.record_locked([command.run.task_id])
            raise
        except CommitInDoubt:
            raise
        except StoreUnavailable as error:
            if self._fast_path is None:
                raise
            # The fast path may have committed the checkpoint and lost the response.
            raise CommitInDoubt(str(error)) from error

    async def latest(self, task_id: TaskId, agent: AgentName | None = None) -> AgentCheckpoint | None:
        """Read the operation's last checkpoint. `None` if missing or of another agent."""
        found = await self._checkpoints(sql.READ_LATEST, task_id)
        return next((each for each in found if agent in {None, each.agent}), None)

    async def l1_snapshot(self, task_id: TaskId, agent: AgentName | None = None) -> L1Snapshot | None:
        """Read the newest working memory among the operation's checkpoints.

        `None` if missing or of another agent. It may be older than the last checkpoint.
        """
        names = self._options.names
        rows = await self._database.read(lambda tx: tx.fetch(sql.READ_SNAPSHOT, task_id=task_id))
        found = [row for row in rows if row.agent_type.startswith(names.prefix)]
        return next((snapshot_from_row(row) for row in found if agent in {None, names.plain(row.agent_type)}), None)

    async def history(self, task_id: TaskId) -> list[AgentCheckpoint]:
        """Read the operation's checkpoints, oldest first. Without any, reads archived ones."""
        checkpoints = await self._checkpoints(sql.READ_HISTORY, task_id)
        return checkpoints or await self._checkpoints(sql.READ_ARCHIVE, task_id)

    async def _checkpoints(self, statement: str, task_id: TaskId) -> list[AgentCheckpoint]:
        names = self._options.names
        rows = await self._database.read(lambda tx: tx.fetch(statement, task_id=task_id))
        return [checkpoint_from_row(row, names) for row in rows if row.agent_type.startswith(names.prefix)]

    async def revive(self, command: Revive) -> ReviveResult:
        """Make an ended task ready again, for any replica of its agent."""
        request = await pack(command.request)
        return await self._write(lambda tx: reviving.revive(tx, command, request, self._options))

    async def copy_key(self) -> bytes:
        """Read the key that authenticates copies outside the database, or create it."""
        namespace = self._options.names.namespace

        async def create_key(tx: Transaction) -> bytes:
            await tx.execute(sql.INSERT_SECRET, namespace=namespace, key=os.urandom(32))
            (row,) = await tx.fetch(sql.READ_SECRET, namespace=namespace)
            return bytes(row.copy_key)

        return await self._database.write(create_key)

    async def preserve(self, task_id: TaskId, *, preserve: bool = True) -> bool:
        """Exempt an operation from deletion, or end the exemption. `False` if it is unknown."""
        return await self._write(lambda tx: reviving.preserve(tx, task_id, self._options, preserve=preserve))

    async def operation(self, task_id: TaskId) -> OperationSummary | None:
        """Summarize one operation of this namespace, or return `None` if it does not exist."""
        names = self._options.names
        rows = await self._database.read(lambda tx: tx.fetch(sql.SHOW_OPERATION, task_id=task_id))
        return next((summary_from_row(row, names) for row in rows if row.agent_name.startswith(names.prefix)), None)

    async def operations(
        self, *, agent: AgentName | None = None, statuses: Sequence[OperationStatus] = (), limit: int = 100
    ) -> list[OperationSummary]:
        """List operations, newest first. Without `statuses`, in every status."""
        names = self._options.names
        states = [state.value for status in statuses or OperationStatus for state in STATES_BY_STATUS[status]]

        if agent is None:
            statement, of = sql.LIST_OPERATIONS, {"prefix": names.prefix}
        else:
            statement, of = sql.LIST_AGENT_OPERATIONS, {"agent": names.qualified(agent)}
        rows = await self._database.read(lambda tx: tx.fetch(statement, statuses=states, limit=limit, **of))
        return [summary_from_row(row, names) for row in rows]
