"""A mesh in one process: memory broker, memory store standing in for the database, a clock that tests move."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from pydantic import JsonValue

from meshpoint.adapters.memory.broker import MemoryBroker
from meshpoint.adapters.memory.clock import FakeClock
from meshpoint.adapters.memory.exchange import MemoryExchange
from meshpoint.adapters.memory.store import MemoryCheckpointStore
from meshpoint.client import Client
from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.ids import TaskId
from meshpoint.model.options import Options
from meshpoint.model.outcomes import Outcome
from meshpoint.ports.store import CheckpointStore
from meshpoint.worker import Worker


@dataclass
class Timings:
    dispatch_lease: timedelta = timedelta(seconds=5)
    tombstone_ttl: timedelta = timedelta(days=1)
    incompatible_limit: timedelta = timedelta(hours=1)


class SharedStore(MemoryCheckpointStore):
    """The memory store in the part of a database: several replicas of one process share it."""

    @property
    def durable(self) -> bool:
        return True


class Events:
    """Every event, and a way to await one."""

    def __init__(self) -> None:
        self.all: list[Event] = []
        self._changed = asyncio.Event()

    def emit(self, event: Event) -> None:
        self.all.append(event)
        self._changed.set()

    def of(self, step: Step, phase: Phase | None = None, **fields: Any) -> list[Event]:
        return [
            event
            for event in self.all
            if event.step is step
            and (phase is None or event.phase is phase)
            and all(getattr(event, name) == value for name, value in fields.items())
        ]

    async def wait(self, step: Step, phase: Phase | None = None, count: int = 1, **fields: Any) -> list[Event]:
        async with asyncio.timeout(20):
            while len(found := self.of(step, phase, **fields)) < count:
                self._changed.clear()
                await self._changed.wait()
        return found


class Running:
    """One worker, running."""

    def __init__(self, worker: Worker, broker: MemoryBroker) -> None:
        self.worker = worker
        self.broker = broker
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(worker.run(self.stop))

    @property
    def id(self) -> str:
        return self.worker.site.replica.id

    async def crash(self) -> None:
        """End it without drain; the broker notices, the database does not."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.broker.close()

    async def drain(self) -> None:
        self.stop.set()
        await self.task
        await self.broker.close()


@dataclass
class Mesh:
    exchange: MemoryExchange = field(default_factory=MemoryExchange)
    clock: FakeClock = field(default_factory=FakeClock)
    events: Events = field(default_factory=Events)
    replicas: list[Running] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store: CheckpointStore = SharedStore(self.clock, timings=Timings())

    async def replica(self, *agents: Any, durable: bool = True, store: Any = None, **options: Any) -> Running:
        """Run `agents` in one worker each; the running of the last."""
        for agent in agents:
            broker = MemoryBroker(self.exchange)
            await broker.open()
            worker = Worker(
                agent,
                broker=broker,
                memory=MemoryCheckpointStore(self.clock, timings=Timings()),
                durable=(store or self.store) if durable else None,
                lease_store=None,
                clock=self.clock,
                observer=self.events,
                options=replace(Options(), **options),
            )
            running = Running(worker, broker)
            await self.events.wait(Step.STARTED, replica=running.id)
            self.replicas.append(running)
        return running

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        async with Client(MemoryBroker(self.exchange)) as client:
            yield client

    async def ask(self, agent: str, input_: JsonValue, **options: Any) -> Outcome:
        async with self.client() as client, asyncio.timeout(20):
            return (await (await client.send(agent, input_, **options))).outcome

    async def advance(self, seconds: float) -> None:
        """Move the clock in steps of a look, and let every sweeper look after each."""
        moved = 0.0
        while moved < seconds:
            step = min(1.0, seconds - moved)
            self.clock.advance(timedelta(seconds=step))
            moved += step
            await self.settle()

    async def settle(self) -> None:
        """Give every task of the loop its turns."""
        for _ in range(200):
            await asyncio.sleep(0)

    async def close(self) -> None:
        for running in self.replicas:
            if not running.task.done():
                await running.crash()


def task_ids(events: Sequence[Event]) -> list[TaskId]:
    return [task_id for event in events for task_id in event.task_ids]


Answer = Callable[[Any], Any]
