"""A worker in this process on real servers, a requester played by the test, and all events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from meshpoint.adapters.clocks import SystemClock
from meshpoint.adapters.inprocess.store import InProcessStore
from meshpoint.adapters.inprocess.working_memory import InProcessWorkingMemory
from meshpoint.adapters.rabbitmq import RabbitMqBroker
from meshpoint.adapters.sql import SqlStore
from meshpoint.engine.runtime import build_runtime
from meshpoint.engine.worker import Worker
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import ReplicaId
from meshpoint.model.options import Options, StoreTimings
from recorded_events import RecordedEvents

_CLOCK = SystemClock()
FAST_OPTIONS = {
    "sweep_interval": timedelta(seconds=0.1),
    "settle_time": timedelta(seconds=0.2),
    "lease": timedelta(seconds=5),
    "renew_interval": timedelta(seconds=1),
}
TIMINGS = StoreTimings(
    dispatch_lease=timedelta(seconds=0.5),
    tombstone_ttl=timedelta(hours=1),
    parked_limit=timedelta(days=30),
    checkpoint_ttl=timedelta(hours=1),
    checkpoint_history=3,
    checkpoint_archive=False,
    keep_security_context=False,
)


class RunningWorker:
    """A worker that serves one agent."""

    def __init__(
        self,
        worker: Worker,
        broker: RabbitMqBroker,
        store: SqlStore | None,
        events: RecordedEvents,
    ) -> None:
        self.worker, self.broker, self.store, self.events = worker, broker, store, events
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(worker.run(self.stop))


SLOW_BROKER_TIMEOUT = timedelta(minutes=1)
"""Time that the broker of a busy machine may take to respond."""


@asynccontextmanager
async def open_broker(url: str, namespace: str, **options: Any) -> AsyncIterator[RabbitMqBroker]:
    broker = RabbitMqBroker(
        url, namespace=namespace, **{"publish_timeout": SLOW_BROKER_TIMEOUT, **options}
    )
    await broker.open()
    try:
        yield broker
    finally:
        await broker.close()


@asynccontextmanager
async def serve_agent(
    agent: Any,
    url: str,
    namespace: str,
    database: str | None,
    replica_id: str | None = None,
    **options: Any,
) -> AsyncIterator[RunningWorker]:
    """Serve `agent`; its tasks live in `database`, or in the process without one."""
    events = RecordedEvents()

    def store() -> SqlStore:
        assert database is not None
        return SqlStore(
            database,
            namespace=namespace,
            dispatch_lease=TIMINGS.dispatch_lease,
            tombstone_ttl=TIMINGS.tombstone_ttl,
        )

    async with open_broker(url, namespace) as broker:
        durable = None if database is None else store()
        worker = Worker(
            agent,
            build_runtime(
                agent,
                broker=broker,
                memory=InProcessStore(_CLOCK, timings=TIMINGS),
                durable=durable,
                lease_store=store if database else None,
                clock=_CLOCK,
                observer=events,
                options=Options(
                    **{**FAST_OPTIONS, "stateless_checkpointing": database is not None, **options}
                ),
                local=InProcessWorkingMemory(_CLOCK),
                replica_id=ReplicaId(replica_id) if replica_id else None,
            ),
        )
        running_worker = RunningWorker(worker, broker, durable, events)
        try:
            started = asyncio.create_task(events.wait(Step.STARTED, Phase.INFO))
            await asyncio.wait({started, running_worker.task}, return_when=asyncio.FIRST_COMPLETED)
            if running_worker.task.done():
                started.cancel()
                await running_worker.task
            await started
            yield running_worker
        finally:
            running_worker.stop.set()
            await asyncio.gather(running_worker.task, return_exceptions=True)
