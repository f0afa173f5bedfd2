"""When to ask an agent for the outcome of a task."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from random import Random

from meshpoint.errors import (
    BrokerUnavailable,
    MeshpointError,
    OutcomeUnknown,
    TaskNotFound,
    UnknownAgent,
)
from meshpoint.model.messages import AttachStatus

_UNKNOWN_DELAYS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
"""Seconds until the next attach after each reply that a replica does not know the task.

The last delay repeats.
"""
_MIN_UNKNOWN_REPLIES = 5
"""Replies that a replica does not know the task, before a certain one counts."""
_QUEUED_DELAYS = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
"""The same while the task's request may wait in the queue. The last delay repeats."""
_RUNNING_DELAY = 10.0
"""Seconds until the next attach to a task whose first segment runs in memory."""
_QUIET_DELAYS = (600.0, 1200.0)
"""Minimum and maximum seconds until the next attach to a task whose reply will come.

The task has a row with this address, or this connection has requested it. But the message that
its place was taken may be lost, and replicas of the previous release do not send one.
"""
_POLL_DELAYS = (60.0, 120.0)
"""Minimum and maximum seconds until the next query while others have the places."""
_UNANSWERED_DELAYS = (60.0, 120.0, 240.0, 480.0, 600.0)
"""Seconds until the next attach without a reply: no replica is up, or the reply was lost.

The last delay repeats. Replicas of the previous release move each attach to the dead letters.
"""
_OUTAGE_DELAY = 1.0
"""Seconds until the next attach if the broker did not accept the last one."""


_random = Random()
"""Not the module's own generator, whose seed belongs to the caller's code."""


class Attachment:
    """Plans the attaches to one task. The asyncio tasks that wait for it send them.

    A task that this connection has requested is asked about after a reconnect, because the reply
    may have been lost, and otherwise every 10 to 20 minutes. If it exists nowhere, it has ended
    and its outcome is unknown.

    Once other connections have taken the place of this one, it takes none back: it queries the
    status every one to two minutes, and attaches when the task has ended.

    Attributes:
        due_at: When to ask, by the event loop's clock; infinite if not at all.
    """

    def __init__(self, agent: str, task_id: str) -> None:
        """Create an attachment that never asks."""
        self.due_at = math.inf
        self._agent, self._task_id = agent, task_id
        self._attach: Callable[[bool], Awaitable[None]] | None = None
        self._query: Callable[[], Awaitable[None]] | None = None
        self._create_error: Callable[[], MeshpointError] | None = None
        self._unknown_count = self._queued_count = self._unanswered_count = 0
        self._is_open = False  # the last attach or query is unanswered
        self._is_requested = self._is_displaced = False

    def ask_by(
        self, attach: Callable[[bool], Awaitable[None]], query: Callable[[], Awaitable[None]]
    ) -> None:
        """Set how to ask. `attach` takes whether a snapshot is wanted; `query` takes no place."""
        self._attach, self._query = attach, query

    def start(self, at: float = 0.0) -> None:
        """Ask at the next wait from `at` on, by the event loop's clock."""
        self.due_at, self._create_error = at, None
        self._unknown_count = self._queued_count = self._unanswered_count = 0

    def expect_reply(self, now: float) -> None:
        """Record that this connection has requested the task, so that a reply will come."""
        self._is_requested = True
        self._unknown_count = 0  # earlier replies were right before this request
        self.due_at = min(self.due_at, now + _spread(_QUIET_DELAYS))

    def hasten(self, at: float) -> bool:
        """Ask at `at`, or earlier. Returns whether that was changed."""
        if self.due_at <= at or self._is_displaced or self._create_error is not None:
            return False
        self.due_at = at
        return True

    def displace(self, now: float) -> None:
        """Record that other connections took the place of this one."""
        if not self._is_displaced:  # a repeated message must not postpone the query
            self._is_displaced = True
            self.start(now + _spread(_POLL_DELAYS))

    def take_place(self) -> None:
        """Attach at the next wait, and so take the place of another connection."""
        self._is_displaced = False
        self.start()

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
        """Ask. `now` is by the event loop's clock."""
        # Set first, so that concurrent waits do not ask too.
        self.due_at = now + _delay(_UNANSWERED_DELAYS, self._unanswered_count)
        if self._is_requested and not self._is_displaced:
            self.due_at = now + _spread(_QUIET_DELAYS)
        self._unanswered_count += 1
        self._is_open = True
        if self._attach is None or self._query is None:
            return
        try:
            await (self._query() if self._is_displaced else self._attach(wants_snapshot))
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

    def record_status(self, status: AttachStatus, now: float, *, certain: bool = False) -> None:
        """Record what a replica knows about the task, and plan the next attach.

        An unknown task is not found once a reply is `certain` that it exists nowhere. Several
        replicas may reply. A replica that knows the task overrules the others. An attach that is
        due stays due: the reply is to an earlier one.
        """
        was_due_at = self.due_at
        match status:
            case AttachStatus.RECORDED | AttachStatus.RUNNING:
                self._record_found(now)
                if status is AttachStatus.RUNNING and not self._asks_rarely:
                    self.due_at = now + _RUNNING_DELAY
            case AttachStatus.QUEUED if self._is_open:
                queued_count = self._queued_count
                self._record_found(now)
                if not self._asks_rarely:
                    self.due_at = now + _delay(_QUEUED_DELAYS, queued_count)
                    self._queued_count = queued_count + 1
            case AttachStatus.UNKNOWN if self._is_open:
                self.due_at = now + _delay(_UNKNOWN_DELAYS, self._unknown_count)
                self._unknown_count += 1
                if certain and self._unknown_count >= _MIN_UNKNOWN_REPLIES:
                    self._record_not_found()
                    return
            case _:
                return
        if was_due_at <= now:
            self.due_at = was_due_at
        self._is_open, self._unanswered_count = False, 0

    def record_end(self) -> None:
        """Record that the task has ended: the next attach gets its reply and takes no place."""
        if self._is_displaced:
            self.take_place()

    def _record_not_found(self) -> None:
        self._is_open, self._unanswered_count = False, 0
        error = OutcomeUnknown if self._is_requested else TaskNotFound
        self.fail(lambda: error(self._agent, self._task_id))

    @property
    def _asks_rarely(self) -> bool:
        return self._is_requested or self._is_displaced

    def _record_found(self, now: float) -> None:
        self._unknown_count = self._queued_count = 0
        self.due_at = now + _spread(_POLL_DELAYS if self._is_displaced else _QUIET_DELAYS)


def _delay(delays: Sequence[float], count: int) -> float:
    """The delay after `count` earlier replies of the same kind."""
    return delays[min(count, len(delays) - 1)]


def _spread(bounds: tuple[float, float]) -> float:
    """A random delay, so that tasks that began together do not ask together."""
    return _random.uniform(*bounds)
