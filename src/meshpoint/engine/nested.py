"""Send calls to peers' nested-request queues.

Peers on an older release have a single request queue, which receives the calls instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from meshpoint.errors import Unavailable
from meshpoint.model.envelopes import Letter
from meshpoint.model.messages import Address, instead_of_nested
from meshpoint.ports.broker import Published

_AT_ONCE = 200
"""Maximum messages published together, so that messages of other tasks are interleaved."""
_REMEMBERED = 60.0
"""Seconds until a peer without a nested-request queue is retried.

It may have been upgraded.
"""
_MOST_REMEMBERED = 10_000

Publish = Callable[[Sequence[Letter]], Awaitable[list[Published]]]


class NestedRoutes:
    """Remembers which peers have no nested-request queue."""

    def __init__(self) -> None:
        self._missing: dict[Address, float] = {}

    async def publish(self, letters: Sequence[Letter], publish: Publish) -> list[Published]:
        """Publish messages.

        Calls to a peer without a nested-request queue go to its ordinary queue.
        """
        words: list[Published] = []
        for start in range(0, len(letters), _AT_ONCE):
            try:
                words += await self._publish(letters[start : start + _AT_ONCE], publish)
            except Unavailable:
                if not words:
                    raise
                # The remaining messages stay due.
                return words + [Published.OVERLOADED] * (len(letters) - len(words))
        return words

    async def _publish(self, letters: Sequence[Letter], publish: Publish) -> list[Published]:
        now = asyncio.get_running_loop().time()
        letters = [(self._route(address, now), message) for address, message in letters]
        words = await publish(letters)
        again = {
            number: (instead, letters[number][1])
            for number, word in enumerate(words)
            if word is Published.UNROUTABLE and (instead := instead_of_nested(letters[number][0])) is not None
        }
        if again:
            for number, word in zip(again, await publish(list(again.values())), strict=True):
                words[number] = word
                if word is not Published.UNROUTABLE:
                    self._remember(letters[number][0], now + _REMEMBERED)
        return words

    def _route(self, address: Address, now: float) -> Address:
        if self._missing.get(address, now) <= now:
            return address
        return instead_of_nested(address) or address

    def _remember(self, address: Address, until: float) -> None:
        if len(self._missing) >= _MOST_REMEMBERED:
            self._missing.clear()
        self._missing[address] = until
