"""Deliver replies that no run commits, or keep them until their address accepts them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count

from meshpoint.engine.backend import Backend
from meshpoint.engine.publisher import Publisher
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.engine.unacked import UnackedRequests, may_run_elsewhere
from meshpoint.errors import BrokerUnavailable, Unavailable
from meshpoint.model.envelopes import Envelope, encode_reply, reply_envelope
from meshpoint.model.events import Step
from meshpoint.model.ids import RunId, TaskId
from meshpoint.model.messages import Address
from meshpoint.model.outcomes import Failed, FailureKind
from meshpoint.model.tasks import Reply, TaskState
from meshpoint.model.transitions import StoreReply
from meshpoint.ports.broker import Delivery, PublishResult

_CONFIRM_TIMEOUT = 2.0
"""Seconds that a request stays unacked while its reply is unconfirmed.

After that, the reply is kept and sent separately.
"""


class Replies:
    """Replies of refused requests and of tasks in memory.

    `unacked` has the requests of tasks in memory, and counts the replies in memory that wait for
    their address.
    """

    def __init__(self, runtime: ReplicaRuntime, publisher: Publisher) -> None:
        self._runtime = runtime
        self._publisher, self._backoff = publisher, publisher.backoff
        self.unacked = UnackedRequests()

    async def publish_reply(
        self,
        reply: Reply,
        run_id: RunId,
        *,
        is_redelivery: bool = False,
        digest: str | None = None,
        requests: Sequence[Delivery] = (),
        may_ack: bool = False,
    ) -> bool:
        """Publish a reply that no run commits.

        If it cannot be delivered at once, it is kept and sent later.

        Args:
            reply: The reply.
            run_id: The run that replies.
            is_redelivery: The request of an ended task was redelivered.
            digest: Digest of the request's input.
            requests: The unacked requests that it answers. If any is lost meanwhile, a
                confirmed reply is also stored, so that the next delivery of the request finds it.
                A reply that needs another attempt is stored before it is sent, and dropped if
                another run has a row.
            may_ack: Whether a confirmed reply is the last consequence of `requests`. A broker that
                can acks them in its commit; other brokers leave that to the caller.

        Returns:
            `True` if the request may be acked: the reply is confirmed or stored in a row, or its
            loss is reported. `False` if only this process has the reply: the request belongs in
            `unacked`.
        """
        envelope = reply_envelope(reply)
        if envelope is None:
            return True
        address, _ = envelope
        if self._backoff.is_blocked(address, fresh=True) and not self._must_await_confirm(address):
            is_missing = self._backoff.is_queue_missing(address)
            result = PublishResult.UNROUTABLE if is_missing else PublishResult.OVERLOADED
        else:
            # A copy: a request that is added meanwhile may need more than this reply.
            acking = list(requests) if may_ack else []
            attempt = partial(self._publish_promptly, reply, envelope, requests, acking, count(1))
            with self._runtime.steps.step(Step.REPLY, [reply.task_id]):
                result = await self._runtime.retry.until_available(attempt)
        if result is PublishResult.REJECTED:
            self._publisher.report_rejected(reply.task_id, "reply")
        elif result is not PublishResult.ACCEPTED:
            retention = (
                self._runtime.options.reply_retry_time
                if result is PublishResult.UNROUTABLE
                else None
            )
            return await self._store_or_drop(
                StoreReply(run_id, reply, retention, is_redelivery, digest),
                self._choose_backend(is_contested=may_run_elsewhere(requests)),
            )
        elif (
            (database := self._runtime.database) is not None
            and may_run_elsewhere(requests)
            and await self.store_reply(database, StoreReply(run_id, reply, digest=digest))
        ):
            await self._publisher.confirm_sent(database, [reply])
        return True

    async def _publish_promptly(
        self,
        reply: Reply,
        envelope: Envelope,
        requests: Sequence[Delivery],
        acking: Sequence[Delivery],
        attempts: Iterator[int],
    ) -> PublishResult:
        """Publish a reply.

        Returns `OVERLOADED` if the broker works but does not confirm it, or if its row must decide
        before it is sent again.
        """
        is_repeated = next(attempts) > 1 and self._runtime.database is not None
        if is_repeated and may_run_elsewhere(requests):
            return PublishResult.OVERLOADED
        address, _ = envelope
        timeout: float | None = _CONFIRM_TIMEOUT
        started_at = self._runtime.clock.monotonic()
        while True:
            try:
                async with asyncio.timeout(timeout):
                    result: PublishResult | None
                    (result,) = await self._publisher.publish_to_address(
                        address, [envelope], acking
                    )
                    if result is PublishResult.REJECTED:
                        result = await self.publish_failure(reply)
            except TimeoutError:
                if timeout is None:
                    raise
                if self._runtime.broker.can_publish and self._has_capacity:
                    self._backoff.record_failure(address, started_at=started_at, unconfirmed=True)
                    return PublishResult.OVERLOADED
                timeout = None
            else:
                if result is None:
                    raise BrokerUnavailable("publishing a reply: the broker did not confirm it")
                return result

    async def publish_failure(self, reply: Reply) -> PublishResult | None:
        """Replace a reply that the broker can never accept with a small failure of the same id."""
        failure = Failed(
            FailureKind.ERROR, self._publisher.describe_too_large("result", len(reply.body))
        )
        body = encode_reply(reply.task_id, None, failure)
        envelope = reply_envelope(replace(reply, body=body, state=TaskState.FAILED))
        if envelope is None or len(body) >= len(reply.body):
            # The broker rejects something other than the body.
            return PublishResult.REJECTED
        self._runtime.steps.emit(
            Step.MESSAGE_REJECTED, reply.task_id, type="reply", reason=failure.message
        )
        try:
            (result,) = await self._publisher.publish_to_address(envelope[0], [envelope])
        except Unavailable:
            return None
        return result

    async def store_reply(self, backend: Backend, command: StoreReply) -> bool:
        """Store the reply of a task without a row.

        Returns `False` if another run has a row for it.
        """
        reply = command.reply
        with self._runtime.steps.step(Step.END, [reply.task_id], state=reply.state.value):
            (stored,) = await self._runtime.retry.until_available(
                lambda: backend.store.store_replies([command])
            )
        return stored

    def _choose_backend(self, *, is_contested: bool) -> Backend:
        """Where a reply waits for its address: in the database, unless new tasks run without it.

        If the reply is contested, because another replica may run its task too, only the database
        can decide.
        """
        database = self._runtime.database
        if database is None or (self._runtime.runs_without_database and not is_contested):
            return self._runtime.in_process
        return database

    async def _store_or_drop(self, command: StoreReply, backend: Backend) -> bool:
        """Keep a reply in `backend`. Returns `True` if its request may be acked."""
        reply = command.reply
        has_capacity = backend.is_shared or self._has_capacity
        if not (has_capacity or self.unacked.has_ended(reply.task_id)):
            self._drop_reply(reply, "max_in_memory replies are waiting already")
            return True
        if not await self.store_reply(backend, command):
            self._drop_reply(reply, "the row with its id belongs to another run")
        elif not backend.is_shared:
            self.unacked.mark_ended(reply.task_id)
            return False
        return True

    async def store_undelivered(
        self, backend: Backend, reply: Reply, *, wait_for_store: bool = False
    ) -> bool:
        """Keep an undeliverable reply of an in-memory task.

        Returns `True` if its request may be acked.

        The reply is stored in the database or, without a database, in this process, up to a limit.
        With `wait_for_store`, wait until the database is available.
        """
        address = reply.requester.reply_to
        is_contested = self.may_be_duplicate(backend, reply)
        chosen = self._choose_backend(is_contested=is_contested)
        if not chosen.is_shared:
            if self._has_capacity:
                self.unacked.mark_ended(reply.task_id)
                return False
            if address is not None and self._must_await_confirm(address):
                return False
            self._drop_reply(reply, "max_in_memory replies are waiting already")
        else:
            queue_missing = address is not None and self._backoff.is_queue_missing(address)
            # Each attempt uses the same id, so that a repeated write finds the earlier one.
            command = StoreReply(
                self._run_id(reply),
                reply,
                self._runtime.options.reply_retry_time if queue_missing else None,
            )
            store = partial(chosen.store.store_replies, [command])
            try:
                (stored,) = await (
                    self._runtime.retry.until_available(store) if wait_for_store else store()
                )
            except Unavailable as error:
                self._runtime.retry.record_outage(error)
                return False
            if not stored:
                self._drop_reply(reply, "the row with its id belongs to another run")
            elif is_contested:
                await self._publish_stored(chosen, replace(reply, fence=0))
        await backend.store.confirm_sent([reply])
        return True

    def _run_id(self, reply: Reply) -> RunId:
        """The run that stores a reply of this process: the same each time, but not elsewhere."""
        return RunId(f"{self._runtime.replica.id}:{reply.task_id}")

    async def _publish_stored(self, database: Backend, reply: Reply) -> None:
        """Publish a reply that no other run sends any more. If that fails, a sweep sends it."""
        envelope = reply_envelope(reply)
        if envelope is None or self._backoff.is_blocked(envelope[0], fresh=True):
            return
        with suppress(Unavailable):  # already reported
            (result,) = await self._publisher.publish_to_address(envelope[0], [envelope])
            if result is PublishResult.ACCEPTED:
                await self._publisher.confirm_sent(database, [reply])

    async def publish_refusal(self, reply: Reply) -> None:
        """Publish the reply to an unreadable request, once."""
        envelope = reply_envelope(reply)
        if envelope is None:
            return
        result: PublishResult | None = None
        if not self._backoff.is_blocked(envelope[0], fresh=True):
            result = (
                await self._runtime.retry.until_available(
                    partial(self._publisher.publish_to_address, envelope[0], [envelope])
                )
            )[0]
        if result is not PublishResult.ACCEPTED:
            self._drop_reply(reply, "its queue did not accept it")

    async def store_if_possible(self, reply: Reply) -> None:
        """Store the sent reply of an in-memory task in the database.

        Nothing is stored if another run has a row, or no database is available.
        """
        database = self._runtime.database
        if database is None:
            return
        unfenced = replace(reply, fence=0)
        try:
            (stored,) = await database.store.store_replies(
                [StoreReply(self._run_id(reply), unfenced)]
            )
        except Unavailable as error:
            self._runtime.retry.record_outage(error)
        else:
            await self._publisher.confirm_sent(database, [unfenced] if stored else [])

    def release_unacked(self, should_stay: Callable[[TaskId], bool]) -> list[Delivery]:
        """Return the requests of tasks in memory to requeue, except for tasks that stay.

        Lost replies are reported.
        """
        deliveries, lost = self.unacked.remove_all(should_stay)
        for task_id in lost:
            self._runtime.steps.emit(Step.REPLY_DROPPED, task_id, reason="the process ends")
        return deliveries

    def is_address_failing(self, reply: Reply) -> bool:
        """Whether its address refused the last message while the broker was available."""
        return reply.requester.reply_to is not None and self._backoff.is_failing(
            reply.requester.reply_to
        )

    def may_be_duplicate(self, backend: Backend, reply: Reply) -> bool:
        """Whether another replica may run the in-memory task of `reply` from the database."""
        has_one_backend = backend.is_shared or self._runtime.database is None
        return not has_one_backend and self.unacked.may_run_elsewhere(reply.task_id)

    def _must_await_confirm(self, address: Address) -> bool:
        """Whether a reply must wait for the broker's confirmation.

        There is no room to keep it, so it would be dropped, and the broker may only be slow.
        """
        return not self._has_capacity and self._backoff.is_unconfirmed(address)

    @property
    def _has_capacity(self) -> bool:
        """Whether another reply can wait: in the database, or in memory up to a limit."""
        uses_memory = not self._choose_backend(is_contested=False).is_shared
        return not uses_memory or self.unacked.ended < self._runtime.options.max_in_memory

    def _drop_reply(self, reply: Reply, reason: str) -> None:
        self._runtime.steps.emit(
            Step.REPLY_DROPPED, reply.task_id, reply_to=reply.requester.reply_to, reason=reason
        )
