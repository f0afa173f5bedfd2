"""A replica in the test's process that can die as a process would."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from inspect import iscoroutinefunction
from typing import Any, cast

from meshpoint.adapters.inprocess.broker import InProcessBroker, InProcessExchange
from meshpoint.adapters.inprocess.store import InProcessStore
from meshpoint.adapters.inprocess.working_memory import InProcessWorkingMemory
from meshpoint.engine.runtime import build_runtime
from meshpoint.engine.worker import Worker
from meshpoint.model.calls import MAX_DURATION
from meshpoint.model.events import Event, Step
from meshpoint.model.options import Options, StoreTimings
from meshpoint.ports.agent import DurableAgent
from meshpoint.ports.observer import Observer
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.activity import Activity
from meshpoint.testing.clock import FakeClock

TESTER = "tester"  # the login of the test, which may answer every question

OPTIONS = Options(
    stateless_checkpointing=True,
    # All peers are in this process, so only timeouts that the test sets end their calls.
    peer_timeout=MAX_DURATION,
    parked_limit=timedelta(),
    settle_time=timedelta(),
    drain_timeout=timedelta(),
    release_timeout=timedelta(seconds=1),
    operator_logins=(TESTER,),
)


class SharedStore(InProcessStore):
    """The in-process store in the role of a database that all replicas share."""

    @property
    def durable(self) -> bool:
        """`True`: tasks outlive their replicas."""
        return True


@dataclass
class World:
    """What the replicas of one mesh share.

    Attributes:
        activity: Records all calls and events.
        observer: Receives each event of a living replica.
        on_event: Called next, with the replica. Raises if the replica dies there.
    """

    exchange: InProcessExchange
    store: SharedStore
    clock: FakeClock
    activity: Activity
    observer: Observer
    on_event: Callable[[Replica, Event], None]


class Replica:
    """One agent in one replica. It serves from its creation on."""

    def __init__(self, agent: DurableAgent[Any, Any], world: World) -> None:
        self.agent, self._world = agent, world
        self.is_alive = True
        self.started = asyncio.Event()
        self._broker = _Broker(world.exchange, self)
        timings = StoreTimings(parked_limit=OPTIONS.parked_limit)
        self.worker = Worker(
            agent,
            build_runtime(
                agent,
                broker=self._broker,
                memory=_watch(InProcessStore(world.clock, timings=timings), self),
                durable=_watch(world.store, self),
                lease_store=None,  # time stands still while code runs
                clock=world.clock,
                observer=self,
                options=OPTIONS,
                local=InProcessWorkingMemory(world.clock),
            ),
        )
        self.task = asyncio.create_task(self._serve(), name=f"replica of {agent.name}")

    @property
    def is_running_code(self) -> bool:
        """Whether agent code or the settlement of its result is running."""
        return self.worker.runtime.slots.free < OPTIONS.max_concurrency

    def sweep(self) -> None:
        """Find due work now."""
        self.worker.runtime.sweep_wakeup.set()

    async def _serve(self) -> None:
        await self._broker.open()
        await self.worker.run(asyncio.Event())

    def emit(self, event: Event) -> None:
        """Handle one event; see `meshpoint.ports.observer.Observer`."""
        if not self.is_alive:
            return
        self._world.activity.record()
        if event.step is Step.STARTED:
            self.started.set()
        self._world.observer.emit(event)
        self._world.on_event(self, event)

    def kill(self) -> None:
        """Kill it now, between two instructions.

        From here on, its code neither reads nor writes anything. Its unacked messages return to
        their queues. `close` ends what is left of its code.
        """
        self.is_alive = False
        self._broker.abort()

    async def close(self) -> None:
        """Kill it and cancel its code."""
        self.kill()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def check_alive(self) -> None:
        """Record a call to a service. A dead replica waits here until its code is cancelled."""
        self._world.activity.record()
        if not self.is_alive:
            await asyncio.get_running_loop().create_future()


class _Broker(InProcessBroker):
    """The connection of one replica to the broker."""

    def __init__(self, exchange: InProcessExchange, replica: Replica) -> None:
        super().__init__(exchange)
        self._replica = replica

    async def _require_open(self) -> None:
        await self._replica.check_alive()
        await super()._require_open()


class _Store:
    """The connection of one replica to a store."""

    def __init__(self, store: InProcessStore, replica: Replica) -> None:
        self._store, self._replica = store, replica

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._store, name)
        if not iscoroutinefunction(value) or name == "close":
            return value

        async def call(*args: Any, **options: Any) -> Any:
            await self._replica.check_alive()
            return await value(*args, **options)

        return call


def _watch(store: InProcessStore, replica: Replica) -> CheckpointStore:
    return cast("CheckpointStore", _Store(store, replica))


async def start_replicas(replicas: Sequence[Replica]) -> None:
    """Wait until `replicas` serve.

    Raises:
        Exception: A replica could not start.
    """
    for replica in replicas:
        started = asyncio.ensure_future(replica.started.wait())
        await asyncio.wait({started, replica.task}, return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            started.cancel()
            await replica.task
