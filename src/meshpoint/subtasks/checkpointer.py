"""Checkpoints of operations: durable in the database, with an optional copy for fast restores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from meshpoint.errors import CheckpointError
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.subtasks import AgentCheckpoint, SaveCommitted
from meshpoint.model.transitions import Save, SaveResult
from meshpoint.ports.task_store import CacheUnavailable, CheckpointCache, LeftOut, Operations


class CheckpointSource(StrEnum):
    """Where a restored checkpoint was read from."""

    REDIS = "redis"
    SQL = "sql"


class FallbackReason(StrEnum):
    """Why the copy could not be used."""

    MISS = "miss"  # no copy exists
    STALE = "stale"  # it is not a copy of the last checkpoint
    CORRUPT = "garbage"  # it cannot be read
    UNAVAILABLE = "unavailable"  # the cache did not answer
    LEFT_OUT = "left_out"  # it would be large, and most of it had been copied before


@dataclass(frozen=True, slots=True)
class RestoredCheckpoint:
    """An operation's last checkpoint.

    `fallback` is set if a copy was requested but could not be used. A copy may lack
    `checkpoint_time`, which the database sets.
    """

    checkpoint: AgentCheckpoint
    source: CheckpointSource
    fallback: FallbackReason | None = None


ReportProblem: TypeAlias = Callable[[TaskId, str, str], None]
"""Called for each problem with a copy: the task, the kind of problem, and the cause.

The kind is a `FallbackReason`, "not_copied" or "not_forgotten". Must not raise or block.
"""


class AgentCheckpointer:
    """Writes and restores checkpoints of operations.

    A restore uses the copy in the cache if it is of the last checkpoint, and SQL otherwise. The
    copy must have the sequence number that the database says, so a stale, lost or damaged copy
    costs time but nothing else. Problems with copies are reported, never raised.
    """

    def __init__(
        self,
        store: Operations,
        cache: CheckpointCache | None = None,
        *,
        report_problem: ReportProblem = lambda *_: None,
    ) -> None:
        self._store, self._cache, self._report_problem = store, cache, report_problem

    async def save(self, command: Save) -> SaveResult:
        """Write a checkpoint to the database and, when it is durable, to the cache.

        Raises:
            Unavailable: The database did not answer. The copy was not changed.
        """
        result = await self._store.save(command)
        if isinstance(result, SaveCommitted):
            await self.write_to_cache(command.checkpoint)
        return result

    async def restore(
        self, operation_id: TaskId, agent: AgentName, *, seq: int | None = None
    ) -> RestoredCheckpoint | None:
        """Return the last checkpoint of an operation; `None` if missing or another agent's.

        Args:
            operation_id: The operation.
            agent: Its agent.
            seq: Number of the checkpoint, if the caller has read the task's row. A copy is then
                used without asking the database.

        Raises:
            Unavailable: The database was needed and did not answer.
        """
        if self._cache is None:
            return await self._restore_from_sql(operation_id, agent)
        if seq is None:
            operation = await self._store.operation(operation_id)
            seq = (
                operation.checkpoint
                if operation is not None and operation.agent == agent
                else None
            )
        if not seq:
            return None
        cached = await self._read_cached(self._cache, operation_id, agent, seq)
        if isinstance(cached, FallbackReason):
            return await self._restore_from_sql(operation_id, agent, cached)
        return RestoredCheckpoint(cached, CheckpointSource.REDIS)

    async def forget(self, operation_id: TaskId, agent: AgentName) -> None:
        """Delete the copy of a completed operation. A failure is reported, not raised."""
        try:
            if self._cache is not None:
                await self._cache.forget(operation_id, agent)
        except CacheUnavailable as error:
            self._report_problem(operation_id, "not_forgotten", str(error))

    async def _read_cached(
        self, cache: CheckpointCache, operation_id: TaskId, agent: AgentName, seq: int
    ) -> AgentCheckpoint | FallbackReason:
        try:
            cached = await cache.get(operation_id, agent)
            if isinstance(cached, LeftOut):
                return FallbackReason.LEFT_OUT
            if cached is not None and cached.seq == seq:
                return cached
            failure = (
                (FallbackReason.MISS, "")
                if cached is None
                else (FallbackReason.STALE, f"{cached.seq} in place of {seq}")
            )
        except CacheUnavailable as error:
            failure = (FallbackReason.UNAVAILABLE, str(error))
        except CheckpointError as error:
            failure = (FallbackReason.CORRUPT, str(error))
        self._report_problem(operation_id, *failure)
        return failure[0]

    async def _restore_from_sql(
        self, operation_id: TaskId, agent: AgentName, fallback: FallbackReason | None = None
    ) -> RestoredCheckpoint | None:
        checkpoint = await self._store.latest(operation_id, agent)
        if checkpoint is None:
            return None
        if fallback not in {None, FallbackReason.UNAVAILABLE, FallbackReason.LEFT_OUT}:
            await self.write_to_cache(checkpoint)
        return RestoredCheckpoint(checkpoint, CheckpointSource.SQL, fallback)

    async def write_to_cache(self, checkpoint: AgentCheckpoint) -> None:
        """Write a copy of a durable checkpoint. A failure is reported, not raised."""
        try:
            if self._cache is not None:
                await self._cache.put(checkpoint)
        except (CacheUnavailable, CheckpointError) as error:
            self._report_problem(checkpoint.operation_id, "not_copied", str(error))
