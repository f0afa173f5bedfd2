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
_IDLE_TURN = 0.0002
"""Seconds. A turn of the event loop that is shorter had nothing to do."""

_LONGEST_WAIT = 0.01
_HURRIED = 0.005
"""Seconds. Replaces `linger` while `flush` is being awaited."""
_CLOSED = "the store is closed"

log = logging.getLogger("meshpoint.store")


@dataclass(slots=True)
class _Group(Generic[Item, Result]):
    """What one caller brought. Without `results`, nobody waits for them."""

    items: Sequence[Item]
    results: asyncio.Future[list[Result]] | None

    @property
    def given_up(self) -> bool:
        """Whether its caller was cancelled, or knows the results already."""
        return self.results is not None and self.results.done()


def in_parts(items: Sequence[Item], sizes: Sequence[int], most: int = PART_BYTES) -> Iterator[Sequence[Item]]:
    """Split `items`, in order, into parts of at most `most` bytes. A larger item gets a part of its own."""
    if items and sum(sizes) <= most:
        yield items
        return
    part: list[Item] = []
    total = 0
    for item, size in zip(items, sizes, strict=True):
        total += size
        if part and total > most:
            yield part
            part, total = [], size
        part.append(item)
    if part:
        yield part


class Batcher(Generic[Item, Result]):
    """Collects what concurrent callers bring into calls of `flush`, one at a time.

    `flush` returns a result for each item. Whatever it raises is for all of its items; unless the database is away,
    each caller's are then tried on their own, so that one that cannot be written does not keep others from it. `size`
    is an item's in bytes. `linger`: seconds that a batch waits for more, where nobody waits for it. `most`: items
    after which a batch is full.
    """

    def __init__(
        self,
        flush: Callable[[Sequence[Item]], Awaitable[Sequence[Result]]],
        size: Callable[[Item], int] = lambda item: 0,
        linger: float = 0.0,
        most: int = BATCH_ITEMS,
    ) -> None:
        self._flush = flush
        self._size = size
        self._waiting: deque[_Group[Item, Result]] = deque()
        self._flushing: asyncio.Task[None] | None = None
        self._linger = linger
        self._most = most
        self._took = 0.0  # seconds, the last flush
        self._closed = False
        self._hurry = asyncio.Event()
        self._hurrying = 0  # calls of `flush`

    async def put(self, items: Sequence[Item]) -> list[Result]:
        """The results of `items`, in their order.

        A caller that is cancelled does not take back what is on the wire already.
        """
        if not items:
            return []
        results: asyncio.Future[list[Result]] = asyncio.get_running_loop().create_future()
        self._join(_Group(items, results))
        return await results

    def note(self, items: Sequence[Item]) -> None:
        """Have `items` flushed soon, or never: nobody waits for it, and a crash loses them."""
        if items:
            self._join(_Group(items, None))

    def _join(self, group: _Group[Item, Result]) -> None:
        if self._closed:
            _settle([group], StoreUnavailable(_CLOSED))
            return
        self._waiting.append(group)
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush_all())

    async def flush(self) -> None:
        """Return when all that was brought so far is flushed, or lost."""
        self._hurrying += 1
        self._hurry.set()
        try:
            while self._flushing is not None:
                await asyncio.wait({self._flushing})
        finally:
            self._hurrying -= 1
            if not self._hurrying:
                self._hurry.clear()

    async def close(self) -> None:
        """Give up what is on the wire, and take nothing more. Whoever waits is told that the database is away."""
        self._closed = True
        if self._flushing is not None:
            self._flushing.cancel()
            await asyncio.gather(self._flushing, return_exceptions=True)
            self._flushing = None  # a flush that had not begun has not said so
        _settle(self._waiting, StoreUnavailable(_CLOSED))
        self._waiting.clear()

    async def _flush_all(self) -> None:
        try:
            await self._let_more_come()
            while batch := self._next():
                begun = monotonic()
                await self._try(batch)
                self._took = min(monotonic() - begun, _LONGEST_WAIT)
                await self._let_more_come()
        finally:
            self._flushing = None

    async def _let_more_come(self) -> None:
        # Also after a batch, so that items requeued by a flush do not spin on the lock that blocks them.
        if self._linger and self._waiting and sum(len(group.items) for group in self._waiting) < self._most:
            if self._hurrying:
                await asyncio.sleep(_HURRIED)
            else:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._hurry.wait(), self._linger)
        await self._one_turn_more()

    async def _one_turn_more(self) -> None:
        """Let a turn of the event loop pass, and more while it is busy, but no longer than a flush takes."""
        turn = monotonic()
        end = turn + self._took
        while True:
            waiting, begun = len(self._waiting), turn
            await asyncio.sleep(0)
            turn = monotonic()
            if turn > end or (len(self._waiting) == waiting and turn - begun < _IDLE_TURN):
                return

    def _next(self) -> list[_Group[Item, Result]]:
        batch: list[_Group[Item, Result]] = []
        items = size = 0
        while self._waiting and items < self._most and size < BATCH_BYTES:
            group = self._waiting.popleft()
            if not group.given_up:
                batch.append(group)
                items += len(group.items)
                size += sum(map(self._size, group.items))
        return batch

    async def _try(self, batch: Sequence[_Group[Item, Result]]) -> None:
        try:
            results = await self._flush([item for group in batch for item in group.items])
        except asyncio.CancelledError:
            _settle(batch, CommitInDoubt(_CLOSED))
            raise
        except Exception as error:
            if len(batch) == 1 or isinstance(error, Unavailable):
                _settle(batch, error)
            else:
                await self._try_each(batch)
        else:
            _hand_out(batch, results)

    async def _try_each(self, batch: Sequence[_Group[Item, Result]]) -> None:
        left = deque(batch)
        try:
            while left:
                await self._try([left.popleft()])
        finally:  # closed meanwhile: none of these were written
            _settle(left, StoreUnavailable(_CLOSED))


def _hand_out(batch: Sequence[_Group[Item, Result]], results: Sequence[Result]) -> None:
    first = 0
    for group in batch:
        after = first + len(group.items)
        if group.results is not None and not group.results.done():
            group.results.set_result(list(results[first:after]))
        first = after


def _settle(batch: Iterable[_Group[Item, Result]], error: Exception) -> None:
    for group in batch:
        if group.results is None:
            log.debug("lost, and done again later: %s", error)
        elif not group.results.done():
            group.results.set_exception(error)
