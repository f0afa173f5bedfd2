"""Send calls to peers' nested-request queues.

Peers on an older release have a single request queue, which receives the calls instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from meshpoint.errors import Unavailable
from meshpoint.model.envelopes import Envelope
from meshpoint.model.messages import Address, fallback_for_nested
from meshpoint.ports.broker import PublishResult

_MAX_BATCH_SIZE = 200
"""Maximum messages published together, so that messages of other tasks are interleaved."""
_RETRY_AFTER_SECONDS = 60.0
"""Seconds until a peer without a nested-request queue is retried.

It may have been upgraded.
"""
_MAX_MISSING_QUEUES = 10_000

_Publish = Callable[[Sequence[Envelope]], Awaitable[list[PublishResult]]]


class NestedRoutes:
    """Remembers which peers have no nested-request queue."""

    def __init__(self) -> None:
        self._missing_until: dict[Address, float] = {}

    async def publish(
        self, envelopes: Sequence[Envelope], publish: _Publish
    ) -> list[PublishResult]:
        """Publish messages.

        Calls to a peer without a nested-request queue go to its ordinary queue.
        """
        results: list[PublishResult] = []
        for start in range(0, len(envelopes), _MAX_BATCH_SIZE):
            try:
                results += await self._publish(envelopes[start : start + _MAX_BATCH_SIZE], publish)
            except Unavailable:
                if not results:
                    raise
                # The remaining messages stay due.
                return results + [PublishResult.OVERLOADED] * (len(envelopes) - len(results))
        return results

    async def _publish(
        self, envelopes: Sequence[Envelope], publish: _Publish
    ) -> list[PublishResult]:
        now = asyncio.get_running_loop().time()
        if self._missing_until:
            envelopes = [(self._route(address, now), message) for address, message in envelopes]
        results = await publish(envelopes)
        if PublishResult.UNROUTABLE not in results:
            return results
        rerouted = {
            index: (fallback, envelopes[index][1])
            for index, result in enumerate(results)
            if result is PublishResult.UNROUTABLE
            and (fallback := fallback_for_nested(envelopes[index][0])) is not None
        }
        if rerouted:
            for number, word in zip(rerouted, await publish(list(rerouted.values())), strict=True):
                results[number] = word
                if word is not PublishResult.UNROUTABLE:
                    self._mark_missing(envelopes[number][0], now + _RETRY_AFTER_SECONDS)
        return results

    def _route(self, address: Address, now: float) -> Address:
        if self._missing_until.get(address, now) <= now:
            return address
        return fallback_for_nested(address) or address

    def _mark_missing(self, address: Address, until: float) -> None:
        if len(self._missing_until) >= _MAX_MISSING_QUEUES:
            self._missing_until.clear()
        self._missing_until[address] = until
