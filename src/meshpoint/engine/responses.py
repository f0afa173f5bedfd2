"""Handle responses, status updates, cancels and wake-ups."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TypeAlias, assert_never

from pydantic import JsonValue

from meshpoint.engine import parsing
from meshpoint.engine.backend import Backend
from meshpoint.engine.cancels import CancelCommand, cancel_tasks
from meshpoint.engine.postponed import PostponedMessages, ReceivedMessage
from meshpoint.engine.publisher import Publisher
from meshpoint.engine.refusals import Refusals
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.engine.segment_runner import SegmentRunner
from meshpoint.engine.senders import identify_canceller, impersonation_error
from meshpoint.errors import NON_DEFECT_ERRORS, PoisonMessage
from meshpoint.model.envelopes import (
    KEEP_ALIVE,
    MAX_STATUS_BYTES,
    Envelope,
    cancel_message,
    fingerprint,
    request_envelope,
    status_envelope,
)
from meshpoint.model.error_text import quantity
from meshpoint.model.events import Step
from meshpoint.model.ids import RunId, TaskId, new_id
from meshpoint.model.messages import Message, MessageType
from meshpoint.model.tasks import Dispatch, TaskState
from meshpoint.model.transitions import (
    CancelBeforeRequest,
    CancelCommitted,
    CancelRefused,
    CancelRequested,
    CancelStale,
    CancelTooLate,
    Claim,
    Progress,
    ProgressRecorded,
    TaskLocked,
    WrongSender,
)
from meshpoint.ports.broker import Delivery

log = logging.getLogger("meshpoint.peer_messages")

_MAX_STATUSES_PER_SECOND = 20  # maximum status updates forwarded per second for one task
_MAX_THROTTLED_TASKS = 10_000
"""Maximum tasks whose rate is remembered. The most recent ones are kept."""

_ParsedResponse: TypeAlias = tuple[Delivery, Claim, str | None]
"""A response, the claim of its outcome, and the reason if the response is unreadable."""


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One attempt to handle a batch of messages.

    `shared` is `True` for the agent's queue, `False` for this replica's private queue. `refused`
    messages are dead-lettered after the rest of the batch. `handed_off_ids` holds the ids of
    messages that are postponed or being dead-lettered.
    """

    backend: Backend
    shared: bool
    refused: list[tuple[ReceivedMessage, str]] = field(default_factory=list)
    handed_off_ids: set[RunId] = field(default_factory=set)


class PeerMessages:
    """Handles every message that is not a request."""

    def __init__(
        self,
        runtime: ReplicaRuntime,
        runner: SegmentRunner,
        publisher: Publisher,
        refusals: Refusals,
        adjust_prefetch: Callable[[int], None],
    ) -> None:
        self._runtime = runtime
        self._runner = runner
        self._tasks = runner.tasks
        self._settlement = runner.settlement
        self._publisher = publisher
        self._refusals = refusals
        self._status_throttle = Throttle(_MAX_STATUSES_PER_SECOND, runtime.clock.now)
        self._spawn = runtime.background.spawn
        self._postponed = PostponedMessages(self._handle_postponed, runtime, adjust_prefetch)

    async def handle_messages(
        self, deliveries: Sequence[Delivery], backend: Backend, *, shared: bool
    ) -> None:
        """Handle a batch of messages that are not requests.

        `shared` is `True` for the agent's queue, `False` for this replica's private queue. A batch
        that hits a defect is retried one by one, and a delivery that hits it again is set aside.
        Each delivery keeps its claim id, so that a retry recognizes its own commit.

        Raises:
            Unavailable, ConfigurationError: the batch will be retried.
        """
        received, attempt = (
            [(delivery, RunId(new_id())) for delivery in deliveries],
            _Attempt(backend, shared),
        )
        try:
            await self._handle_batch(received, attempt)
        except NON_DEFECT_ERRORS:
            for item in [each for each in received if each[1] not in attempt.handed_off_ids]:
                await self._postponed.postpone(item, backend, shared=shared)
            raise

    async def requeue_postponed(self) -> None:
        """Requeue all postponed messages. From now on, postponed messages are requeued at once."""
        await self._postponed.close()

    async def _handle_postponed(
        self, received: Sequence[ReceivedMessage], backend: Backend, shared: bool
    ) -> None:
        await self._handle_batch(received, _Attempt(backend, shared))

    async def _handle_batch(self, received: Sequence[ReceivedMessage], attempt: _Attempt) -> None:
        if (defect := await self._try_batch(received, attempt)) is None:
            return
        count = quantity(len(received), "message")
        log.warning("retrying %s one by one", count, exc_info=defect)
        for item in [each for each in received if each[1] not in attempt.handed_off_ids]:
            if (defect := await self._try_batch([item], attempt)) is not None:
                self._refusals.dead_letter_defective(item[0], defect)
                attempt.handed_off_ids.add(item[1])

    async def _try_batch(
        self, received: Sequence[ReceivedMessage], attempt: _Attempt
    ) -> Exception | None:
        """Handle messages. Returns the internal error raised, or `None`."""
        try:
            await self._handle_by_type(received, attempt)
        except NON_DEFECT_ERRORS:
            raise
        except Exception as error:
            return error
        return None

    async def _handle_by_type(
        self, received: Sequence[ReceivedMessage], attempt: _Attempt
    ) -> None:
        received_by_type: dict[MessageType, list[ReceivedMessage]] = {
            message_type: [] for message_type in MessageType
        }
        attempt.refused.clear()
        for item in received:
            if (reason := self._find_refusal_reason(item[0].message)) is not None:
                attempt.refused.append((item, reason))
            else:
                received_by_type[item[0].message.type].append(item)
        await self.handle_cancels(received_by_type[MessageType.CANCEL], attempt)
        await self.handle_responses(received_by_type[MessageType.RESPONSE], attempt)
        await self.handle_statuses(received_by_type[MessageType.STATUS], attempt)
        for delivery, _ in received_by_type[MessageType.WAKE]:
            self._tasks.tasks_ready.set()
            self._runtime.sweep_wakeup.set()
            await delivery.ack()
        for (delivery, claim_id), reason in attempt.refused:
            attempt.handed_off_ids.add(claim_id)
            self._refusals.dead_letter_in_background(delivery, reason)

    def _find_refusal_reason(self, message: Message) -> str | None:
        """Why a message is refused unread, or `None` if it is not."""
        if message.type is MessageType.REQUEST:
            return "a request does not belong on a response queue"
        if message.type is MessageType.WAKE and message.app_id != self._runtime.agent:
            return (
                f"app_id: {message.app_id!r} does not wake the replicas of {self._runtime.agent!r}"
            )
        return impersonation_error(message, self._runtime.options)

    async def handle_responses(
        self, received: Sequence[ReceivedMessage], attempt: _Attempt
    ) -> None:
        """Record outcomes in one batch, resume the tasks whose join is complete, then ack."""
        responses: list[_ParsedResponse] = []
        for delivery, claim_id in received:
            try:
                claim = parsing.parse_claim(delivery.message, self._runtime.options)
                responses.append((delivery, replace(claim, id=claim_id), None))
            except PoisonMessage as error:
                failure_claim = parsing.claim_for_unreadable(
                    delivery.message, str(error), self._runtime.options
                )
                if failure_claim is None:
                    attempt.refused.append(((delivery, claim_id), str(error)))
                else:
                    responses.append((delivery, replace(failure_claim, id=claim_id), str(error)))
        responses = await self._drop_unrelated_refusals(responses, attempt)
        if not responses:
            return
        results = await self._runner.record_outcomes(
            attempt.backend, [response_claim for _, response_claim, _ in responses]
        )
        with self._runtime.steps.step(Step.ACK, [each.task_id for _, each, _ in responses]):
            for (delivery, claim, unreadable_reason), result in zip(
                responses, results, strict=True
            ):
                if isinstance(result, TaskLocked):
                    await self._postpone_locked(result.task_id, (delivery, claim.id), attempt)
                elif isinstance(result, WrongSender):
                    reason = (
                        f"the response came from {delivery.message.app_id!r}, "
                        f"the call went to {result.expected!r}"
                    )
                    attempt.refused.append(((delivery, claim.id), reason))
                elif unreadable_reason is not None:
                    attempt.refused.append(((delivery, claim.id), unreadable_reason))
                else:
                    await delivery.ack()

    async def _postpone_locked(
        self, task_id: TaskId, received: ReceivedMessage, attempt: _Attempt
    ) -> None:
        self._runtime.steps.emit(Step.ROW_LOCKED, task_id)
        attempt.handed_off_ids.add(received[1])
        await self._postponed.postpone(received, attempt.backend, shared=attempt.shared)

    async def _drop_unrelated_refusals(
        self, responses: Sequence[_ParsedResponse], attempt: _Attempt
    ) -> list[_ParsedResponse]:
        """Filter out refusals of requests that are not our calls: they are not outcomes.

        A peer sends a refusal to the reply address in the refused request. A third party that
        knows a call's ids could have sent that request.
        """
        refusals = [
            response for response in responses if response[1].refused_fingerprint is not None
        ]
        if not refusals:
            return list(responses)
        call_ids = [(each.task_id, each.sub_task_id) for _, each, _ in refusals]
        dispatches = await self._runtime.retry.until_available(
            lambda: attempt.backend.store.find_dispatches(call_ids)
        )
        unrelated: list[Delivery] = []
        for (delivery, refusal, _), dispatch in zip(refusals, dispatches, strict=True):
            if dispatch is not None and refusal.refused_fingerprint != self._request_fingerprint(
                dispatch, attempt.backend
            ):
                unrelated.append(delivery)
                attempt.refused.append(
                    ((delivery, refusal.id), "it refuses a request that is not this call's")
                )
        return [each for each in responses if each[0] not in unrelated]

    def _request_fingerprint(self, call: Dispatch, backend: Backend) -> str:
        _, request = request_envelope(
            call, backend.reply_to, self._runtime.options.deadline_margin
        )
        return fingerprint(request)

    async def handle_statuses(
        self, received: Sequence[ReceivedMessage], attempt: _Attempt
    ) -> None:
        """Extend idle deadlines, and forward peers' status updates to our own requesters.

        Keep-alives are not forwarded: a task sends its own.
        """
        statuses: list[tuple[Progress, JsonValue]] = []
        for delivery, claim_id in received:
            try:
                statuses.append(parsing.parse_status(delivery.message, self._runtime.options))
            except PoisonMessage as error:
                attempt.refused.append(((delivery, claim_id), str(error)))
            else:
                await delivery.ack()
        if not statuses:
            return
        updates = [progress for progress, _ in statuses]
        targets = await self._runtime.retry.until_available(
            lambda: attempt.backend.store.record_progress(updates)
        )
        await self._publisher.publish_advisory(
            [
                self._build_forwarded_status(target, data)
                for (_, data), target in zip(statuses, targets, strict=True)
                if target is not None and data != KEEP_ALIVE
            ]
        )

    def _build_forwarded_status(
        self, target: ProgressRecorded, data: JsonValue
    ) -> Envelope | None:
        """The status update for the requester, or `None` if the rate limit drops it."""
        envelope = status_envelope(self._runtime.agent, target.task_id, target.requester, data)
        if envelope is None:
            return None
        is_too_long = len(envelope[1].body) > MAX_STATUS_BYTES
        if not is_too_long and self._status_throttle.try_consume(target.task_id):
            return envelope
        if dropped_count := self._status_throttle.count_dropped(target.task_id):
            reason = (
                f"more than {MAX_STATUS_BYTES} bytes"
                if is_too_long
                else f"more than {_MAX_STATUSES_PER_SECOND} a second"
            )
            self._runtime.steps.emit(
                Step.STATUS_DROPPED, target.task_id, reason=reason, dropped=dropped_count
            )
        return None

    async def handle_cancels(self, cancels: Sequence[ReceivedMessage], attempt: _Attempt) -> None:
        """Cancel tasks.

        Commands from the shared queue cancel in the database. Broadcasts cancel in this process.
        """
        agent, options, shared = self._runtime.agent, self._runtime.options, attempt.shared
        received_by_command: dict[CancelCommand, list[ReceivedMessage]] = {}
        for delivery, claim_id in cancels:
            try:
                sender = identify_canceller(delivery.message, agent, options, shared=shared)
                task_id, parent, reason = parsing.parse_cancel(delivery.message, options)
                command = CancelCommand(task_id, parent, sender, reason)
                received_by_command.setdefault(command, []).append((delivery, claim_id))
            except PoisonMessage as error:
                attempt.refused.append(((delivery, claim_id), str(error)))
        if not received_by_command:
            return
        commands = list(received_by_command)
        refused = await (
            self._cancel_and_broadcast(commands) if shared else self._cancel_in_process(commands)
        )
        for command, received in received_by_command.items():
            for item in received:
                match refused.get(command):
                    case TaskLocked():
                        await self._postpone_locked(command.task_id, item, attempt)
                    case CancelRefused():
                        reason = (
                            f"the task {command.task_id} is another requester's, "
                            f"not {command.sender!r}'s"
                        )
                        attempt.refused.append((item, reason))
                    case None:
                        await item[0].ack()

    async def _cancel_and_broadcast(
        self, commands: Sequence[CancelCommand]
    ) -> dict[CancelCommand, CancelRefused | TaskLocked]:
        """Cancel tasks in the database, and broadcast the cancels of tasks that may be running.

        Returns the commands for tasks of other requesters or locked by another session.
        """
        if self._runtime.database is None:
            await self._broadcast_cancels(commands)
            return {}
        if not self._runtime.new_task_backend.is_shared:
            # First, because the tasks may be in memory and the database unavailable.
            await self._broadcast_cancels(commands)
        refused: dict[CancelCommand, CancelRefused | TaskLocked] = {}
        to_broadcast: list[CancelCommand] = []
        results = await cancel_tasks(self._runtime.database, commands, self._runtime)
        for command, result in zip(commands, results, strict=True):
            match result:
                case CancelCommitted(reply=reply, cancels=cancels):
                    # Committed and due: a slow address must not delay the messages after it.
                    self._spawn(self._settlement.send(self._runtime.database, [reply, *cancels]))
                case CancelRequested():  # by an authorized sender, maybe another one
                    to_broadcast.append(command._replace(sender=None))
                case CancelBeforeRequest():
                    to_broadcast.append(command)
                case CancelTooLate(reply=reply) if reply.state is TaskState.CANCELLED:
                    # Cancelled earlier, but a crash may have prevented the broadcast.
                    to_broadcast.append(command)
                case CancelTooLate() | CancelStale():
                    pass
                case CancelRefused() | TaskLocked():
                    refused[command] = result
                case _:
                    assert_never(result)
        await self._broadcast_cancels(to_broadcast)
        return refused

    async def _broadcast_cancels(self, commands: Sequence[CancelCommand]) -> None:
        agent = self._runtime.agent

        async def broadcast_all() -> None:
            messages = [
                cancel_message(agent, task_id, parent=parent, on_behalf_of=sender, reason=reason)
                for task_id, parent, sender, reason in commands
            ]
            await asyncio.gather(
                *(self._runtime.broker.broadcast(agent, message) for message in messages)
            )

        await self._runtime.retry.until_available(broadcast_all)

    async def _cancel_in_process(
        self, commands: Sequence[CancelCommand]
    ) -> dict[CancelCommand, CancelRefused | TaskLocked]:
        """Cancel tasks in this process. Returns the commands for tasks of other requesters."""
        refused: dict[CancelCommand, CancelRefused | TaskLocked] = {}
        in_process_commands: list[CancelCommand] = []
        for command in commands:
            match self._tasks.cancel(*command):
                case False:
                    refused[command] = CancelRefused()
                case None if (
                    command.task_id in self._tasks.unacked.by_task
                    or self._runtime.database is None
                ):
                    in_process_commands.append(command)
                case _:
                    pass
        if not in_process_commands:
            return refused
        results = await cancel_tasks(self._runtime.in_process, in_process_commands, self._runtime)
        for command, result in zip(in_process_commands, results, strict=True):
            match result:
                case CancelCommitted():
                    self._spawn(
                        self._settlement.send(
                            self._runtime.in_process, [result.reply, *result.cancels]
                        )
                    )
                case CancelRefused():
                    refused[command] = result
                case _:
                    pass
        return refused


@dataclass(slots=True)
class _Budget:
    remaining: float
    updated_at: datetime
    dropped: int = 0


class Throttle:
    """Allows `rate` events per second for each task, with bursts of the same size."""

    def __init__(self, rate: int, now: Callable[[], datetime]) -> None:
        self._rate, self._now = rate, now
        self._budgets: OrderedDict[TaskId, _Budget] = OrderedDict()

    def try_consume(self, task_id: TaskId) -> bool:
        """Consume one event from the task's budget. Returns `False` if none is left."""
        budget, now = self._get_budget(task_id), self._now()
        elapsed = max(
            now - budget.updated_at, timedelta()
        )  # setting the clock back adds no budget
        budget.remaining = min(self._rate, budget.remaining + self._rate * elapsed.total_seconds())
        budget.updated_at = now
        if budget.remaining < 1:
            return False
        budget.remaining -= 1
        return True

    def count_dropped(self, task_id: TaskId) -> int | None:
        """Count a dropped event. Returns the total if it should be reported: 1, 10, 100, ..."""
        budget = self._get_budget(task_id)
        budget.dropped += 1
        digits = str(budget.dropped)
        return budget.dropped if digits[0] == "1" and not digits[1:].strip("0") else None

    def _get_budget(self, task_id: TaskId) -> _Budget:
        budget = self._budgets.pop(task_id, None) or _Budget(self._rate, self._now())
        self._budgets[task_id] = budget
        if len(self._budgets) > _MAX_THROTTLED_TASKS:
            self._budgets.popitem(last=False)
        return budget
