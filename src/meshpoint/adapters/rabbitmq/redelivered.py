"""How often a message came again from a queue that does not count: classic queues say only that it did."""

from __future__ import annotations

from collections import OrderedDict

from meshpoint.adapters.rabbitmq.frames import Arrived

_REMEMBERED = 1000


class Redelivered:
    """Counts the deliveries of messages by their content, of the latest thousand that came again."""

    def __init__(self) -> None:
        self._counts: OrderedDict[tuple[int, int], int] = OrderedDict()

    def count(self, arrived: Arrived) -> int:
        """Which delivery this is, of a message that was delivered before."""
        key = hash(arrived.header), hash(arrived.body)
        count = self._counts.pop(key, 1) + 1
        self._counts[key] = count
        if len(self._counts) > _REMEMBERED:
            self._counts.popitem(last=False)
        return count
