"""Tests that every store must pass: one per sentence of `ports.task_store`.

To test a store of your own with pytest (and pytest-asyncio, with `asyncio_mode = auto`):

    from meshpoint.testing.clock import FakeClock
    from meshpoint.testing.conformance.build import TIMINGS
    from meshpoint.testing.conformance.store import CheckpointStoreSuite

    class TestMyStore(CheckpointStoreSuite):
        @pytest.fixture
        async def store(self, clock: FakeClock) -> AsyncIterator[CheckpointStore]:
            store = MyStore(..., clock=clock, timings=TIMINGS)
            await store.open()
            yield store
            await store.close()

        @pytest.fixture
        async def other(
            self, clock: FakeClock, store: CheckpointStore
        ) -> AsyncIterator[CheckpointStore]:
            # A second open store on the same data. Leave it out if only one process can use yours.
            ...

To run the class on several stores, use `@pytest.fixture(params=[...])` instead.
"""

from __future__ import annotations

import pytest

from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.store_attaching import AttachingSuite
from meshpoint.testing.conformance.store_cancels import CancelSuite
from meshpoint.testing.conformance.store_catalog import CatalogSuite
from meshpoint.testing.conformance.store_claims import ClaimSuite
from meshpoint.testing.conformance.store_fleet import FleetSuite
from meshpoint.testing.conformance.store_last_pause import LastPauseSuite
from meshpoint.testing.conformance.store_leases import LeaseSuite
from meshpoint.testing.conformance.store_logs import LogSuite
from meshpoint.testing.conformance.store_mailbox import MailboxSuite
from meshpoint.testing.conformance.store_memory import MemorySuite
from meshpoint.testing.conformance.store_operations import OperationSuite
from meshpoint.testing.conformance.store_outbox import OutboxSuite
from meshpoint.testing.conformance.store_parking import ParkingSuite
from meshpoint.testing.conformance.store_pauses import PauseSuite
from meshpoint.testing.conformance.store_questions import QuestionSuite
from meshpoint.testing.conformance.store_records import RecordSuite
from meshpoint.testing.conformance.store_replicas import ReplicasSuite
from meshpoint.testing.conformance.store_rerequests import RerequestSuite
from meshpoint.testing.conformance.store_retention import RetentionSuite
from meshpoint.testing.conformance.store_retries import RetrySuite
from meshpoint.testing.conformance.store_revivals import ReviveSuite
from meshpoint.testing.conformance.store_runs import RunSuite
from meshpoint.testing.conformance.store_sleeps import SleepSuite
from meshpoint.testing.conformance.store_suspending import SuspendingSuite
from meshpoint.testing.conformance.store_suspension_ends import (
    SuspendingRacesSuite,
    SuspensionEndSuite,
)
from meshpoint.testing.conformance.store_unroutable import UnroutableSuite


class CheckpointStoreSuite(
    RunSuite,
    PauseSuite,
    LogSuite,
    ClaimSuite,
    SleepSuite,
    QuestionSuite,
    MailboxSuite,
    RetrySuite,
    CancelSuite,
    LeaseSuite,
    ParkingSuite,
    SuspendingSuite,
    SuspensionEndSuite,
    SuspendingRacesSuite,
    OutboxSuite,
    AttachingSuite,
    UnroutableSuite,
    CatalogSuite,
    OperationSuite,
    RecordSuite,
    RetentionSuite,
    MemorySuite,
    LastPauseSuite,
    ReviveSuite,
    RerequestSuite,
    ReplicasSuite,
    FleetSuite,
):
    """Conformance tests for a `CheckpointStore`. Subclass it and provide the fixture `store`.

    The store must be open and empty, use `clock` as its time, and have the timings `TIMINGS`.
    """

    @pytest.fixture
    def clock(self) -> FakeClock:
        """The clock that the store must use."""
        return FakeClock()

    @pytest.fixture
    def store(self) -> CheckpointStore:
        """The store under test."""
        raise NotImplementedError("a store's suite provides the fixture `store`")

    @pytest.fixture
    def other(self, store: CheckpointStore) -> CheckpointStore:
        """The store that a second replica opens on the same data."""
        return store
