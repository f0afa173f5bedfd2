"""The tasks that one replica has in memory, and its way out of them: the drain."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from meshpoint.engine import parsing
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.engine.segment import Segment, StopReason
from meshpoint.engine.unacked import UnackedRequests
from meshpoint.model.events import Step
from meshpoint.model.ids import TaskId
from meshpoint.model.tasks import Reply, Run, same_requester
from meshpoint.ports.broker import Delivery


class LiveTasks:
    """Tasks with a live segment here, and in-process tasks with unacked requests.

    Attributes:
        segments: The live segments by task.
        unacked: The requests of in-process tasks.
        is_draining: Set when the drain begins: nothing new may begin here.
        has_released_all: Set when the drain has released every task: no code starts any more,
            and nothing answers a requeued request.
        tasks_ready: Set when a task may be ready for a slot.
    """

    def __init__(self, runtime: ReplicaRuntime, unacked: UnackedRequests) -> None:
        self._runtime = runtime
        self.segments: dict[TaskId, Segment] = {}
        self.unacked = unacked
        self.is_draining = self.has_released_all = False
        self.tasks_ready = asyncio.Event()
        self._idle = asyncio.Event()
        self._claims_in_progress = 0
        self._replies_in_progress: Counter[TaskId] = Counter()

    def remove(self, segment: Segment) -> None:
        """Forget a task: it ended, was released, or never started here."""
        if segment.run.fence:
            self._runtime.stop_renewing(segment.run)
        if self.segments.get(segment.run.task_id) is segment:
            del self.segments[segment.run.task_id]
        segment.decided.set()
        segment.removed.set()
        self.notify_if_idle()

    def find_requester_and_digest(self, task_id: TaskId) -> tuple[str | None, str | None] | None:
        """The requester and input digest of a task in this process's memory, or `None`."""
        if (live := self.segments.get(task_id)) is not None:
            return live.requester.app_id, live.digest
        if (request := self.unacked.first_request(task_id)) is not None:
            parsed = parsing.parse_request(request, self._runtime.options)
            return parsed.requester.app_id, parsed.digest
        return None

    def is_running(self, run: Run) -> bool:
        """Whether this very run has a live segment."""
        segment = self.segments.get(run.task_id)
        return segment is not None and segment.run == run

    def is_here(self, task_id: TaskId) -> bool:
        """Whether a task runs here or lives in this process's memory."""
        return task_id in self.segments or task_id in self.unacked.by_task

    def is_active(self, task_id: TaskId) -> bool:
        """Whether a task has code that may not have stopped, or its reply is being sent."""
        live = self.segments.get(task_id)
        return task_id in self._replies_in_progress or (live is not None and live.decided.is_set())

    def cancel(
        self,
        task_id: TaskId,
        parent: str | None = None,
        sender: str | None = None,
        reason: str = "",
    ) -> bool | None:
        """Stop a live task's code, or keep it from starting.

        A task that runs for another parent task than `parent`, or for another attempt at it, is
        not stopped.

        Returns:
            Whether the sender may cancel the task, or `None` if the task is not live.
        """
        segment = self.segments.get(task_id)
        if segment is None:
            return None
        if sender not in {None, self._runtime.agent} and not same_requester(
            segment.requester.app_id, sender
        ):
            return False
        if parent is None or segment.requester.parent_task_id in {None, parent}:
            segment.cancel_reason = segment.cancel_reason or reason
            segment.stop(StopReason.CANCELLED)
        return True

    def stop_lost(self, run: Run) -> None:
        """Stop the code of a run whose task another replica owns.

        Even if the code ends first, the fence rejects its write.
        """
        segment = self.segments.get(run.task_id)
        if segment is not None and segment.run == run and not segment.settling:
            if run.fence:  # else a first run, or a repeated request whose row is being read
                self._runtime.steps.emit(Step.LEASE_LOST, run.task_id, fence=run.fence)
            segment.stop(StopReason.LOST)

    async def requeue_if_draining(self, *deliveries: Delivery) -> Sequence[Delivery]:
        """Return `deliveries`, or requeue them and return none while the replica drains."""
        if not self.is_draining:
            return deliveries
        for delivery in deliveries:
            await delivery.requeue()
        return ()

    @contextmanager
    def claiming(self) -> Iterator[None]:
        """Keep the replica from being idle during a claim, which may start a task."""
        self._claims_in_progress += 1
        try:
            yield
        finally:
            self._claims_in_progress -= 1
            self.notify_if_idle()

    @contextmanager
    def replying(self, replies: Sequence[Reply]) -> Iterator[None]:
        """Keep the tasks of `replies` active while they are sent."""
        task_ids = [reply.task_id for reply in replies]
        self._replies_in_progress.update(task_ids)
        try:
            yield
        finally:
            self._replies_in_progress.subtract(task_ids)
            for task_id in task_ids:
                if not self._replies_in_progress[task_id]:
                    del self._replies_in_progress[task_id]

    def notify_if_idle(self) -> None:
        """Wake `wait_until_idle` if nothing is left."""
        if not self.segments and not self.unacked.by_task and not self._claims_in_progress:
            self._idle.set()

    async def wait_until_idle(self) -> None:
        """Wait until every task has ended or is paused in the database.

        No claim that could start another task is in progress then.
        """
        while self.segments or self.unacked.by_task or self._claims_in_progress:
            self._idle.clear()
            await self._idle.wait()
