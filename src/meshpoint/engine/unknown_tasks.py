"""Limit the cost of looking for tasks without a row."""

from __future__ import annotations

from contextlib import suppress

from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.engine.throttle import Throttle
from meshpoint.errors import Unavailable
from meshpoint.model.messages import AttachStatus, shard_for_sender

MAX_LOOKS_PER_SECOND = 50
"""Maximum unknown tasks per second and sender for which all replicas and the queue are asked."""


class UnknownTasks:
    """Decides which status callers get for tasks without a row."""

    def __init__(self, runtime: ReplicaRuntime) -> None:
        self._runtime = runtime
        self._throttle = Throttle(MAX_LOOKS_PER_SECOND, runtime.clock.now)

    def may_look(self, sender: str) -> bool:
        """Whether to look for one more task of `sender`. If not, reply `queued`."""
        return self._throttle.try_consume(sender)

    async def status_of(self, sender: str) -> AttachStatus:
        """`QUEUED` if the request may still be in the queue for this sender, else `UNKNOWN`."""
        agent, shards = self._runtime.agent, self._runtime.options.request_shards
        with suppress(Unavailable):
            if await self._runtime.broker.depth(shard_for_sender(agent, sender, shards)):
                return AttachStatus.QUEUED
        return AttachStatus.UNKNOWN
