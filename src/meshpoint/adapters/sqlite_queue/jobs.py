"""Jobs from the event loop for the database thread, and their results."""

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
    """One step of the next transaction.

    `future` gets the result of `run(queues, holder)` after the commit. With `durable`, the commit
    also survives a power failure. With `settles`, the job does not fail while the database is
    unavailable, but is retried until it is committed.
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
    """A subscription as seen by the database thread. `deliver` is called on the event loop."""

    address: Address
    prefetch: int
    deliver: Callable[[ClaimedMessage], None]
    unacked: set[tuple[int, int, int]] = field(default_factory=set)

    @property
    def room(self) -> int:
        """Number of further messages it can hold unacked."""
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
