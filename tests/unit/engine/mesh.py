"""A mesh in one process, with an in-process broker and store and a clock that tests move."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from pydantic import JsonValue

from meshpoint.adapters.inprocess.clock import FakeClock
from meshpoint.adapters.inprocess.exchange import InProcessExchange, Queue
from meshpoint.adapters.inprocess.store import InProcessStore
from meshpoint.adapters.inprocess.working_memory import InProcessWorkingMemory
from meshpoint.client import Client
from meshpoint.engine.worker import Worker
from meshpoint.model.checkpoint import CallSummary, TaskState, TaskSummary
from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.messages import Header, Message, dead_letters_of, nested_of, requests_of
from meshpoint.model.options import Options
from meshpoint.model.outcomes import Outcome
from meshpoint.ports.checkpoint_cache import CheckpointCache
from meshpoint.ports.clock import Clock
from meshpoint.ports.isolation import Isolation
from meshpoint.ports.working_memory import SnapshotStore, WorkingMemory

from .faults import FaultyBroker, FaultyStore
from .puppet import Puppet


@dataclass
class Timings:
    dispatch_lease: timedelta = timedelta(seconds=5)
    tombstone_ttl: timedelta = timedelta(days=1)
    incompatible_limit: timedelta = timedelta(hours=1)
    checkpoint_ttl: timedelta = timedelta(days=30)
    checkpoint_history: int = 5
    checkpoint_archive: bool = False


class SharedStore(InProcessStore):
    """The in-process store in the role of a database shared by several replicas."""

    @property
    def durable(self) -> bool:
        return True


class Events:
    """Records every event and lets a test await one."""

    def __init__(self) -> None:
        self.all: list[Event] = []
        self.hooks: list[Callable[[Event], object]] = []
        self._changed = asyncio.Event()

    def emit(self, event: Event) -> None:
        self.all.append(event)
        for hook in self.hooks:
            hook(event)
        self._changed.set()

    def of(self, step: Step, phase: Phase | None = None, task_id: str | None = None, **fields: Any) -> list[Event]:
        return [
            event
            for event in self.all
            if event.step is step
            and (phase is None or event.phase is phase)
            and (task_id is None or task_id in event.task_ids)
            and all(getattr(event, name) == value for name, value in fields.items())
        ]

    async def wait(
        self, step: Step, phase: Phase | None = None, count: int = 1, task_id: str | None = None, **fields: Any
    ) -> list[Event]:
        while len(found := self.of(step, phase, task_id, **fields)) < count:
            self._changed.clear()
            await self._changed.wait()
        return found

    def story(self, task_id: str, *steps: Step) -> list[str]:
        """Events of a task in order, as "checkpoint before" etc.; only of `steps`, if given."""
        return [
            f"{event.step.value} {event.phase.value}"
            for event in self.all
            if task_id in event.task_ids and (not steps or event.step in steps)
        ]


class Running:
    """A running worker with its broker and stores."""

    def __init__(self, worker: Worker, broker: FaultyBroker, store: FaultyStore, memory: FaultyStore) -> None:
        self.worker, self.broker, self.store, self.memory = worker, broker, store, memory
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(worker.run(self.stop))

    @property
    def id(self) -> str:
        return self.worker.site.replica.id

    async def crash(self) -> None:
        """Stop without draining: the broker notices at once, the database does not.

        Asserts that nothing is written or published on the way out.
        """
        written, said = len(self.store.calls), len(self.broker.published)
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        assert {"pause", "end", "release"}.isdisjoint(self.store.calls[written:]), "a crash wrote"
        assert self.broker.published[said:] == [], "a crash must not publish"
        await self.broker.close()

    async def drain(self) -> None:
        self.stop.set()
        await self.task
        await self.broker.close()


class Mesh:
    """Replicas that share one exchange, one database and one clock."""

    def __init__(self) -> None:
        self.exchange = InProcessExchange()
        self.clock = FakeClock()
        self.events = Events()
        self.store = SharedStore(self.clock, timings=Timings())
        self.replicas: list[Running] = []
        self._puppets: list[Puppet] = []

    async def replica(self, *agents: Any, durable: bool = True, **options: Any) -> Running:
        """Start one worker per agent, wait until each is ready, and return the last."""
        for agent in agents:
            running = await self.launch(agent, durable=durable, **options)
            await self.events.wait(Step.STARTED, replica=running.id)
            await self.settle()  # replicas sweep in the order they were started
        return running

    async def launch(
        self,
        agent: Any,
        durable: bool = True,
        *,
        away: str = "",
        cache: CheckpointCache | None = None,
        l1: WorkingMemory | None = None,
        snapshots: SnapshotStore | None = None,
        isolation: Isolation | None = None,
        ended_kept: int | None = None,
        clock: Clock | None = None,
        **options: Any,
    ) -> Running:
        """Start `agent` without waiting.

        `away` ("store" or "broker") is unavailable from the start.
        """
        broker, clock = FaultyBroker(self.exchange), clock or self.clock
        await broker.open()
        store, memory = (
            FaultyStore(self.store),
            FaultyStore(InProcessStore(clock, timings=Timings(), max_ended=ended_kept)),
        )
        store.away, broker.away = away == "store", away == "broker"
        worker = Worker(
            agent,
            broker=broker,
            memory=memory,
            durable=store if durable else None,
            lease_store=None,
            clock=clock,
            observer=self.events,
            options=replace(Options(), **options),
            cache=cache,
            local=InProcessWorkingMemory(self.clock),
            l1=l1,
            snapshots=snapshots,
            isolation=isolation,
        )
        running = Running(worker, broker, store, memory)
        self.replicas.append(running)
        return running

    async def puppet(self, name: str) -> Puppet:
        puppet = await Puppet(self.exchange, name).open()
        self._puppets.append(puppet)
        return puppet

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        async with Client(FaultyBroker(self.exchange)) as client:
            yield client

    async def ask(self, agent: str, input_: JsonValue, **options: Any) -> Outcome:
        async with self.client() as client:
            return (await (await client.send(agent, input_, **options))).outcome

    async def task(self, task_id: str) -> tuple[TaskSummary, list[CallSummary]]:
        found = await self.store.task(TaskId(task_id))
        assert found is not None
        return found

    async def state(self, task_id: str) -> TaskState | None:
        found = await self.store.task(TaskId(task_id))
        return found[0].state if found else None

    def dead_letters(self, agent: str) -> list[Message]:
        queue = self.exchange.queue(dead_letters_of(AgentName(agent)))
        return [item.message for item in sorted(queue.ready)] if queue else []

    def dead_reasons(self, agent: str) -> list[str]:
        return [str(message.headers[Header.DEAD_REASON.value]) for message in self.dead_letters(agent)]

    def unacked(self, agent: str) -> int:
        """Number of unacked requests at replicas."""
        return sum(len(consumer.unacked) for queue in self._request_queues(agent) for consumer in queue.consumers)

    def waiting(self, agent: str) -> int:
        """Number of requests in the queues that no replica holds."""
        return sum(len(queue.ready) for queue in self._request_queues(agent))

    def _request_queues(self, agent: str) -> list[Queue]:
        name = AgentName(agent)
        found = [self.exchange.queue(address) for address in (requests_of(name), nested_of(name))]
        return [queue for queue in found if queue is not None]

    def in_seconds(self, seconds: float) -> float:
        """The value of the `x-deadline` header for an instant that many seconds from now."""
        return (self.clock.now() + timedelta(seconds=seconds)).timestamp()

    async def advance(self, seconds: float) -> None:
        """Move the clock in steps of one second at most, and let every sweeper run after each."""
        moved = 0.0
        while moved < seconds:
            step = min(1.0, seconds - moved)
            self.clock.advance(timedelta(seconds=step))
            moved += step
            await self.settle()

    async def settle(self) -> None:
        """Yield to the event loop often enough that pending tasks make progress."""
        for _ in range(100):
            await asyncio.sleep(0)

    async def close(self) -> None:
        for running in self.replicas:
            if not running.task.done():
                await running.crash()
            elif not running.task.cancelled() and (error := running.task.exception()):
                raise AssertionError("a worker failed") from error
        for puppet in self._puppets:
            await puppet.close()
