"""Settle segments: commit the result, publish what it allows, then ack the request.

`Settlement.settle` shows the order from top to bottom. A crash before the commit loses nothing,
because the lease or the unacked request starts the segment again. After the commit, unsent
messages are due in the outbox, and a redelivered request finds its task. So nothing is published
before it is committed, and nothing is acked before it is published.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TypeAlias, assert_never

from meshpoint.engine import end
from meshpoint.engine.attaches import Attaches
from meshpoint.engine.backend import Backend
from meshpoint.engine.commit import (
    Commits,
    Committed,
    TaskEnded,
    TaskHasNoRow,
    TaskLost,
    TaskNotStored,
    TaskPaused,
    TaskReleased,
    TaskRescheduled,
    checked_result,
)
from meshpoint.engine.containment import is_defect
from meshpoint.engine.dispatch import Dispatcher
from meshpoint.engine.live_tasks import LiveTasks
from meshpoint.engine.refusals import ID_IN_USE, internal_error_text
from meshpoint.engine.running import SegmentResult
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.engine.segment import FinalCheckpoint, RequestedSegment, Segment
from meshpoint.engine.senders import Relation, Sender, compare_request
from meshpoint.engine.status_sender import StatusSender
from meshpoint.engine.unacked import may_run_elsewhere
from meshpoint.errors import StoreUnavailable, Unavailable
from meshpoint.model.events import Step
from meshpoint.model.hand_over import HandOver
from meshpoint.model.ids import TaskId
from meshpoint.model.outcomes import Failed, FailureKind, Outcome
from meshpoint.model.questions import QuestionCall
from meshpoint.model.tasks import CancelNotice, OutboxItem, Reply, TaskState
from meshpoint.model.transitions import Claim, ClaimResult, StoreReply
from meshpoint.ports.broker import Delivery

log = logging.getLogger("meshpoint.settlement")

_MAX_UNACKED_TIME = timedelta(minutes=15)
"""Maximum time a request stays unacked while its reply is undelivered.

RabbitMQ closes the channel after 30 minutes by default.
"""

_RecordOutcomes: TypeAlias = Callable[[Backend, Sequence[Claim]], Awaitable[list[ClaimResult]]]


class Settlement:
    """Commits, publishes and acks, in this order.

    `attaches` serves the callers that attached during a segment.

    `adjust_prefetch` adapts the prefetch to the number of unacked requests. `record_outcomes`
    claims the outcomes of calls that no queue accepted.
    """

    def __init__(
        self,
        runtime: ReplicaRuntime,
        commits: Commits,
        tasks: LiveTasks,
        dispatcher: Dispatcher,
        adjust_prefetch: Callable[[], None],
        record_outcomes: _RecordOutcomes,
    ) -> None:
        self._runtime = runtime
        self._commits = commits
        self._tasks = tasks
        self._dispatcher = dispatcher
        self._replies = dispatcher.replies
        self.attaches = Attaches(runtime, tasks, dispatcher.publisher, dispatcher.replies)
        self._adjust_prefetch = adjust_prefetch
        self._record_outcomes = record_outcomes

    async def settle(
        self, segment: Segment, result: SegmentResult, on_committed: Callable[[Segment], None]
    ) -> None:
        """Commit `result`, publish what that allows, then ack the task's requests."""
        segment.settling = True
        committed = await self._commit(segment, result)
        on_committed(segment)
        match committed:
            case TaskPaused(backend=backend, workspace=workspace):
                await self._keep_in_process(segment, backend)
                # Before a response lets another replica resume the task.
                await self.attaches.settle_unrecorded(segment, backend, None)
                await workspace.update_caches(backend, committed.final_checkpoint)
                await self._send_committed(backend, committed.dispatches, committed.hand_over)
                if committed.is_ready:
                    self._tasks.tasks_ready.set()
                await self.ack(segment)
                await self._show_questions(segment, committed.questions)
            case TaskEnded(backend=backend, reply=reply, outcome=outcome):
                self._report_end(segment, outcome)
                await self._keep_requests(segment, backend)
                await self._send_committed(backend, [reply], committed.hand_over)
                if reply.task_id in self._tasks.unacked.by_task:  # its reply waits for its address
                    await self._keep_requests(segment, backend)  # if redelivered meanwhile
                await self.attaches.settle_unrecorded(segment, None, reply)
                await self.ack(segment)
                await self._clean_up(segment, backend, reply, committed.final_checkpoint)
            case TaskHasNoRow(reply=reply, outcome=outcome):
                await self._answer(segment, reply, outcome)
            case TaskReleased(backend=backend):
                await self.attaches.settle_unrecorded(segment, backend, None)
                await self._announce_release(segment, committed)
                await self.ack(segment)
            case TaskRescheduled(may_be_ready=may_be_ready):
                if may_be_ready:
                    self._tasks.tasks_ready.set()
                await self.attaches.settle_unrecorded(segment, segment.backend, None)
                await self.ack(segment)
            case TaskLost():
                await self._settle_lost(segment)
            case TaskNotStored():
                await self.requeue(segment)
            case _:
                assert_never(committed)

    async def _show_questions(self, segment: Segment, questions: Sequence[QuestionCall]) -> None:
        """Show the questions that the task now waits for to its callers. Advisory."""
        if not questions:
            return
        publisher = self._dispatcher.publisher
        updates = segment.updates or StatusSender(segment, self._runtime, publisher)
        for question in questions:
            agent, task_id = self._runtime.agent, segment.run.task_id
            await updates.send_question(question.to_update(agent, task_id))

    async def _commit(self, segment: Segment, result: SegmentResult) -> Committed:
        try:
            if segment.begin_task is not None:
                result = await checked_result(segment.begin_task, result)
            return await self._commits.commit(segment, result)
        except BaseException as error:
            # A result that cannot be committed becomes a failure.
            if not is_defect(error):
                raise
            log.exception("task %s: its segment could not be settled", segment.run.task_id)
            failed = Failed(FailureKind.ERROR, internal_error_text(error))
            return await self._commits.commit(segment, failed)

    async def _keep_in_process(self, segment: Segment, backend: Backend) -> None:
        """Let a response resume a paused in-process task, whose requests stay unacked."""
        if not backend.is_shared:
            await self.keep_unacked(segment)
            self._tasks.remove(segment)

    async def _keep_requests(self, segment: Segment, backend: Backend) -> None:
        if not backend.is_shared:
            await self.keep_unacked(segment)

    def _report_end(self, segment: Segment, outcome: Outcome) -> None:
        if isinstance(outcome, Failed):
            raised = None if segment.workspace is None else segment.workspace.failure
            self._runtime.report_failure(segment.run.task_id, outcome, raised)
        else:
            self._runtime.steps.emit(Step.TASK_COMPLETED, segment.run.task_id)

    async def _answer(self, segment: Segment, reply: Reply, outcome: Outcome) -> None:
        """Answer a task without a row: ack its request once its reply is confirmed or stored.

        If another replica may be running the same request, only the first run to store its reply
        answers. The reply is also stored first if its requester, or another caller that attached,
        wants it to be kept.
        """
        database = self._runtime.database
        is_wanted = reply.requester.result_ttl is not None or bool(segment.unrecorded)
        is_kept = is_wanted and not self._runtime.runs_without_database
        if database is not None and (is_kept or may_run_elsewhere(segment.deliveries)):
            command = StoreReply(segment.run.id, reply, digest=segment.digest)
            if await self._replies.store_reply(database, command):
                await self.send(database, [reply])
                await self.attaches.settle_unrecorded(segment, None, reply)
                await self.ack(segment)
                await self._clean_up(segment, database, reply)
            else:
                return await self._settle_lost(segment)
        else:
            is_published = await self._replies.publish_reply(
                reply,
                segment.run.id,
                digest=segment.digest,
                requests=segment.deliveries,
                may_ack=not segment.unrecorded,
            )
            if segment.unrecorded:
                await self.attaches.settle_unrecorded(segment, None, reply)
            await (self.ack(segment) if is_published else self.keep_unacked(segment))
        self._report_end(segment, outcome)
        return None

    async def _settle_lost(self, segment: Segment) -> None:
        """Settle a request whose run owns no row.

        Another run answers it, unless the row is for another request: then it is refused.
        """
        is_stored = segment.run.fence != 0
        if (
            not is_stored
            and isinstance(segment, RequestedSegment)
            and await self.is_id_taken(segment)
        ):
            refusal = end.build_refusal(segment, ID_IN_USE, id_in_use=True)
            await self._replies.publish_refusal(refusal)
        await self.attaches.settle_unrecorded(segment, self._runtime.database, None)
        await self.ack(segment)

    async def is_id_taken(self, segment: Segment) -> bool:
        """Whether the existing row for a new request's id belongs to another request."""
        task_id, sender = segment.run.task_id, Sender(segment.requester.app_id)
        for backend in self._runtime.backends:
            rows = await self._runtime.retry.until_available(
                partial(backend.store.lookup, [task_id])
            )
            if (existing := rows.get(task_id)) is not None:
                relation = compare_request(
                    sender, segment.digest, existing.requester, existing.digest
                )
                is_same_agent = existing.agent == self._runtime.agent
                return not is_same_agent or relation is not Relation.SAME_REQUEST
        return False

    async def _announce_release(self, segment: Segment, committed: TaskReleased) -> None:
        """Offer the task to other replicas, and report that it is parked."""
        if (reason := committed.parked_reason) is not None:
            task_id, store = segment.run.task_id, committed.backend.store
            found = await self._runtime.retry.until_available(lambda: store.task(task_id))
            if found is not None and found[0].state is TaskState.PARKED:  # not cancelled meanwhile
                version = self._runtime.replica.version
                self._runtime.steps.emit(Step.PARKED, task_id, reason=reason, version=version)
        await self._dispatcher.publisher.wake_others()

    async def _clean_up(
        self,
        segment: Segment,
        backend: Backend,
        reply: Reply,
        final_checkpoint: FinalCheckpoint | None = None,
    ) -> None:
        """Drop what a completed task no longer needs, and cache what a failed one resumes from."""
        if segment.workspace is None:
            return
        if reply.state is TaskState.COMPLETED:
            await segment.workspace.clear_caches(backend)
        elif final_checkpoint is not None:
            await segment.workspace.update_caches(backend, final_checkpoint)

    async def _send_committed(
        self, backend: Backend, items: Sequence[OutboxItem], hand_over: HandOver | None
    ) -> None:
        """Send the messages of a transition, unless its commit has published them."""
        if hand_over is not None and hand_over.is_done:
            self._dispatcher.report_handed_over(items, hand_over)
        else:
            await self.send(backend, items)

    async def send(
        self, backend: Backend, items: Sequence[OutboxItem], *, overdue: bool = False
    ) -> None:
        """Send the messages that a backend committed.

        An undeliverable call is claimed as such at once.

        `overdue`: the messages were due before, so those for addresses in back-off may wait.
        """
        if backend.is_shared:
            undeliverable, _ = await self._dispatcher.send(backend, items, overdue=overdue)
            if undeliverable and not self._tasks.is_draining:  # else another replica claims
                with suppress(StoreUnavailable):  # the calls stay due
                    await self._record_outcomes(backend, undeliverable)
            return
        if self._tasks.has_released_all:
            items = list(filter(self._is_still_due, items))
        with self._tasks.replying([item for item in items if isinstance(item, Reply)]):
            await self._send_from_process(backend, items, overdue=overdue)
        if self._tasks.has_released_all:
            await self.requeue_unacked()

    def _is_still_due(self, item: OutboxItem) -> bool:
        """Whether to send a message of an in-process task after the replica has released all.

        Another replica answers requeued requests, and no task here continues with the results of
        its calls.
        """
        return isinstance(item, CancelNotice) or (
            isinstance(item, Reply) and item.task_id in self._tasks.unacked.by_task
        )

    async def _send_from_process(
        self, backend: Backend, items: Sequence[OutboxItem], *, overdue: bool
    ) -> None:
        undeliverable, settled = await self._dispatcher.send(backend, items, overdue=overdue)
        for task_id in [*settled, *await self._store_deferred_replies(backend, items, settled)]:
            if deliveries := self._tasks.unacked.remove(task_id):
                await self._ack_all(task_id, deliveries)
        self._adjust_prefetch()
        self._tasks.notify_if_idle()
        if undeliverable:
            await self._record_outcomes(backend, undeliverable)

    async def _store_deferred_replies(
        self, backend: Backend, items: Sequence[OutboxItem], settled: Sequence[TaskId]
    ) -> list[TaskId]:
        """Keep the replies of in-process tasks whose address is in back-off.

        Returns the tasks with requests to ack.
        """
        stored: list[TaskId] = []
        unacked = self._tasks.unacked
        for item in items:
            if not isinstance(item, Reply) or item.task_id in settled:
                continue
            if item.task_id not in unacked.by_task:
                continue
            if unacked.has_ended(item.task_id):
                if item.age >= _MAX_UNACKED_TIME:
                    await self._ack_all(item.task_id, unacked.remove_requests(item.task_id))
            elif self._replies.is_address_failing(item) and await self._replies.store_undelivered(
                backend, item
            ):
                stored.append(item.task_id)
        return stored

    async def ack(self, segment: Segment) -> None:
        """Ack the task's requests: their consequences are committed and sent."""
        while segment.deliveries:  # a redelivery during the acks must be acked too
            deliveries, segment.deliveries = segment.deliveries, []
            await self._ack_all(segment.run.task_id, deliveries)

    async def requeue(self, segment: Segment) -> None:
        """Requeue the task's requests."""
        while segment.deliveries:
            await segment.deliveries.pop().requeue()

    async def keep_unacked(self, segment: Segment) -> None:
        """Keep the task's requests unacked until it ends, and make room for others."""
        while True:
            deliveries, segment.deliveries = segment.deliveries, []
            await self._keep_unacked(segment.run.task_id, deliveries)
            if not segment.deliveries:  # a redelivery may have arrived while a copy was acked
                return

    async def add_redelivery(self, task_id: TaskId, delivery: Delivery) -> None:
        """Keep a request that arrived again for a task this process has in memory.

        If a running task already keeps a copy unacked, a new copy is acked: it would only use up
        prefetch that other requests need.
        """
        live = self._tasks.segments.get(task_id)
        if live is None:
            await self._keep_unacked(task_id, [delivery])
        elif live.deliveries and delivery.delivery_count == 1:
            await self._ack_all(task_id, [delivery])
        else:
            live.deliveries.append(delivery)

    async def _keep_unacked(self, task_id: TaskId, deliveries: Sequence[Delivery]) -> None:
        """Keep requests unacked.

        Once the replica has released all its tasks, the requests are requeued instead, but only
        after the task's code has ended.
        """
        surplus = self._tasks.unacked.add(task_id, deliveries)
        if self._tasks.has_released_all and not self._tasks.is_active(task_id):
            for delivery in surplus:
                await delivery.requeue()
            await self.requeue_unacked()
            return
        self._adjust_prefetch()
        if surplus:
            await self._ack_all(task_id, surplus)

    async def requeue_unacked(self) -> None:
        """Requeue the requests of in-process tasks, except tasks that may still answer."""
        for delivery in self._replies.release_unacked(self._tasks.is_active):
            with suppress(Unavailable):  # its connection is lost, which requeues it too
                await delivery.requeue()
        self._tasks.notify_if_idle()

    async def _ack_all(self, task_id: TaskId, deliveries: Sequence[Delivery]) -> None:
        with self._runtime.steps.step(Step.ACK, [task_id]):
            for delivery in deliveries:
                try:
                    await delivery.ack()
                except Exception:  # a redelivery is settled by the task's row or its run
                    log.exception("task %s: a request could not be acked", task_id)
                    with suppress(Exception):
                        await delivery.requeue()
