"""Checkpoints go to the database; a failing copy affects only a restore that reads it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest

from meshpoint.errors import CheckpointError, StoreUnavailable
from meshpoint.model.ids import AgentName, RunId, TaskId
from meshpoint.model.operations import OperationStatus, OperationSummary
from meshpoint.model.subtasks import AgentCheckpoint, SaveCommitted
from meshpoint.model.tasks import Run
from meshpoint.model.transitions import CancelFound, Fenced, Save, SaveResult
from meshpoint.ports.task_store import CacheUnavailable, LeftOut
from meshpoint.subtasks.checkpointer import (
    AgentCheckpointer,
    CheckpointSource,
    FallbackReason,
    RestoredCheckpoint,
)

OPERATION, AGENT = TaskId("op-1"), AgentName("travel")
RUN = Run(OPERATION, AGENT, RunId("run-1"), fence=1)
UNAVAILABLE = CacheUnavailable("no answer within 0.5 s")


def create_checkpoint(seq: int) -> AgentCheckpoint:
    return AgentCheckpoint(operation_id=OPERATION, agent=AGENT, seq=seq, subject=f"state {seq}")


@dataclass
class FakeStore:
    """The part of `Operations` that a checkpointer uses.

    `calls` is shared with the cache and shows the order.
    """

    calls: list[str]
    stored: AgentCheckpoint | None = None
    answer: SaveResult | StoreUnavailable = field(default_factory=SaveCommitted)
    unavailable: bool = False

    async def save(self, save: Save) -> SaveResult:
        self.calls.append("save")
        if isinstance(self.answer, StoreUnavailable):
            raise self.answer
        if isinstance(self.answer, SaveCommitted):
            self.stored = save.checkpoint
        return self.answer

    async def latest(
        self, task_id: TaskId, agent: AgentName | None = None
    ) -> AgentCheckpoint | None:
        self._record_call("latest")
        stored = self.stored
        return (
            stored
            if stored is not None and (stored.operation_id, stored.agent) == (task_id, agent)
            else None
        )

    async def operation(self, task_id: TaskId) -> OperationSummary | None:
        self._record_call("operation")
        return (
            create_summary(self.stored.seq if self.stored else None)
            if task_id == OPERATION
            else None
        )

    def _record_call(self, method: str) -> None:
        self.calls.append(method)
        if self.unavailable:
            raise StoreUnavailable("the database is unavailable")


@dataclass
class FakeCache:
    """Holds one copy. `get_error` and `put_error` are raised; `gate` delays every answer."""

    calls: list[str]
    copy: AgentCheckpoint | LeftOut | None = None
    get_error: Exception | None = None
    put_error: Exception | None = None
    gate: asyncio.Event | None = None
    reached: asyncio.Event = field(default_factory=asyncio.Event)

    async def put(self, checkpoint: AgentCheckpoint) -> None:
        await self._answer("put", self.put_error)
        self.copy = checkpoint

    async def get(
        self, operation_id: TaskId, agent: AgentName
    ) -> AgentCheckpoint | LeftOut | None:
        await self._answer("get", self.get_error)
        return self.copy

    async def forget(self, operation_id: TaskId, agent: AgentName) -> None:
        await self._answer("forget", self.put_error)
        self.copy = None

    async def close(self) -> None:
        raise AssertionError("the checkpointer must not close a cache it did not open")

    async def _answer(self, method: str, error: Exception | None) -> None:
        self.calls.append(method)
        self.reached.set()
        if self.gate is not None:
            await self.gate.wait()
        if error is not None:
            raise error


class CheckpointerHarness:
    """A checkpointer with a store and, optionally, a cache."""

    def __init__(self, *, cached: bool = True) -> None:
        self.calls: list[str] = []
        self.problems: list[tuple[str, str]] = []
        self.store, self.cache = FakeStore(self.calls), FakeCache(self.calls)
        parts: Any = (self.store, self.cache if cached else None)
        self.checkpointer = AgentCheckpointer(*parts, report_problem=self.report_problem)

    def report_problem(self, operation_id: TaskId, event: str, reason: str) -> None:
        assert operation_id == OPERATION
        self.problems.append((event, reason))


@pytest.fixture
def harness() -> CheckpointerHarness:
    return CheckpointerHarness()


async def test_the_cache_is_written_once_the_checkpoint_is_durable(
    harness: CheckpointerHarness,
) -> None:
    assert await harness.checkpointer.save(Save(RUN, create_checkpoint(1))) == SaveCommitted()
    assert harness.calls == ["save", "put"]
    assert harness.store.stored == harness.cache.copy == create_checkpoint(1)
    assert not harness.problems


@pytest.mark.parametrize("refusal", [Fenced(), CancelFound(None), CancelFound(RUN)])
async def test_a_checkpoint_that_was_not_saved_has_no_copy(
    harness: CheckpointerHarness, refusal: SaveResult
) -> None:
    harness.cache.copy, harness.store.answer = create_checkpoint(1), refusal
    assert await harness.checkpointer.save(Save(RUN, create_checkpoint(2))) == refusal
    assert harness.calls == ["save"]
    assert harness.cache.copy == create_checkpoint(1)


async def test_a_database_outage_is_raised_and_leaves_no_copy(
    harness: CheckpointerHarness,
) -> None:
    harness.store.answer = StoreUnavailable("the database is unavailable")
    with pytest.raises(StoreUnavailable):
        await harness.checkpointer.save(Save(RUN, create_checkpoint(1)))
    assert harness.calls == ["save"]


@pytest.mark.parametrize("error", [UNAVAILABLE, CheckpointError("surrogates not allowed")])
async def test_a_copy_that_cannot_be_written_fails_nothing(
    harness: CheckpointerHarness, error: Exception
) -> None:
    harness.cache.put_error = error
    assert await harness.checkpointer.save(Save(RUN, create_checkpoint(1))) == SaveCommitted()
    assert harness.store.stored == create_checkpoint(1)
    assert harness.problems == [("not_copied", str(error))]


async def test_a_hanging_cache_is_awaited_after_the_checkpoint_is_durable(
    harness: CheckpointerHarness,
) -> None:
    harness.cache.gate, harness.cache.put_error = asyncio.Event(), UNAVAILABLE
    saving = asyncio.create_task(harness.checkpointer.save(Save(RUN, create_checkpoint(1))))
    await harness.cache.reached.wait()
    assert harness.store.stored == create_checkpoint(1)
    assert not saving.done()

    harness.cache.gate.set()  # ends the timeout of the cache
    assert await saving == SaveCommitted()
    assert harness.problems == [("not_copied", str(UNAVAILABLE))]


async def test_a_save_can_be_cancelled_while_the_cache_hangs(harness: CheckpointerHarness) -> None:
    harness.cache.gate = asyncio.Event()
    saving = asyncio.create_task(harness.checkpointer.save(Save(RUN, create_checkpoint(1))))
    await harness.cache.reached.wait()
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving
    assert harness.store.stored == create_checkpoint(1)


async def test_a_copy_of_the_latest_checkpoint_is_used_without_the_database(
    harness: CheckpointerHarness,
) -> None:
    harness.cache.copy, harness.store.unavailable = create_checkpoint(3), True
    restored = await harness.checkpointer.restore(OPERATION, AGENT, seq=3)
    assert restored == RestoredCheckpoint(create_checkpoint(3), CheckpointSource.REDIS)
    assert harness.calls == ["get"]
    assert not harness.problems


@pytest.mark.parametrize(
    ("copy", "error", "reason", "detail"),
    [
        (None, None, FallbackReason.MISS, ""),
        (create_checkpoint(2), None, FallbackReason.STALE, "2 in place of 3"),
        (create_checkpoint(4), None, FallbackReason.STALE, "4 in place of 3"),
        (None, CheckpointError("garbage"), FallbackReason.CORRUPT, "garbage"),
        (None, UNAVAILABLE, FallbackReason.UNAVAILABLE, str(UNAVAILABLE)),
    ],
)
async def test_the_database_is_used_if_the_copy_is_unusable(
    harness: CheckpointerHarness,
    copy: AgentCheckpoint | None,
    error: Exception | None,
    reason: FallbackReason,
    detail: str,
) -> None:
    harness.store.stored = create_checkpoint(3)
    harness.cache.copy, harness.cache.get_error = copy, error

    restored = await harness.checkpointer.restore(OPERATION, AGENT, seq=3)

    assert restored == RestoredCheckpoint(create_checkpoint(3), CheckpointSource.SQL, reason)
    assert harness.problems == [(reason, detail)]
    assert harness.store.stored == create_checkpoint(3)
    healed = reason is not FallbackReason.UNAVAILABLE
    assert harness.calls == ["get", "latest", *(["put"] if healed else [])]
    assert harness.cache.copy == (create_checkpoint(3) if healed else None)


async def test_a_checkpoint_that_was_left_out_is_read_from_the_database(
    harness: CheckpointerHarness,
) -> None:
    harness.store.stored, harness.cache.copy = create_checkpoint(3), LeftOut()
    restored = await harness.checkpointer.restore(OPERATION, AGENT, seq=3)
    assert restored == RestoredCheckpoint(
        create_checkpoint(3), CheckpointSource.SQL, FallbackReason.LEFT_OUT
    )
    assert harness.calls == ["get", "latest"]  # not copied either
    assert harness.problems == []


async def test_a_restore_succeeds_if_the_copy_cannot_be_rewritten(
    harness: CheckpointerHarness,
) -> None:
    harness.store.stored, harness.cache.put_error = create_checkpoint(3), UNAVAILABLE
    restored = await harness.checkpointer.restore(OPERATION, AGENT, seq=3)
    assert restored == RestoredCheckpoint(
        create_checkpoint(3), CheckpointSource.SQL, FallbackReason.MISS
    )
    assert harness.problems == [("miss", ""), ("not_copied", str(UNAVAILABLE))]


async def test_without_a_sequence_number_the_database_is_asked_first(
    harness: CheckpointerHarness,
) -> None:
    harness.store.stored = harness.cache.copy = create_checkpoint(3)
    restored = await harness.checkpointer.restore(OPERATION, AGENT)
    assert restored == RestoredCheckpoint(create_checkpoint(3), CheckpointSource.REDIS)
    assert harness.calls == ["operation", "get"]


async def test_without_a_sequence_number_an_old_copy_is_not_used(
    harness: CheckpointerHarness,
) -> None:
    harness.store.stored, harness.cache.copy = create_checkpoint(3), create_checkpoint(2)
    restored = await harness.checkpointer.restore(OPERATION, AGENT)
    assert restored == RestoredCheckpoint(
        create_checkpoint(3), CheckpointSource.SQL, FallbackReason.STALE
    )


@pytest.mark.parametrize(
    ("operation_id", "agent", "seq"),
    [
        (OPERATION, AGENT, 0),
        (OPERATION, AgentName("other"), None),
        (TaskId("unknown"), AGENT, None),
    ],
)
async def test_a_task_without_a_checkpoint_has_none_whatever_the_cache_holds(
    harness: CheckpointerHarness, operation_id: TaskId, agent: AgentName, seq: int | None
) -> None:
    harness.store.stored = harness.cache.copy = create_checkpoint(3)
    assert await harness.checkpointer.restore(operation_id, agent, seq=seq) is None
    assert "get" not in harness.calls


async def test_an_operation_before_its_first_checkpoint_has_none(
    harness: CheckpointerHarness,
) -> None:
    harness.cache.copy = create_checkpoint(1)
    assert await harness.checkpointer.restore(OPERATION, AGENT) is None


async def test_a_checkpoint_deleted_from_the_database_is_not_restored(
    harness: CheckpointerHarness,
) -> None:
    assert await harness.checkpointer.restore(OPERATION, AGENT, seq=3) is None
    assert harness.calls == ["get", "latest"]


@pytest.mark.parametrize("seq", [None, 3])
async def test_a_restore_that_needs_the_database_raises_its_outage(
    harness: CheckpointerHarness, seq: int | None
) -> None:
    harness.store.unavailable = True
    with pytest.raises(StoreUnavailable):
        await harness.checkpointer.restore(OPERATION, AGENT, seq=seq)


@pytest.mark.parametrize("seq", [None, 3])
async def test_without_a_cache_only_the_database_is_used(seq: int | None) -> None:
    harness = CheckpointerHarness(cached=False)
    await harness.checkpointer.save(Save(RUN, create_checkpoint(3)))
    restored = await harness.checkpointer.restore(OPERATION, AGENT, seq=seq)
    assert restored == RestoredCheckpoint(create_checkpoint(3), CheckpointSource.SQL)
    await harness.checkpointer.forget(OPERATION, AGENT)
    assert harness.calls == ["save", "latest"]


async def test_a_copy_is_deleted(harness: CheckpointerHarness) -> None:
    harness.cache.copy = create_checkpoint(1)
    await harness.checkpointer.forget(OPERATION, AGENT)
    assert harness.cache.copy is None
    assert not harness.problems


async def test_a_copy_that_cannot_be_deleted_fails_nothing(harness: CheckpointerHarness) -> None:
    harness.cache.put_error = UNAVAILABLE
    await harness.checkpointer.forget(OPERATION, AGENT)
    assert harness.problems == [("not_forgotten", str(UNAVAILABLE))]


def create_summary(checkpoint: int | None) -> OperationSummary:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    return OperationSummary(
        id=OPERATION,
        agent=AGENT,
        type="travel",
        status=OperationStatus.RUNNING,
        phase=None,
        subject=None,
        parameters=None,
        children=(),
        progress_pct=0.0,
        retry_count=0,
        owner=None,
        lease_until=None,
        created_at=now,
        updated_at=now,
        ended_at=None,
        failure_reason=None,
        exclusive=False,
        preserve=False,
        checkpoint=checkpoint,
    )
