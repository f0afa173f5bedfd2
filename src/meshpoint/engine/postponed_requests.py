"""Requests that wait for the database, while first deliveries run without it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta

from meshpoint.engine.live_tasks import LiveTasks
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.engine.segment import RequestedSegment
from meshpoint.engine.settlement import Settlement
from meshpoint.errors import Unavailable
from meshpoint.model.ids import TaskId
from meshpoint.ports.broker import Delivery

_RETRY_INTERVAL = timedelta(milliseconds=500)


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
            self._runtime.background.spawn(self._handle_after_outage())

    async def requeue_all(self) -> None:
        """Requeue all requests, so that another replica can run them."""
        for delivery in self._take_all():
            await delivery.requeue()
        self._tasks.notify_if_idle()

    async def _handle_after_outage(self) -> None:
        try:
            while self._task_ids:
                await self._runtime.clock.sleep(_RETRY_INTERVAL)
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
