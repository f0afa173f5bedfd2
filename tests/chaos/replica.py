"""One replica under chaos, forked from a process that has imported everything.

It serves all agents of a configuration until SIGTERM and reports through a pipe which of them it
serves. When the other end of the pipe is closed, the process ends: no replica outlives the run.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path

from meshpoint import event_loop, wiring
from meshpoint.adapters.clocks import SystemClock
from meshpoint.cli.watchdog import DrainExitObserver
from meshpoint.errors import MeshpointError
from meshpoint.ports.broker import Broker
from meshpoint.settings import load

from .agents import EFFECTS_VARIABLE
from .instrumentation import DoublingBroker, EventFile

PRELOADED_MODULES = [
    "meshpoint.wiring",
    "meshpoint.settings",
    "meshpoint.settings.strict_yaml",
    "meshpoint.agents.function",
    "meshpoint.adapters.rabbitmq",
    "meshpoint.adapters.postgres_queue",
]
PRELOADED_MODULES += [
    "meshpoint.adapters.sql",
    "asyncpg",
    "sqlalchemy.dialects.postgresql.asyncpg",
]
"""Modules imported before forking: a start then costs milliseconds, not a second of CPU time."""


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """Parameters of a replica. `duplicate_share` is the share of messages that it sends twice."""

    config: Path
    folder: Path
    name: str
    seed: str
    duplicate_share: float


class SteppedClock(SystemClock):
    """A wrong clock: each step applies the next offset."""

    def __init__(self) -> None:
        super().__init__()
        self._offset = timedelta()
        self._offsets = cycle(
            (timedelta(minutes=10), timedelta(), timedelta(hours=-1), timedelta())
        )

    def step(self) -> None:
        self._offset = next(self._offsets)

    def now(self) -> datetime:
        """The wrong time, in UTC."""
        return super().now() + self._offset


WrapBroker = Callable[[Broker, EventFile, ReplicaSpec], Broker]
"""Wraps a replica's broker."""


def wrap_in_doubling_broker(broker: Broker, events: EventFile, spec: ReplicaSpec) -> Broker:
    """A broker that doubles some messages."""
    return DoublingBroker(broker, events, random.Random(spec.seed), spec.duplicate_share)


def main(
    spec: ReplicaSpec, supervisor: Connection, wrap: WrapBroker = wrap_in_doubling_broker
) -> None:
    """Serve, and exit with 0 after a drain."""
    log = os.open(spec.folder / f"{spec.name}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, sys.stderr.fileno())
    os.environ[EFFECTS_VARIABLE] = str(spec.folder / "effects")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C is for the supervisor
    clock = SteppedClock()
    signal.signal(signal.SIGUSR2, lambda *_: clock.step())
    wiring._CLOCK = clock
    gc.freeze()  # keeps garbage collection at the start from copying the parent's pages
    try:
        event_loop.run(_serve(spec, supervisor, wrap))
    except MeshpointError as error:
        sys.exit(f"error: {error}")


async def _serve(spec: ReplicaSpec, supervisor: Connection, wrap: WrapBroker) -> None:
    """Like `meshpoint run`, with a wrapped broker and without its watchdog."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    # the pipe carries no data this way: readable means that the supervisor is gone
    loop.add_reader(supervisor.fileno(), os._exit, 1)
    settings = load([spec.config])
    exit_observer = DrainExitObserver(len(settings.agents), lambda: os._exit(0))
    events = EventFile(spec.folder / f"{spec.name}.events", supervisor, exit_observer)
    mesh = settings.mesh
    broker = wrap(wiring.make_broker(mesh), events, spec)
    workers = [
        wiring.make_worker(
            agent_worker,
            mesh.namespace,
            broker,
            events,
            agent_worker.options(),
            wiring.make_isolation(agent_worker, mesh, events),
        )
        for agent_worker in settings.agents
    ]
    try:
        await broker.open()
        async with asyncio.TaskGroup() as agents:
            for worker in workers:
                agents.create_task(worker.run(stop))
    except BaseExceptionGroup as group:
        raise wiring.first_error(group) from group
    finally:
        await broker.close()
