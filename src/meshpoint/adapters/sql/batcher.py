"""Natural batching: items that arrive while one batch is being flushed form the next batch.

No timer is involved by default. Items that arrive at an idle batcher are flushed in the next turn
of the event loop, and items that arrive under load share commits.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Generic, TypeVar

from meshpoint.errors import CommitInDoubt, StoreUnavailable, Unavailable

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

BATCH_BYTES = 4 * 1024 * 1024
"""Approximate maximum bytes of a batch, which keeps the wait for the next batch short."""
PART_BYTES = 16 * 1024 * 1024
"""Maximum bytes sent or read by one statement: PostgreSQL aborts statements above 1 GiB."""
BATCH_ITEMS = 32
"""Items after which a batch is full.

Enough to share a commit, and few enough that the next batch can be packed while this one is
flushed.
"""
_IDLE_LOOP_SECONDS = 0.0002
"""A shorter turn of the event loop had nothing to do."""

_MAX_WAIT = 0.01  # seconds
_RETRY_LINGER = 0.005
"""Replaces `linger`, in seconds, while a caller awaits `flush` and items were put back."""
_CLOSED = "the store is closed"

_log = logging.getLogger("meshpoint.store")


@dataclass(slots=True)
class _Group(Generic[_Item, _Result]):
    """The items of one caller. `results` is `None` if the caller does not wait for them."""

    items: Sequence[_Item]
    results: asyncio.Future[list[_Result]] | None

    @property
    def is_done(self) -> bool:
        """Whether its caller was cancelled, or already has the results."""
        return self.results is not None and self.results.done()


def split_by_size(
    items: Sequence[_Item], sizes: Sequence[int], max_bytes: int = PART_BYTES
) -> Iterator[Sequence[_Item]]:
    """Split `items`, in order, into parts of at most `max_bytes`. A larger item is one part."""
    if items and sum(sizes) <= max_bytes:
        yield items
        return
    part: list[_Item] = []
    total = 0
    for item, size in zip(items, sizes, strict=True):
        total += size
        if part and total > max_bytes:
            yield part
            part, total = [], size
        part.append(item)
    if part:
        yield part


class Batcher(Generic[_Item, _Result]):
    """Collects the items of concurrent callers into batches, flushed one at a time.

    If a flush fails while the database is available, each caller's items are flushed separately,
    so that an item that cannot be written does not fail the others.

    Args:
        flush: Writes a batch and returns a result for each item. An exception applies to all
            items.
        size: The size of an item in bytes.
        linger: Seconds that a batch which is not full waits for more items.
        max_items: Number of items after which a batch is full.
    """

    def __init__(
        self,
        flush: Callable[[Sequence[_Item]], Awaitable[Sequence[_Result]]],
        size: Callable[[_Item], int] = lambda item: 0,
        linger: float = 0.0,
        max_items: int = BATCH_ITEMS,
    ) -> None:
        self._flush = flush
        self._size = size
        self._waiting: deque[_Group[_Item, _Result]] = deque()
        self._flushing: asyncio.Task[None] | None = None
        self._linger = linger
        self._max_items = max_items
        self._last_flush_seconds = 0.0
        self._closed = False
        self._put_back = False  # during the last flush
        self._flush_requested = asyncio.Event()
        self._flush_waiters = 0  # callers that await `flush`

    async def put(self, items: Sequence[_Item]) -> list[_Result]:
        """Flush `items` with others, and return their results in the same order.

        Cancelling the caller does not undo items that are already being flushed.

        Raises:
            StoreUnavailable: The batcher is closed.
        """
        if not items:
            return []
        results: asyncio.Future[list[_Result]] = asyncio.get_running_loop().create_future()
        self._enqueue(_Group(items, results))
        return await results

    def put_nowait(self, items: Sequence[_Item]) -> None:
        """Flush `items` soon, without waiting. A crash or an error loses them."""
        if items:
            self._enqueue(_Group(items, None))

    def put_back(self, items: Sequence[_Item]) -> None:
        """Flush `items` again: called by a flush that could not write them, as a row is locked."""
        self._put_back = bool(items)
        self.put_nowait(items)

    def _enqueue(self, group: _Group[_Item, _Result]) -> None:
        if self._closed:
            _fail_groups([group], StoreUnavailable(_CLOSED))
            return
        self._waiting.append(group)
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush_all())

    async def flush(self) -> None:
        """Wait until all items added so far are flushed or lost."""
        self._flush_waiters += 1
        self._flush_requested.set()
        try:
            while self._flushing is not None:
                await asyncio.wait({self._flushing})
        finally:
            self._flush_waiters -= 1
            if not self._flush_waiters:
                self._flush_requested.clear()

    async def close(self) -> None:
        """Abort the flush in progress, and accept no more items.

        Waiting callers get `CommitInDoubt` for items being flushed, `StoreUnavailable` for others.
        """
        self._closed = True
        if self._flushing is not None:
            self._flushing.cancel()
            await asyncio.gather(self._flushing, return_exceptions=True)
            self._flushing = None  # a task cancelled before it started has not reset this
        _fail_groups(self._waiting, StoreUnavailable(_CLOSED))
        self._waiting.clear()

    async def _flush_all(self) -> None:
        try:
            await self._wait_for_more()
            while batch := self._next_batch():
                begun = monotonic()
                await self._flush_batch(batch)
                self._last_flush_seconds = min(monotonic() - begun, _MAX_WAIT)
                await self._wait_for_more()
        finally:
            self._flushing = None

    async def _wait_for_more(self) -> None:
        # Linger after a batch too: otherwise, items that a flush puts back would be flushed again
        # in a tight loop.
        if (
            self._linger
            and self._waiting
            and sum(len(group.items) for group in self._waiting) < self._max_items
        ):
            if not self._flush_waiters:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._flush_requested.wait(), self._linger)
            elif self._put_back:
                await asyncio.sleep(_RETRY_LINGER)
        self._put_back = False
        await self._yield_to_loop()

    async def _yield_to_loop(self) -> None:
        """Yield a turn of the event loop, and more while it is busy, up to the time of a flush."""
        turn = monotonic()
        end = turn + self._last_flush_seconds
        while True:
            waiting, begun = len(self._waiting), turn
            await asyncio.sleep(0)
            turn = monotonic()
            if turn > end or (len(self._waiting) == waiting and turn - begun < _IDLE_LOOP_SECONDS):
                return

    def _next_batch(self) -> list[_Group[_Item, _Result]]:
        batch: list[_Group[_Item, _Result]] = []
        items = size = 0
        while self._waiting and items < self._max_items and size < BATCH_BYTES:
            group = self._waiting.popleft()
            if not group.is_done:
                batch.append(group)
                items += len(group.items)
                size += sum(map(self._size, group.items))
        return batch

    async def _flush_batch(self, batch: Sequence[_Group[_Item, _Result]]) -> None:
        try:
            results = await self._flush([item for group in batch for item in group.items])
        except asyncio.CancelledError:
            _fail_groups(batch, CommitInDoubt(_CLOSED))
            raise
        except Exception as error:
            if len(batch) == 1 or isinstance(error, Unavailable):
                _fail_groups(batch, error)
            else:
                await self._flush_each(batch)
        else:
            _deliver_results(batch, results)

    async def _flush_each(self, batch: Sequence[_Group[_Item, _Result]]) -> None:
        left = deque(batch)
        try:
            while left:
                await self._flush_batch([left.popleft()])
        finally:  # cancelled by `close`: none of the remaining items were written
            _fail_groups(left, StoreUnavailable(_CLOSED))


def _deliver_results(batch: Sequence[_Group[_Item, _Result]], results: Sequence[_Result]) -> None:
    first = 0
    for group in batch:
        after = first + len(group.items)
        if group.results is not None and not group.results.done():
            group.results.set_result(list(results[first:after]))
        first = after


def _fail_groups(batch: Iterable[_Group[_Item, _Result]], error: Exception) -> None:
    for group in batch:
        if group.results is None:
            _log.debug("lost a batch that no caller waits for: %s", error)
        elif not group.results.done():
            group.results.set_exception(error)
