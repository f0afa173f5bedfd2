"""Handle responses, status updates, cancels and wake-ups."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias, TypeVar, assert_never

from meshpoint.engine import parsing
from meshpoint.engine.attaches import AttachCommand, Attaches
from meshpoint.engine.backend import Backend
from meshpoint.engine.cancels import CancelCommand, cancel_tasks
from meshpoint.engine.completions import Completions
from meshpoint.engine.hand_over import prepare_ack
from meshpoint.engine.own_card import OwnCard
from meshpoint.engine.peer_directory import Directory
from meshpoint.engine.postponed import PostponedMessages, ReceivedMessage
from meshpoint.engine.publisher import Publisher
from meshpoint.engine.recent_progress import RecentProgress
from meshpoint.engine.refusals import Refusals
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.engine.segment_runner import SegmentRunner
from meshpoint.engine.senders import (
    belongs_to_another,
    identify_attacher,
    identify_canceller,
    impersonation_error,
)
from meshpoint.engine.signals import Signals
from meshpoint.engine.status_queries import StatusQueries, StatusQuery
from meshpoint.engine.throttle import MAX_STATUSES_PER_SECOND, Throttle
from meshpoint.errors import NON_DEFECT_ERRORS, PoisonMessage, StoreUnavailable
from meshpoint.model.envelopes import (
    KEEP_ALIVE,
    MAX_STATUS_BYTES,
    Envelope,
    cancel_message,
    fingerprint,
    request_envelope,
    status_envelopes,
)
from meshpoint.model.error_text import quantity
from meshpoint.model.events import Step
from meshpoint.model.ids import RunId, TaskId, new_id
from meshpoint.model.messages import Header, Message, MessageType
from meshpoint.model.tasks import Dispatch, OutboxItem, TaskState
from meshpoint.model.transitions import (
    AttachRefused,
    CancelBeforeRequest,
    CancelCommitted,
    CancelRefused,
    CancelRequested,
    CancelStale,
    CancelTooLate,
    Claim,
    ClaimResult,
    ProgressRecorded,
    TaskLocked,
    WrongSender,
)
from meshpoint.ports.broker import Delivery

log = logging.getLogger("meshpoint.peer_messages")


_INTERNAL = frozenset({MessageType.WAKE, MessageType.DENY})
_DISCOVERY = frozenset({MessageType.DESCRIBE, MessageType.CARD})
_ParsedResponse: TypeAlias = tuple[Delivery, Claim, str | None]
"""A response, the claim of its outcome, and the reason if the response is unreadable."""
_Command = TypeVar("_Command", CancelCommand, AttachCommand, StatusQuery)
_Refusal: TypeAlias = CancelRefused | AttachRefused | TaskLocked


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One attempt to handle a batch of messages.

    `shared` is `True` for the agent's queue, `False` for this replica's private queue. `refused`
    messages are dead-lettered after the rest of the batch. `handed_off_ids` holds the ids of
    messages that are postponed or being dead-lettered. `is_retry`: the messages were postponed.
    """

    backend: Backend
    shared: bool
    is_retry: bool = False
    refused: list[tuple[ReceivedMessage, str]] = field(default_factory=list)
    handed_off_ids: set[RunId] = field(default_factory=set)


class PeerMessages:
    """Handles every message that is not a request."""

    def __init__(
        self,
        runtime: ReplicaRuntime,
        runner: SegmentRunner,
        publisher: Publisher,
        attaches: Attaches,
        refusals: Refusals,
        adjust_prefetch: Callable[[int], None],
        own_card: OwnCard,
        directory: Directory,
    ) -> None:
        self._runtime = runtime
        self._own_card, self._directory = own_card, directory
        self._runner = runner
        self._tasks = runner.tasks
        self._settlement = runner.settlement
        self._publisher = publisher
        self._attaches = attaches
        self._queries = StatusQueries(runtime, runner.tasks, publisher, attaches.unknown_tasks)
        self._refusals = refusals
        self._completions = Completions(runtime, runner, publisher)
        self._signals = Signals(runtime, runner, publisher)
        self._status_throttle = Throttle(MAX_STATUSES_PER_SECOND, runtime.clock.now)
        self._recent_progress = RecentProgress(runtime)
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
        await self._handle_batch(received, _Attempt(backend, shared, is_retry=True))

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
        await self.handle_attaches(received_by_type[MessageType.ATTACH], attempt)
        await self.handle_denials(received_by_type[MessageType.DENY], attempt)
        await self.handle_completions(received_by_type[MessageType.COMPLETE], attempt)
        await self.handle_signals(received_by_type[MessageType.SIGNAL], attempt)
        await self.handle_responses(received_by_type[MessageType.RESPONSE], attempt)
        await self.handle_statuses(received_by_type[MessageType.STATUS], attempt)
        await self.handle_reads(received_by_type[MessageType.READ], attempt)
        if received_by_type[MessageType.DESCRIBE] or received_by_type[MessageType.CARD]:
            await self.handle_cards(
                received_by_type[MessageType.DESCRIBE], received_by_type[MessageType.CARD]
            )
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
        if message.type in _INTERNAL and message.app_id != self._runtime.agent:
            return f"app_id: {message.app_id!r} is no replica of {self._runtime.agent!r}"
        if message.type in _DISCOVERY:
            return None  # refused without a dead letter, as one message reaches many replicas
        return impersonation_error(message, self._runtime.options)

    async def handle_cards(
        self, questions: Sequence[ReceivedMessage], cards: Sequence[ReceivedMessage]
    ) -> None:
        """Keep the cards of peers, and send our own to those who ask for it."""
        for delivery, _ in cards:
            self._directory.receive(delivery.message)
        await self._own_card.answer([delivery.message for delivery, _ in questions])
        for delivery, _ in (*cards, *questions):
            await delivery.ack()

    async def handle_completions(
        self, received: Sequence[ReceivedMessage], attempt: _Attempt
    ) -> None:
        """Record answers to questions, one by one."""
        for item in received:
            delivery, claim_id = item
            try:
                locked = await self._completions.complete(
                    delivery.message, claim_id, shared=attempt.shared
                )
            except PoisonMessage as error:
                attempt.refused.append((item, str(error)))
                continue
            except StoreUnavailable:
                await self._postpone(item, attempt)
                continue
            if locked is None:
                await delivery.ack()
            else:
                await self._postpone_locked(locked.task_id, item, attempt)

    async def handle_signals(self, received: Sequence[ReceivedMessage], attempt: _Attempt) -> None:
        """Keep signals one by one. Those to the same task keep their order of arrival."""
        for item in received:
            try:
                if self._postponed.is_behind(item, shared=attempt.shared):
                    if attempt.shared and not attempt.is_retry:
                        await self._signals.announce(item[0].message)
                    await self._postpone(item, attempt)
                    continue
                locked = await self._signals.signal(
                    item[0].message, shared=attempt.shared, is_retry=attempt.is_retry
                )
            except PoisonMessage as error:
                attempt.refused.append((item, str(error)))
                continue
            except StoreUnavailable:
                await self._postpone(item, attempt)
                continue
            if locked is None:
                await item[0].ack()
            else:
                await self._postpone_locked(locked.task_id, item, attempt)

    async def handle_reads(self, received: Sequence[ReceivedMessage], attempt: _Attempt) -> None:
        """Reply with values of tasks."""
        for item in received:
            try:
                await self._signals.read(
                    item[0].message, shared=attempt.shared, is_retry=attempt.is_retry
                )
            except PoisonMessage as error:
                attempt.refused.append((item, str(error)))
            except StoreUnavailable:
                await self._postpone(item, attempt)
            else:
                await item[0].ack()

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
        try:
            responses = await self._drop_unrelated_refusals(responses, attempt)
            if not responses:
                return
            results = await self._runner.record_outcomes(
                attempt.backend, await self._with_acks(responses, attempt.backend)
            )
        except StoreUnavailable:
            for delivery, claim, _ in responses:
                await self._postpone((delivery, claim.id), attempt)
        else:
            await self._settle_responses(responses, results, attempt)

    async def _with_acks(
        self, responses: Sequence[_ParsedResponse], backend: Backend
    ) -> list[Claim]:
        """The claims, with the acks of their responses. Unreadable ones become dead letters."""
        return [
            response_claim
            if unreadable_reason is not None
            else replace(
                response_claim, hand_over=await prepare_ack(delivery, backend, self._runtime)
            )
            for delivery, response_claim, unreadable_reason in responses
        ]

    async def _settle_responses(
        self,
        responses: Sequence[_ParsedResponse],
        results: Sequence[ClaimResult],
        attempt: _Attempt,
    ) -> None:
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
        await self._postpone(received, attempt)

    async def _postpone(self, received: ReceivedMessage, attempt: _Attempt) -> None:
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
        dispatches = await self._runtime.ask_store(
            attempt.backend, lambda: attempt.backend.store.find_dispatches(call_ids)
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
        statuses: list[parsing.PeerStatus] = []
        for delivery, claim_id in received:
            try:
                statuses.append(parsing.parse_status(delivery.message, self._runtime.options))
            except PoisonMessage as error:
                attempt.refused.append(((delivery, claim_id), str(error)))
            else:
                await delivery.ack()
        if not statuses:
            return
        targets = await self._recent_progress.record(
            attempt.backend, [status.progress for status in statuses]
        )
        await self._publisher.publish_advisory(
            [
                envelope
                for status, target in zip(statuses, targets, strict=True)
                if target is not None and status.content != KEEP_ALIVE
                for envelope in self._build_forwarded_statuses(target, status)
            ]
        )

    def _build_forwarded_statuses(
        self, target: ProgressRecorded, status: parsing.PeerStatus
    ) -> list[Envelope]:
        """The status update for each caller, or none if the rate limit drops it."""
        if target.requester.reply_to is None and not target.followers:
            return []
        is_too_long = False
        if self._status_throttle.try_consume(target.task_id):  # first: a flood is not encoded
            envelopes = status_envelopes(
                self._runtime.agent,
                target.task_id,
                target.requester,
                target.followers,
                status.content,
                status.metadata,
            )
            is_too_long = len(envelopes[0][1].body) > MAX_STATUS_BYTES
            if not is_too_long:
                return envelopes
        if dropped_count := self._status_throttle.count_dropped(target.task_id):
            reason = (
                f"more than {MAX_STATUS_BYTES} bytes"
                if is_too_long
                else f"more than {MAX_STATUSES_PER_SECOND} a second"
            )
            self._runtime.steps.emit(
                Step.STATUS_DROPPED, target.task_id, reason=reason, dropped=dropped_count
            )
        return []

    async def handle_cancels(self, cancels: Sequence[ReceivedMessage], attempt: _Attempt) -> None:
        """Cancel tasks.

        Commands from the shared queue cancel in the database. Broadcasts cancel in this process.
        """
        agent, options, shared = self._runtime.agent, self._runtime.options, attempt.shared

        def parse(message: Message) -> CancelCommand:
            sender = identify_canceller(message, agent, options, shared=shared)
            task_id, parent, reason = parsing.parse_cancel(message, options)
            return CancelCommand(task_id, parent, sender, reason)

        carry_out = (
            partial(self._cancel_and_broadcast, is_retry=attempt.is_retry)
            if shared
            else self._cancel_in_process
        )
        await self._handle_commands(cancels, attempt, parse, carry_out)

    async def handle_attaches(
        self, attaches: Sequence[ReceivedMessage], attempt: _Attempt
    ) -> None:
        """Attach callers to tasks.

        Messages from the shared queue attach in the database, and broadcasts in this process.
        """
        agent, options, shared = self._runtime.agent, self._runtime.options, attempt.shared
        searches: list[tuple[TaskId, Message]] = []

        def parse(message: Message) -> AttachCommand:
            sender = identify_attacher(message, agent, options, shared=shared)
            task_id, reply_to = parsing.parse_attach(message, options)
            if not shared and Header.DENY_TO in message.headers:
                searches.append((task_id, message))
            wants_snapshot = bool(message.headers.get(Header.SNAPSHOT))
            return AttachCommand(task_id, sender, reply_to, wants_snapshot)

        def parse_query(message: Message) -> StatusQuery:
            token = parsing.parse_query(message) or ""
            command = parse(message)
            return StatusQuery(command.task_id, command.sender, command.reply_to, token)

        here, queries = self._attaches, self._queries
        is_retry = attempt.is_retry
        carry_out = (
            partial(here.attach_and_broadcast, is_retry=is_retry)
            if shared
            else here.attach_in_process
        )
        answer = (
            partial(queries.answer_and_broadcast, is_retry=is_retry)
            if shared
            else queries.answer_in_process
        )
        asking = [each for each in attaches if Header.QUERY in each[0].message.headers]
        others = [each for each in attaches if Header.QUERY not in each[0].message.headers]
        await self._handle_commands(others, attempt, parse, carry_out)
        await self._handle_commands(asking, attempt, parse_query, answer)
        await self._attaches.unknown_tasks.deny(searches)

    async def handle_denials(self, received: Sequence[ReceivedMessage], attempt: _Attempt) -> None:
        """Record that other replicas do not have a task."""
        for item in received:
            try:
                self._attaches.unknown_tasks.add_denial(item[0].message)
            except PoisonMessage as error:
                attempt.refused.append((item, str(error)))
            else:
                await item[0].ack()

    async def _handle_commands(
        self,
        received: Sequence[ReceivedMessage],
        attempt: _Attempt,
        parse: Callable[[Message], _Command],
        carry_out: Callable[[Sequence[_Command]], Awaitable[Mapping[_Command, _Refusal]]],
    ) -> None:
        """Carry out the commands of messages, each command once.

        `carry_out` returns the commands for tasks of other requesters or locked by another
        session. If it raises `StoreUnavailable`, all commands are carried out again later.
        """
        received_by_command: dict[_Command, list[ReceivedMessage]] = {}
        for item in received:
            try:
                command = parse(item[0].message)
            except PoisonMessage as error:
                attempt.refused.append((item, str(error)))
            else:
                received_by_command.setdefault(command, []).append(item)
        if not received_by_command:
            return
        try:
            refused = await carry_out(list(received_by_command))
        except StoreUnavailable:
            for items in received_by_command.values():
                for item in items:
                    await self._postpone(item, attempt)
            return
        for command, items in received_by_command.items():
            for item in items:
                match refused.get(command):
                    case None:
                        await item[0].ack()
                    case TaskLocked():
                        await self._postpone_locked(command.task_id, item, attempt)
                    case _:
                        reason = belongs_to_another(command.task_id)
                        attempt.refused.append((item, reason))

    async def _cancel_and_broadcast(
        self, commands: Sequence[CancelCommand], *, is_retry: bool = False
    ) -> dict[CancelCommand, CancelRefused | TaskLocked]:
        """Cancel tasks in the database, and broadcast the cancels of tasks that may be running.

        Returns the commands for tasks of other requesters or locked by another session.
        """
        if self._runtime.database is None:
            await self._broadcast_cancels(commands)
            return {}
        if not (is_retry or self._runtime.new_task_backend.is_shared):
            # First, because the tasks may be in memory and the database unavailable.
            await self._broadcast_cancels(commands)
        refused: dict[CancelCommand, CancelRefused | TaskLocked] = {}
        to_broadcast: list[CancelCommand] = []
        results = await cancel_tasks(self._runtime.database, commands, self._runtime)
        for command, result in zip(commands, results, strict=True):
            match result:
                case CancelCommitted(reply=reply, cancels=cancels):
                    # Committed and due: a slow address must not delay the messages after it.
                    self._spawn(self._settlement.send, self._runtime.database, [reply, *cancels])
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
                    due: list[OutboxItem] = [result.reply, *result.cancels]
                    self._spawn(self._settlement.send, self._runtime.in_process, due)
                case CancelRefused():
                    refused[command] = result
                case _:
                    pass
        return refused
