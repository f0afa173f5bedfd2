"""Publish envelopes, each address independently of the others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence, Sized
from contextlib import suppress

from meshpoint.engine.backend import Backend
from meshpoint.engine.backoff import AddressBackoff
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.errors import BrokerUnavailable, ConfigurationError, Unavailable
from meshpoint.model.envelopes import Envelope, wake_message
from meshpoint.model.events import Step
from meshpoint.model.ids import TaskId
from meshpoint.model.messages import Address, fallback_for_nested
from meshpoint.model.tasks import OutboxItem
from meshpoint.ports.broker import Broker, Delivery, PublishResult
from meshpoint.ports.hand_over import AckingPublisher

log = logging.getLogger("meshpoint.publisher")

_MAX_CONCURRENT_ADDRESSES = 32
"""Addresses that one batch publishes to concurrently."""
_SLOW_PUBLISH_SECONDS = 1.0
"""Seconds after which a publish counts as slow."""
_MAX_BATCH_SIZE = 200
"""Maximum messages published together, so that messages of other tasks are interleaved."""
_NESTED_QUEUE_RETRY_SECONDS = 60.0
"""Seconds until a peer without a nested-request queue is retried.

It may have been upgraded.
"""
_MAX_MISSING_QUEUES = 10_000


class Publisher:
    """Publishes envelopes. A full, missing or silent queue delays only its own messages."""

    def __init__(self, runtime: ReplicaRuntime) -> None:
        self._runtime = runtime
        self._nested_routes = _NestedRoutes(runtime.broker)
        self.backoff = AddressBackoff(runtime.clock)

    async def publish(self, envelopes: Sequence[Envelope]) -> Sequence[PublishResult | None]:
        """Publish envelopes, each address independently. A result is `None` if it is in doubt.

        Raises:
            BrokerUnavailable: all results are in doubt.
        """
        indexes_by_address: dict[Address, list[int]] = {}
        for index, (address, _) in enumerate(envelopes):
            indexes_by_address.setdefault(address, []).append(index)
        if len(indexes_by_address) == 1:
            return await self.publish_to_address(address, envelopes)
        results: list[PublishResult | None] = [None] * len(envelopes)
        semaphore = asyncio.Semaphore(_MAX_CONCURRENT_ADDRESSES)
        errors: list[Unavailable] = []

        async def publish_indexes(address: Address, indexes: list[int]) -> None:
            async with semaphore:
                try:
                    address_results = await self.publish_to_address(
                        address, [envelopes[index] for index in indexes]
                    )
                except Unavailable as error:
                    errors.append(error)
                    return
            for number, result in zip(indexes, address_results, strict=True):
                results[number] = result

        await asyncio.gather(
            *(publish_indexes(address, indexes) for address, indexes in indexes_by_address.items())
        )
        if len(errors) == len(indexes_by_address):
            raise errors[0]
        return results

    async def publish_to_address(
        self,
        address: Address,
        envelopes: Sequence[Envelope],
        acking: Sequence[Delivery] = (),
    ) -> list[PublishResult]:
        """Publish envelopes for one address.

        A broker that can acks `acking` with a single envelope, if it accepts that.

        Raises:
            BrokerUnavailable: all results are in doubt.
        """
        started_at = self._runtime.clock.monotonic()
        if address in self._nested_routes.missing_until:
            route = self._nested_routes.route(address)
            envelopes = [(route, message) for _, message in envelopes]
        results: list[PublishResult] = []
        batch_size = _MAX_BATCH_SIZE
        while len(results) < len(envelopes):
            batch = envelopes[len(results) : len(results) + batch_size]
            try:
                batch_results = await self._publish_batch(batch, acking)
                if len(batch_results) != len(batch):
                    raise _wrong_count(batch_results, batch)
                if PublishResult.UNROUTABLE in batch_results:
                    batch_results = await self._nested_routes.reroute(batch, batch_results)
                results += batch_results
            except Unavailable as error:
                if results:  # the remaining messages stay due
                    results += [PublishResult.OVERLOADED] * (len(envelopes) - len(results))
                    break
                self._runtime.retry.record_outage(error)
                self._runtime.retry.observe_broker(is_up=self._runtime.broker.can_publish)
                raise
            except ConfigurationError:
                raise
            except Exception:
                if len(batch) > 1:  # an unencodable message must not affect the others
                    batch_size = 1
                    continue
                log.warning(
                    "a %s for %s cannot be sent: %s",
                    batch[0][1].type,
                    address,
                    batch[0][1].message_id,
                    exc_info=True,
                )
                results.append(PublishResult.REJECTED)
        if PublishResult.UNROUTABLE in results or PublishResult.OVERLOADED in results:
            self.backoff.record_failure(
                address,
                started_at=started_at,
                queue_missing=PublishResult.UNROUTABLE in results,
                slow=self._runtime.clock.monotonic() - started_at >= _SLOW_PUBLISH_SECONDS,
            )
        elif PublishResult.ACCEPTED in results:
            self.backoff.record_success(address)
            self._runtime.retry.record_broker_recovery()
        return results

    async def _publish_batch(
        self, batch: Sequence[Envelope], acking: Sequence[Delivery]
    ) -> list[PublishResult]:
        broker = self._runtime.broker
        if acking and len(batch) == 1 and isinstance(broker, AckingPublisher):
            return [await broker.publish_acking(batch[0], acking)]
        return await broker.publish(batch)

    async def publish_advisory(self, envelopes: Sequence[Envelope | None]) -> None:
        """Publish advisory messages. They are lost if the broker or their queue rejects them."""
        publishable = [
            envelope
            for envelope in envelopes
            if envelope is not None and not self.backoff.is_blocked(envelope[0])
        ]
        if not publishable:
            return
        with suppress(Unavailable):  # already reported
            for (_, message), result in zip(
                publishable, await self.publish(publishable), strict=True
            ):
                if result is PublishResult.REJECTED:
                    self.report_rejected(TaskId(message.correlation_id), message.type.value)

    async def wake_others(self) -> None:
        """Notify all replicas that a task is ready.

        A lost notification costs one sweep interval.
        """
        try:
            await self._runtime.broker.broadcast(
                self._runtime.agent, wake_message(self._runtime.agent)
            )
        except Unavailable as error:
            self._runtime.retry.record_outage(error)

    async def confirm_sent(self, backend: Backend, settled: Sequence[OutboxItem]) -> None:
        if not settled:
            return
        try:
            with self._runtime.steps.step(Step.CONFIRM_SENT, [item.task_id for item in settled]):
                await backend.store.confirm_sent(settled)
        except Unavailable as error:  # if the record is lost, they are only sent again
            self._runtime.retry.record_outage(error)

    def report_rejected(self, task_id: TaskId, message_type: str) -> None:
        reason = "the broker can never accept it: too large, or not encodable"
        self._runtime.steps.emit(Step.MESSAGE_REJECTED, task_id, type=message_type, reason=reason)

    def describe_too_large(self, subject: str, size: int) -> str:
        limit = self._runtime.broker.max_message_bytes
        limit_text = (
            f"the broker accepts at most {limit}"
            if limit
            else "the broker does not accept that many"
        )
        return f"the {subject} has {size} bytes; {limit_text}"


class _NestedRoutes:
    """Reroutes calls to peers without a nested-request queue, and remembers these peers.

    Peers on an older release have a single request queue, which receives the calls instead.

    `missing_until`: the missing queues, and the loop's time at which they are tried again.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.missing_until: dict[Address, float] = {}

    def route(self, address: Address) -> Address:
        """The address to try for a missing queue: the peer's ordinary queue, until it is time."""
        if self.missing_until[address] <= asyncio.get_running_loop().time():
            return address
        return fallback_for_nested(address) or address

    async def reroute(
        self, envelopes: Sequence[Envelope], results: list[PublishResult]
    ) -> list[PublishResult]:
        """Publish unroutable calls to the peers' ordinary queues. Returns the new results."""
        rerouted = {
            index: (fallback, envelopes[index][1])
            for index, result in enumerate(results)
            if result is PublishResult.UNROUTABLE
            and (fallback := fallback_for_nested(envelopes[index][0])) is not None
        }
        if rerouted:
            repeated = await self._broker.publish(list(rerouted.values()))
            if len(repeated) != len(rerouted):
                raise _wrong_count(repeated, rerouted)
            for number, result in zip(rerouted, repeated, strict=True):
                results[number] = result
                if result is not PublishResult.UNROUTABLE:
                    self._mark_missing(envelopes[number][0])
        return results

    def _mark_missing(self, address: Address) -> None:
        if len(self.missing_until) >= _MAX_MISSING_QUEUES:
            self.missing_until.clear()
        now = asyncio.get_running_loop().time()
        self.missing_until[address] = now + _NESTED_QUEUE_RETRY_SECONDS


def _wrong_count(results: Sized, messages: Sized) -> BrokerUnavailable:
    """All messages are in doubt: the results cannot be matched to them."""
    counts = f"{len(results)} results for {len(messages)} messages"
    return BrokerUnavailable(f"the broker adapter returned {counts}")
