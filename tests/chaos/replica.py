"""One replica under chaos, in a process of its own that is forked with everything imported.

Serves all agents of a configuration until SIGTERM, and says through a pipe which of them it serves. When nobody
holds the other end any more, the process ends: no replica outlives the run.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from meshpoint import event_loop, wiring
from meshpoint.errors import MeshpointError
from meshpoint.settings import load

from .cast import EFFECTS
from .tap import DoublingBroker, EventFile

HEAVY = ["meshpoint.wiring", "meshpoint.settings", "meshpoint.agents.function", "meshpoint.adapters.rabbitmq"]
HEAVY += ["meshpoint.adapters.sql", "asyncpg", "sqlalchemy.dialects.postgresql.asyncpg"]
"""Modules to have imported before replicas are forked: a start costs milliseconds, not a second of processor time."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a replica is told. `double` is the share of messages that it sends twice."""

    config: Path
    folder: Path
    name: str
    seed: str
    double: float


def main(order: Order, told: Connection) -> None:
    """Serve, and exit with 0 after a drain."""
    log = os.open(order.folder / f"{order.name}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, sys.stderr.fileno())
    os.environ[EFFECTS] = str(order.folder / "effects")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C is for the supervisor
    try:
        event_loop.run(_serve(order, told))
    except MeshpointError as error:
        sys.exit(f"error: {error}")


async def _serve(order: Order, told: Connection) -> None:
    """As `wiring.serve`, with a broker that doubles."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_reader(told.fileno(), os._exit, 1)  # nothing is ever sent here: the supervisor is gone
    events = EventFile(order.folder / f"{order.name}.events", told)
    settings = load([order.config])
    mesh = settings.mesh
    broker = DoublingBroker(wiring.make_broker(mesh), events, random.Random(order.seed), order.double)
    workers = [wiring.make_worker(each, mesh.namespace, broker, events, each.options()) for each in settings.agents]
    try:
        await broker.open()
        async with asyncio.TaskGroup() as agents:
            for worker in workers:
                agents.create_task(worker.run(stop))
    except BaseExceptionGroup as group:
        raise wiring.first_of(group) from group
    finally:
        await broker.close()
