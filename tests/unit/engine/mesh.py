"""A mesh in one process, with an in-process broker and store and a clock that tests move."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

from pydantic import JsonValue

from fake_peer import FakePeer
from idle_loop import idle
from meshpoint import Mesh as Connection
from meshpoint.adapters.inprocess.broker import InProcessBroker, InProcessExchange, Queue
from meshpoint.adapters.inprocess.store import InProcessStore
from meshpoint.adapters.inprocess.working_memory import InProcessWorkingMemory
from meshpoint.adapters.sql import SqlStore
from meshpoint.client.transport import Transport
from meshpoint.engine.runtime import build_runtime
from meshpoint.engine.worker import Worker
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.messages import (
    Header,
    Message,
    dead_letter_queue,
    nested_queue,
    request_queue,
)
from meshpoint.model.options import Options, StoreTimings
from meshpoint.model.outcomes import Outcome
from meshpoint.model.tasks import CallSummary, TaskState, TaskSummary
from meshpoint.ports.clock import Clock
from meshpoint.ports.isolation import Isolation
from meshpoint.ports.task_store import CheckpointCache
from meshpoint.ports.working_memory import SnapshotStore, WorkingMemory
from meshpoint.testing.clock import FakeClock
from plain_client import PlainClient
from recorded_events import RecordedEvents

from .faults import FaultyBroker, FaultyStore


class SharedStore(InProcessStore):
    """The in-process store in the role of a database shared by several replicas."""

    @property
    def durable(self) -> bool:
        return True


class RunningReplica:
    """A running worker with its broker and stores."""

    def __init__(
        self, worker: Worker, broker: FaultyBroker, store: FaultyStore, memory: FaultyStore
    ) -> None:
        self.worker, self.broker, self.store, self.memory = worker, broker, store, memory
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(worker.run(self.stop))

    @property
    def id(self) -> str:
        return self.worker.runtime.replica.id

    async def crash(self) -> None:
        """Stop without draining: the broker notices at once, the database does not.

        Asserts that nothing is written or published on the way out.
        """
        store_call_count, published_count = len(self.store.calls), len(self.broker.published)
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        assert {"pause", "end", "release"}.isdisjoint(self.store.calls[store_call_count:]), (
            "a crash wrote"
        )
        assert self.broker.published[published_count:] == [], "a crash must not publish"
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
        self.events = RecordedEvents()
        self.store = SharedStore(self.clock, timings=StoreTimings())
        self.replicas: list[RunningReplica] = []
        self._fake_peers: list[FakePeer] = []

    async def replica(self, *agents: Any, durable: bool = True, **options: Any) -> RunningReplica:
        """Start one worker per agent, wait until each is ready, and return the last."""
        for agent in agents:
            replica = await self.launch(agent, durable=durable, **options)
            await self.events.wait(Step.STARTED, replica=replica.id)
            await self.idle()  # replicas sweep in the order they were started
        return replica

    async def launch(
        self,
        agent: Any,
        durable: bool = True,
        *,
        checkpointing: bool = True,
        unavailable_service: str = "",
        cache: CheckpointCache | None = None,
        l1: WorkingMemory | None = None,
        snapshots: SnapshotStore | None = None,
        isolation: Isolation | None = None,
        ended_kept: int | None = None,
        clock: Clock | None = None,
        **options: Any,
    ) -> RunningReplica:
        """Start `agent` without waiting.

        It has the database if it is `durable`, and new tasks pause there with `checkpointing`.
        `unavailable_service` ("store" or "broker") is unavailable from the start.
        """
        broker, clock = FaultyBroker(self.exchange), clock or self.clock
        await broker.open()
        store, memory = (
            FaultyStore(self.open_store()),
            FaultyStore(InProcessStore(clock, timings=StoreTimings(), max_ended=ended_kept)),
        )
        store.unavailable, broker.unavailable = (
            unavailable_service == "store",
            unavailable_service == "broker",
        )
        worker = Worker(
            agent,
            build_runtime(
                agent,
                broker=broker,
                memory=memory,
                durable=store if durable else None,
                lease_store=None,
                clock=clock,
                observer=self.events,
                options=replace(
                    Options(stateless_checkpointing=durable and checkpointing), **options
                ),
                cache=cache,
                local=InProcessWorkingMemory(self.clock),
                l1=l1,
                snapshots=snapshots,
                isolation=isolation,
            ),
        )
        replica = RunningReplica(worker, broker, store, memory)
        self.replicas.append(replica)
        return replica

    def open_store(self) -> Any:
        """The connection of one replica to the database."""
        return self.store

    async def fake_peer(self, name: str) -> FakePeer:
        broker = InProcessBroker(self.exchange)
        await broker.open()
        peer = await FakePeer(broker, name).open()
        self._fake_peers.append(peer)
        return peer

    @asynccontextmanager
    async def client(self) -> AsyncIterator[PlainClient]:
        async with PlainClient(FaultyBroker(self.exchange)) as client:
            yield client

    async def ask(self, agent: str, input_: JsonValue, **options: Any) -> Outcome:
        async with self.client() as client:
            return (await (await client.send(agent, input_, **options))).outcome

    async def task(self, task_id: str) -> tuple[TaskSummary, list[CallSummary]]:
        row = await self.store.task(TaskId(task_id))
        assert row is not None
        return row

    async def state(self, task_id: str) -> TaskState | None:
        row = await self.store.task(TaskId(task_id))
        return row[0].state if row else None

    def dead_letters(self, agent: str) -> list[Message]:
        queue = self.exchange.queues.get(dead_letter_queue(AgentName(agent)))
        return [item.message for item in sorted(queue.ready)] if queue else []

    def dead_reasons(self, agent: str) -> list[str]:
        return [
            str(message.headers[Header.DEAD_REASON.value]) for message in self.dead_letters(agent)
        ]

    def unacked(self, agent: str) -> int:
        """Number of unacked requests at replicas."""
        return sum(
            len(consumer.unacked)
            for queue in self._request_queues(agent)
            for consumer in queue.consumers
        )

    def waiting(self, agent: str) -> int:
        """Number of requests in the queues that no replica holds."""
        return sum(len(queue.ready) for queue in self._request_queues(agent))

    def _request_queues(self, agent: str) -> list[Queue]:
        name = AgentName(agent)
        queues = [
            self.exchange.queues.get(address)
            for address in (request_queue(name), nested_queue(name))
        ]
        return [queue for queue in queues if queue is not None]

    def deadline_in(self, seconds: float) -> float:
        """The value of the `x-deadline` header for an instant that many seconds from now."""
        return (self.clock.now() + timedelta(seconds=seconds)).timestamp()

    async def advance(self, seconds: float, *, step: float = 1.0) -> None:
        """Move the clock in steps of some seconds, and let every sweeper run after each."""
        elapsed = 0.0
        while elapsed < seconds:
            duration = min(step, seconds - elapsed)
            self.clock.advance(timedelta(seconds=duration))
            elapsed += duration
            await self.idle()

    async def idle(self) -> None:
        """Wait until nothing is left to do before the clock moves."""
        await idle()

    async def close(self) -> None:
        for replica in self.replicas:
            if not replica.task.done():
                await replica.crash()
            elif not replica.task.cancelled() and (error := replica.task.exception()):
                raise AssertionError("a worker failed") from error
        for peer in self._fake_peers:
            await peer.close()


class SqlMesh(Mesh):
    """A mesh with a real database, whose clock the test moves too."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        store: Any = self.open_store()  # has the same methods
        self.store = store

    def open_store(self) -> Any:
        return SqlStore(self._url, namespace="test", clock=self.clock)

    async def advance(self, seconds: float, *, step: float = 1.0) -> None:
        """Move the clock in steps of some seconds. Each replica sweeps after each step."""
        running = [replica.id for replica in self.replicas if not replica.task.done()]
        for _ in range(round(seconds / step)):
            await self.idle()
            sweeps = {each: self._count_sweeps(each) for each in running}
            self.clock.advance(timedelta(seconds=step))
            await self._wait_for_more(sweeps)
        await self.idle()

    async def idle(self) -> None:
        """Wait for the database as well: the loop has nothing to do while a server works.

        Otherwise, the clock would run ahead of the statements of a slow database, and leases and
        timeouts would expire before a replica could renew or extend them.
        """
        await super().idle()
        while busy := [each.store for each in self.replicas if each.store.is_busy]:
            for store in busy:
                await store.wait_for_calls()
            await super().idle()

    async def _wait_for_more(self, sweeps: dict[str, int]) -> None:
        await self.events.wait_until(
            lambda: all(self._count_sweeps(each) > count for each, count in sweeps.items())
        )

    def _count_sweeps(self, replica_id: str) -> int:
        """The number of completed sweeps of both backends."""
        sweeps = self.events.matching(Step.SWEEP, Phase.AFTER, replica=replica_id)
        count_by_backend = Counter(each.detail["durable"] for each in sweeps)
        return min(count_by_backend[durable] for durable in (True, False))

    async def close(self) -> None:
        await super().close()
        await self.store.close()


@asynccontextmanager
async def connected(mesh: Mesh, name: str = "client") -> AsyncIterator[Connection]:
    """A connection of the requester, unless another name is given."""
    async with Transport(FaultyBroker(mesh.exchange), name) as transport:
        yield Connection(transport)
