"""Find out whether a task without a row exists.

Until a task has a row, its request is in a queue, or a replica holds it unacked. So a task does
not exist if, in this order, no queue has its request, no consumer holds it, and the database still
has no row. The order matters: a replica writes the row before it acks the request.

Some brokers do not show what their consumers hold. Then each of the consumers that the broker
counts must deny that it holds the request. A replica that is stopped, blocked or dead does not
deny, but the broker counts it until it requeues what it holds. A replica of an earlier release
does not deny either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

from meshpoint.engine.background import wait_for_first
from meshpoint.engine.live_tasks import LiveTasks
from meshpoint.engine.publisher import Publisher
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.engine.throttle import Throttle
from meshpoint.errors import Unavailable
from meshpoint.model.bodies import DenyBody, parse_body
from meshpoint.model.envelopes import Search, deny_envelope
from meshpoint.model.ids import TaskId, new_id
from meshpoint.model.messages import Address, AttachStatus, Message, private_queue
from meshpoint.ports.broker import SEARCH_SECONDS, RequestSearch

_T = TypeVar("_T")

MAX_SEARCHES_PER_SECOND = 50
"""Maximum unknown tasks per second and sender that are searched for."""

Broadcast = Callable[[Search | None], Awaitable[None]]
"""Forwards an attach or a query to all replicas, and asks them to deny the task if needed."""
SendStatus = Callable[[AttachStatus, bool], Awaitable[None]]
"""Sends what is known about a task to its caller, and whether `UNKNOWN` is certain."""


class _Denials:
    """Counts the consumers that have denied one task, until all `consumers` have."""

    def __init__(self, consumers: Mapping[Address, int]) -> None:
        self._consumers = consumers
        self._denied: dict[str, Mapping[str, int]] = {}  # by replica
        self.is_complete = asyncio.Event()

    def add(self, replica: str, consumers: Mapping[str, int]) -> None:
        """Record the denial of one replica. Only its first one counts."""
        self._denied.setdefault(replica, consumers)
        if all(self._count_denied(address) >= n for address, n in self._consumers.items()):
            self.is_complete.set()

    def _count_denied(self, address: Address) -> int:
        return sum(max(0, each.get(address, 0)) for each in self._denied.values())


class UnknownTasks:
    """Replies to callers that ask about tasks without a row."""

    def __init__(self, runtime: ReplicaRuntime, tasks: LiveTasks, publisher: Publisher) -> None:
        self._runtime, self._tasks, self._publisher = runtime, tasks, publisher
        self._throttle = Throttle(MAX_SEARCHES_PER_SECOND, runtime.clock.now)
        self._denials: dict[str, _Denials] = {}

    async def search(
        self, task_id: TaskId, sender: str, broadcast: Broadcast, send: SendStatus
    ) -> None:
        """Search for a task, and let the replica that has it reply.

        A sender that asks for too many tasks gets `QUEUED`. If other replicas must deny the task,
        this returns before its caller gets the status, within `SEARCH_SECONDS`.
        """
        if not self._throttle.try_consume(sender):
            await send(AttachStatus.QUEUED, False)
            return
        started_at = self._runtime.clock.monotonic()
        found = await _if_available(
            self._runtime.broker.find_request(self._runtime.agent, task_id)
        )
        if found is None or found.may_be_queued or not found.consumers:
            await broadcast(None)
            await self._conclude(task_id, found, send)
            return
        self._runtime.background.spawn(
            self._await_denials, task_id, started_at, found, broadcast, send
        )

    async def _await_denials(
        self,
        task_id: TaskId,
        started_at: float,
        found: RequestSearch,
        broadcast: Broadcast,
        send: SendStatus,
    ) -> None:
        token, clock = new_id(), self._runtime.clock
        denials = self._denials[token] = _Denials(found.consumers)
        try:
            reply_to = private_queue(self._runtime.agent, self._runtime.replica.id)
            await broadcast(Search(token, reply_to))
            await wait_for_first(
                denials.is_complete.wait(), clock.sleep(timedelta(seconds=SEARCH_SECONDS))
            )
        finally:
            del self._denials[token]
        # This process may have been stopped meanwhile, and the denials may be recent.
        is_in_time = clock.monotonic() - started_at < SEARCH_SECONDS
        is_denied = is_in_time and denials.is_complete.is_set()
        await self._conclude(task_id, found if is_denied else None, send)

    async def _conclude(
        self, task_id: TaskId, found: RequestSearch | None, send: SendStatus
    ) -> None:
        """Send the status. `found` is `None` if a replica may hold the request."""
        if found is None:
            await send(AttachStatus.UNKNOWN, False)
        elif found.may_be_queued:
            await send(AttachStatus.QUEUED, False)
        else:
            has_row = await self._has_row(task_id)
            status = AttachStatus.QUEUED if has_row else AttachStatus.UNKNOWN
            await send(status, has_row is False)

    async def _has_row(self, task_id: TaskId) -> bool | None:
        """Whether the task has a row by now; `None` if the database is unavailable."""
        if self._runtime.database is None:
            return False
        rows = await _if_available(self._runtime.database.store.lookup([task_id]))
        row = None if rows is None else rows.get(task_id)
        found = row is not None and row.agent == self._runtime.agent and not row.is_early_cancel
        return None if rows is None else found

    async def deny(self, questions: Sequence[tuple[TaskId, Message]]) -> None:
        """Deny the tasks that other replicas search for and that are not here."""
        agent = self._runtime.agent
        envelopes = [
            deny_envelope(agent, message, self._runtime.replica.id, consumers)
            for task_id, message in questions
            if message.app_id == agent
            and not self._tasks.is_here(task_id)
            and (consumers := self._runtime.broker.deny_request(agent, task_id))
        ]
        await self._publisher.publish_advisory(envelopes)

    def add_denial(self, message: Message) -> None:
        """Record a denial of another replica.

        Raises:
            PoisonMessage: The message cannot be read.
        """
        body = parse_body(DenyBody, message.body)
        if (denials := self._denials.get(message.correlation_id)) is not None:
            denials.add(body.replica, body.consumers)


async def _if_available(look_up: Awaitable[_T]) -> _T | None:
    try:
        return await look_up
    except Unavailable:
        return None
