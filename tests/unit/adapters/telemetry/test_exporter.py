"""The exporter of a mesh shows the last values of each server, and whether it answers."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from datetime import timedelta

import pytest

from meshpoint.adapters.telemetry.exporter import DatabaseSource, Exporter, QueueSource
from meshpoint.adapters.telemetry.mesh_metrics import (
    DEAD,
    READY_AGE,
    TASKS,
    Sample,
    describe_database,
)
from meshpoint.errors import BrokerUnavailable, ConfigurationError, StoreUnavailable
from meshpoint.model.ids import AgentName
from meshpoint.model.messages import Address
from meshpoint.model.tasks import TaskState
from meshpoint.ports.gauges import AgentGauges, DatabaseGauges, SessionGauges
from meshpoint.ports.inspection import QueueFacts
from meshpoint.testing.clock import FakeClock

TRAVEL = AgentName("travel")
INTERVAL, TIMEOUT = timedelta(seconds=15), timedelta(seconds=20)


@dataclass(eq=False)
class Server:
    """A source that answers with `values`, or raises `error`."""

    server: str = "postgresql://mesh"
    role: str = "database"
    values: list[Sample] = field(default_factory=list)
    error: Exception | None = None
    clock: FakeClock | None = None
    readings: int = 0
    closed: bool = False

    async def read(self) -> list[Sample]:
        self.readings += 1
        if self.clock is not None:
            self.clock.advance(timedelta(seconds=3))
        if self.error is not None:
            raise self.error
        return self.values

    async def close(self) -> None:
        self.closed = True


def create_exporter(*sources: Server, clock: FakeClock) -> Exporter:
    return Exporter(sources, interval=INTERVAL, timeout=TIMEOUT, clock=clock)


def shown(exporter: Exporter) -> list[str]:
    return [line for line in exporter.render().decode().splitlines() if line[0] != "#"]


async def test_the_last_values_stay_during_an_outage(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(values=[(READY_AGE, (TRAVEL,), 7.0)])
    exporter = create_exporter(server, clock=clock)
    assert exporter.find_problem() == "reading postgresql://mesh"
    await exporter.read(server)
    up = 'meshpoint_server_up{role="database",server="postgresql://mesh"}'
    assert 'meshpoint_ready_age_seconds{agent="travel"} 7.0' in shown(exporter)
    assert f"{up} 1.0" in shown(exporter)
    read_at = [line for line in shown(exporter) if "read_timestamp" in line]
    clock.advance(INTERVAL)
    for error in (StoreUnavailable("gone"), ConfigurationError("a", "b", "c"), TimeoutError()):
        server.error = error
        await exporter.read(server)
        assert 'meshpoint_ready_age_seconds{agent="travel"} 7.0' in shown(exporter)
        assert f"{up} 0.0" in shown(exporter)
        assert [line for line in shown(exporter) if "read_timestamp" in line] == read_at
    assert exporter.find_problem() is None
    server.error = None
    await exporter.read(server)
    assert f"{up} 1.0" in shown(exporter)
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "database postgresql://mesh: not read for 0 s: gone",
        "database postgresql://mesh: read again after 0 s",
    ]


async def test_a_server_that_does_not_answer_delays_no_other(clock: FakeClock) -> None:
    class Silent(Server):
        async def read(self) -> list[Sample]:
            await asyncio.Event().wait()
            raise AssertionError

    silent, server = Silent("silent"), Server(values=[(READY_AGE, (TRAVEL,), 7.0)])
    exporter = create_exporter(silent, server, clock=clock)
    running = asyncio.create_task(exporter.run())
    await clock.wait_for_sleepers()
    assert 'meshpoint_ready_age_seconds{agent="travel"} 7.0' in shown(exporter)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert silent.closed
    assert server.closed


async def test_a_slow_server_rests_longer(clock: FakeClock) -> None:
    server = Server(clock=clock)  # each reading takes 3 seconds
    running = asyncio.create_task(create_exporter(server, clock=clock).run())
    await clock.wait_for_sleepers()
    clock.advance(timedelta(seconds=59))
    await asyncio.sleep(0)
    assert server.readings == 1
    clock.advance(timedelta(seconds=1))
    await clock.wait_for_sleepers()
    assert server.readings == 2
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_an_agent_in_two_databases_is_shown_once(clock: FakeClock) -> None:
    waiting = (TRAVEL, TaskState.WAITING.value)
    old = Server("old", values=[(TASKS, waiting, 2.0), (READY_AGE, (TRAVEL,), 9.0)])
    new = Server("new", values=[(TASKS, waiting, 3.0), (READY_AGE, (TRAVEL,), 1.0)])
    exporter = create_exporter(old, new, clock=clock)
    for each in (old, new):
        await exporter.read(each)
    lines = shown(exporter)
    assert 'meshpoint_tasks{agent="travel",state="waiting"} 5.0' in lines
    assert 'meshpoint_ready_age_seconds{agent="travel"} 9.0' in lines


class Reader:
    def __init__(self, gauges: DatabaseGauges) -> None:
        self._gauges = gauges

    async def read(self) -> DatabaseGauges:
        return self._gauges

    async def close(self) -> None:
        pass


async def test_a_database_is_described(clock: FakeClock) -> None:
    gauges = DatabaseGauges(
        {TRAVEL: AgentGauges({TaskState.READY: 4}, dead=2)},
        size=8192,
        now=clock.now() + timedelta(seconds=2),
        sessions=SessionGauges(1.0, 2.0, 3.0),
    )
    source = DatabaseSource("db", Reader(gauges), clock)
    samples = {(metric.name, labels): value for metric, labels, value in await source.read()}
    assert samples["meshpoint_tasks", ("travel", "ready")] == 4
    assert samples[DEAD.name, ("travel",)] == 2
    assert samples["meshpoint_database_bytes", ("db",)] == 8192
    assert samples["meshpoint_database_clock_offset_seconds", ("db",)] == 2
    assert samples["meshpoint_database_oldest_transaction_seconds", ("db",)] == 1
    assert samples["meshpoint_database_longest_query_seconds", ("db",)] == 2
    assert samples["meshpoint_database_longest_lock_wait_seconds", ("db",)] == 3


def test_sqlite_has_neither_clock_nor_sessions(clock: FakeClock) -> None:
    samples = describe_database("db", DatabaseGauges({}, 1), clock.now())
    assert [metric.name for metric, _, _ in samples] == ["meshpoint_database_bytes"]


class Inspection:
    """Queues at a broker that may be unavailable."""

    def __init__(self, depths: dict[str, int], error: Exception | None = None) -> None:
        self._depths, self._error = depths, error
        self.opened = self.closed = 0

    async def open(self) -> None:
        self.opened += 1

    async def close(self) -> None:
        self.closed += 1

    async def queue(self, address: Address) -> QueueFacts | None:
        if self._error is not None:
            raise self._error
        depth = self._depths.get(address)
        return None if depth is None else QueueFacts(depth, 0)


async def test_queues_are_read_on_one_connection() -> None:
    broken = Inspection({}, BrokerUnavailable("gone"))
    working = Inspection({"travel.req": 3, "travel.req.1": 2, "travel.nested": 5, "travel.dlq": 1})
    inspections = [broken, working]
    source = QueueSource("broker", lambda: inspections.pop(0), {TRAVEL: 2})  # type: ignore[arg-type,return-value]
    with pytest.raises(BrokerUnavailable):
        await source.read()
    assert broken.closed == 1
    for _ in range(2):
        assert [(labels, value) for _, labels, value in await source.read()] == [
            (("travel", "requests"), 3.0),
            (("travel", "requests"), 2.0),
            (("travel", "nested"), 5.0),
            (("travel", "dead_letters"), 1.0),
        ]
    assert (working.opened, working.closed) == (1, 0)
    await source.close()
    assert working.closed == 1
