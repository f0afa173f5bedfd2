"""A fast copy of each operation's last checkpoint, next to the database. It may lose any entry."""

from __future__ import annotations

from typing import Protocol

from meshpoint.errors import Unavailable
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.subtasks import AgentCheckpoint


class CacheUnavailable(Unavailable):
    """The cache did not answer in time."""


class CheckpointCache(Protocol):
    """A cache with one entry per operation and agent.

    Keys have the form `checkpoint:{analysis_id}:{agent_type}`.
    """

    async def put(self, checkpoint: AgentCheckpoint) -> None:
        """Replace the cached copy and restart its time to live.

        Raises:
            CacheUnavailable: the entry may or may not have been written.
            CheckpointError: the checkpoint is too large to cache.
        """

    async def get(self, operation_id: TaskId, agent: AgentName) -> AgentCheckpoint | None:
        """Return the cached copy, or `None` if there is no entry.

        Raises:
            CacheUnavailable: the cache did not answer.
            CheckpointError: the entry is not a checkpoint of this operation.
        """

    async def forget(self, operation_id: TaskId, agent: AgentName) -> None:
        """Delete the cached copy.

        Raises:
            CacheUnavailable: the entry may or may not have been deleted.
        """

    async def close(self) -> None:
        """Release all connections."""
