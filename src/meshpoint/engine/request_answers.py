"""Answer requests that begin no task here: repeated, resumed and refused ones.

`find_existing` reads the rows that decide, and `RequestAnswers` answers from them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import assert_never

from meshpoint.engine import end, parsing
from meshpoint.engine.attaches import AttachCommand
from meshpoint.engine.backend import Backend
from meshpoint.engine.live_tasks import LiveTasks
from meshpoint.engine.publisher import Publisher
from meshpoint.engine.refusals import ID_IN_USE, Refusals
from meshpoint.engine.replies import Replies
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.engine.segment import RequestedSegment
from meshpoint.engine.senders import Relation, belongs_to_another, compare_request
from meshpoint.engine.settlement import Settlement
from meshpoint.errors import PoisonMessage, Unavailable
from meshpoint.model.bodies import RequestBody, parse_body
from meshpoint.model.envelopes import (
    accepted_status,
    decode_request,
    describe_envelopes,
    encode_request,
)
from meshpoint.model.events import Step
from meshpoint.model.ids import TaskId, new_id
from meshpoint.model.json_values import differing_field
from meshpoint.model.messages import Address, Message
from meshpoint.model.operations import (
    DIFFERENT_INPUT,
    DIFFERENT_REQUESTER,
    RESUMED_SINCE,
    Adopted,
    NotRevived,
    Refusal,
    Revive,
    Revived,
)
from meshpoint.model.outcomes import Failed, FailureKind
from meshpoint.model.tasks import Reply, TaskState, cancel_applies, same_requester
from meshpoint.model.transitions import ExistingTask
from meshpoint.subtasks.resuming import at_last_pause

_MAX_FIELD_LENGTH = 100
"""Maximum characters of a field that an error names."""
_CHANGED_SINCE = {"", DIFFERENT_REQUESTER, RESUMED_SINCE}
"""Details of a row that has changed, or was deleted, since it was read."""


async def find_existing(
    segments: Mapping[TaskId, RequestedSegment], runtime: ReplicaRuntime
) -> tuple[dict[TaskId, tuple[Backend, ExistingTask]], bool]:
    """Look up the rows of these tasks in every backend, without unrelated early cancels.

    The database wins if another replica ran a task that this process also has in memory.

    Returns:
        The rows, and `False` if the database is unavailable and was not asked: tasks that pause in
        this process do not wait for it.
    """
    found: dict[TaskId, tuple[Backend, ExistingTask]] = {}
    is_complete = True
    if not segments:
        return found, is_complete
    task_ids = list(segments)
    deliveries = [each for segment in segments.values() for each in segment.deliveries]
    describe = partial(describe_envelopes, [(each.address, each.message) for each in deliveries])
    with runtime.steps.step(Step.RECEIVE, task_ids, describe):
        for backend in runtime.backends:
            look_up = partial(backend.store.lookup, task_ids)
            rows = (
                await _look_up_if_available(look_up, runtime)
                if backend.is_shared and not runtime.new_task_backend.is_shared
                else await runtime.retry.until_available(look_up)
            )
            is_complete = is_complete and rows is not None
            for task_id, row in (rows or {}).items():
                if task_id not in found or found[task_id][1].is_early_cancel:
                    found[task_id] = backend, row
    for task_id, (_, row) in list(found.items()):
        if _is_unrelated_cancel(segments[task_id], row):
            del found[task_id]
    return found, is_complete


async def _look_up_if_available(
    look_up: Callable[[], Awaitable[dict[TaskId, ExistingTask]]], runtime: ReplicaRuntime
) -> dict[TaskId, ExistingTask] | None:
    """Look up rows, or return `None` if the database is unavailable: new tasks do not need it."""
    if runtime.runs_without_database:
        return None
    try:
        return await look_up()
    except Unavailable as error:
        runtime.retry.record_outage(error)
        return None


def _is_unrelated_cancel(segment: RequestedSegment, existing: ExistingTask) -> bool:
    """Whether a row is only an early cancel from another sender or for another agent."""
    return existing.is_early_cancel and not (
        existing.agent == segment.run.agent
        and cancel_applies(existing.requester, segment.requester.app_id)
    )


class RequestAnswers:
    """Answers each request from its task's row, and runs nothing.

    Each method acks, requeues, dead-letters or keeps the request unacked, and forgets its segment.
    """

    def __init__(
        self,
        runtime: ReplicaRuntime,
        tasks: LiveTasks,
        settlement: Settlement,
        replies: Replies,
        refusals: Refusals,
        publisher: Publisher,
    ) -> None:
        self._runtime = runtime
        self._tasks = tasks
        self._settlement = settlement
        self._replies = replies
        self._refusals = refusals
        self._publisher = publisher

    async def settle_id_conflict(self, segment: RequestedSegment) -> None:
        """Settle a request whose task id got a row concurrently, from this or another request."""
        if await self._settlement.is_id_taken(segment):
            await self.refuse_id_in_use(segment)
        else:
            await self.settle(segment)

    async def handle_existing(
        self,
        segment: RequestedSegment,
        request: parsing.Request,
        backend: Backend,
        existing: ExistingTask,
    ) -> None:
        """Handle a request whose task has a row: do what is still missing, run nothing twice."""
        request_relation = (
            Relation.SAME_REQUEST
            if existing.is_early_cancel
            else compare_request(
                segment.sender, segment.digest, existing.requester, existing.digest
            )
        )
        if request_relation is Relation.OTHER_REQUESTER:
            await self.reject_other_requester(segment, request)
        elif existing.agent != self._runtime.agent:
            await self.refuse_id_in_use(segment, f" to agent {existing.agent!r}")
        elif request_relation is Relation.OTHER_INPUT:
            await self.refuse_other_input(
                segment, request, await self._stored_request(existing.task_id, backend)
            )
        elif (
            request.start_token is not None
            and existing.order != request.start_order
            and not existing.is_early_cancel
        ):
            await self.refuse_existing(segment, request)
        else:
            await self.accept_start(segment, request)
            await self._handle_repeated(segment, request, backend, existing)

    async def _handle_repeated(
        self,
        segment: RequestedSegment,
        request: parsing.Request,
        backend: Backend,
        existing: ExistingTask,
    ) -> None:
        if request.resume_token is not None and existing.state is not TaskState.COMPLETED:
            command = self._build_revive(segment, request.resume_token, existing)
            await self._revive(segment, command, backend, existing)
        elif existing.reply is not None:
            await self._resend_reply(segment, existing.reply, existing)
        elif backend.is_shared or existing.is_reply_discarded:
            if existing.state is TaskState.WAITING:
                self._runtime.sweep_wakeup.set()  # the sweep resends messages that are due
            await self._attach_sender(segment, backend, existing)
            await self.settle(segment)
        else:
            await self._attach_sender(segment, backend, existing)
            await self._keep_unacked(segment)

    async def answer_start(
        self, segment: RequestedSegment, request: parsing.Request, backend: Backend
    ) -> None:
        """Handle a request whose task must not exist, and has a row."""
        if (existing := await self._reread_row(segment, backend)) is not None:
            await self.handle_existing(segment, request, backend, existing)

    async def accept_start(self, segment: RequestedSegment, request: parsing.Request) -> None:
        """Accept a request whose task must be new, now that it has begun the task.

        If the message is lost, the sender repeats the request.
        """
        reply_to = segment.requester.reply_to
        if request.start_token is not None and reply_to is not None:
            envelope = accepted_status(
                self._runtime.agent, request.task_id, reply_to, request.start_token
            )
            await self._publisher.publish_advisory([envelope])

    async def _attach_sender(
        self, segment: RequestedSegment, backend: Backend, existing: ExistingTask
    ) -> None:
        """Let the sender of a repeated request get the reply too, if it has another address.

        Tasks ask for their calls again from another address only to resume them.
        """
        requester = segment.requester
        if (
            existing.state.is_final
            or requester.parent_task_id is not None
            or requester.reply_to in {None, existing.reply_to}
        ):
            return
        command = AttachCommand(
            existing.task_id, segment.sender.name or "", Address(str(requester.reply_to))
        )
        await self._settlement.attaches.attach_sender(backend, command)

    async def _revive(
        self, segment: RequestedSegment, command: Revive, backend: Backend, existing: ExistingTask
    ) -> None:
        """Resume the task from its own checkpoint: its requester was resumed and asked again.

        A task that is still running continues unchanged and answers the new request.
        """
        with self._runtime.steps.step(Step.RESUME, [existing.task_id]):
            placed = await self._runtime.retry.until_available(
                lambda: at_last_pause(backend.store, command)
            )
            result = await self._runtime.retry.until_available(
                lambda: backend.store.revive(placed)
            )
        match result:
            case Revived(repeated=True) | NotRevived(refusal=Refusal.COMPLETED):
                await self._settle_from_current_row(segment, backend)  # the looked-up row is stale
            case Revived() if command.order is None:
                await self.settle(segment)
                self._tasks.tasks_ready.set()
            case Revived() | Adopted():
                await self._leave_to_task(segment, backend)
            case NotRevived(refusal=Refusal.OTHER_ACTIVE, detail=active_operation):
                message = (
                    f"agent {existing.agent!r} is exclusive, "
                    f"and its operation {active_operation} is active"
                )
                await self.refuse(segment, Failed(FailureKind.ERROR, message))
            case NotRevived(refusal=Refusal.RUNNING, detail=detail) if detail != RESUMED_SINCE:
                await self.settle(segment)
            case NotRevived(detail=detail) if detail == DIFFERENT_INPUT:
                await self.refuse_id_in_use(segment)
            case NotRevived(detail=detail) if detail not in _CHANGED_SINCE:
                await self.refuse(
                    segment, Failed(FailureKind.ERROR, f"the task does not go on: {detail}")
                )
            case NotRevived():
                await self.requeue(segment)
            case _:
                assert_never(result)

    def _build_revive(
        self, segment: RequestedSegment, resume_token: str, existing: ExistingTask
    ) -> Revive:
        command = Revive(
            task_id=existing.task_id,
            token=new_id(),
            agent=self._runtime.agent,
            without_checkpoint=True,
        )
        if not same_requester(existing.requester, segment.sender.name):
            return command  # from an operator: the reply still goes to the task's requester
        return replace(
            command,
            order=resume_token,
            request=encode_request(segment.message),
            requester=segment.requester,
            adopt=True,
            digest=segment.digest,
        )

    async def _settle_from_current_row(self, segment: RequestedSegment, backend: Backend) -> None:
        """Reread the row to answer an already served request or a just completed task."""
        existing = await self._reread_row(segment, backend)
        if existing is not None and existing.reply is not None:
            await self._resend_reply(segment, existing.reply, existing)
        elif existing is not None:
            await self._leave_to_task(segment, backend)

    async def _reread_row(
        self, segment: RequestedSegment, backend: Backend
    ) -> ExistingTask | None:
        """The row of a request's task. If it was deleted meanwhile, the request is requeued."""
        task_id = segment.run.task_id
        rows = await self._runtime.retry.until_available(partial(backend.store.lookup, [task_id]))
        if (existing := rows.get(task_id)) is None:
            await self.requeue(segment)
        return existing

    async def _leave_to_task(self, segment: RequestedSegment, backend: Backend) -> None:
        """Leave the request to its task, which runs now or soon and knows where to reply."""
        if backend.is_shared:
            await self.settle(segment)
            self._runtime.sweep_wakeup.set()  # the sweep resends messages that are due
        else:
            await self._keep_unacked(segment)
        self._tasks.tasks_ready.set()

    async def _resend_reply(
        self, segment: RequestedSegment, stored_reply: Reply, existing: ExistingTask
    ) -> None:
        # An early cancel's tombstone does not name the requester; this request does.
        reply = end.repeat_reply(stored_reply, segment.requester)
        if existing.is_early_cancel or same_requester(existing.requester, segment.sender.name):
            await self._answer(segment, reply, is_redelivery=True)
        else:  # from an operator: the row keeps its requester
            await self._replies.publish_refusal(reply)
            await self.settle(segment)

    async def reject_other_requester(
        self, segment: RequestedSegment, request: parsing.Request
    ) -> None:
        """Refuse a request that uses the id of another requester's task.

        The request is dead-lettered. A request to resume the task gets no reply.
        """
        reason = belongs_to_another(request.task_id)
        if request.resume_token is None:
            refusal = end.build_refusal(segment, ID_IN_USE, id_in_use=True)
            await self._replies.publish_refusal(refusal)
        self._tasks.remove(segment)
        while segment.deliveries:
            await self._refusals.dead_letter(segment.deliveries.pop(), reason)

    async def refuse(self, segment: RequestedSegment, failure: Failed) -> None:
        """Answer a request with the failure of its task, which does not run."""
        reply = end.build_refusal(segment, failure)
        self._runtime.report_failure(segment.run.task_id, failure, refused=True)
        await self._answer(
            segment,
            reply,
            is_redelivery=failure.kind is FailureKind.CANCELLED,
            digest=segment.digest,
        )

    async def refuse_id_in_use(self, segment: RequestedSegment, suffix: str = "") -> None:
        """Reply that the task id is in use.

        An undeliverable reply is not stored: the row belongs to another request.
        """
        failure = replace(ID_IN_USE, message=ID_IN_USE.message + suffix)
        await self._refuse_id(segment, failure, may_attach=False)

    async def refuse_existing(self, segment: RequestedSegment, request: parsing.Request) -> None:
        """Reply that the task exists, and was not started by this request."""
        message = f"task {request.task_id!r} of {self._runtime.agent!r} exists"
        await self._refuse_id(segment, Failed(FailureKind.INVALID, message))

    async def _refuse_id(
        self, segment: RequestedSegment, failure: Failed, *, may_attach: bool = True
    ) -> None:
        refusal = end.build_refusal(segment, failure, id_in_use=True, may_attach=may_attach)
        await self._replies.publish_refusal(refusal)
        await self.settle(segment)

    async def refuse_other_input(
        self, segment: RequestedSegment, request: parsing.Request, existing: Message | None
    ) -> None:
        """Reply that the task exists with another input, and name a field that differs.

        `existing` is the request of the task, if it is still known.
        """
        field = None
        if existing is not None:
            with suppress(PoisonMessage):
                body = parse_body(RequestBody, existing.body)
                field = differing_field(request.input, body.input())
        suffix = "" if field is None else f" (field {field[:_MAX_FIELD_LENGTH]!r})"
        message = f"task {request.task_id!r} exists with another input{suffix}"
        await self._refuse_id(segment, Failed(FailureKind.INVALID, message))

    async def _stored_request(self, task_id: TaskId, backend: Backend) -> Message | None:
        """The request of a task; `None` if it is damaged or no longer stored."""
        stored = await self._runtime.retry.until_available(
            partial(backend.store.stored_request, task_id)
        )
        try:
            return None if stored is None else decode_request(stored)
        except (ValueError, TypeError):
            return None

    async def _answer(
        self,
        segment: RequestedSegment,
        reply: Reply,
        *,
        is_redelivery: bool,
        digest: str | None = None,
    ) -> None:
        may_ack = await self._replies.publish_reply(
            reply, segment.run.id, is_redelivery=is_redelivery, digest=digest
        )
        if may_ack or segment.dead_reason is not None:
            await self.settle(segment)
        else:
            await self._keep_unacked(segment)

    async def settle(self, segment: RequestedSegment) -> None:
        if segment.dead_reason is None:
            await self._settlement.ack(segment)
        else:
            self._runtime.steps.emit(
                Step.DEAD_TASK, segment.run.task_id, reason=segment.dead_reason
            )
            for delivery in segment.deliveries:
                await self._refusals.dead_letter(delivery, segment.dead_reason)
        self._tasks.remove(segment)

    async def keep_until_start(self, segment: RequestedSegment) -> None:
        """Keep the request of a delayed task in this process.

        Up to `max_in_memory` delayed tasks do not count as tasks in memory.
        """
        await self._keep_unacked(segment)
        unacked, task_id = self._tasks.unacked, segment.run.task_id
        has_room = unacked.delayed < self._runtime.options.max_in_memory
        if has_room and task_id in unacked.by_task and task_id not in self._tasks.segments:
            unacked.mark_delayed(task_id)

    async def _keep_unacked(self, segment: RequestedSegment) -> None:
        await self._settlement.keep_unacked(segment)
        self._tasks.remove(segment)

    async def requeue(self, segment: RequestedSegment) -> None:
        self._tasks.remove(segment)
        while segment.deliveries:
            await segment.deliveries.pop().requeue()
