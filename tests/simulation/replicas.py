"""Replicas as processes with contexts in which they can be frozen, killed or drained."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection
from datetime import UTC, datetime, timedelta
from typing import Any

from meshpoint.adapters.inprocess.working_memory import InProcessWorkingMemory
from meshpoint.engine.lease_renewer import LeaseRenewer
from meshpoint.engine.presence import Presence
from meshpoint.engine.runtime import build_runtime
from meshpoint.engine.worker import Worker
from meshpoint.model.ids import ReplicaId
from meshpoint.model.options import Options
from meshpoint.model.tasks import Run
from meshpoint.ports.observer import Observer
from meshpoint.ports.task_store import CheckpointStore

from .broker import SimulatedBroker
from .loop import SimulatedLoop, process_context

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


class VirtualClock:
    """The loop's time as a clock, slightly skewed in each replica."""

    def __init__(self, loop: asyncio.AbstractEventLoop, skew: float = 0.0) -> None:
        self._loop, self._skew = loop, skew

    def now(self) -> datetime:
        """Current virtual time in UTC."""
        return EPOCH + timedelta(seconds=self._loop.time() + self._skew)

    def monotonic(self) -> float:
        """Seconds of virtual time."""
        return self._loop.time()

    async def sleep(self, duration: timedelta) -> None:
        """Return after `duration` of virtual time."""
        await asyncio.sleep(duration.total_seconds())


class EventLoopLeaseRenewer(LeaseRenewer):
    """Renews leases in a task of the process, because a thread would not be deterministic."""

    _lock: threading.Lock
    _renewing: asyncio.Task[None] | None = None

    def start(self, on_lost: Callable[[Run], None], presence: Presence | None = None) -> None:
        """Start renewing."""
        self._renewing = asyncio.create_task(
            self._keep_renewing(asyncio.get_running_loop(), on_lost)
        )

    async def close(self, timeout: float = 5.0, running: Collection[Run] = ()) -> None:
        """Stop renewing."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)


class Process:
    """One worker in a simulated process."""

    def __init__(
        self,
        name: str,
        agent: Any,
        *,
        broker: SimulatedBroker,
        memory: CheckpointStore,
        durable: Callable[[], CheckpointStore] | None,
        clock: VirtualClock,
        observer: Observer,
        options: Options,
    ) -> None:
        self.name, self.agent, self.broker = name, agent, broker
        self.stop = asyncio.Event()
        self.frozen_until: float | None = None
        self.worker = Worker(
            agent,
            build_runtime(
                agent,
                broker=broker,
                memory=memory,
                durable=durable() if durable else None,
                lease_store=durable,
                clock=clock,
                observer=observer,
                options=options,
                local=InProcessWorkingMemory(clock),
                replica_id=ReplicaId(name),
            ),
        )
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        self._loop = loop
        self.task = loop.create_task(self._run_worker(), context=process_context(name))

    async def _run_worker(self) -> None:
        await self.broker.open()
        await self.worker.run(self.stop)

    def kill(self) -> None:
        """SIGKILL: none of its code runs again, and the broker notices the closed connection."""
        self._loop.freeze(self.name)
        self.broker.notice_end()

    async def abort(self) -> None:
        """End it like an event loop with an unhandled signal: cancel everything, drain nothing."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.broker.notice_end()

    async def drain(self) -> None:
        """SIGTERM, and wait for its end."""
        self.stop.set()
        await asyncio.wait({self.task})
        await self.broker.close()

    def freeze(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after `seconds`."""
        self._loop.freeze(self.name)
        self.frozen_until = self._loop.time() + seconds
        self._loop.call_at(self.frozen_until, self.thaw)

    def thaw(self) -> None:
        """SIGCONT."""
        self.frozen_until = None
        self._loop.thaw(self.name)
