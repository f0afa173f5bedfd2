"""Checkpoints go to the database; a failing copy affects only a restore that reads it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest

from meshpoint.errors import CheckpointError, StoreUnavailable
from meshpoint.model.checkpoint import CancelFound, Fenced, Run, Save, SaveResult
from meshpoint.model.ids import AgentName, RunId, TaskId
from meshpoint.model.operations import OperationStatus, OperationSummary
from meshpoint.model.subtasks import AgentCheckpoint, Saved
from meshpoint.ports.checkpoint_cache import CacheUnavailable
from meshpoint.subtasks.checkpointer import (
    AgentCheckpointer,
    CheckpointerCounters,
    CheckpointSource,
    FallbackReason,
    RestoredCheckpoint,
)

OPERATION, AGENT = TaskId("op-1"), AgentName("travel")
RUN = Run(OPERATION, AGENT, RunId("run-1"), fence=1)
AWAY = CacheUnavailable("no answer within 0.5 s")


def a_checkpoint(seq: int) -> AgentCheckpoint:
    return AgentCheckpoint(operation_id=OPERATION, agent=AGENT, seq=seq, subject=f"state {seq}")


@dataclass
class Store:
    """The part of `Operations` that a checkpointer uses.

    `calls` is shared with the cache and shows the order.
    """

    calls: list[str]
    kept: AgentCheckpoint | None = None
    answer: SaveResult | StoreUnavailable = field(default_factory=Saved)
    away: bool = False

    async def save(self, wish: Save) -> SaveResult:
        self.calls.append("save")
        if isinstance(self.answer, StoreUnavailable):
            raise self.answer
        if isinstance(self.answer, Saved):
            self.kept = wish.checkpoint
        return self.answer

    async def latest(self, task_id: TaskId, agent: AgentName | None = None) -> AgentCheckpoint | None:
        self._ask("latest")
        kept = self.kept
        return kept if kept is not None and (kept.operation_id, kept.agent) == (task_id, agent) else None

    async def operation(self, task_id: TaskId) -> OperationSummary | None:
        self._ask("operation")
        return a_summary(self.kept.seq if self.kept else None) if task_id == OPERATION else None

    def _ask(self, what: str) -> None:
        self.calls.append(what)
        if self.away:
            raise StoreUnavailable("the database is unavailable")


@dataclass
class Cache:
    """Holds one copy. `get_error` and `put_error` are raised; `gate` delays every answer."""

    calls: list[str]
    copy: AgentCheckpoint | None = None
    get_error: Exception | None = None
    put_error: Exception | None = None
    gate: asyncio.Event | None = None
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def put(self, checkpoint: AgentCheckpoint) -> None:
        await self._answer("put", self.put_error)
        self.copy = checkpoint

    async def get(self, operation_id: TaskId, agent: AgentName) -> AgentCheckpoint | None:
        await self._answer("get", self.get_error)
        return self.copy

    async def forget(self, operation_id: TaskId, agent: AgentName) -> None:
        await self._answer("forget", self.put_error)
        self.copy = None

    async def close(self) -> None:
        raise AssertionError("the checkpointer must not close a cache it did not open")

    async def _answer(self, what: str, error: Exception | None) -> None:
        self.calls.append(what)
        self.asked.set()
        if self.gate is not None:
            await self.gate.wait()
        if error is not None:
            raise error


class Scene:
    """A checkpointer with a store and, optionally, a cache."""

    def __init__(self, *, cached: bool = True) -> None:
        self.calls: list[str] = []
        self.told: list[tuple[str, str]] = []
        self.store, self.cache = Store(self.calls), Cache(self.calls)
        parts: Any = (self.store, self.cache if cached else None)
        self.checkpointer = AgentCheckpointer(*parts, report_problem=self.tell)

    def tell(self, operation_id: TaskId, event: str, why: str) -> None:
        assert operation_id == OPERATION
        self.told.append((event, why))

    @property
    def counts(self) -> CheckpointerCounters:
        return self.checkpointer.counters


@pytest.fixture
def scene() -> Scene:
    return Scene()


async def test_a_copy_is_written_when_the_checkpoint_is_durable(scene: Scene) -> None:
    assert await scene.checkpointer.save(Save(RUN, a_checkpoint(1))) == Saved()
    assert scene.calls == ["save", "put"]
    assert scene.store.kept == scene.cache.copy == a_checkpoint(1)
    assert scene.counts == CheckpointerCounters()


@pytest.mark.parametrize("refusal", [Fenced(), CancelFound(None), CancelFound(RUN)])
async def test_a_checkpoint_that_was_not_saved_has_no_copy(scene: Scene, refusal: SaveResult) -> None:
    scene.cache.copy, scene.store.answer = a_checkpoint(1), refusal
    assert await scene.checkpointer.save(Save(RUN, a_checkpoint(2))) == refusal
    assert scene.calls == ["save"]
    assert scene.cache.copy == a_checkpoint(1)


async def test_a_database_that_is_away_is_told_to_the_caller_and_leaves_no_copy(scene: Scene) -> None:
    scene.store.answer = StoreUnavailable("the database is unavailable")
    with pytest.raises(StoreUnavailable):
        await scene.checkpointer.save(Save(RUN, a_checkpoint(1)))
    assert scene.calls == ["save"]


@pytest.mark.parametrize("error", [AWAY, CheckpointError("surrogates not allowed")])
async def test_a_copy_that_cannot_be_written_fails_nothing(scene: Scene, error: Exception) -> None:
    scene.cache.put_error = error
    assert await scene.checkpointer.save(Save(RUN, a_checkpoint(1))) == Saved()
    assert scene.store.kept == a_checkpoint(1)
    assert scene.counts.cache_write_failures == 1
    assert scene.told == [("not_copied", str(error))]


async def test_a_cache_that_hangs_is_waited_for_with_the_checkpoint_durable(scene: Scene) -> None:
    scene.cache.gate, scene.cache.put_error = asyncio.Event(), AWAY
    saving = asyncio.create_task(scene.checkpointer.save(Save(RUN, a_checkpoint(1))))
    await scene.cache.asked.wait()
    assert scene.store.kept == a_checkpoint(1)
    assert not saving.done()

    scene.cache.gate.set()  # ends the timeout of the cache
    assert await saving == Saved()
    assert scene.counts.cache_write_failures == 1


async def test_whoever_is_cancelled_while_the_cache_hangs_is_cancelled(scene: Scene) -> None:
    scene.cache.gate = asyncio.Event()
    saving = asyncio.create_task(scene.checkpointer.save(Save(RUN, a_checkpoint(1))))
    await scene.cache.asked.wait()
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving
    assert scene.store.kept == a_checkpoint(1)


async def test_a_copy_of_the_last_checkpoint_serves_without_the_database(scene: Scene) -> None:
    scene.cache.copy, scene.store.away = a_checkpoint(3), True
    restored = await scene.checkpointer.restore(OPERATION, AGENT, seq=3)
    assert restored == RestoredCheckpoint(a_checkpoint(3), CheckpointSource.REDIS)
    assert scene.calls == ["get"]
    assert scene.counts.served == {CheckpointSource.REDIS: 1}
    assert not scene.counts.fallbacks
    assert not scene.told


@pytest.mark.parametrize(
    ("copy", "error", "why", "told"),
    [
        (None, None, FallbackReason.MISS, ""),
        (a_checkpoint(2), None, FallbackReason.STALE, "2 in place of 3"),
        (a_checkpoint(4), None, FallbackReason.STALE, "4 in place of 3"),
        (None, CheckpointError("garbage"), FallbackReason.CORRUPT, "garbage"),
        (None, AWAY, FallbackReason.UNAVAILABLE, str(AWAY)),
    ],
)
async def test_the_database_serves_when_the_copy_cannot(
    scene: Scene, copy: AgentCheckpoint | None, error: Exception | None, why: FallbackReason, told: str
) -> None:
    scene.store.kept = a_checkpoint(3)
    scene.cache.copy, scene.cache.get_error = copy, error

    restored = await scene.checkpointer.restore(OPERATION, AGENT, seq=3)

    assert restored == RestoredCheckpoint(a_checkpoint(3), CheckpointSource.SQL, why)
    assert scene.counts == CheckpointerCounters(served={CheckpointSource.SQL: 1}, fallbacks={why: 1})  # type: ignore[arg-type]
    assert scene.told == [(why, told)]
    assert scene.store.kept == a_checkpoint(3)
    healed = why is not FallbackReason.UNAVAILABLE
    assert scene.calls == ["get", "latest", *(["put"] if healed else [])]
    assert scene.cache.copy == (a_checkpoint(3) if healed else None)


async def test_a_copy_that_cannot_be_written_again_fails_no_restore(scene: Scene) -> None:
    scene.store.kept, scene.cache.put_error = a_checkpoint(3), AWAY
    restored = await scene.checkpointer.restore(OPERATION, AGENT, seq=3)
    assert restored == RestoredCheckpoint(a_checkpoint(3), CheckpointSource.SQL, FallbackReason.MISS)
    assert scene.counts.cache_write_failures == 1
    assert scene.told == [("miss", ""), ("not_copied", str(AWAY))]


async def test_without_a_number_the_database_is_asked_for_it_first(scene: Scene) -> None:
    scene.store.kept = scene.cache.copy = a_checkpoint(3)
    restored = await scene.checkpointer.restore(OPERATION, AGENT)
    assert restored == RestoredCheckpoint(a_checkpoint(3), CheckpointSource.REDIS)
    assert scene.calls == ["operation", "get"]


async def test_without_a_number_an_old_copy_does_not_serve(scene: Scene) -> None:
    scene.store.kept, scene.cache.copy = a_checkpoint(3), a_checkpoint(2)
    restored = await scene.checkpointer.restore(OPERATION, AGENT)
    assert restored == RestoredCheckpoint(a_checkpoint(3), CheckpointSource.SQL, FallbackReason.STALE)


@pytest.mark.parametrize(
    ("operation_id", "agent", "seq"),
    [(OPERATION, AGENT, 0), (OPERATION, AgentName("other"), None), (TaskId("unknown"), AGENT, None)],
)
async def test_what_has_no_checkpoint_has_none_whatever_the_cache_says(
    scene: Scene, operation_id: TaskId, agent: AgentName, seq: int | None
) -> None:
    scene.store.kept = scene.cache.copy = a_checkpoint(3)
    assert await scene.checkpointer.restore(operation_id, agent, seq=seq) is None
    assert "get" not in scene.calls


async def test_an_operation_before_its_first_checkpoint_has_none(scene: Scene) -> None:
    scene.cache.copy = a_checkpoint(1)
    assert await scene.checkpointer.restore(OPERATION, AGENT) is None


async def test_a_checkpoint_that_is_gone_from_the_database_is_gone(scene: Scene) -> None:
    assert await scene.checkpointer.restore(OPERATION, AGENT, seq=3) is None
    assert not scene.counts.served
    assert scene.calls == ["get", "latest"]


@pytest.mark.parametrize("seq", [None, 3])
async def test_a_restore_that_needs_the_database_passes_on_that_it_is_away(scene: Scene, seq: int | None) -> None:
    scene.store.away = True
    with pytest.raises(StoreUnavailable):
        await scene.checkpointer.restore(OPERATION, AGENT, seq=seq)


@pytest.mark.parametrize("seq", [None, 3])
async def test_without_a_cache_the_database_does_it_all(seq: int | None) -> None:
    scene = Scene(cached=False)
    await scene.checkpointer.save(Save(RUN, a_checkpoint(3)))
    restored = await scene.checkpointer.restore(OPERATION, AGENT, seq=seq)
    assert restored == RestoredCheckpoint(a_checkpoint(3), CheckpointSource.SQL)
    await scene.checkpointer.forget(OPERATION, AGENT)
    assert scene.calls == ["save", "latest"]
    assert scene.counts == CheckpointerCounters(served={CheckpointSource.SQL: 1})  # type: ignore[arg-type]


async def test_a_copy_is_forgotten(scene: Scene) -> None:
    scene.cache.copy = a_checkpoint(1)
    await scene.checkpointer.forget(OPERATION, AGENT)
    assert scene.cache.copy is None
    assert not scene.told


async def test_a_copy_that_cannot_be_forgotten_fails_nothing(scene: Scene) -> None:
    scene.cache.put_error = AWAY
    await scene.checkpointer.forget(OPERATION, AGENT)
    assert scene.told == [("not_forgotten", str(AWAY))]


def a_summary(checkpoint: int | None) -> OperationSummary:
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
