"""Ask an agent for the status of one task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from meshpoint.client.reply_slot import ReplySlot
from meshpoint.errors import OtherRequester, TaskNotFound
from meshpoint.model.messages import AttachStatus
from meshpoint.model.task_status import TaskStatus

_REPLY_SECONDS = 5.0
"""Seconds after which an agent without a reply counts as not served."""
_UNKNOWN_DELAYS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Seconds to wait for a replica that knows the task, after each reply without a status.

After the last query, the first reply that is certain that the task exists nowhere counts.
"""
_UNDECIDED = {AttachStatus.UNKNOWN, AttachStatus.QUEUED}


class StatusReply(NamedTuple):
    """What one replica knows about the task.

    A refusal names the `requester`. `status` is `None` if the replica does not know the task, or
    runs an earlier release, which handles a query like any other attach. `is_certain`: the task
    is in no queue, in no replica and not in the database.
    """

    known: AttachStatus
    status: TaskStatus | None = None
    requester: str = "another client"
    is_certain: bool = False

    def decides(self) -> bool:
        """Whether the sender knows the task, so that no other reply is needed."""
        return self.status is not None or self.known not in _UNDECIDED


class StatusQuery:
    """Collects the replies to one query. Several replicas may reply."""

    def __init__(self, agent: str, task_id: str, name: str) -> None:
        """Create a query under `name`."""
        self._agent, self._task_id, self._name = agent, task_id, name
        self._replies = ReplySlot(StatusReply.decides)

    def add(self, reply: StatusReply) -> None:
        """Record a reply."""
        self._replies.add(reply)

    def close(self, error: Exception) -> None:
        """Let `ask` raise `error`."""
        self._replies.close(error)

    async def ask(self, send: Callable[[], Awaitable[None]], *, requested: bool) -> TaskStatus:
        """Send the query, repeat it after each reply without a status, and return the status.

        `requested`: this connection has requested the task, so it exists.

        Raises:
            TaskNotFound, OtherRequester, MeshClosed: As for `TaskHandle.status`.
        """
        for attempt, delay in enumerate(_UNKNOWN_DELAYS, 1):
            await send()
            latest: StatusReply | None = None
            now = asyncio.get_running_loop().time
            until = now() + _REPLY_SECONDS
            while (reply := await self._next(until)) is not None:
                if reply.status is not None:
                    return reply.status
                if reply.known is AttachStatus.REFUSED:
                    raise OtherRequester(self._task_id, reply.requester, self._name)
                if reply.known in {AttachStatus.RECORDED, AttachStatus.RUNNING}:
                    return TaskStatus(state="unknown")
                if reply.is_certain and attempt == len(_UNKNOWN_DELAYS) and not requested:
                    raise TaskNotFound(self._agent, self._task_id)
                until = min(until, now() + delay) if latest is None else until
                latest = reply
            if latest is None:
                return TaskStatus(state="unknown", is_served=False)
            if latest.known is AttachStatus.QUEUED:
                return TaskStatus(state="queued")
        return TaskStatus(state="queued" if requested else "unknown")

    async def _next(self, until: float) -> StatusReply | None:
        try:
            async with asyncio.timeout_at(until):
                return await self._replies.take()
        except TimeoutError:
            return None
