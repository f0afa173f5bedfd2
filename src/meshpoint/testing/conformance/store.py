"""Tests that every store must pass: one per sentence of `ports.task_store` and `ports.operations`.

To test a store of your own with pytest (and pytest-asyncio, with `asyncio_mode = auto`):

    from meshpoint.adapters.inprocess.clock import FakeClock
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
        async def other(self, clock: FakeClock, store: CheckpointStore) -> AsyncIterator[CheckpointStore]:
            ...  # a second open store on the same data; leave it out if only one process can use yours

To run the class on several stores, use `@pytest.fixture(params=[...])` instead.
"""

from __future__ import annotations

import pytest

SECTIONS = (
    "runs",
    "pauses",
    "claims",
    "cancels",
    "expiry",
    "leases",
    "outbox",
    "operations",
    "kept",
    "memory",
    "memory_pauses",
    "revivals",
    "again",
    "replicas",
    "replies",
)
pytest.register_assert_rewrite(*(f"meshpoint.testing.conformance.store_{section}" for section in SECTIONS))

from meshpoint.adapters.inprocess.clock import FakeClock  # noqa: E402
from meshpoint.ports.task_store import CheckpointStore  # noqa: E402
from meshpoint.testing.conformance.store_again import AdoptSuite, ApartSuite, OrderSuite  # noqa: E402
from meshpoint.testing.conformance.store_cancels import CancellerSuite, CancelSuite  # noqa: E402
from meshpoint.testing.conformance.store_claims import ClaimSuite, JoinSuite  # noqa: E402
from meshpoint.testing.conformance.store_expiry import ExpireSuite, ProgressSuite  # noqa: E402
from meshpoint.testing.conformance.store_kept import KeptSuite, RetentionSuite  # noqa: E402
from meshpoint.testing.conformance.store_leases import KeepAliveSuite, LeaseSuite, PurgeSuite, RescueSuite  # noqa: E402
from meshpoint.testing.conformance.store_memory import MemoryAtTheEndSuite, MemoryInCheckpointsSuite  # noqa: E402
from meshpoint.testing.conformance.store_memory_pauses import MemoryAtPausesSuite  # noqa: E402
from meshpoint.testing.conformance.store_operations import ChildrenSuite, SaveSuite, SummarySuite, TrackSuite  # noqa: E402
from meshpoint.testing.conformance.store_outbox import CatalogSuite, OutboxSuite  # noqa: E402
from meshpoint.testing.conformance.store_pauses import PauseSuite  # noqa: E402
from meshpoint.testing.conformance.store_replicas import ReplicasSuite  # noqa: E402
from meshpoint.testing.conformance.store_replies import DueSuite, RepliesSuite  # noqa: E402
from meshpoint.testing.conformance.store_revivals import RefusalSuite, ReviveSuite, TokenSuite  # noqa: E402
from meshpoint.testing.conformance.store_runs import BeginSuite, EndSuite, LookupSuite, ReleaseSuite  # noqa: E402


class CheckpointStoreSuite(
    LookupSuite,
    BeginSuite,
    PauseSuite,
    ClaimSuite,
    JoinSuite,
    EndSuite,
    ReleaseSuite,
    CancelSuite,
    CancellerSuite,
    ExpireSuite,
    LeaseSuite,
    RescueSuite,
    ProgressSuite,
    KeepAliveSuite,
    PurgeSuite,
    OutboxSuite,
    CatalogSuite,
    TrackSuite,
    ChildrenSuite,
    SaveSuite,
    SummarySuite,
    KeptSuite,
    RetentionSuite,
    MemoryInCheckpointsSuite,
    MemoryAtPausesSuite,
    MemoryAtTheEndSuite,
    ReviveSuite,
    RefusalSuite,
    TokenSuite,
    ApartSuite,
    OrderSuite,
    AdoptSuite,
    ReplicasSuite,
    RepliesSuite,
    DueSuite,
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
