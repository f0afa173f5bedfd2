"""Natural batching: what came while the last batch was on the wire goes next, as one.

There is no timer: whoever comes to an idle batcher goes in the next turn of the event loop, and load shares commits.
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

Item = TypeVar("Item")
Result = TypeVar("Result")

BATCH_BYTES = 4 * 1024 * 1024
"""About what one batch carries, so that none takes so long that others wait for it."""
PART_BYTES = 16 * 1024 * 1024
"""Maximum bytes sent in one statement, or read at once: PostgreSQL aborts a statement above 1 GiB."""
BATCH_ITEMS = 32
"""What one batch holds: enough to share a commit, few enough for the next batch to be packed while it is away."""
_IDLE_LOOP_SECONDS = 0.0002
"""Seconds. A turn of the event loop that is shorter had nothing to do."""

_MAX_WAIT = 0.01
_FLUSH_LINGER = 0.005
"""Seconds. Replaces `linger` while `flush` is being awaited."""
_CLOSED = "the store is closed"

log = logging.getLogger("meshpoint.store")


@dataclass(slots=True)
class _Group(Generic[Item, Result]):
    """What one caller brought. Without `results`, nobody waits for them."""

    items: Sequence[Item]
    results: asyncio.Future[list[Result]] | None

    @property
    def is_done(self) -> bool:
        """Whether its caller was cancelled, or knows the results already."""
        return self.results is not None and self.results.done()


def split_by_size(
    items: Sequence[Item], sizes: Sequence[int], max_bytes: int = PART_BYTES
) -> Iterator[Sequence[Item]]:
    """Split `items`, in order, into parts of at most `max_bytes` bytes. A larger item gets a part of its own."""
    if items and sum(sizes) <= max_bytes:
        yield items
        return
    part: list[Item] = []
    total = 0
    for item, size in zip(items, sizes, strict=True):
        total += size
        if part and total > max_bytes:
            yield part
            part, total = [], size
        part.append(item)
    if part:
        yield part


class Batcher(Generic[Item, Result]):
    """Collects what concurrent callers bring into calls of `flush`, one at a time.

    `flush` returns a result for each item. Whatever it raises is for all of its items; unless the database is away,
    each caller's are then tried on their own, so that one that cannot be written does not keep others from it. `size`
    is an item's in bytes. `linger`: seconds that a batch waits for more, where nobody waits for it. A batch of
    `max_items` items is full.
    """

    def __init__(
        self,
        flush: Callable[[Sequence[Item]], Awaitable[Sequence[Result]]],
        size: Callable[[Item], int] = lambda item: 0,
        linger: float = 0.0,
        max_items: int = BATCH_ITEMS,
    ) -> None:
        self._flush = flush
        self._size = size
        self._waiting: deque[_Group[Item, Result]] = deque()
        self._flushing: asyncio.Task[None] | None = None
        self._linger = linger
        self._max_items = max_items
        self._last_flush_seconds = 0.0  # seconds, the last flush
        self._closed = False
        self._flush_requested = asyncio.Event()
        self._flush_waiters = 0  # calls of `flush`

    async def put(self, items: Sequence[Item]) -> list[Result]:
        """The results of `items`, in their order.

        A caller that is cancelled does not take back what is on the wire already.
        """
        if not items:
            return []
        results: asyncio.Future[list[Result]] = asyncio.get_running_loop().create_future()
        self._enqueue(_Group(items, results))
        return await results

    def put_nowait(self, items: Sequence[Item]) -> None:
        """Have `items` flushed soon, or never: nobody waits for it, and a crash loses them."""
        if items:
            self._enqueue(_Group(items, None))

    def _enqueue(self, group: _Group[Item, Result]) -> None:
        if self._closed:
            _fail_groups([group], StoreUnavailable(_CLOSED))
            return
        self._waiting.append(group)
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush_all())

    async def flush(self) -> None:
        """Return when all that was brought so far is flushed, or lost."""
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
        """Give up what is on the wire, and take nothing more. Whoever waits is told that the database is away."""
        self._closed = True
        if self._flushing is not None:
            self._flushing.cancel()
            await asyncio.gather(self._flushing, return_exceptions=True)
            self._flushing = None  # a flush that had not begun has not said so
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
        # Also after a batch, so that items requeued by a flush do not spin on the lock that blocks them.
        if self._linger and self._waiting and sum(len(group.items) for group in self._waiting) < self._max_items:
            if self._flush_waiters:
                await asyncio.sleep(_FLUSH_LINGER)
            else:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._flush_requested.wait(), self._linger)
        await self._yield_to_loop()

    async def _yield_to_loop(self) -> None:
        """Let a turn of the event loop pass, and more while it is busy, but no longer than a flush takes."""
        turn = monotonic()
        end = turn + self._last_flush_seconds
        while True:
            waiting, begun = len(self._waiting), turn
            await asyncio.sleep(0)
            turn = monotonic()
            if turn > end or (len(self._waiting) == waiting and turn - begun < _IDLE_LOOP_SECONDS):
                return

    def _next_batch(self) -> list[_Group[Item, Result]]:
        batch: list[_Group[Item, Result]] = []
        items = size = 0
        while self._waiting and items < self._max_items and size < BATCH_BYTES:
            group = self._waiting.popleft()
            if not group.is_done:
                batch.append(group)
                items += len(group.items)
                size += sum(map(self._size, group.items))
        return batch

    async def _flush_batch(self, batch: Sequence[_Group[Item, Result]]) -> None:
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

    async def _flush_each(self, batch: Sequence[_Group[Item, Result]]) -> None:
        left = deque(batch)
        try:
            while left:
                await self._flush_batch([left.popleft()])
        finally:  # closed meanwhile: none of these were written
            _fail_groups(left, StoreUnavailable(_CLOSED))


def _deliver_results(batch: Sequence[_Group[Item, Result]], results: Sequence[Result]) -> None:
    first = 0
    for group in batch:
        after = first + len(group.items)
        if group.results is not None and not group.results.done():
            group.results.set_result(list(results[first:after]))
        first = after


def _fail_groups(batch: Iterable[_Group[Item, Result]], error: Exception) -> None:
    for group in batch:
        if group.results is None:
            log.debug("lost, and done again later: %s", error)
        elif not group.results.done():
            group.results.set_exception(error)
