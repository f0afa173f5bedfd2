"""Begin the first segment of each new task, and settle repeated requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Concatenate, ParamSpec, TypeAlias, assert_never

from meshpoint.engine import parsing
from meshpoint.engine.backend import Backend
from meshpoint.engine.begin import commit_begin, commit_redelivered
from meshpoint.engine.cancels import cancelled_outcome
from meshpoint.engine.dispatch import Dispatcher
from meshpoint.engine.postponed import PostponedRequests
from meshpoint.engine.refusals import Refusals, find_refusal
from meshpoint.engine.request_answers import RequestAnswers, find_existing
from meshpoint.engine.request_consumer import RequestConsumer
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.engine.segment import RequestedSegment, Segment
from meshpoint.engine.segment_runner import SegmentRunner
from meshpoint.engine.senders import (
    Relation,
    compare_request,
    identify_sender,
    reply_address_error,
)
from meshpoint.errors import NON_DEFECT_ERRORS, PoisonMessage
from meshpoint.model.ids import RunId, TaskId, new_id
from meshpoint.model.outcomes import Failed, FailureKind
from meshpoint.model.tasks import Run, TaskState
from meshpoint.model.transitions import BeginCommitted, CancelFound, ExistingTask, Fenced
from meshpoint.ports.broker import Delivery

_P = ParamSpec("_P")
_PendingRequest: TypeAlias = tuple[RequestedSegment, parsing.Request, Delivery]

_DEFECT_RETRY_DELAY = timedelta(seconds=1)
"""Delay before requeueing a request that hit a defect. The broker counts and limits deliveries."""


class Requests:
    """Accepts requests. `request_consumer` assigns slots."""

    def __init__(
        self,
        runtime: ReplicaRuntime,
        runner: SegmentRunner,
        dispatcher: Dispatcher,
        refusals: Refusals,
        request_consumer: RequestConsumer,
    ) -> None:
        self._runtime = runtime
        self._runner = runner
        self._tasks = runner.tasks
        self._settlement = runner.settlement
        self._publisher = dispatcher.publisher
        self._refusals = refusals
        self._answers = RequestAnswers(
            runtime, runner.tasks, runner.settlement, dispatcher.replies, refusals
        )
        self._spawn = runtime.background.spawn
        self._request_consumer = request_consumer
        self.postponed = PostponedRequests(
            self.handle_requests,
            runtime,
            runner.tasks,
            runner.settlement,
            request_consumer.adjust_prefetch,
        )

    async def handle_requests(self, deliveries: Sequence[Delivery]) -> None:
        """Begin the first segment of each new task, and settle repeated requests.

        A batch that hits a defect is retried one by one, so only the faulty request is set aside.
        """
        remaining = list(deliveries)
        try:
            await self._process_batch(remaining)
        except NON_DEFECT_ERRORS:
            for delivery in remaining:
                await delivery.requeue()
            raise
        except Exception as error:
            if len(remaining) == 1:
                self._refusals.dead_letter_defective(remaining[0], error)
            else:
                for delivery in remaining:
                    await self.handle_requests([delivery])

    async def _process_batch(self, remaining: list[Delivery]) -> None:
        """Handle the requests in `remaining`, removing each request once it is dealt with.

        The slot is taken last, so that no slot is held during a database outage: in-process tasks
        need them.
        """
        pending: list[_PendingRequest] = []
        segments: dict[TaskId, RequestedSegment] = {}
        begin_at, must_begin_any = self._runtime.options.begin_at_delivery, False
        try:
            for delivery in list(remaining):
                if parsed := await self._parse(delivery):
                    pending.append((*parsed, delivery))
                    segments[parsed[1].task_id] = parsed[0]
                    must_begin_any |= delivery.delivery_count >= begin_at
                else:
                    remaining.remove(delivery)
            existing_by_id = await self._find_existing(segments, pending, remaining)
            if (database := self._runtime.new_task_backend).is_shared and must_begin_any:
                redelivered = [
                    entry
                    for entry in pending
                    if entry[2].delivery_count >= begin_at
                    and find_refusal(entry[1], self._runtime.options, self._runtime.clock.now())
                    is None
                    and entry[1].task_id not in existing_by_id
                ]
                if redelivered:
                    await self._begin_redelivered(redelivered, database)
                for each in redelivered:
                    pending.remove(each)
                    remaining.remove(each[2])
            is_busy = False
            while pending:
                segment, request, delivery = pending[0]
                if await self._admit(
                    segment, request, delivery, existing_by_id.get(request.task_id)
                ):
                    if await self._request_consumer.acquire_slot(segment, nowait=is_busy):
                        self._runner.start(segment, request)
                    else:
                        is_busy = True
                        await self._answers.requeue(segment)
                pending.pop(0)
                remaining.remove(delivery)
        finally:
            for segment, _, _ in pending:  # unacked, so they are redelivered
                self._runner.abandon_unstarted(segment)

    async def _find_existing(
        self,
        segments: Mapping[TaskId, RequestedSegment],
        pending: list[_PendingRequest],
        remaining: list[Delivery],
    ) -> dict[TaskId, tuple[Backend, ExistingTask]]:
        """Look up the rows of these tasks, and postpone the requests that need the database.

        While it is unavailable, first deliveries stay in `pending` if their tasks pause here.
        """
        existing_by_id, is_complete = await find_existing(segments, self._runtime)
        for each in () if is_complete else list(pending):
            segment, request, delivery = each
            may_have_row = delivery.delivery_count > 1 or request.resume_token is not None
            if may_have_row and request.task_id not in existing_by_id:
                pending.remove(each)
                remaining.remove(delivery)
                await self.postponed.postpone(segment)
        return existing_by_id

    async def _parse(self, delivery: Delivery) -> tuple[RequestedSegment, parsing.Request] | None:
        options = self._runtime.options
        try:
            sender = identify_sender(delivery.message, self._runtime.agent, options)
            if (address_error := reply_address_error(delivery.message)) is not None:
                raise PoisonMessage(address_error)
            request = parsing.parse_request(delivery.message, options)
        except PoisonMessage as error:
            self._refusals.dead_letter_in_background(delivery, str(error))
            return None
        segment = RequestedSegment(
            run=Run(request.task_id, self._runtime.agent, RunId(new_id())),
            requester=request.requester,
            digest=request.digest,
            deliveries=[delivery],
            message=delivery.message,
            sender=sender,
        )
        is_local = (
            request.task_id in self._tasks.segments
            or request.task_id in self._tasks.unacked.by_task
        )
        if is_local and await self._delegate_to_local_task(segment, request, delivery):
            return None
        self._tasks.register(segment)
        return segment, request

    async def _delegate_to_local_task(
        self, segment: RequestedSegment, request: parsing.Request, delivery: Delivery
    ) -> bool:
        """Whether the task with the request's id in this process takes care of the request.

        If so, the request is settled already or will be soon.
        """
        live = self._tasks.segments.get(request.task_id)
        requester_and_digest = self._tasks.find_requester_and_digest(request.task_id)
        if requester_and_digest is None:
            return False
        if live is not None and live.settling and live.shared_backend is not None:
            # Its reply may go to another address.
            self._spawn(self._handle_after(live.removed, delivery))
            return True
        match compare_request(segment.sender, segment.digest, *requester_and_digest):
            case Relation.SAME_REQUEST if request.resume_token is None:
                await self._settlement.add_redelivery(request.task_id, delivery)
                live = self._tasks.segments.get(request.task_id)
                if live is not None and live.shared_backend is not None:
                    await self._settlement.ack(live)
            case Relation.SAME_REQUEST if live is not None:
                self._spawn(self._redirect_reply(live, segment, request))
            case _ if live is not None and not live.decided.is_set():  # lookup is pending
                self._spawn(self._handle_after(live.decided, delivery))
            case Relation.OTHER_INPUT:
                self._spawn_answer(self._answers.refuse_id_in_use, segment)
            case Relation.OTHER_REQUESTER:
                self._spawn_answer(self._answers.reject_other_requester, segment, request)
            case Relation.SAME_REQUEST:  # unacked here, not running: the row knows more
                return False
        return True

    async def _handle_after(self, event: asyncio.Event, delivery: Delivery) -> None:
        await event.wait()
        await self.handle_requests(await self._tasks.requeue_if_draining(delivery))

    async def _redirect_reply(
        self, live: Segment, new_segment: RequestedSegment, request: parsing.Request
    ) -> None:
        """Redirect the reply of a task that runs here to its resumed requester.

        The redirect is recorded in the task's row. A segment without a row still answers the
        previous request, whose sender no longer waits; after that the new request is requeued.
        """
        if live.begin_task is not None:
            await asyncio.wait({live.begin_task})
        backend = live.shared_backend
        if backend is None:
            await live.removed.wait()
            await self._answers.requeue(new_segment)
            return
        existing = ExistingTask(
            request.task_id,
            self._runtime.agent,
            TaskState.RUNNING,
            requester=live.requester.app_id,
            digest=live.digest,
        )
        self._spawn_answer(self._answers.handle_existing, new_segment, request, backend, existing)

    async def _begin_redelivered(
        self,
        pending: Sequence[tuple[RequestedSegment, parsing.Request, Delivery]],
        database: Backend,
    ) -> None:
        """Insert the tasks and ack their requests before any task runs: one may kill this process.

        From then on the broker no longer counts deliveries. Any replica may run the tasks that got
        no slot.
        """
        results = await commit_redelivered(
            [(segment, request.resume_token) for segment, request, _ in pending],
            database,
            self._runtime,
        )
        running: list[tuple[RequestedSegment, parsing.Request]] = []
        for (segment, request, _), result in zip(pending, results, strict=True):
            if isinstance(result, BeginCommitted) and not result.queued:
                segment.run, segment.backend = result.run, database
                database.start_renewing(result.run)
                running.append((segment, request))
            elif isinstance(result, BeginCommitted):
                self._spawn_answer(self._settle_queued, segment)
            else:
                self._settle_not_begun(segment, request, result)
        for segment, _ in running:
            await self._settlement.ack(segment)
        for segment, request in running:
            self._runner.start(segment, request)

    async def _settle_queued(self, segment: RequestedSegment) -> None:
        await self._answers.settle(segment)
        self._tasks.tasks_ready.set()
        await self._publisher.wake_others()

    async def _admit(
        self,
        segment: RequestedSegment,
        request: parsing.Request,
        delivery: Delivery,
        existing: tuple[Backend, ExistingTask] | None,
    ) -> bool:
        """Whether to run the task here now. If not, its request is settled or soon will be."""
        if existing is not None and not self._needs_rerun(segment, request, existing[1]):
            self._spawn_answer(self._answers.handle_existing, segment, request, *existing)
            return False
        options, count = self._runtime.options, delivery.delivery_count
        is_shared = self._runtime.new_task_backend.is_shared
        if not is_shared and count >= options.begin_at_delivery + options.max_attempts:
            segment.dead_reason = f"it was delivered {count} times and no run of it came to an end"
            failure: Failed | None = Failed(FailureKind.ERROR, segment.dead_reason)
        else:
            failure = find_refusal(request, options, self._runtime.clock.now())
        if failure is not None:
            self._spawn_answer(self._answers.refuse, segment, failure)
            return False
        if not is_shared or (
            options.ack_policy == "at_checkpoint"
            # A resumed requester's task may run on another replica: only the row can decide.
            and request.resume_token is None
        ):
            return True
        return await self._begin_before_run(segment, request)

    def _needs_rerun(
        self, segment: RequestedSegment, request: parsing.Request, existing: ExistingTask
    ) -> bool:
        """Whether a resumed requester needs a rerun because the task's reply was deleted."""
        return (
            request.resume_token is not None
            and existing.is_reply_discarded
            and existing.agent == self._runtime.agent
            and compare_request(
                segment.sender, segment.digest, existing.requester, existing.digest
            )
            is Relation.SAME_REQUEST
        )

    async def _begin_before_run(self, segment: RequestedSegment, request: parsing.Request) -> bool:
        """Insert the task as running and ack its request.

        From then on the lease protects the run, not the broker.
        """
        backend, result = await commit_begin(segment, self._runtime, order=request.resume_token)
        if isinstance(result, BeginCommitted):
            segment.run, segment.backend = result.run, backend
            backend.start_renewing(segment.run)
            await self._settlement.ack(segment)
            return True
        self._settle_not_begun(segment, request, result)
        return False

    def _settle_not_begun(
        self, segment: RequestedSegment, request: parsing.Request, result: Fenced | CancelFound
    ) -> None:
        """Settle a request whose task already has a row."""
        match result:
            case Fenced() if request.resume_token is not None:  # the new row needs this requester
                self._spawn_answer(self._answers.requeue, segment)
            case Fenced():
                self._spawn_answer(self._answers.settle_id_conflict, segment)
            case CancelFound():
                failure = cancelled_outcome(segment.cancel_reason)
                self._spawn_answer(self._answers.refuse, segment, failure)
            case _:
                assert_never(result)

    def _spawn_answer(
        self,
        answer: Callable[Concatenate[RequestedSegment, _P], Awaitable[None]],
        segment: RequestedSegment,
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> None:
        self._spawn(self._answer_or_requeue(partial(answer, segment, *args, **kwargs), segment))

    async def _answer_or_requeue(
        self, answer: Callable[[], Awaitable[None]], segment: RequestedSegment
    ) -> None:
        """Answer a request that does not run here. After a defect, it is requeued with a delay."""
        try:
            await answer()
        except Exception:
            await self._runtime.clock.sleep(_DEFECT_RETRY_DELAY)
            await self._answers.requeue(segment)
            raise
