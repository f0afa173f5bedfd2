"""Every metric of a mesh moves when its cause is provoked."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias

import asyncpg
import pytest

from meshpoint.adapters.sql import SqlStore
from meshpoint.adapters.sql.gauges import SqlGauges
from meshpoint.adapters.sqlite_queue import SqliteBroker
from meshpoint.adapters.sqlite_queue.inspection import SqliteInspection
from meshpoint.adapters.telemetry.exporter import DatabaseSource, Exporter, QueueSource, Source
from meshpoint.adapters.telemetry.mesh_metrics import MESH_METRICS
from meshpoint.model.messages import Message, MessageType, request_queue
from meshpoint.ports.clock import Clock
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    AGENT,
    FAILED,
    OTHER_FORMAT,
    SECOND,
    a_call,
    an_end,
    begun,
    paused,
    ready,
)
from meshpoint.testing.conformance.store_fleet import a_registration
from meshpoint.testing.conformance.store_mailbox import a_question
from meshpoint.testing.conformance.store_suspending import suspended

TIMEOUT = timedelta(seconds=30)


@dataclass
class Exported:
    """A mesh and its exporter."""

    store: SqlStore
    clock: FakeClock
    url: str
    folder: Path
    stack: AsyncExitStack
    sources: dict[str, Source] = field(default_factory=dict)
    _exporter: Exporter | None = None

    async def values(self) -> dict[str, float]:
        """Read every server, and return all series."""
        if self._exporter is None:
            self._exporter = Exporter(
                list(self.sources.values()),
                interval=TIMEOUT,
                timeout=TIMEOUT,
                clock=self.clock,
            )
        for source in self.sources.values():
            await self._exporter.read(source)
        lines = self._exporter.render().decode().splitlines()
        return {
            series: float(value)
            for series, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
        }

    def reads_with(self, clock: Clock | None) -> None:
        """Read the database, by `clock` or by its own."""
        reader = SqlGauges(
            self.url, namespace="test", timeout=TIMEOUT, agents=[AGENT], clock=clock
        )
        self.sources["database"] = DatabaseSource("db", reader, self.clock)
        self.stack.push_async_callback(reader.close)


@pytest.fixture
async def exported(
    database_url: str, store: SqlStore, clock: FakeClock, tmp_path: Path
) -> AsyncIterator[Exported]:
    async with AsyncExitStack() as stack:
        exported = Exported(store, clock, database_url, tmp_path, stack)
        exported.reads_with(clock)
        yield exported


async def pause(mesh: Exported) -> None:
    await paused(mesh.store, a_call("a", timeout=timedelta(hours=1)))
    mesh.clock.advance(60 * SECOND)


async def leave_unsent(mesh: Exported) -> None:
    await ready(mesh.store)
    mesh.clock.advance(90 * SECOND)


async def suspend_one(mesh: Exported) -> None:
    await suspended(mesh.store)


async def die(mesh: Exported) -> None:
    run = await begun(mesh.store)
    await mesh.store.end([an_end(run, FAILED, dead_reason="killed its processes")])


async def strand(mesh: Exported) -> None:
    await ready(mesh.store)
    mesh.clock.advance(90 * SECOND)
    await mesh.store.register(replace(a_registration(), formats=frozenset({OTHER_FORMAT})))


async def start_a_replica(mesh: Exported) -> None:
    await mesh.store.register(a_registration())


async def ask(mesh: Exported) -> None:
    await paused(mesh.store, a_question())


async def send_a_request(mesh: Exported) -> None:
    path = mesh.folder / "queues.db"
    broker = SqliteBroker(path, namespace="test")
    await broker.open()
    await broker.declare(AGENT)
    message = Message(MessageType.REQUEST, b"1", "id", "id", app_id="client")
    await broker.publish([(request_queue(AGENT), message)])
    await broker.close()


async def lose_the_server(mesh: Exported) -> None:
    source = mesh.sources["database"]

    async def fail() -> None:
        raise TimeoutError

    source.read = fail  # type: ignore[method-assign,assignment]


async def answer_slowly(mesh: Exported) -> None:
    source = mesh.sources["database"]
    read = source.read

    async def read_slowly() -> object:
        mesh.clock.advance(3 * SECOND)
        return await read()

    source.read = read_slowly  # type: ignore[method-assign,assignment]


async def wait_a_minute(mesh: Exported) -> None:
    mesh.clock.advance(60 * SECOND)


async def store_much(mesh: Exported) -> None:
    for _ in range(3):
        await paused(mesh.store, state=os.urandom(200_000))


Cause: TypeAlias = Callable[[Exported], Awaitable[None]]
DB = 'role="database",server="db"'
EFFECTS: dict[str, tuple[Cause, Callable[[float, float], bool]]] = {
    'meshpoint_tasks{agent="travel",state="waiting"}': (pause, lambda old, new: new == old + 1),
    'meshpoint_suspended_tasks{agent="travel"}': (suspend_one, lambda old, new: new == old + 1),
    'meshpoint_dead_tasks{agent="travel"}': (die, lambda old, new: new == old + 1),
    'meshpoint_stranded_tasks{agent="travel"}': (strand, lambda old, new: new == old + 1),
    'meshpoint_replicas{agent="travel",state="live"}': (
        start_a_replica,
        lambda old, new: new == old + 1,
    ),
    'meshpoint_ready_age_seconds{agent="travel"}': (leave_unsent, lambda old, new: new > 89),
    'meshpoint_waiting_oldest_seconds{agent="travel"}': (pause, lambda old, new: new > 59),
    'meshpoint_outbox_oldest_seconds{agent="travel"}': (pause, lambda old, new: new > 59),
    'meshpoint_questions_open{agent="travel"}': (ask, lambda old, new: new == old + 1),
    'meshpoint_queue_messages{agent="travel",queue="requests"}': (
        send_a_request,
        lambda old, new: new == old + 1,
    ),
    f"meshpoint_server_up{{{DB}}}": (lose_the_server, lambda old, new: (old, new) == (1, 0)),
    f"meshpoint_server_read_duration_seconds{{{DB}}}": (
        answer_slowly,
        lambda old, new: new >= old + 3,
    ),
    f"meshpoint_server_read_timestamp_seconds{{{DB}}}": (
        wait_a_minute,
        lambda old, new: new == old + 60,
    ),
    'meshpoint_database_bytes{server="db"}': (store_much, lambda old, new: new > old + 100_000),
}
"""For each series, a cause that provokes it, and how its value changes."""


@pytest.mark.parametrize("series", EFFECTS)
async def test_a_cause_moves_its_metric(exported: Exported, sqlite_url: str, series: str) -> None:
    cause, has_moved = EFFECTS[series]
    path = exported.folder / "queues.db"
    exported.sources["broker"] = QueueSource(
        "queues",
        lambda: SqliteInspection(path, namespace="test", timeout=TIMEOUT),
        {AGENT: 1},
    )
    before = (await exported.values()).get(series, 0.0)
    await cause(exported)
    after = (await exported.values())[series]
    assert has_moved(before, after), (before, after)


SESSION_METRICS = (
    "meshpoint_database_clock_offset_seconds",
    "meshpoint_database_oldest_transaction_seconds",
    "meshpoint_database_longest_query_seconds",
    "meshpoint_database_longest_lock_wait_seconds",
)


@pytest.mark.servers
async def test_sessions_and_the_clock_of_postgres_move_their_metrics(
    postgres_url: str, clock: FakeClock, tmp_path: Path
) -> None:
    store = SqlStore(postgres_url, namespace="test")
    async with AsyncExitStack() as stack:
        mesh = Exported(store, clock, postgres_url, tmp_path, stack)
        mesh.reads_with(None)
        before = await mesh.values()
        holder, waiter = await asyncpg.connect(postgres_url), await asyncpg.connect(postgres_url)
        stack.push_async_callback(waiter.close)
        stack.push_async_callback(holder.close)
        await holder.execute("BEGIN; LOCK TABLE agent_mesh_secrets IN ACCESS EXCLUSIVE MODE")
        waiting = asyncio.create_task(waiter.execute("SELECT * FROM agent_mesh_secrets"))
        clock.advance(60 * SECOND)
        while True:
            after = await mesh.values()
            if after['meshpoint_database_longest_lock_wait_seconds{server="db"}']:
                break
        await holder.execute("ROLLBACK")
        await waiting
        for name in SESSION_METRICS:
            series = f'{name}{{server="db"}}'
            assert after[series] != before[series], name
        await store.close()


def test_every_metric_has_a_cause() -> None:
    provoked = {series.partition("{")[0] for series in EFFECTS}
    assert provoked | set(SESSION_METRICS) == {metric.name for metric in MESH_METRICS}
