"""The thread that renews leases survives every error of the store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest

from meshpoint.engine.lease_renewer import LeaseRenewer
from meshpoint.engine.presence import Presence
from meshpoint.errors import StoreUnavailable
from meshpoint.model.ids import AgentName, ReplicaId, RunId, TaskId
from meshpoint.model.replicas import Registration
from meshpoint.model.tasks import Replica, Run
from meshpoint.ports.observer import Steps
from recorded_events import RecordedEvents

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
async def create_renewer(
    open_store: Callable[[], Any], presence: Presence | None = None
) -> AsyncIterator[tuple[LeaseRenewer, asyncio.Future[Run]]]:
    """Run a lease keeper; yields it and the future of the first run that it reports as lost."""
    lost_ids: asyncio.Future[Run] = asyncio.get_running_loop().create_future()
    replica_id = ReplicaId("A")
    replica = Replica(replica_id, AGENT, frozenset(), timedelta(seconds=15))
    renewer = LeaseRenewer(
        open_store,
        replica,
        timedelta(milliseconds=1),
        Steps(RecordedEvents(), AGENT, replica_id),
    )
    renewer.start(lost_ids.set_result, presence)
    renewer.start_renewing(RUN)
    try:
        yield renewer, lost_ids
    finally:
        await renewer.close()


@pytest.mark.parametrize("error", [StoreUnavailable("unavailable"), ValueError("a defect")])
async def test_a_failed_renewal_is_retried(error: Exception) -> None:
    store = Renewals(error)
    async with create_renewer(lambda: store) as (_, lost):
        assert await lost == RUN
    assert store.closed


async def test_a_store_that_fails_to_open_is_reopened() -> None:
    stores = [Renewals()]
    errors = [OSError("too many open files")]

    def open_store() -> Renewals:
        if errors:
            raise errors.pop()
        return stores[0]

    async with create_renewer(open_store) as (_, lost):
        assert await lost == RUN


async def test_a_renewer_with_a_hanging_renewal_can_be_closed() -> None:
    class Hanging(Renewals):
        async def renew(self, runs: Any, replica: Replica) -> list[Run]:
            reached.set()
            await asyncio.Event().wait()
            return []

    loop, renewing = asyncio.get_running_loop(), asyncio.Event()

    class Reached:
        def set(self) -> None:
            loop.call_soon_threadsafe(renewing.set)

    reached, store = Reached(), Hanging()
    async with create_renewer(lambda: store):
        await renewing.wait()
    assert store.closed


class Registry(Renewals):
    """A store that records registrations, on the thread of the renewer."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self._registering_errors = list(errors)
        self.seen: list[str] = []
        self.clock_offset: timedelta | None = None
        self.registered = threading.Event()

    async def register(self, registration: Registration) -> None:
        if self._registering_errors:
            raise self._registering_errors.pop(0)
        self.seen.append("draining" if registration.is_draining else "live")
        self.registered.set()

    async def unregister(self, agent: AgentName, replica: ReplicaId) -> None:
        self.seen.append(f"{replica} left")


def create_presence(seconds: float) -> Presence:
    return Presence(
        Registration(
            ReplicaId("A"), AGENT, "1", "2", frozenset(), 1, "host", timedelta(seconds=seconds)
        )
    )


async def test_a_replica_is_registered_until_it_stops() -> None:
    store = Registry()
    async with create_renewer(lambda: store, create_presence(3600)) as (renewer, _):
        await asyncio.to_thread(store.registered.wait)
        store.registered.clear()
        renewer.drain()
        await asyncio.to_thread(store.registered.wait)
    assert store.seen == ["live", "draining", "A left"]
    assert store.closed


@pytest.mark.parametrize("error", [StoreUnavailable("unavailable"), ValueError("a defect")])
async def test_a_failed_registration_delays_no_renewal(error: Exception) -> None:
    store = Registry(error)
    async with create_renewer(lambda: store, create_presence(0.003)) as (_, lost):
        assert await lost == RUN
        await asyncio.to_thread(store.registered.wait)
    assert store.seen[0] == "live"
    assert store.seen[-1] == "A left"


@pytest.mark.parametrize(("seconds", "side"), [(90, "behind"), (-3.5, "ahead of")])
async def test_a_clock_apart_from_the_database_is_logged_once(
    caplog: pytest.LogCaptureFixture, seconds: float, side: str
) -> None:
    store: Any = Registry()
    presence = create_presence(3600)
    caplog.set_level("INFO", logger="meshpoint.leases")

    async def register(offset: float | None) -> list[str]:
        caplog.clear()
        store.clock_offset = None if offset is None else timedelta(seconds=offset)
        await presence._register(store)
        return [record.getMessage() for record in caplog.records]

    assert await register(None) == []
    assert await register(2) == []
    (problem,) = await register(seconds)
    assert f"the clock of this host is {abs(seconds):.1f} s {side} the database's" in problem
    assert await register(seconds) == []
    (repaired,) = await register(0)
    assert repaired.endswith("the clocks agree again")
