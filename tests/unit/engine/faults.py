"""A database and a broker that fail on demand."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from meshpoint.adapters.inprocess.broker import InProcessBroker
from meshpoint.errors import BrokerUnavailable, CommitInDoubt, StoreUnavailable
from meshpoint.model.messages import Address, Message
from meshpoint.ports.broker import Published

NOT_COMMITTED = "not committed"
IN_DOUBT = "in doubt"
"""Committed, but the response was lost."""
LOST_IN_DOUBT = "lost, in doubt"
"""Not committed, but reported to the caller as in doubt."""


class FaultyStore:
    """Wraps a store and injects faults into chosen methods, or into all of them while `away`."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._script: dict[str, deque[str | None]] = defaultdict(deque)
        self._always: dict[str, str] = {}
        self.away = False
        self.before: dict[str, Callable[[], Awaitable[None]]] = {}
        self.after: dict[str, Callable[[], Awaitable[None]]] = {}
        self.calls: list[str] = []
        self.arguments: list[tuple[str, tuple[Any, ...]]] = []

    def fail(self, method: str, *faults: str | None) -> None:
        """Inject one fault into each of the next calls of `method`; `None` is a normal call."""
        self._script[method].extend(faults)

    def fail_always(self, method: str, fault: str = NOT_COMMITTED) -> None:
        self._always[method] = fault

    def heal(self) -> None:
        self._always.clear()
        self._script.clear()
        self.away = False

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
            result = await value(*args, **options)
            if name in self.after:
                await self.after[name]()
            if fault == IN_DOUBT:
                raise CommitInDoubt(f"{name}: the answer was lost")
            return result

        return call

    def _fault(self, name: str) -> str | None:
        if self.away and name != "close":
            return NOT_COMMITTED
        if self._script[name]:
            return self._script[name].popleft()
        return self._always.get(name)


@dataclass
class Publication:
    """The scripted result of publishing a message of one type."""

    fault: str | Published
    type: str | None = None


class FaultyBroker(InProcessBroker):
    """An in-process broker that fails publishes on demand."""

    def __init__(self, exchange: Any) -> None:
        super().__init__(exchange)
        self.away = False
        self._script: deque[Publication] = deque()
        self.published: list[tuple[Address, Message]] = []
        self.prefetches: list[int] = []
        self.locked: set[str] = set()
        """Substrings of addresses whose queues can be neither declared nor consumed."""

    @property
    def connected(self) -> bool:
        return super().connected and not self.away

    def consuming(self, address: Address) -> bool:
        return super().consuming(address) and not any(part in address for part in self.locked)

    def fail(self, *faults: str | Published, type: str | None = None) -> None:
        """Fail the next publishes with these faults in order; only publishes of `type`, if set."""
        self._script.extend(Publication(fault, type) for fault in faults)

    def heal(self) -> None:
        self.away = False
        self._script.clear()

    async def publish(self, messages: Sequence[tuple[Address, Message]]) -> list[Published]:
        if self.away:
            raise BrokerUnavailable("the broker is unavailable")
        fault = self._fault(messages)
        if fault == NOT_COMMITTED:
            raise BrokerUnavailable("the broker is unavailable")
        if isinstance(fault, Published):
            return [fault for _ in messages]
        words = await super().publish(messages)
        self.published += messages
        if fault == IN_DOUBT:
            raise BrokerUnavailable("the confirm was lost")
        return words

    async def declare(self, agent: Any, replica: Any = None, *, shards: int = 1) -> None:
        if self.away:
            raise BrokerUnavailable("the broker is unavailable")
        if replica is not None and "private" in self.locked:
            raise BrokerUnavailable("the private queue is locked")
        await super().declare(agent, replica, shards=shards)

    async def broadcast(self, agent: Any, message: Message) -> None:
        if self.away:
            raise BrokerUnavailable("the broker is unavailable")
        await super().broadcast(agent, message)

    async def consume(self, address: Address, prefetch: int, on_delivery: Any) -> Any:
        subscription = await super().consume(address, prefetch, on_delivery)
        resize, prefetches = subscription.resize, self.prefetches

        async def noted(prefetch: int) -> None:
            if self.away:
                raise BrokerUnavailable("the broker is unavailable")
            prefetches.append(prefetch)
            await resize(prefetch)

        subscription.resize = noted  # type: ignore[method-assign]
        return subscription

    def _fault(self, messages: Sequence[tuple[Address, Message]]) -> str | Published | None:
        if self._script and self._script[0].type in {None, messages[0][1].type.value}:
            return self._script.popleft().fault
        return None
