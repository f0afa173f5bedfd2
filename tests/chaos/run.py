"""One run of chaos, from empty servers to the verdict."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from meshpoint import wiring
from meshpoint.adapters.sql import migrations
from meshpoint.model.ids import new_id
from meshpoint.settings import MeshSettings
from servers import PostgresServer, RabbitServer, RedisServer, own_database

from . import leftovers, story, tally
from .crew import Crew, configuration
from .ledger import Ledger
from .plan import plan
from .report import Findings, Report, judge
from .stream import Stream
from .strikes import Strikes

_HEARTBEAT = "heartbeat=5"
"""Bounds how long a frozen replica keeps its messages."""


@dataclass(frozen=True, slots=True)
class Wish:
    """Parameters of a run. `stories`: folder for the histories of failed tasks."""

    seed: int
    seconds: float
    rate: float = 9.5
    in_flight: int = 100
    replicas: int = 4
    # seconds to wait for the next answer, and then for rows and messages to change
    patience: float = 90.0
    stories: Path = Path("chaos-stories")
    keep: bool = False  # keep the events even of a good run


@dataclass
class Running:
    """A run in progress, for display."""

    wish: Wish
    ledger: Ledger
    strikes: Strikes
    crew: Crew
    began: float = field(default_factory=time.time)
    phase: str = "faults"


Watch = Callable[[Running], None]


async def run(
    wish: Wish, rabbit: RabbitServer, postgres: PostgresServer, redis: RedisServer, watch: Watch | None = None
) -> Report:
    """Run chaos on the given servers. `watch` is called once, when the run starts."""
    folder = Path(tempfile.mkdtemp(prefix="meshpoint-chaos-"))
    try:
        async with own_database(postgres.url) as db_url:
            await asyncio.to_thread(migrations.upgrade, db_url)
            return await _run(wish, rabbit, postgres, redis, db_url, folder, watch)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, True)


async def _run(
    wish: Wish,
    rabbit: RabbitServer,
    postgres: PostgresServer,
    redis: RedisServer,
    db_url: str,
    folder: Path,
    watch: Watch | None,
) -> Report:
    namespace, ledger = f"chaos-{new_id()}", Ledger()
    broker_url = f"{rabbit.url}?{_HEARTBEAT}"

    broker = wiring.make_broker(MeshSettings(namespace=namespace, broker_url=broker_url))
    configure = partial(configuration, namespace, redis.url)
    async with Crew(folder, configure, broker_url, db_url, seed=wish.seed, size=wish.replicas) as crew:
        async with Stream(broker, ledger, seed=wish.seed, rate=wish.rate, in_flight=wish.in_flight) as stream:
            strikes = Strikes(crew, rabbit, postgres, redis, stream, broker, db_url, namespace)
            running = Running(wish, ledger, strikes, crew)
            if watch is not None:
                watch(running)
            async with asyncio.TaskGroup() as storm:
                storm.create_task(stream.run(wish.seconds))
                storm.create_task(strikes.run(plan(wish.seed, wish.seconds)))
            running.phase = "last answers"
            await stream.all_answered(wish.patience)
            running.phase = "last rows"
            left = await leftovers.until_none(db_url, rabbit, namespace, wish.patience)
            await crew.drain()
        running.phase = "verdict"
        faults = Counter({**strikes.counts, "requests doubled": stream.doubled})
        found = await asyncio.to_thread(_findings, running, folder, dict(faults), left)
        report = judge(found)
        report.bad = await _stories(found, wish.stories / str(wish.seed), folder, db_url)
        if wish.keep or not report.good:
            await asyncio.to_thread(
                shutil.copytree, folder, wish.stories / str(wish.seed) / "events", dirs_exist_ok=True
            )
        return report


def _findings(running: Running, folder: Path, faults: dict[str, int], left: leftovers.Leftovers) -> Findings:
    counts, degraded = tally.counts(folder)
    return Findings(
        seed=running.wish.seed,
        seconds=running.wish.seconds,
        began=running.began,
        ledger=running.ledger,
        strikes=running.strikes.log,
        faults=faults,
        events=dict(counts),
        exits=dict(running.crew.exits),
        degraded=degraded,
        effects=tally.effects(folder, running.ledger, degraded),
        leftovers=left,
    )


async def _stories(found: Findings, into: Path, folder: Path, db_url: str) -> list[str]:
    bad = found.bad()
    files = await story.write(
        [entry for entries in bad.values() for entry in entries],
        into,
        folder=folder,
        found=found.effects,
        strikes=found.strikes,
        db_url=db_url,
    )
    if found.leftovers.shown:
        into.mkdir(parents=True, exist_ok=True)
        files.append(into / "rows-left.txt")
        files[-1].write_text("\n".join(found.leftovers.shown) + "\n")
    return [str(path) for path in files]
