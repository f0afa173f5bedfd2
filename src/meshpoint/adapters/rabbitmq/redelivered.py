"""Delivery counts for classic queues, which only flag a message as redelivered."""

from __future__ import annotations

from collections import OrderedDict

from meshpoint.adapters.rabbitmq.frames import RawDelivery

_MAX_COUNTS = 1000


class RedeliveryCounter:
    """Counts deliveries by message content, for the last 1,000 redelivered messages."""

    def __init__(self) -> None:
        self._counts: OrderedDict[tuple[int, int], int] = OrderedDict()

    def count(self, raw: RawDelivery) -> int:
        """The delivery count of a redelivered message, including this delivery."""
        key = hash(raw.header), hash(raw.body)
        count = self._counts.pop(key, 1) + 1
        self._counts[key] = count
        if len(self._counts) > _MAX_COUNTS:
            self._counts.popitem(last=False)
        return count
