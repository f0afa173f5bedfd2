"""Natural batching: items that arrive while a batch is in flight leave with the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from meshpoint.adapters.sql.batcher import BATCH_ITEMS, Batcher
from meshpoint.errors import CommitInDoubt, StoreUnavailable


class Wire:
    """A flush that waits for `open` and fails on demand."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.busy = asyncio.Event()
        self.batches: list[list[int]] = []
        self.poison: int | None = None
        self.away = False

    async def flush(self, items: Sequence[int]) -> Sequence[int]:
        self.batches.append(list(items))
        self.busy.set()
        await self.open.wait()
        if self.away:
            raise StoreUnavailable("away")
        if self.poison in items:
            raise ValueError("poison")
        return [10 * item for item in items]


async def waiting(batcher: Batcher[int, int], wire: Wire, *groups: Sequence[int]) -> list[asyncio.Task[list[int]]]:
    """Callers that arrive one after another; the batch of the first is in flight."""
    callers = []
    for group in groups:
        callers.append(asyncio.create_task(batcher.put(group)))
        await wire.busy.wait()
    await asyncio.sleep(0)  # the last caller has arrived
    return callers


async def test_what_comes_meanwhile_goes_together() -> None:
    wire = Wire()
    callers = await waiting(Batcher(wire.flush), wire, [1], [2, 3], [4])
    wire.open.set()
    assert await asyncio.gather(*callers) == [[10], [20, 30], [40]]
    assert wire.batches == [[1], [2, 3, 4]]


async def test_a_batch_has_its_bounds() -> None:
    wire = Wire()
    many = list(range(BATCH_ITEMS))
    callers = await waiting(Batcher(wire.flush), wire, [1], many, [2])
    wire.open.set()
    await asyncio.gather(*callers)
    assert wire.batches == [[1], many, [2]]


async def test_one_that_cannot_be_written_keeps_no_other_from_it() -> None:
    wire = Wire()
    wire.poison = 3
    first, good, bad = await waiting(Batcher(wire.flush), wire, [1], [2], [3])
    wire.open.set()
    assert await first == [10]
    assert await good == [20]
    with pytest.raises(ValueError, match="poison"):
        await bad


async def test_a_database_that_is_away_is_not_asked_for_each() -> None:
    wire = Wire()
    wire.away = True
    callers = await waiting(Batcher(wire.flush), wire, [1], [2], [3])
    wire.open.set()
    results = await asyncio.gather(*callers, return_exceptions=True)
    assert [type(each) for each in results] == [StoreUnavailable] * 3
    assert wire.batches == [[1], [2, 3]]


async def test_a_caller_that_gives_up_takes_nobody_else_along() -> None:
    wire = Wire()
    first, gone, last = await waiting(Batcher(wire.flush), wire, [1], [2], [3])
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    wire.open.set()
    assert await asyncio.gather(first, last) == [[10], [30]]
    assert wire.batches == [[1], [3]]


async def test_closed_on_the_wire_and_before_it() -> None:
    """The batch in flight is in doubt; waiting items were not written; later ones are refused."""
    wire = Wire()
    batcher = Batcher(wire.flush)
    sent, waits = await waiting(batcher, wire, [1], [2])
    await batcher.close()
    with pytest.raises(CommitInDoubt):
        await sent
    for refused in (waits, asyncio.ensure_future(batcher.put([3]))):
        with pytest.raises(StoreUnavailable) as error:
            await refused
        assert not isinstance(error.value, CommitInDoubt)


async def test_closed_while_the_callers_of_a_failed_batch_are_tried_one_by_one() -> None:
    """Callers not tried yet must not wait forever."""
    on_the_wire, never = asyncio.Event(), asyncio.Event()

    async def flush(items: Sequence[int]) -> Sequence[int]:
        if 1 in items:
            raise ValueError("poison")
        on_the_wire.set()
        await never.wait()
        return items

    batcher = Batcher(flush)
    bad, alone, waits = [asyncio.create_task(batcher.put([item])) for item in (1, 2, 3)]
    await on_the_wire.wait()

    await batcher.close()

    results = await asyncio.gather(bad, alone, waits, return_exceptions=True)
    assert [type(each) for each in results] == [ValueError, CommitInDoubt, StoreUnavailable]


async def test_closed_before_the_first_flush_began() -> None:
    batcher = Batcher(Wire().flush)
    caller = asyncio.ensure_future(batcher.put([1]))
    await asyncio.sleep(0)
    await batcher.close()
    with pytest.raises(StoreUnavailable):
        await caller
    await batcher.flush()


async def test_what_nobody_waits_for_lingers_until_somebody_hurries() -> None:
    wire = Wire()
    wire.open.set()
    batcher = Batcher(wire.flush, linger=3600)
    batcher.put_nowait([1])
    batcher.put_nowait([2])
    await batcher.flush()
    assert wire.batches == [[1, 2]]


async def test_what_a_flush_brings_back_lingers_before_it_goes_again() -> None:
    """An item whose join is locked must not be flushed again and again until it is free."""
    batches: list[list[int]] = []
    flushed = asyncio.Event()

    async def flush(items: Sequence[int]) -> Sequence[None]:
        batches.append(list(items))
        batcher.put_nowait(items[1:])
        flushed.set()
        return [None] * len(items)

    batcher: Batcher[int, None] = Batcher(flush, linger=3600, max_items=3)
    batcher.put_nowait([1, 2, 3])
    await flushed.wait()
    for _ in range(100):
        await asyncio.sleep(0)
    assert batches == [[1, 2, 3]]

    await batcher.flush()  # does not wait for the linger

    assert batches == [[1, 2, 3], [2, 3], [3]]
