"""What the event loop asks of the database thread, and what it hears back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from meshpoint.adapters.sqlite_queue.queues import ClaimedMessage, Queues
from meshpoint.model.messages import Address

T = TypeVar("T")
Failure: TypeAlias = tuple[asyncio.Future[Any], Exception]


@dataclass(frozen=True, slots=True)
class Job(Generic[T]):
    """One step of the next transaction; `future` gets what `run(queues, holder)` returns, once committed.

    `durable`: the future is set when the commit survives a loss of power, too. `settles`: never fails for
    want of the database; it waits until the database takes it.
    """

    run: Callable[[Queues, int], T]
    future: asyncio.Future[T]
    durable: bool = False
    settles: bool = False


@dataclass(frozen=True, slots=True)
class ThreadCommand:
    """A change of the thread's own state, which needs no transaction."""

    run: Callable[[], object]
    future: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class Consumer:
    """A subscription as the database thread sees it. `deliver` is called on the event loop."""

    address: Address
    prefetch: int
    deliver: Callable[[ClaimedMessage], None]
    unacked: set[tuple[int, int, int]] = field(default_factory=set)

    @property
    def room(self) -> int:
        """How many more it takes."""
        return max(0, self.prefetch - len(self.unacked))


@dataclass(slots=True)
class TransactionResult:
    """The result of one transaction, for the event loop.

    `more_ready`: unreadable rows took up part of a claim, so more messages may be ready.
    """

    results: list[tuple[asyncio.Future[Any], object]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    deliveries: list[tuple[Consumer, ClaimedMessage]] = field(default_factory=list)
    more_ready: bool = False

    def deliver(self) -> None:
        """Set the futures, then hand over the deliveries. Runs on the event loop."""
        for future, result in self.results:
            if not future.done():
                future.set_result(result)
        for future, error in self.failures:
            if not future.done():
                future.set_exception(error)
        for consumer, claimed in self.deliveries:
            consumer.deliver(claimed)
