"""Send committed messages, then record them as sent. The task rows are the outbox."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import TypeVar

from meshpoint.engine.backend import Backend
from meshpoint.engine.publisher import Publisher
from meshpoint.engine.replies import Replies
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.errors import Unavailable
from meshpoint.model.envelopes import (
    Envelope,
    cancel_envelope,
    describe_envelopes,
    reply_envelope,
    request_envelope,
)
from meshpoint.model.events import Step
from meshpoint.model.hand_over import HandOver
from meshpoint.model.ids import AgentName, RunId, TaskId, new_id
from meshpoint.model.messages import is_agent_name
from meshpoint.model.outcomes import Failed, FailureKind, peer_missing
from meshpoint.model.tasks import CancelNotice, Dispatch, OutboxItem, Reply
from meshpoint.model.transitions import Claim, ExistingTask, UnroutableCall
from meshpoint.ports.broker import PublishResult

_T = TypeVar("_T")

_STEP_BY_KIND = {Dispatch: Step.DISPATCH, CancelNotice: Step.CANCEL_NOTICE, Reply: Step.REPLY}
_MIN_RETRY_DELAY, _MAX_RETRY_DELAY = timedelta(seconds=1), timedelta(seconds=10)
"""The first and the longest delay before a returned request is sent again."""
_REPORT_INTERVAL = 60.0
"""Minimum seconds between two `peer_missing` events for one peer."""
_MAX_REPORTED_PEERS = 1_000
"""Maximum peers reported within one interval, since agent code chooses their names."""


class Dispatcher:
    """Sends committed requests, cancels and replies, and records them as sent.

    Failed messages stay due in their backend, and the sweeper sends them again under the same ids.
    """

    def __init__(self, runtime: ReplicaRuntime) -> None:
        self._runtime = runtime
        self.publisher = Publisher(runtime)
        self.replies = Replies(runtime, self.publisher)
        self._unroutable = _UnroutableCalls(runtime)

    async def send(
        self, backend: Backend, items: Sequence[OutboxItem], *, overdue: bool = False
    ) -> tuple[list[Claim], list[TaskId]]:
        """Publish messages and record them as sent.

        A reply that another run may also send is stored instead of published, and the row decides.

        Args:
            backend: The backend that committed the messages.
            items: The messages.
            overdue: The messages were overdue. Addresses in back-off are skipped: the sweeper
                sends later.

        Returns:
            The undeliverable calls, and the tasks whose reply is settled with no other reply due.
        """
        possible_duplicates = [
            item
            for item in items
            if isinstance(item, Reply) and self.replies.may_be_duplicate(backend, item)
        ]
        items = [send for send in items if send not in possible_duplicates]
        publish_calls = [
            self._publish(backend, kind_items, overdue=overdue)
            for kind in _STEP_BY_KIND
            if (kind_items := [send for send in items if isinstance(send, kind)])
        ]
        results = [*chain.from_iterable(await _gather(publish_calls))]
        unroutable, undeliverable = self._sort_refused_calls(results)
        await self._unroutable.keep_due(backend, unroutable)
        settled = [send for send, result in results if self._is_settled(send, result)]
        replied_ids = await self._find_replied_tasks(
            backend, [send for send in settled if isinstance(send, Reply)]
        )
        await self.publisher.confirm_sent(backend, settled)
        for send in settled:
            if isinstance(send, Reply) and self.replies.may_be_duplicate(backend, send):
                # The request was lost while the reply was being sent.
                await self.replies.store_if_possible(send)
        replied_ids += [
            reply.task_id
            for reply in possible_duplicates
            if await self.replies.store_undelivered(backend, reply, wait_for_store=not overdue)
        ]
        return undeliverable, replied_ids

    def report_handed_over(self, items: Sequence[OutboxItem], hand_over: HandOver) -> None:
        """Report messages that the commit of their task has published."""
        with self._runtime.steps.step(
            _STEP_BY_KIND[type(items[0])],
            [send.task_id for send in items],
            partial(describe_envelopes, hand_over.envelopes),
        ):
            for address, _ in hand_over.envelopes:
                self.publisher.backoff.record_success(address)
            self._runtime.retry.record_broker_recovery()

    def _sort_refused_calls(
        self, results: Sequence[tuple[OutboxItem, PublishResult | None]]
    ) -> tuple[list[Dispatch], list[Claim]]:
        """Return the calls that wait for their peer's queue, and the undeliverable ones."""
        unroutable: list[Dispatch] = []
        undeliverable: list[Claim] = []
        for send, result in results:
            if not isinstance(send, Dispatch):
                continue
            if result is PublishResult.UNROUTABLE and not self._unroutable.is_overdue(send):
                unroutable.append(send)
            elif result in {PublishResult.UNROUTABLE, PublishResult.REJECTED}:
                undeliverable.append(self._build_undeliverable_claim(send, result))
        return unroutable, undeliverable

    async def _find_replied_tasks(
        self, backend: Backend, replies: Sequence[Reply]
    ) -> list[TaskId]:
        """Return the tasks of `replies`.

        In-memory tasks are included only if their reply is still current.

        Meanwhile the request may have arrived from another address, or the task may have been
        resumed. This runs before the replies are recorded as sent: if it fails, they are sent
        again.
        """
        ids = [reply.task_id for reply in replies]
        existing_by_id = {} if backend.is_shared or not ids else await backend.store.lookup(ids)
        return [
            reply.task_id
            for reply in replies
            if _is_current_reply(reply, existing_by_id.get(reply.task_id))
        ]

    def _is_settled(self, item: OutboxItem, result: PublishResult | None) -> bool:
        """Whether nothing is left to send; otherwise the sweeper tries again."""
        match item, result:
            case _, PublishResult.ACCEPTED:
                return True
            case Dispatch(), _:
                return False
            case _, PublishResult.REJECTED:
                self.publisher.report_rejected(item.task_id, type(item).__name__.lower())
                return True
            case CancelNotice(), PublishResult.UNROUTABLE:
                return True
            case Reply(), PublishResult.UNROUTABLE:
                if item.age < self._runtime.options.reply_retry_time:
                    return False
                self._runtime.steps.emit(
                    Step.REPLY_UNROUTABLE, item.task_id, reply_to=item.requester.reply_to
                )
                return True
            case _:
                return False

    async def _publish(
        self, backend: Backend, items: Sequence[OutboxItem], *, overdue: bool
    ) -> list[tuple[OutboxItem, PublishResult | None]]:
        """Publish `items`, all of one kind.

        A result is `None` if it was not sent or is in doubt.
        """
        results: list[tuple[OutboxItem, PublishResult | None]] = []
        pending: list[tuple[OutboxItem, Envelope]] = []
        for send in items:
            envelope = self._build_envelope(backend, send)
            if envelope is None:  # its requester did not want a reply
                results.append((send, PublishResult.ACCEPTED))
            elif self._may_skip(send, overdue=overdue) and self.publisher.backoff.is_blocked(
                envelope[0], fresh=not overdue
            ):
                is_missing = self.publisher.backoff.is_queue_missing(envelope[0])
                results.append((send, PublishResult.UNROUTABLE if is_missing else None))
            else:
                pending.append((send, envelope))
        if pending:
            try:
                with self._runtime.steps.step(
                    _STEP_BY_KIND[type(items[0])],
                    [send.task_id for send, _ in pending],
                    partial(describe_envelopes, [envelope for _, envelope in pending]),
                ):
                    publish_results = await self.publisher.publish(
                        [envelope for _, envelope in pending]
                    )
            except Unavailable:
                return results  # recorded for each address
            for (send, _), result in zip(pending, publish_results, strict=True):
                if isinstance(send, Reply) and result is PublishResult.REJECTED:
                    results.append((send, await self.replies.publish_failure(send)))
                else:
                    results.append((send, result))
        return results

    def _may_skip(self, send: OutboxItem, *, overdue: bool) -> bool:
        """Whether back-off may skip this attempt.

        It never skips the first attempt of a call, nor the one after which it is undeliverable.
        """
        if isinstance(send, Dispatch):
            return overdue and not self._unroutable.is_overdue(send)
        return overdue or isinstance(send, Reply)

    def _build_envelope(self, backend: Backend, item: OutboxItem) -> Envelope | None:
        match item:
            case Dispatch():
                return request_envelope(
                    item, backend.reply_to, self._runtime.options.deadline_margin
                )
            case CancelNotice():
                return cancel_envelope(item)
            case Reply():
                return reply_envelope(item)

    def _build_undeliverable_claim(self, call: Dispatch, result: PublishResult | None) -> Claim:
        if result is PublishResult.REJECTED:
            message = self.publisher.describe_too_large("request", len(call.body))
            failed = Failed(FailureKind.UNDELIVERABLE, message)
        else:
            failed = peer_missing(call.peer)
            self._runtime.steps.emit(Step.UNDELIVERABLE, call.task_id, peer=call.peer)
        return Claim(
            RunId(new_id()),
            call.task_id,
            call.sub_task_id,
            failed,
            None,
            # The next attempt would send the same message, or to the same invalid name.
            retryable=result is not PublishResult.REJECTED and is_agent_name(call.peer),
        )


class _UnroutableCalls:
    """Calls whose peers have no queue yet, and how long each waits for it.

    Agents may be deployed in any order: a call to a peer that never had a replica stays due in the
    outbox until `undeliverable_after` has passed since the broker first returned it. The call's
    row stores that instant, so it survives this replica. After an outage of the broker the time
    starts over, because the peer's replicas could not declare their queue during the outage. An
    outage that no replica survived is found by its effect: the next attempt comes too late.
    """

    def __init__(self, runtime: ReplicaRuntime) -> None:
        self._runtime = runtime
        self._limit = runtime.options.undeliverable_after
        self._reported_at: dict[AgentName, float] = {}  # oldest first

    def is_overdue(self, call: Dispatch) -> bool:
        """Whether the call is undeliverable if the broker returns it now.

        A peer with an invalid name can never start, so a call to it does not wait.
        """
        waited = self._waited(call) or timedelta()
        return waited >= self._limit or not is_agent_name(call.peer)

    async def keep_due(self, backend: Backend, calls: Sequence[Dispatch]) -> None:
        """Keep returned requests due in their backend, which sends them again with a back-off."""
        if not calls:
            return
        try:
            await backend.store.record_unroutable([self._plan_retry(call) for call in calls])
        except Unavailable as error:  # the time then starts when the broker returns it again
            self._runtime.retry.record_outage(error)
        self._report_missing(calls)

    def _plan_retry(self, call: Dispatch) -> UnroutableCall:
        waited = self._waited(call)
        so_far = waited or timedelta()
        delay = min(so_far + _MIN_RETRY_DELAY, _MAX_RETRY_DELAY, self._limit - so_far)
        return UnroutableCall(
            call.task_id, call.generation, call.sub_task_id, waited is None, delay
        )

    def _waited(self, call: Dispatch) -> timedelta | None:
        """Time since the broker first returned it; `None` if never since its last outage."""
        waited = call.unroutable_for
        if waited is None or waited.total_seconds() > self._runtime.retry.broker_uptime:
            return None
        return waited

    def _report_missing(self, calls: Sequence[Dispatch]) -> None:
        task_ids_by_peer: dict[AgentName, list[TaskId]] = {}
        for call in calls:
            if call.unroutable_for is None:
                task_ids_by_peer.setdefault(call.peer, []).append(call.task_id)
        for peer, task_ids in task_ids_by_peer.items():
            if self._may_report(peer):
                self._runtime.steps.emit(
                    Step.PEER_MISSING, *task_ids, peer=peer, seconds=self._limit.total_seconds()
                )

    def _may_report(self, peer: AgentName) -> bool:
        """Whether this replica has not reported `peer` within the last interval. Records it."""
        now, reported_at = self._runtime.clock.monotonic(), self._reported_at
        while reported_at and now - next(iter(reported_at.values())) >= _REPORT_INTERVAL:
            del reported_at[next(iter(reported_at))]
        if peer in reported_at or len(reported_at) >= _MAX_REPORTED_PEERS:
            return False
        reported_at[peer] = now
        return True


def _is_current_reply(reply: Reply, existing: ExistingTask | None) -> bool:
    if existing is None or existing.is_reply_discarded:
        return True
    current = existing.reply
    return current is not None and (current.fence, current.requester.reply_to) == (
        reply.fence,
        reply.requester.reply_to,
    )


async def _gather(awaitables: Sequence[Awaitable[_T]]) -> list[_T]:
    """Run `awaitables` concurrently. A single step, the usual case, needs no task."""
    return [await awaitables[0]] if len(awaitables) == 1 else await asyncio.gather(*awaitables)
