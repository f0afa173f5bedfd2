"""When to ask an agent for the outcome of a task."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence

from meshpoint.errors import BrokerUnavailable, MeshpointError, TaskNotFound, UnknownAgent
from meshpoint.model.messages import AttachStatus

_UNKNOWN_DELAYS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Seconds until the next attach after each reply that a replica does not know the task.

After the last one, the task counts as not found.
"""
_QUEUED_DELAYS = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
"""The same while the task's request may wait in the queue. The last delay repeats."""
_RUNNING_DELAY = 10.0
"""Seconds until the next attach to a task whose first segment runs in memory."""
_RECORDED_DELAY = 600.0
"""Seconds until the next attach to a task whose row has this address.

Replicas of the previous release do not send the task's reply to it.
"""
_UNANSWERED_DELAYS = (60.0, 120.0, 240.0, 480.0, 600.0)
"""Seconds until the next attach without a reply: no replica is up, or the reply was lost.

The last delay repeats. Replicas of the previous release move each attach to the dead letters.
"""
_OUTAGE_DELAY = 1.0
"""Seconds until the next attach if the broker did not accept the last one."""


class Attachment:
    """Plans the attaches to one task. The asyncio tasks that wait for it send them.

    To a task that this connection has requested, it attaches only after a reconnect, because the
    reply may have been lost, or after other connections took its place. It attaches once more
    after each reply, and in the second case also without one. The task never counts as not found:
    its request may wait anywhere.

    Attributes:
        due_at: When to attach, by the event loop's clock; infinite if not at all.
    """

    def __init__(self, agent: str, task_id: str) -> None:
        """Create an attachment without a due attach."""
        self.due_at = math.inf
        self._agent, self._task_id = agent, task_id
        self._ask: Callable[[bool], Awaitable[None]] | None = None
        self._create_error: Callable[[], MeshpointError] | None = None
        self._unknown_count = self._queued_count = self._unanswered_count = 0
        self._is_open = False  # the last attach is unanswered
        self._is_requested = self._is_detached = False

    def ask_by(self, ask: Callable[[bool], Awaitable[None]]) -> None:
        """Send each attach with `ask`, which takes whether a snapshot is wanted."""
        self._ask = ask

    def start(
        self, at: float = 0.0, *, is_requested: bool = False, is_detached: bool = False
    ) -> None:
        """Ask at the next wait from `at` on, by the event loop's clock.

        `is_requested`: this connection has requested the task. `is_detached`: other connections
        took its place.
        """
        self.due_at, self._create_error = at, None
        self._is_requested, self._is_detached = is_requested, is_detached
        self._unknown_count = self._queued_count = self._unanswered_count = 0

    def restart_if_failed(self) -> None:
        """Ask again if the last attempt ended with an error."""
        if self._create_error is not None:
            self.start()

    def raise_error(self) -> None:
        """Raise the error given to `fail`, if any."""
        if self._create_error is not None:
            raise self._create_error()

    def fail(self, create_error: Callable[[], MeshpointError]) -> None:
        """Stop asking, and let every wait raise an error."""
        self._create_error, self.due_at = create_error, math.inf

    async def ask(self, now: float, *, wants_snapshot: bool = False) -> None:
        """Ask, or fail after too many unknown replies. `now` is by the event loop's clock."""
        if self._unknown_count > len(_UNKNOWN_DELAYS):
            if self._is_requested:
                self.due_at = now + _UNANSWERED_DELAYS[-1] if self._is_detached else math.inf
                self._unknown_count = 0
            else:
                self.fail(lambda: TaskNotFound(self._agent, self._task_id))
            return
        # Set first, so that concurrent waits do not ask too.
        self.due_at = now + _delay(_UNANSWERED_DELAYS, self._unanswered_count)
        if self._is_requested and not self._is_detached:
            self.due_at = math.inf
        self._unanswered_count += 1
        self._is_open = True
        if self._ask is None:
            return
        try:
            await self._ask(wants_snapshot)
        except BrokerUnavailable:
            self.due_at = now + _OUTAGE_DELAY
        except UnknownAgent:
            if self._is_requested:  # its queues were lost, and may be declared again
                self.due_at = now + _OUTAGE_DELAY
            else:
                self.due_at = now
                raise
        except BaseException:  # the next wait asks
            self.due_at = now
            raise

    def record_status(self, status: AttachStatus, now: float) -> None:
        """Record what a replica knows about the task, and plan the next attach.

        Several replicas may reply. A replica that knows the task overrules the others.
        """
        match status:
            case AttachStatus.RECORDED:
                self._record_found(now + _RECORDED_DELAY)
            case AttachStatus.RUNNING:
                self._record_found(now + _RUNNING_DELAY)
            case AttachStatus.QUEUED if self._is_open:
                self.due_at = now + _delay(_QUEUED_DELAYS, self._queued_count)
                self._queued_count, self._unknown_count = self._queued_count + 1, 0
            case AttachStatus.UNKNOWN if self._is_open:
                self.due_at = now + _delay(_UNKNOWN_DELAYS, self._unknown_count)
                self._unknown_count += 1
            case _:
                return
        self._is_open, self._unanswered_count = False, 0

    def _record_found(self, due_at: float) -> None:
        self._unknown_count = self._queued_count = 0
        self.due_at = due_at


def _delay(delays: Sequence[float], count: int) -> float:
    """The delay after `count` earlier replies of the same kind."""
    return delays[min(count, len(delays) - 1)]
