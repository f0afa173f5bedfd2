"""A fast copy of each operation's last checkpoint, beside the database. It may lose anything at any time."""

from __future__ import annotations

from typing import Protocol

from meshpoint.errors import Unavailable
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.subtasks import AgentCheckpoint


class CacheUnavailable(Unavailable):
    """The cache did not answer in time."""


class CheckpointCache(Protocol):
    """One copy for each operation and agent, under `checkpoint:{analysis_id}:{agent_type}`."""

    async def put(self, checkpoint: AgentCheckpoint) -> None:
        """Replace the copy, and let it live for the cache's time to live.

        Raises:
            CacheUnavailable: nothing is known of what the cache holds now.
            CheckpointError: the checkpoint is too large to cache.
        """

    async def get(self, operation_id: TaskId, agent: AgentName) -> AgentCheckpoint | None:
        """The copy; None: there is none.

        Raises:
            CacheUnavailable: the cache did not answer.
            CheckpointError: what stands there is no copy of a checkpoint of this operation.
        """

    async def forget(self, operation_id: TaskId, agent: AgentName) -> None:
        """Delete the copy.

        Raises:
            CacheUnavailable: nothing is known of what the cache holds now.
        """

    async def close(self) -> None:
        """Release every connection."""
