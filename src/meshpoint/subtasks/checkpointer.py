"""Checkpoints of operations: durable in the database, with a copy beside it that makes restores fast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from meshpoint.errors import CheckpointError
from meshpoint.model.checkpoint import Save, SaveResult
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.subtasks import AgentCheckpoint, Saved
from meshpoint.ports.checkpoint_cache import CacheUnavailable, CheckpointCache
from meshpoint.ports.operations import Operations


class Source(StrEnum):
    """Where a restored checkpoint came from."""

    REDIS = "redis"
    SQL = "sql"


class Fallback(StrEnum):
    """Why the copy could not serve."""

    MISS = "miss"  # there is none
    STALE = "stale"  # it is of another checkpoint than the last one
    GARBAGE = "garbage"  # what stands in its place cannot be read
    AWAY = "away"  # the cache did not answer


@dataclass(frozen=True, slots=True)
class Restored:
    """An operation's last checkpoint. `fallback` is set when a copy was asked for and could not serve.

    A copy may lack `checkpoint_time`: the database sets it.
    """

    checkpoint: AgentCheckpoint
    source: Source
    fallback: Fallback | None = None


@dataclass(slots=True)
class Counters:
    """What a checkpointer has done. `not_copied` counts checkpoints that are durable and whose copy failed."""

    served: Counter[Source] = field(default_factory=Counter)
    fallbacks: Counter[Fallback] = field(default_factory=Counter)
    not_copied: int = 0


Tell: TypeAlias = Callable[[TaskId, str, str], None]
"""Hears of each copy that failed: a `Fallback`, "not_copied" or "not_forgotten"; and why. Must not raise or block."""


class AgentCheckpointer:
    """Writes checkpoints of operations and restores them: from the cache if its copy is the last one, else from SQL.

    A copy serves only if it has the number that the database says, so one that is old, lost or broken costs time and
    nothing else. What goes wrong with copies is counted and told, never raised.
    """

    def __init__(
        self, store: Operations, cache: CheckpointCache | None = None, *, tell: Tell = lambda *_: None
    ) -> None:
        self._store, self._cache, self._tell = store, cache, tell
        self.counts = Counters()

    async def save(self, wish: Save) -> SaveResult:
        """Write a checkpoint to the database, then, durable there, to the cache.

        Raises:
            Unavailable: the database did not answer; the copy was not touched.
        """
        result = await self._store.save(wish)
        if isinstance(result, Saved):
            await self.copy(wish.checkpoint)
        return result

    async def restore(self, operation_id: TaskId, agent: AgentName, *, seq: int | None = None) -> Restored | None:
        """The last checkpoint of an operation; None: there is none, or it is another agent's.

        `seq` is its number, for a caller that has the task's row: then a copy is served without the database.

        Raises:
            Unavailable: the database had to be asked and did not answer.
        """
        if self._cache is None:
            return await self._from_sql(operation_id, agent)
        if seq is None:
            operation = await self._store.operation(operation_id)
            seq = operation.checkpoint if operation is not None and operation.agent == agent else None
        if not seq:
            return None
        copy = await self._copy_of(self._cache, operation_id, agent, seq)
        if isinstance(copy, Fallback):
            return await self._from_sql(operation_id, agent, copy)
        self.counts.served[Source.REDIS] += 1
        return Restored(copy, Source.REDIS)

    async def forget(self, operation_id: TaskId, agent: AgentName) -> None:
        """Delete the copy of an operation that has ended well, if that is possible now."""
        try:
            if self._cache is not None:
                await self._cache.forget(operation_id, agent)
        except CacheUnavailable as error:
            self._tell(operation_id, "not_forgotten", str(error))

    async def _copy_of(
        self, cache: CheckpointCache, operation_id: TaskId, agent: AgentName, seq: int
    ) -> AgentCheckpoint | Fallback:
        try:
            copy = await cache.get(operation_id, agent)
            if copy is not None and copy.seq == seq:
                return copy
            why = (Fallback.MISS, "") if copy is None else (Fallback.STALE, f"{copy.seq} in place of {seq}")
        except CacheUnavailable as error:
            why = (Fallback.AWAY, str(error))
        except CheckpointError as error:
            why = (Fallback.GARBAGE, str(error))
        self.counts.fallbacks[why[0]] += 1
        self._tell(operation_id, *why)
        return why[0]

    async def _from_sql(self, operation_id: TaskId, agent: AgentName, why: Fallback | None = None) -> Restored | None:
        checkpoint = await self._store.latest(operation_id, agent)
        if checkpoint is None:
            return None
        self.counts.served[Source.SQL] += 1
        if why is not None and why is not Fallback.AWAY:
            await self.copy(checkpoint)
        return Restored(checkpoint, Source.SQL, why)

    async def copy(self, checkpoint: AgentCheckpoint) -> None:
        """Put a checkpoint that is durable beside the database, if that is possible now."""
        try:
            if self._cache is not None:
                await self._cache.put(checkpoint)
        except (CacheUnavailable, CheckpointError) as error:
            self.counts.not_copied += 1
            self._tell(checkpoint.operation_id, "not_copied", str(error))
