"""One replica under chaos, as a process: `python -m chaos.replica CONFIG --events FILE --seed TEXT --double SHARE`.

Serves all agents of CONFIG, and prints the name of each that it serves.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
from pathlib import Path

from meshpoint import wiring
from meshpoint.errors import MeshpointError
from meshpoint.settings import Settings, load

from .tap import DoublingBroker, EventFile


async def serve(settings: Settings, events: EventFile, chance: random.Random, share: float) -> None:
    """Run all agents of `settings` until SIGTERM; then drain. As `wiring.serve`, with a broker that doubles."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    mesh = settings.mesh
    broker = DoublingBroker(wiring.make_broker(mesh), events, chance, share)
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


def main() -> None:
    """Serve, and exit with 0 after a drain."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("config", type=Path)
    arguments.add_argument("--events", type=Path, required=True)
    arguments.add_argument("--seed", required=True)
    arguments.add_argument("--double", type=float, default=0.0)
    options = arguments.parse_args()
    chance = random.Random(options.seed)
    try:
        asyncio.run(serve(load([options.config]), EventFile(options.events), chance, options.double))
    except MeshpointError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
