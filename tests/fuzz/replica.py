"""One replica under fuzz: counts the branches it takes and records how messages are settled."""

from __future__ import annotations

import json
import re
import signal
from multiprocessing.connection import Connection

from chaos import replica
from chaos.instrumentation import EventFile, WrappedBroker
from chaos.replica import ReplicaSpec
from meshpoint.model.messages import Address, Message
from meshpoint.ports.broker import Broker, Delivery, OnDelivery, Subscription

from .branches import BranchCounter

MARK = re.compile(rb"fz-\d{7}")
"""Pattern that every mutated message contains in its message id, a header or its body."""
SETTLED_EVENT = "fuzz_settled"
"""Event that reports how a message was settled."""
_SEARCHED_BYTES = 4096


def marks_of(*parts: bytes) -> set[str]:
    """Marks in the first and last bytes of `parts`."""
    return {
        mark.decode()
        for part in parts
        for end in (part[:_SEARCHED_BYTES], part[-_SEARCHED_BYTES:])
        for mark in MARK.findall(end)
    }


def main(spec: ReplicaSpec, supervisor: Connection) -> None:
    """Serve like a replica under chaos.

    SIGRTMIN writes the branch counts, as does the end; SIGUSR1 resets them.
    """
    counting, path = BranchCounter(), spec.folder / f"{spec.name}.branches"

    def write() -> None:
        counts = [[module, line, count] for (module, line), count in list(counting.counts.items())]
        new = path.with_suffix(".new")
        new.write_text(json.dumps(counts))
        new.replace(path)

    signal.signal(signal.SIGUSR1, lambda *_: counting.counts.clear())
    signal.signal(signal.SIGRTMIN, lambda *_: write())
    counting.start()
    try:
        replica.main(spec, supervisor, WatchedBroker)
    finally:
        write()


class WatchedBroker(WrappedBroker):
    """Records how marked deliveries are settled."""

    def __init__(self, broker: Broker, events: EventFile, spec: ReplicaSpec) -> None:
        super().__init__(broker)
        self._events = events

    async def consume(
        self, address: Address, prefetch: int, on_delivery: OnDelivery
    ) -> Subscription:
        """Deliver; marked messages are wrapped in `_WatchedDelivery`."""

        def wrap_and_deliver(delivery: Delivery) -> None:
            message = delivery.message
            marks = marks_of(message.message_id.encode("utf-8", "surrogateescape"), message.body)
            on_delivery(
                _WatchedDelivery(delivery, sorted(marks), self._events) if marks else delivery
            )

        return await self._broker.consume(address, prefetch, wrap_and_deliver)


class _WatchedDelivery:
    def __init__(self, delivery: Delivery, marks: list[str], events: EventFile) -> None:
        self._delivery, self._marks, self._events = delivery, marks, events

    def __getattr__(self, name: str) -> object:
        return getattr(self._delivery, name)

    @property
    def message(self) -> Message:
        return self._delivery.message

    @property
    def address(self) -> Address:
        return self._delivery.address

    @property
    def delivery_count(self) -> int:
        return self._delivery.delivery_count

    @property
    def lost(self) -> bool:
        return self._delivery.lost

    async def ack(self) -> bool:
        settled = await self._delivery.ack()
        self._record("ack", settled)
        return settled

    async def requeue(self) -> bool:
        return await self._delivery.requeue()

    async def dead_letter(self, reason: str) -> bool:
        settled = await self._delivery.dead_letter(reason)
        self._record("dead", settled, reason)
        return settled

    def _record(self, settlement: str, succeeded: bool, reason: str = "") -> None:
        if succeeded:
            message = self._delivery.message
            ids = [message.correlation_id[:300]]
            detail = {
                "how": settlement,
                "marks": self._marks,
                "reason": reason[:200],
                "type": message.type.value,
            }
            self._events.append(SETTLED_EVENT, "info", self._delivery.address, ids, detail)
