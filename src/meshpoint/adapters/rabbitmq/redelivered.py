"""Delivery counts for classic queues, which only flag a message as redelivered."""

from __future__ import annotations

from collections import OrderedDict

from meshpoint.adapters.rabbitmq.frames import Arrived

_REMEMBERED = 1000


class Redelivered:
    """Counts deliveries by message content, for the last thousand redelivered messages."""

    def __init__(self) -> None:
        self._counts: OrderedDict[tuple[int, int], int] = OrderedDict()

    def count(self, arrived: Arrived) -> int:
        """Delivery count of a redelivered message, including this delivery."""
        key = hash(arrived.header), hash(arrived.body)
        count = self._counts.pop(key, 1) + 1
        self._counts[key] = count
        if len(self._counts) > _REMEMBERED:
            self._counts.popitem(last=False)
        return count
