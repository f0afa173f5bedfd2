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

from . import event_counts, leftovers, task_history
from .fault_injector import FaultInjector
from .fault_plan import make_plan
from .ledger import Ledger
from .load_generator import LoadGenerator
from .queue_server import PostgresQueues, QueueServer, RabbitQueues
from .replica_pool import ReplicaPool, make_configuration
from .report import Findings, Report, make_report


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Parameters of a run. `history_folder`: folder for the histories of failed tasks."""

    seed: int
    seconds: float
    rate: float = 9.5
    in_flight: int = 100
    replicas: int = 4
    # seconds to wait for the next answer, and then for rows and messages to change
    stall_timeout: float = 90.0
    history_folder: Path = Path("chaos-stories")
    keep_events: bool = False  # keep the events even of a good run
    database_every: float | None = None  # seconds between further stops of PostgreSQL


@dataclass
class RunState:
    """A run in progress, for display."""

    config: RunConfig
    ledger: Ledger
    injector: FaultInjector
    pool: ReplicaPool
    started_at: float = field(default_factory=time.time)
    phase: str = "faults"


OnStart = Callable[[RunState], None]


async def run(
    config: RunConfig,
    rabbit: RabbitServer | None,
    postgres: PostgresServer,
    redis: RedisServer,
    on_start: OnStart | None = None,
) -> Report:
    """Run chaos on the given servers; without `rabbit`, with the queues on PostgreSQL.

    `on_start` is called once, when the run starts.
    """
    folder = Path(tempfile.mkdtemp(prefix="meshpoint-chaos-"))
    try:
        async with own_database(postgres.url) as db_url:
            await asyncio.to_thread(migrations.upgrade, db_url)
            queues = RabbitQueues(rabbit) if rabbit else PostgresQueues(postgres, db_url)
            return await _run(config, queues, postgres, redis, db_url, folder, on_start)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, True)


async def _run(
    config: RunConfig,
    queues: QueueServer,
    postgres: PostgresServer,
    redis: RedisServer,
    db_url: str,
    folder: Path,
    on_start: OnStart | None,
) -> Report:
    namespace, ledger = f"chaos-{new_id()}", Ledger()
    broker = wiring.make_broker(MeshSettings(namespace=namespace, broker_url=queues.broker_url))
    configure_agents = partial(make_configuration, namespace, redis.url)
    async with ReplicaPool(
        folder, configure_agents, queues.broker_url, db_url, seed=config.seed, size=config.replicas
    ) as pool:
        async with LoadGenerator(
            broker, ledger, seed=config.seed, rate=config.rate, in_flight=config.in_flight
        ) as generator:
            injector = FaultInjector(
                pool, queues, postgres, redis, generator, broker, db_url, namespace
            )
            state = RunState(config, ledger, injector, pool)
            if on_start is not None:
                on_start(state)
            async with asyncio.TaskGroup() as load_and_faults:
                load_and_faults.create_task(generator.run(config.seconds))
                load_and_faults.create_task(
                    injector.run(make_plan(config.seed, config.seconds, config.database_every))
                )
            state.phase = "last answers"
            await generator.wait_until_answered(config.stall_timeout)
            state.phase = "last rows"
            leftover_work = await leftovers.wait_until_none(
                db_url, queues, namespace, config.stall_timeout
            )
            await pool.drain()
        state.phase = "verdict"
        faults = Counter({**injector.counts, "requests doubled": generator.doubled_requests})
        findings = await asyncio.to_thread(
            _collect_findings, state, folder, dict(faults), leftover_work
        )
        report = make_report(findings)
        report.bad = await _write_histories(
            findings, config.history_folder / str(config.seed), folder, db_url
        )
        if config.keep_events or not report.good:
            await asyncio.to_thread(
                shutil.copytree,
                folder,
                config.history_folder / str(config.seed) / "events",
                dirs_exist_ok=True,
            )
        return report


def _collect_findings(
    state: RunState, folder: Path, faults: dict[str, int], leftover_work: leftovers.Leftovers
) -> Findings:
    counts, degraded = event_counts.count_events(folder)
    return Findings(
        seed=state.config.seed,
        seconds=state.config.seconds,
        started_at=state.started_at,
        ledger=state.ledger,
        applied_faults=state.injector.applied,
        faults=faults,
        events=dict(counts),
        exits=dict(state.pool.exits),
        may_end_twice=degraded | event_counts.find_replies_in_doubt(folder),
        effects=event_counts.collect_effects(folder, state.ledger, degraded),
        leftovers=leftover_work,
    )


async def _write_histories(
    findings: Findings, destination: Path, folder: Path, db_url: str
) -> list[str]:
    failed = findings.failed_requests()
    files = await task_history.write_histories(
        [record for records in failed.values() for record in records],
        destination,
        folder=folder,
        effects=findings.effects,
        applied_faults=findings.applied_faults,
        db_url=db_url,
    )
    if findings.leftovers.task_rows:
        destination.mkdir(parents=True, exist_ok=True)
        files.append(destination / "rows-left.txt")
        files[-1].write_text("\n".join(findings.leftovers.task_rows) + "\n")
    return [str(path) for path in files]
