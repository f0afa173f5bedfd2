"""The thread that renews leases survives every error of the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest

from meshpoint.engine.leases import LeaseKeeper
from meshpoint.errors import StoreUnavailable
from meshpoint.model.checkpoint import Replica, Run
from meshpoint.model.ids import AgentName, ReplicaId, RunId, TaskId
from meshpoint.ports.observer import Steps

from .mesh import Events

AGENT = AgentName("travel")
RUN = Run(TaskId("task"), AGENT, RunId("run"), fence=2, generation=1)


class Renewals:
    """A store with `renew` only: it raises `errors` in order, then reports every run as lost."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self.closed = False

    async def renew(self, runs: Any, replica: Replica) -> list[Run]:
        if self._errors:
            raise self._errors.pop(0)
        return list(runs)

    async def close(self) -> None:
        self.closed = True


@asynccontextmanager
async def keeper(open_store: Callable[[], Any]) -> AsyncIterator[asyncio.Future[Run]]:
    """Run a lease keeper; yields the future of the first run that it reports as lost."""
    lost: asyncio.Future[Run] = asyncio.get_running_loop().create_future()
    replica_id = ReplicaId("A")
    replica = Replica(replica_id, AGENT, frozenset(), timedelta(seconds=15))
    keeper = LeaseKeeper(
        open_store, replica, timedelta(milliseconds=1), Steps(Events(), AGENT, replica_id), lost.set_result
    )
    keeper.start()
    keeper.keep(RUN)
    try:
        yield lost
    finally:
        await keeper.close()


@pytest.mark.parametrize("error", [StoreUnavailable("away"), ValueError("a defect")])
async def test_a_renewal_that_fails_is_tried_again(error: Exception) -> None:
    store = Renewals(error)
    async with keeper(lambda: store) as lost:
        assert await lost == RUN
    assert store.closed


async def test_a_store_that_cannot_be_opened_is_opened_again() -> None:
    stores = [Renewals()]
    errors = [OSError("too many open files")]

    def open_store() -> Renewals:
        if errors:
            raise errors.pop()
        return stores[0]

    async with keeper(open_store) as lost:
        assert await lost == RUN


async def test_a_keeper_that_renews_for_ever_can_be_closed() -> None:
    class Hanging(Renewals):
        async def renew(self, runs: Any, replica: Replica) -> list[Run]:
            reached.set()
            await asyncio.Event().wait()
            return []

    loop, came = asyncio.get_running_loop(), asyncio.Event()

    class Reached:
        def set(self) -> None:
            loop.call_soon_threadsafe(came.set)

    reached, store = Reached(), Hanging()
    async with keeper(lambda: store):
        await came.wait()
    assert store.closed
