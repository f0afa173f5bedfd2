"""Begin the first segment of each new task, and settle repeated requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import timedelta
from functools import partial
from typing import Concatenate, ParamSpec, TypeAlias, assert_never

from meshpoint.engine import parsing
from meshpoint.engine.attaches import AttachCommand
from meshpoint.engine.backend import Backend
from meshpoint.engine.begin import commit_begin, commit_delayed, commit_redelivered
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
from meshpoint.model.call_attempts import final_failure
from meshpoint.model.ids import RunId, TaskId, new_id
from meshpoint.model.messages import Header, Message
from meshpoint.model.outcomes import Failed, FailureKind
from meshpoint.model.tasks import MAX_REPLY_ADDRESSES, Run, TaskState
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
            runtime,
            runner.tasks,
            runner.settlement,
            dispatcher.replies,
            refusals,
            dispatcher.publisher,
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
        is_any_delayed = False
        try:
            for delivery in list(remaining):
                if parsed := await self._parse(delivery):
                    pending.append((*parsed, delivery))
                    segments[parsed[1].task_id] = parsed[0]
                    must_begin_any |= delivery.delivery_count >= begin_at
                    is_any_delayed |= parsed[1].start_at is not None
                else:
                    remaining.remove(delivery)
            existing_by_id, is_complete = await find_existing(segments, self._runtime)
            if not is_complete:
                await self._postpone_unknown(pending, remaining, existing_by_id)
            if is_any_delayed:
                await self._begin_delayed(pending, remaining, existing_by_id)
            if must_begin_any and self._runtime.new_task_backend.is_shared:
                await self._begin_redelivered(pending, remaining, existing_by_id)
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

    async def _postpone_unknown(
        self,
        pending: list[_PendingRequest],
        remaining: list[Delivery],
        existing_by_id: Collection[TaskId],
    ) -> None:
        """Postpone the requests that need the database, while it is unavailable.

        First deliveries stay in `pending`: their tasks pause here.
        """
        for each in list(pending):
            segment, request, delivery = each
            may_have_row = delivery.delivery_count > 1 or request.resume_token is not None
            if may_have_row and request.task_id not in existing_by_id:
                pending.remove(each)
                remaining.remove(delivery)
                await self.postponed.postpone(segment)

    def _find_delayed(
        self, pending: Sequence[_PendingRequest], existing_by_id: Collection[TaskId]
    ) -> list[_PendingRequest]:
        """The requests of new tasks that begin later."""
        now = self._runtime.clock.now()
        return [
            each
            for each in pending
            if each[1].is_delayed(now)
            and each[1].task_id not in existing_by_id
            and find_refusal(each[1], self._runtime) is None
        ]

    async def _begin_delayed(
        self,
        pending: list[_PendingRequest],
        remaining: list[Delivery],
        existing_by_id: Collection[TaskId],
    ) -> None:
        """Insert tasks that begin later, on any replica.

        The request of a task that waits in this process stays unacked, as while it pauses.
        """
        delayed = self._find_delayed(pending, existing_by_id)
        if not delayed:
            return
        backend = self._runtime.new_task_backend
        results = await commit_delayed(
            [
                (segment, request.order, request.start_at)
                for segment, request, _ in delayed
                if request.start_at is not None
            ],
            backend,
            self._runtime,
        )
        for (segment, request, _), result in zip(delayed, results, strict=True):
            if not isinstance(result, BeginCommitted):
                self._settle_not_begun(segment, request, result)
                continue
            self._accept_start(segment, request)
            if backend.is_shared:
                self._spawn_answer(self._answers.settle, segment)
            else:
                self._spawn_answer(self._answers.keep_until_start, segment)
        for each in delayed:
            pending.remove(each)
            remaining.remove(each[2])

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
        self._tasks.segments[request.task_id] = segment  # from now on, a cancel finds it
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
            self._spawn(self._handle_after, live.removed, delivery)
            return True
        match compare_request(segment.sender, segment.digest, *requester_and_digest):
            case Relation.SAME_REQUEST if request.start_token is not None:
                await self._add_start(live, segment, request, delivery)
            case Relation.SAME_REQUEST if request.resume_token is None:
                await self._add_repeated(live, segment, delivery)
            case Relation.SAME_REQUEST if live is not None:
                self._spawn(self._redirect_reply, live, segment, request)
            case _ if live is not None and not live.decided.is_set():  # lookup is pending
                self._spawn(self._handle_after, live.decided, delivery)
            case Relation.OTHER_INPUT:
                existing = self._find_request(request.task_id)
                self._spawn_answer(self._answers.refuse_other_input, segment, request, existing)
            case Relation.OTHER_REQUESTER:
                self._spawn_answer(self._answers.reject_other_requester, segment, request)
            case Relation.SAME_REQUEST:  # unacked here, not running: the row knows more
                return False
        return True

    async def _add_start(
        self,
        live: Segment | None,
        segment: RequestedSegment,
        request: parsing.Request,
        delivery: Delivery,
    ) -> None:
        """Handle a request whose task must not exist, but is in this process."""
        if live is not None and not live.decided.is_set():  # lookup is pending
            self._spawn(self._handle_after, live.decided, delivery)
            return
        known = self._find_request(request.task_id)
        if known is None and live is not None and live.shared_backend is not None:
            backend = live.shared_backend
            self._spawn_answer(self._answers.answer_start, segment, request, backend)
        elif known is not None and known.headers.get(Header.START) == request.start_token:
            await self._add_repeated(live, segment, delivery)
            self._accept_start(segment, request)
        else:
            self._spawn_answer(self._answers.refuse_existing, segment, request)

    def _find_request(self, task_id: TaskId) -> Message | None:
        """The request of a task in this process; `None` if only its row has it."""
        live = self._tasks.segments.get(task_id)
        if isinstance(live, RequestedSegment):
            return live.message
        return self._tasks.unacked.first_request(task_id)

    async def _add_repeated(
        self, live: Segment | None, repeated: RequestedSegment, delivery: Delivery
    ) -> None:
        """Add a repeated request to its task. Its sender gets the reply too.

        It is acked once its address is in the task's row. Until then, a crash brings it back.
        """
        address, task_id = repeated.requester.reply_to, repeated.run.task_id
        if address is None or repeated.requester.parent_task_id is not None:
            await self._add_redelivery(task_id, delivery)
            return
        command = AttachCommand(task_id, repeated.sender.name or "", address)
        if live is None:
            in_process = self._runtime.in_process
            if await self._settlement.attaches.attach_sender(in_process, command):
                await self._answers.settle(repeated)
            else:
                await self._add_redelivery(task_id, delivery)
        elif address == live.requester.reply_to:
            await self._add_redelivery(task_id, delivery)
        elif live.shared_backend is not None:
            self._spawn_answer(self._attach_repeated, repeated, live.shared_backend, command)
        elif not live.decided.is_set():
            self._spawn(self._handle_after, live.decided, delivery)
        elif live.settling:
            self._spawn(self._handle_after, live.removed, delivery)
        else:
            is_known = address in live.unrecorded
            dropped = live.attach(address, recorded=False)
            self._settlement.attaches.report_dropped_later(task_id, dropped)
            if is_known or len(live.deliveries) >= MAX_REPLY_ADDRESSES:
                await self._add_redelivery(task_id, delivery)
            else:
                live.deliveries.append(delivery)

    async def _add_redelivery(self, task_id: TaskId, delivery: Delivery) -> None:
        await self._settlement.add_redelivery(task_id, delivery)
        live = self._tasks.segments.get(task_id)
        if live is not None and live.shared_backend is not None:
            await self._settlement.ack(live)

    async def _attach_repeated(
        self, repeated: RequestedSegment, backend: Backend, command: AttachCommand
    ) -> None:
        await self._settlement.attaches.attach_sender(backend, command)
        await self._answers.settle(repeated)

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
        pending: list[_PendingRequest],
        remaining: list[Delivery],
        existing_by_id: Collection[TaskId],
    ) -> None:
        """Insert tasks and ack their requests before any of them runs: one may kill this process.

        From then on the broker no longer counts deliveries. Any replica may run the tasks that got
        no slot.
        """
        redelivered = self._find_redelivered(pending, existing_by_id)
        if not redelivered:
            return
        database = self._runtime.new_task_backend
        results = await commit_redelivered(
            [(segment, request.order) for segment, request, _ in redelivered],
            database,
            self._runtime,
        )
        running: list[tuple[RequestedSegment, parsing.Request]] = []
        for (segment, request, _), result in zip(redelivered, results, strict=True):
            if isinstance(result, BeginCommitted) and not result.queued:
                self._accept_start(segment, request)
                segment.run, segment.backend = result.run, database
                database.start_renewing(result.run)
                running.append((segment, request))
            elif isinstance(result, BeginCommitted):
                self._accept_start(segment, request)
                self._spawn_answer(self._settle_queued, segment)
            else:
                self._settle_not_begun(segment, request, result)
        for segment, _ in running:
            await self._settlement.ack(segment)
        for segment, request in running:
            self._runner.start(segment, request)
        for each in redelivered:
            pending.remove(each)
            remaining.remove(each[2])

    def _find_redelivered(
        self, pending: Sequence[_PendingRequest], existing_by_id: Collection[TaskId]
    ) -> list[_PendingRequest]:
        """The requests of new tasks whose row is written first: earlier runs may have crashed."""
        begin_at = self._runtime.options.begin_at_delivery
        return [
            each
            for each in pending
            if each[2].delivery_count >= begin_at
            and each[1].task_id not in existing_by_id
            and find_refusal(each[1], self._runtime) is None
        ]

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
            segment.dead_reason = f"it was delivered {count} times and no run of it finished"
            failure: Failed | None = final_failure(FailureKind.ERROR, segment.dead_reason)
        else:
            failure = find_refusal(request, self._runtime)
        if failure is not None:
            self._spawn_answer(self._answers.refuse, segment, failure)
            return False
        if not is_shared:
            self._accept_start(segment, request)
            return True
        # A resumed requester's task, or a task that must be new, may be running on another
        # replica: only the row decides.
        has_order = bool(request.resume_token) or request.start_token is not None
        if options.ack_policy == "at_checkpoint" and not has_order:
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
        backend, result = await commit_begin(segment, self._runtime, order=request.order)
        if isinstance(result, BeginCommitted):
            segment.run, segment.backend = result.run, backend
            backend.start_renewing(segment.run)
            self._accept_start(segment, request)
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
            case Fenced() if request.start_token is not None:
                backend = self._runtime.new_task_backend
                self._spawn_answer(self._answers.answer_start, segment, request, backend)
            case Fenced():
                self._spawn_answer(self._answers.settle_id_conflict, segment)
            case CancelFound():
                failure = cancelled_outcome(segment.cancel_reason)
                self._spawn_answer(self._answers.refuse, segment, failure)
            case _:
                assert_never(result)

    def _accept_start(self, segment: RequestedSegment, request: parsing.Request) -> None:
        if request.start_token is not None:
            self._spawn(self._answers.accept_start, segment, request)

    def _spawn_answer(
        self,
        answer: Callable[Concatenate[RequestedSegment, _P], Awaitable[None]],
        segment: RequestedSegment,
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> None:
        self._spawn(self._answer_or_requeue, partial(answer, segment, *args, **kwargs), segment)

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
