"""Natural batching: what came while the last batch was on the wire goes next, as one.

There is no timer: whoever comes to an idle batcher goes at once, and load shares commits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from meshpoint.errors import StoreUnavailable, Unavailable

Item = TypeVar("Item")
Result = TypeVar("Result")

BATCH_BYTES = 4 * 1024 * 1024
"""About what one batch carries, so that none takes so long that others wait for it."""
BATCH_ITEMS = 256


@dataclass(slots=True)
class _Group(Generic[Item, Result]):
    """What one caller brought."""

    items: Sequence[Item]
    results: asyncio.Future[list[Result]]


class Batcher(Generic[Item, Result]):
    """Collects what concurrent callers bring into calls of `flush`, one at a time.

    `flush` returns a result for each item, or the exception for it. Whatever it raises is for all of its items;
    unless the database is away, each caller's are then tried on their own, so that one that cannot be written
    does not keep others from it. `size` is an item's in bytes.
    """

    def __init__(
        self,
        flush: Callable[[Sequence[Item]], Awaitable[Sequence[Result | Exception]]],
        size: Callable[[Item], int] = lambda item: 0,
    ) -> None:
        self._flush = flush
        self._size = size
        self._waiting: deque[_Group[Item, Result]] = deque()
        self._flushing: asyncio.Task[None] | None = None

    async def put(self, items: Sequence[Item]) -> list[Result]:
        """The results of `items`, in their order.

        A caller that is cancelled does not take back what is on the wire already.
        """
        if not items:
            return []
        group = _Group[Item, Result](items, asyncio.get_running_loop().create_future())
        self._waiting.append(group)
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush_all())
        return await group.results

    async def close(self) -> None:
        """Give up what is on the wire. Whoever waits for it is told that the database is away."""
        if self._flushing is not None:
            self._flushing.cancel()
            await asyncio.gather(self._flushing, return_exceptions=True)

    async def _flush_all(self) -> None:
        try:
            while batch := self._next():
                await self._try(batch)
        finally:
            self._flushing = None
            _settle(self._waiting, StoreUnavailable("the store is closed"))
            self._waiting.clear()

    def _next(self) -> list[_Group[Item, Result]]:
        batch: list[_Group[Item, Result]] = []
        items = size = 0
        while self._waiting and items < BATCH_ITEMS and size < BATCH_BYTES:
            group = self._waiting.popleft()
            if not group.results.done():  # its caller has not been cancelled
                batch.append(group)
                items += len(group.items)
                size += sum(map(self._size, group.items))
        return batch

    async def _try(self, batch: Sequence[_Group[Item, Result]]) -> None:
        try:
            results = await self._flush([item for group in batch for item in group.items])
        except asyncio.CancelledError:
            _settle(batch, StoreUnavailable("the store is closed"))
            raise
        except Exception as error:
            if len(batch) == 1 or isinstance(error, Unavailable):
                _settle(batch, error)
            else:
                for group in batch:
                    await self._try([group])
        else:
            _hand_out(batch, results)


def _hand_out(batch: Sequence[_Group[Item, Result]], results: Sequence[Result | Exception]) -> None:
    given = iter(results)
    for group in batch:
        own = [next(given) for _ in group.items]
        failed = next((each for each in own if isinstance(each, Exception)), None)
        if group.results.done():
            continue
        if failed is not None:
            group.results.set_exception(failed)
        else:
            group.results.set_result(own)  # type: ignore[arg-type]  # none of them is an exception


def _settle(batch: Sequence[_Group[Item, Result]] | deque[_Group[Item, Result]], error: Exception) -> None:
    for group in batch:
        if not group.results.done():
            group.results.set_exception(error)
