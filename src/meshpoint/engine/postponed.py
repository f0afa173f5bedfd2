"""Requests and responses that cannot be handled yet and wait unacked, apart from all others."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from meshpoint.engine.backend import Backend
from meshpoint.engine.live_tasks import LiveTasks
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.engine.segment import RequestedSegment
from meshpoint.engine.settlement import Settlement
from meshpoint.errors import NON_DEFECT_ERRORS, Unavailable
from meshpoint.model.error_text import quantity
from meshpoint.model.ids import RunId, TaskId
from meshpoint.model.messages import MessageType
from meshpoint.ports.broker import Delivery

log = logging.getLogger("meshpoint.postponed")

ReceivedMessage: TypeAlias = tuple[Delivery, RunId]
"""A delivery and the id of its claim, which stays the same across retries."""

_MIN_DELAY, _MAX_DELAY = timedelta(milliseconds=50), timedelta(seconds=1)
_MAX_BATCH_SIZE = 256
_MAX_CAPACITY = 1024
_OUTAGE_CHECK_INTERVAL = timedelta(milliseconds=500)


_Sequence: TypeAlias = tuple[bool, str]
"""The signals to one task, from the shared queue or forwarded by replicas."""


class _Postponed(NamedTuple):
    """A postponed message, whether it came from the shared queue, and its place in the order."""

    received: ReceivedMessage
    backend: Backend
    shared: bool
    number: int

    @property
    def sequence(self) -> _Sequence | None:
        """The messages among which this one keeps its place, if any."""
        return _sequence_of(self.received, shared=self.shared)


def _sequence_of(received: ReceivedMessage, *, shared: bool) -> _Sequence | None:
    """The sequence of a signal. A task receives its signals in order; other messages have none."""
    message = received[0].message
    return (shared, message.correlation_id) if message.type is MessageType.SIGNAL else None


class PostponedMessages:
    """Unacked messages that wait for another attempt, in which they keep their order.

    Either another database session locks their task's row, or handling them failed, or they are
    behind a message that waits for one of these reasons.
    `handle` is called with messages, their backend, and `True` if they came from the shared queue.
    It passes messages that must wait again to `postpone`. `adjust_prefetch` raises the prefetch so
    that other messages still arrive.
    """

    def __init__(
        self,
        handle: Callable[[Sequence[ReceivedMessage], Backend, bool], Awaitable[None]],
        runtime: ReplicaRuntime,
        adjust_prefetch: Callable[[int], None],
    ) -> None:
        self._handle = handle
        self._runtime = runtime
        self._adjust_prefetch = adjust_prefetch
        self._postponed: dict[RunId, _Postponed] = {}
        self._attempt: dict[RunId, _Postponed] = {}  # the messages that are handled now
        self._sequences: Counter[_Sequence] = Counter()  # of all these messages
        self._postponed_again: set[_Sequence] = set()  # since all were last retried
        self._last_number = 0
        self._attempt_lock = asyncio.Lock()
        self._is_retrying = self._is_closed = False

    async def postpone(self, received: ReceivedMessage, backend: Backend, *, shared: bool) -> None:
        """Schedule this message for another attempt, or requeue it if the replica drains."""
        delivery, claim_id = received
        if self._is_closed:
            await delivery.requeue()
            return
        if (known := self._attempt.get(claim_id)) is None:
            self._last_number += 1
            known = _Postponed(received, backend, shared, self._last_number)
        self._postponed[claim_id] = known
        if (sequence := known.sequence) is not None:
            if claim_id in self._attempt:
                self._postponed_again.add(sequence)
            else:
                self._sequences[sequence] += 1
        self._update_prefetch()
        if not self._is_retrying:
            self._is_retrying = True
            self._runtime.background.spawn(self._retry_until_handled)

    def is_behind(self, received: ReceivedMessage, *, shared: bool) -> bool:
        """Whether an earlier signal to the same task waits, so that this one must wait too.

        Copies that replicas forward do not wait for signals from the shared queue: each replica
        forwards a signal at once, as its task may be in memory, and then waits for the database.
        """
        sequence = _sequence_of(received, shared=shared)
        if received[1] in self._attempt:  # those before it have had their attempts
            return sequence in self._postponed_again
        return sequence in self._sequences

    async def close(self) -> None:
        """Requeue all messages once the current attempt ends. From now on, `postpone` requeues.

        Raises:
            Unavailable: the broker is unavailable. It redelivers the messages when the connection
                closes.
        """
        self._is_closed = True
        async with self._attempt_lock:
            postponed, self._postponed = self._postponed, {}
            self._sequences.clear()
            for each in sorted(postponed.values(), key=attrgetter("number")):
                await each.received[0].requeue()

    def _update_prefetch(self) -> None:
        unhandled_count = len(self._postponed) + len(self._attempt)
        self._adjust_prefetch(
            min(1 << unhandled_count.bit_length(), _MAX_CAPACITY) if unhandled_count else 0
        )

    async def _retry_until_handled(self) -> None:
        delay = _MIN_DELAY
        try:
            while self._postponed:
                count_before = len(self._postponed)
                await self._runtime.clock.sleep(delay)
                async with self._attempt_lock:
                    await self._retry_all()
                delay = (
                    _MIN_DELAY
                    if len(self._postponed) < count_before
                    else min(2 * delay, _MAX_DELAY)
                )
        finally:
            self._is_retrying = False
            self._update_prefetch()

    async def _retry_all(self) -> None:
        self._postponed_again.clear()
        remaining = sorted(self._postponed.values(), key=attrgetter("number"))
        while remaining and not self._is_closed:
            backend, shared = remaining[0].backend, remaining[0].shared
            batch = [
                each for each in remaining if each.backend is backend and each.shared is shared
            ][:_MAX_BATCH_SIZE]
            numbers = {each.number for each in batch}
            remaining = [each for each in remaining if each.number not in numbers]
            await self._retry_batch(batch, backend, shared=shared)

    async def _retry_batch(
        self, batch: Sequence[_Postponed], backend: Backend, *, shared: bool
    ) -> None:
        messages = [each.received for each in batch]
        self._attempt = {each.received[1]: each for each in batch}
        for claim_id in self._attempt:
            del self._postponed[claim_id]
        try:
            await self._handle(messages, backend, shared)
        except BaseException as error:
            for received in messages:
                await self.postpone(received, backend, shared=shared)
            if not isinstance(error, Exception):
                raise
            is_defect = not isinstance(error, NON_DEFECT_ERRORS)
            log.warning(
                "%s will be retried later: %s",
                quantity(len(messages), "message"),
                error,
                exc_info=is_defect,
            )
        finally:
            attempt, self._attempt = self._attempt, {}
            self._forget_handled(attempt)

    def _forget_handled(self, attempt: Mapping[RunId, _Postponed]) -> None:
        for claim_id, each in attempt.items():
            sequence = each.sequence
            if sequence is None or claim_id in self._postponed:
                continue
            self._sequences[sequence] -= 1
            if self._sequences[sequence] <= 0:
                del self._sequences[sequence]


class PostponedRequests:
    """Redelivered requests, and requests of resumed requesters, during an outage.

    Another replica may run or have run their tasks, and only rows in the database show it. The
    requests stay unacked and count as tasks that wait in memory, so that others still arrive.
    `handle` is called with the requests when the database is available again.
    """

    def __init__(
        self,
        handle: Callable[[Sequence[Delivery]], Awaitable[None]],
        runtime: ReplicaRuntime,
        tasks: LiveTasks,
        settlement: Settlement,
        adjust_prefetch: Callable[[], None],
    ) -> None:
        self._handle = handle
        self._runtime, self._tasks, self._settlement = runtime, tasks, settlement
        self._adjust_prefetch = adjust_prefetch
        self._task_ids: dict[TaskId, None] = {}
        self._is_waiting = False

    async def postpone(self, segment: RequestedSegment) -> None:
        """Keep the requests of `segment` until the database is available again."""
        self._task_ids[segment.run.task_id] = None
        await self._settlement.keep_unacked(segment)
        self._tasks.remove(segment)
        if not self._is_waiting:
            self._is_waiting = True
            self._runtime.background.spawn(self._handle_after_outage)

    async def requeue_all(self) -> None:
        """Requeue all requests, so that another replica can run them."""
        for delivery in self._take_all():
            await delivery.requeue()
        self._tasks.notify_if_idle()

    async def _handle_after_outage(self) -> None:
        try:
            while self._task_ids:
                await self._runtime.clock.sleep(_OUTAGE_CHECK_INTERVAL)
                if self._tasks.is_draining:
                    await self.requeue_all()
                elif not self._runtime.retry.is_store_unavailable:
                    await self._handle_all()
        finally:
            self._is_waiting = False

    async def _handle_all(self) -> None:
        try:
            await self._handle(self._take_all())
        except Unavailable as error:  # requeued: the broker redelivers them
            self._runtime.retry.record_outage(error)

    def _take_all(self) -> list[Delivery]:
        task_ids, self._task_ids = self._task_ids, {}
        unacked = self._tasks.unacked
        deliveries = [delivery for task_id in task_ids for delivery in unacked.remove(task_id)]
        self._adjust_prefetch()
        return deliveries
