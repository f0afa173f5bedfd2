"""Natural batching: items that arrive while a batch is in flight leave with the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from idle_loop import idle
from meshpoint.adapters.sql.batcher import BATCH_ITEMS, Batcher
from meshpoint.errors import CommitInDoubt, StoreUnavailable


class FakeFlush:
    """A flush that waits for `released` and fails on demand."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.reached = asyncio.Event()
        self.batches: list[list[int]] = []
        self.poison: int | None = None
        self.unavailable = False

    async def flush(self, items: Sequence[int]) -> Sequence[int]:
        self.batches.append(list(items))
        self.reached.set()
        await self.released.wait()
        if self.unavailable:
            raise StoreUnavailable("unavailable")
        if self.poison in items:
            raise ValueError("poison")
        return [10 * item for item in items]


async def start_callers(
    batcher: Batcher[int, int], flush_: FakeFlush, *groups: Sequence[int]
) -> list[asyncio.Task[list[int]]]:
    """Callers that arrive one after another; the batch of the first is in flight."""
    callers = []
    for group in groups:
        callers.append(asyncio.create_task(batcher.put(group)))
        await flush_.reached.wait()
    await idle()  # the last caller has arrived
    return callers


async def test_items_that_arrive_during_a_flush_are_batched() -> None:
    flush_ = FakeFlush()
    callers = await start_callers(Batcher(flush_.flush), flush_, [1], [2, 3], [4])
    flush_.released.set()
    assert await asyncio.gather(*callers) == [[10], [20, 30], [40]]
    assert flush_.batches == [[1], [2, 3, 4]]


async def test_a_batch_is_bounded() -> None:
    flush_ = FakeFlush()
    full_batch = list(range(BATCH_ITEMS))
    callers = await start_callers(Batcher(flush_.flush), flush_, [1], full_batch, [2])
    flush_.released.set()
    await asyncio.gather(*callers)
    assert flush_.batches == [[1], full_batch, [2]]


async def test_an_unwritable_item_does_not_fail_the_others() -> None:
    flush_ = FakeFlush()
    flush_.poison = 3
    first, good, bad = await start_callers(Batcher(flush_.flush), flush_, [1], [2], [3])
    flush_.released.set()
    assert await first == [10]
    assert await good == [20]
    with pytest.raises(ValueError, match="poison"):
        await bad


async def test_an_unavailable_database_is_not_tried_for_each_caller() -> None:
    flush_ = FakeFlush()
    flush_.unavailable = True
    callers = await start_callers(Batcher(flush_.flush), flush_, [1], [2], [3])
    flush_.released.set()
    results = await asyncio.gather(*callers, return_exceptions=True)
    assert [type(result) for result in results] == [StoreUnavailable] * 3
    assert flush_.batches == [[1], [2, 3]]


async def test_a_cancelled_caller_does_not_cancel_the_others() -> None:
    flush_ = FakeFlush()
    first, cancelled_caller, last = await start_callers(
        Batcher(flush_.flush), flush_, [1], [2], [3]
    )
    cancelled_caller.cancel()
    await asyncio.gather(cancelled_caller, return_exceptions=True)
    flush_.released.set()
    assert list(await asyncio.gather(first, last)) == [[10], [30]]
    assert flush_.batches == [[1], [3]]


async def test_closing_fails_in_flight_and_waiting_items() -> None:
    """The batch in flight is in doubt; waiting items were not written; later ones are refused."""
    flush_ = FakeFlush()
    batcher = Batcher(flush_.flush)
    sent, waits = await start_callers(batcher, flush_, [1], [2])
    await batcher.close()
    with pytest.raises(CommitInDoubt):
        await sent
    for refused in (waits, asyncio.ensure_future(batcher.put([3]))):
        with pytest.raises(StoreUnavailable) as error:
            await refused
        assert not isinstance(error.value, CommitInDoubt)


async def test_closing_during_one_by_one_retries_fails_the_waiting_callers() -> None:
    """Callers not tried yet must not wait forever."""
    first_flush_started, never_set = asyncio.Event(), asyncio.Event()

    async def flush(items: Sequence[int]) -> Sequence[int]:
        if 1 in items:
            raise ValueError("poison")
        first_flush_started.set()
        await never_set.wait()
        return items

    batcher = Batcher(flush)
    bad, single, waits = [asyncio.create_task(batcher.put([item])) for item in (1, 2, 3)]
    await first_flush_started.wait()

    await batcher.close()

    results = await asyncio.gather(bad, single, waits, return_exceptions=True)
    assert [type(result) for result in results] == [ValueError, CommitInDoubt, StoreUnavailable]


async def test_closing_before_the_first_flush_fails_its_caller() -> None:
    batcher = Batcher(FakeFlush().flush)
    caller = asyncio.ensure_future(batcher.put([1]))
    await asyncio.sleep(0)
    await batcher.close()
    with pytest.raises(StoreUnavailable):
        await caller
    await batcher.flush()


async def test_unawaited_items_linger_until_a_caller_waits() -> None:
    flush_ = FakeFlush()
    flush_.released.set()
    batcher = Batcher(flush_.flush, linger=3600)
    batcher.put_nowait([1])
    batcher.put_nowait([2])
    await batcher.flush()
    assert flush_.batches == [[1, 2]]


async def test_returned_items_linger_before_the_next_flush() -> None:
    """An item whose join is locked must not be flushed again and again until it is free."""
    batches: list[list[int]] = []
    flushed = asyncio.Event()

    async def flush(items: Sequence[int]) -> Sequence[None]:
        batches.append(list(items))
        batcher.put_back(items[1:])
        flushed.set()
        return [None] * len(items)

    batcher: Batcher[int, None] = Batcher(flush, linger=3600, max_items=3)
    batcher.put_nowait([1, 2, 3])
    await flushed.wait()
    await idle()
    assert batches == [[1, 2, 3]]

    await batcher.flush()  # does not wait for the linger

    assert batches == [[1, 2, 3], [2, 3], [3]]
