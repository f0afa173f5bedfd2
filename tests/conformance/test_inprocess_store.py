"""The in-process store passes the store suite."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator

import pytest

from meshpoint.adapters.inprocess.store import InProcessStore
from meshpoint.model.tasks import Requester
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import AGENT, SECOND, TIMINGS, an_end, paused, resumed
from meshpoint.testing.conformance.store import CheckpointStoreSuite


class TestMemoryCheckpointStore(CheckpointStoreSuite):
    @pytest.fixture
    async def store(self, clock: FakeClock) -> AsyncIterator[CheckpointStore]:
        store = InProcessStore(clock, timings=TIMINGS)
        await store.open()
        yield store
        await store.close()


def test_an_in_process_task_ends_with_the_process() -> None:
    assert not InProcessStore(FakeClock(), timings=TIMINGS).durable


def test_test_names_are_unique_across_the_suite() -> None:
    names = Counter(
        name
        for section in CheckpointStoreSuite.__bases__
        for name in vars(section)
        if "test" in name
    )
    assert [name for name, times in names.items() if times > 1] == []


async def test_a_reply_that_has_no_address_is_not_offered() -> None:
    clock = FakeClock()
    store = InProcessStore(clock, timings=TIMINGS)
    pause = await paused(store, requester=Requester())
    await store.end([an_end((await resumed(store, pause)).run)])
    clock.advance(TIMINGS.tombstone_ttl + SECOND)
    assert await store.unsent(AGENT, 10) == []
    assert await store.purge(AGENT, 10) == 1
