"""A database and a broker that fail on demand."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from meshpoint.adapters.inprocess.broker import InProcessBroker
from meshpoint.errors import BrokerUnavailable, CommitInDoubt, StoreUnavailable
from meshpoint.model.messages import Address, Message
from meshpoint.ports.broker import PublishResult

NOT_COMMITTED = "not committed"
IN_DOUBT = "in doubt"
FIRST_LOST = "first lost"
"""The first message is lost, and has no result."""
"""Committed, but the response was lost."""
LOST_IN_DOUBT = "lost, in doubt"
"""Not committed, but reported to the caller as in doubt."""


class FaultyStore:
    """Wraps a store and injects faults into chosen methods, or all while `unavailable`."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._script: dict[str, deque[str | None]] = defaultdict(deque)
        self._always: dict[str, str] = {}
        self.unavailable = False
        self.before: dict[str, Callable[[], Awaitable[None]]] = {}
        self.after: dict[str, Callable[[], Awaitable[None]]] = {}
        self.calls: list[str] = []
        self.arguments: list[tuple[str, tuple[Any, ...]]] = []
        self._running_calls = 0
        self._calls_ended = asyncio.Event()

    @property
    def is_busy(self) -> bool:
        """Whether a call runs in the wrapped store, not held by `before` or `after`."""
        return self._running_calls > 0

    async def wait_for_calls(self) -> None:
        """Wait until no call runs in the wrapped store."""
        while self.is_busy:
            self._calls_ended.clear()
            await self._calls_ended.wait()

    def fail(self, method: str, *faults: str | None) -> None:
        """Inject one fault into each of the next calls of `method`; `None` is a normal call."""
        self._script[method].extend(faults)

    def fail_always(self, method: str, fault: str = NOT_COMMITTED) -> None:
        self._always[method] = fault

    def heal(self) -> None:
        self._always.clear()
        self._script.clear()
        self.unavailable = False

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not callable(value):
            return value

        async def call(*args: Any, **options: Any) -> Any:
            self.calls.append(name)
            self.arguments.append((name, args))
            if name in self.before:
                await self.before[name]()
            fault = self._fault(name)
            if fault == NOT_COMMITTED:
                raise StoreUnavailable(f"{name}: the database is unavailable")
            if fault == LOST_IN_DOUBT:
                raise CommitInDoubt(f"{name}: the answer was lost")
            result = await self._run(value(*args, **options))
            if name in self.after:
                await self.after[name]()
            if fault == IN_DOUBT:
                raise CommitInDoubt(f"{name}: the answer was lost")
            return result

        return call

    async def _run(self, call: Awaitable[Any]) -> Any:
        self._running_calls += 1
        try:
            return await call
        finally:
            self._running_calls -= 1
            self._calls_ended.set()

    def _fault(self, name: str) -> str | None:
        if self.unavailable and name != "close":
            return NOT_COMMITTED
        if self._script[name]:
            return self._script[name].popleft()
        return self._always.get(name)


@dataclass
class PublishFault:
    """The scripted result of publishing a message of one type."""

    fault: str | PublishResult
    type: str | None = None


class FaultyBroker(InProcessBroker):
    """An in-process broker that fails publishes on demand."""

    def __init__(self, exchange: Any) -> None:
        super().__init__(exchange)
        self.unavailable = False
        self._script: deque[PublishFault] = deque()
        self.published: list[tuple[Address, Message]] = []
        self.prefetches: list[int] = []
        self.marker_checks = 0
        self.locked_addresses: set[str] = set()
        """Substrings of addresses whose queues can be neither declared nor consumed."""

    @property
    def connected(self) -> bool:
        return super().connected and not self.unavailable

    def is_consuming(self, address: Address) -> bool:
        return super().is_consuming(address) and not any(
            substring in address for substring in self.locked_addresses
        )

    def fail(self, *faults: str | PublishResult, type: str | None = None) -> None:
        """Fail the next publishes with these faults in order; only publishes of `type`, if set."""
        self._script.extend(PublishFault(fault, type) for fault in faults)

    def heal(self) -> None:
        self.unavailable = False
        self._script.clear()

    async def publish(self, messages: Sequence[tuple[Address, Message]]) -> list[PublishResult]:
        if self.unavailable:
            raise BrokerUnavailable("the broker is unavailable")
        fault = self._fault(messages)
        if fault == NOT_COMMITTED:
            raise BrokerUnavailable("the broker is unavailable")
        if isinstance(fault, PublishResult):
            return [fault for _ in messages]
        if fault == FIRST_LOST:
            return await super().publish(messages[1:])
        results = await super().publish(messages)
        self.published += messages
        if fault == IN_DOUBT:
            raise BrokerUnavailable("the confirm was lost")
        return results

    async def declare(self, agent: Any, replica: Any = None, *, shards: int = 1) -> None:
        if self.unavailable:
            raise BrokerUnavailable("the broker is unavailable")
        if replica is not None and "private" in self.locked_addresses:
            raise BrokerUnavailable("the private queue is locked")
        await super().declare(agent, replica, shards=shards)

    async def mark_database(self, agent: Any) -> bool:
        self._require_available()
        return await super().mark_database(agent)

    async def has_database_marker(self, agent: Any) -> bool:
        self._require_available()
        self.marker_checks += 1
        return await super().has_database_marker(agent)

    def _require_available(self) -> None:
        if self.unavailable:
            raise BrokerUnavailable("the broker is unavailable")

    async def subscribe(self, agent: Any, replica: Any, topics: Any) -> None:
        self._require_available()
        await super().subscribe(agent, replica, topics)

    async def announce(self, topic: Any, message: Message) -> None:
        self._require_available()
        await super().announce(topic, message)

    async def broadcast(self, agent: Any, message: Message) -> None:
        if self.unavailable:
            raise BrokerUnavailable("the broker is unavailable")
        await super().broadcast(agent, message)

    async def consume(self, address: Address, prefetch: int, on_delivery: Any) -> Any:
        subscription = await super().consume(address, prefetch, on_delivery)
        resize, prefetches = subscription.resize, self.prefetches

        async def recording_resize(prefetch: int) -> None:
            if self.unavailable:
                raise BrokerUnavailable("the broker is unavailable")
            prefetches.append(prefetch)
            await resize(prefetch)

        subscription.resize = recording_resize  # type: ignore[method-assign]  # a fake
        return subscription

    def _fault(self, messages: Sequence[tuple[Address, Message]]) -> str | PublishResult | None:
        if self._script and self._script[0].type in {None, messages[0][1].type.value}:
            return self._script.popleft().fault
        return None
