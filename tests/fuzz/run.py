"""One run of the fuzzer, from empty servers to the verdict."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from chaos.agents import Work
from chaos.ledger import Ledger
from chaos.load_generator import LoadGenerator
from chaos.replica_pool import ReplicaPool
from meshpoint import wiring
from meshpoint.adapters.sql import migrations
from meshpoint.model.ids import new_id
from meshpoint.settings import MeshSettings
from servers import PostgresServer, RabbitServer, own_database

from . import report as reports
from .amqp import WireMessage
from .mesh import HONEST, IN_PROCESS, LOGIN, make_configuration
from .postgres_side import POSTGRES_ROWS, PostgresSide
from .rabbit_side import Connections, RabbitSide
from .recipes import (
    EVIL,
    FORGED,
    FORGED_RESULT,
    MALLORY,
    ON_SERVERS,
    RECIPES,
    FuzzState,
    MessageScript,
    RecipeScheduler,
    RowLock,
    make_request,
)
from .replica import main
from .report import Report
from .row_locker import RowLocker
from .sqlite_side import SQLITE_ROWS, SqliteSide

_BUSY_TIMEOUT = 60.0
"""Publish timeout in seconds for the broker of a busy machine."""
_MESSAGES_PER_CALL = 12
"""Target number of open calls to the lying peer."""
_STEP_SECONDS = 0.05
_SETTLE_SECONDS = 3.0
"""Seconds without progress after which a busy machine counts as having handled what it can."""
_FOCUS_SECONDS = 15.0
"""Seconds between two checks of the branches in the long form."""
_ROUND_SECONDS = 2.0
"""Seconds of messages between two checks of the branches."""
_MAX_ROUNDS = 20
_BY_HAND = (1, 2, 2)
"""Ranks of recipes written by hand. Few values of tables reach a branch that no other reaches."""
OTHER_ADDRESSES = ("ledger.", "nobody.", f"{EVIL}.", f"{MALLORY}.")
"""Address prefixes without a consumer in this mesh."""
_MB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Parameters of a run. `check_timing`: check rates and latencies too.

    `min_branch_hits`: required hits of each judged branch.
    """

    seed: int
    seconds: float
    broker: str = "rabbitmq"
    rate: float = 85.0  # mutated messages per second
    honest_rate: float = 6.0  # requests per second
    quiet_seconds: float = 10.0  # seconds of honest traffic alone before the fuzz
    stall_timeout: float = 120.0  # seconds to wait for the last answers, and then for empty queues
    check_timing: bool = True
    min_branch_hits: int = reports.MIN_BRANCH_HITS
    name_filter: str = ""  # recipes whose names contain this
    keep_in: Path | None = None


@dataclass
class RunState:
    """A run in progress, for display."""

    config: RunConfig
    ledger: Ledger
    pool: ReplicaPool
    recipe_by_mark: dict[str, str] = field(default_factory=dict)  # recipes by mark
    started_at: float = field(default_factory=time.time)
    phase: str = "quiet"


Side = RabbitSide | PostgresSide | SqliteSide
OnStart = Callable[[RunState], None]


async def run(
    config: RunConfig,
    rabbit: RabbitServer | None,
    postgres: PostgresServer | None,
    on_start: OnStart | None = None,
) -> Report:
    """Run on the given servers; without `rabbit` on PostgreSQL alone, or without both on SQLite.

    `on_start` gets the run when it starts.
    """
    folder = Path(tempfile.mkdtemp(prefix="meshpoint-fuzz-"))
    try:
        async with _database(postgres, folder) as db_url:
            return await _run(config, rabbit, db_url, folder, on_start)
    finally:
        if config.keep_in is not None:
            await asyncio.to_thread(shutil.copytree, folder, config.keep_in, dirs_exist_ok=True)
        await asyncio.to_thread(shutil.rmtree, folder, True)


@asynccontextmanager
async def _database(postgres: PostgresServer | None, folder: Path) -> AsyncIterator[str]:
    if postgres is None:
        url = f"sqlite:///{folder}/tasks.db"
        await asyncio.to_thread(migrations.upgrade, url)
        yield url
        return
    async with own_database(postgres.url) as url:
        await asyncio.to_thread(migrations.upgrade, url)
        yield url


async def _run(
    run_config: RunConfig,
    rabbit: RabbitServer | None,
    db_url: str,
    folder: Path,
    on_start: OnStart | None,
) -> Report:
    namespace, ledger = f"fuzz-{new_id()}", Ledger()
    queue = folder / "queue.db"
    if rabbit is not None:
        broker_url = rabbit.url
    else:
        broker_url = f"sqlite:///{queue}" if db_url.startswith("sqlite:") else db_url
    world = FuzzState(random.Random(run_config.seed))
    timeout = 10.0 if run_config.check_timing else _BUSY_TIMEOUT
    mesh = MeshSettings(
        namespace=namespace, broker_url=broker_url, publish_timeout_seconds=timeout
    )
    broker = wiring.make_broker(mesh)
    configure_agents = partial(make_configuration, namespace, timeout)
    pool = ReplicaPool(
        folder, configure_agents, broker_url, db_url, seed=run_config.seed, size=2, target=main
    )
    generator = LoadGenerator(
        broker,
        ledger,
        seed=run_config.seed,
        rate=run_config.honest_rate,
        in_flight=100,
        agents=HONEST,
        make_input=lambda number, rng: Work(number=number, rounds=1 + rng.randrange(2)),
        login=LOGIN if rabbit is not None else None,
    )
    async with pool, generator:
        state = RunState(run_config, ledger, pool)
        if on_start is not None:
            on_start(state)
        broker_side: Side
        if rabbit is not None:
            broker_side = RabbitSide(rabbit, namespace, world)
        elif broker_url == db_url:
            broker_side = PostgresSide(db_url, namespace, world)
        else:
            broker_side = SqliteSide(str(queue), namespace, world)
        locker_context: AbstractAsyncContextManager[RowLocker | None] = (
            RowLocker(db_url) if rabbit else nullcontext()
        )
        async with broker_side, locker_context as locker:
            fuzz = Fuzzer(run_config, state, broker_side, world, locker, folder)
            await fuzz.run(generator)
            state.phase = "last answers"
            await generator.wait_until_answered(run_config.stall_timeout)
            state.phase = "last messages"
            await fuzz.wait_until_settled(run_config.stall_timeout)
            fuzz.measure_memory()
            fuzz.check_connections()
        state.phase = "drain"
        await pool.drain()
    state.phase = "verdict"
    return await asyncio.to_thread(fuzz.make_report)


class Fuzzer:
    """Sends the recipes' messages alongside the honest stream, and measures."""

    def __init__(
        self,
        config: RunConfig,
        state: RunState,
        side: Side,
        world: FuzzState,
        locker: RowLocker | None,
        folder: Path,
    ) -> None:
        self._config, self._state, self._side, self._world, self._locker = (
            config,
            state,
            side,
            world,
            locker,
        )
        self._folder = folder
        self._recorded_fates = reports.RecordedFates(folder)
        unusable: set[str] = set()
        if not isinstance(side, RabbitSide):
            unusable |= FORGED | ON_SERVERS
        if not isinstance(side, SqliteSide):
            unusable.update(SQLITE_ROWS)
        if not isinstance(side, PostgresSide):
            unusable.update(POSTGRES_ROWS)
        usable = [name for name in RECIPES if name not in unusable]
        self._spawned: set[asyncio.Task[None]] = set()
        self._scheduler = RecipeScheduler(
            world, [name for name in usable if config.name_filter in name]
        )
        self._memory_by_replica: dict[str, list[float]] = {}
        self._initial_connections = Connections()
        self._phase_starts: dict[str, float] = {}
        self._message_count = 0

    async def run(self, generator: LoadGenerator) -> None:
        """First honest traffic alone, then the fuzz."""
        config, state = self._config, self._state
        honest_traffic = asyncio.create_task(generator.run(config.quiet_seconds + config.seconds))
        self._phase_starts["quiet"] = time.time()
        await asyncio.sleep(config.quiet_seconds)
        self._phase_starts["fuzz"] = time.time()
        state.phase = "fuzz"
        for slot in state.pool.slots:
            slot.signal(signal.SIGUSR1)
        self._initial_connections = self._side.connections()
        await self._send(config.seconds / 4)
        if not config.check_timing:  # a busy machine lags, and its replicas have not warmed up yet
            await self.wait_until_settled(_SETTLE_SECONDS)
        self.measure_memory()
        if config.check_timing:
            await self._send(config.seconds / 4)
            await self._send_by_hand(config.seconds / 2)
        else:
            await self._send(config.seconds * 3 / 4)
            await self._send_until_reached(generator)
        self._phase_starts["end"] = time.time()
        await asyncio.gather(*self._spawned)
        await self._side.wait_for_confirms()
        await self._side.drain_full_queue()
        await honest_traffic

    async def _send_by_hand(self, seconds: float) -> None:
        """Send messages of recipes written by hand, and more for branches rarely reached."""
        self._scheduler.ranks = _BY_HAND
        rounds = max(1, round(seconds / _FOCUS_SECONDS))
        for _ in range(rounds):
            self._request_counts()
            await self._send(seconds / rounds)
            await self._focus_on_rarely_reached()

    async def _send_until_reached(self, generator: LoadGenerator) -> None:
        """Send messages, for a limited number of rounds, until each judged branch is reached."""
        self._scheduler.ranks = _BY_HAND
        for _ in range(_MAX_ROUNDS):
            await self.wait_until_settled(_SETTLE_SECONDS)
            self._request_counts()
            await asyncio.gather(self._send(_ROUND_SECONDS), generator.run(_ROUND_SECONDS))
            if not await self._focus_on_rarely_reached():
                return

    def _request_counts(self) -> None:
        for slot in self._state.pool.slots:
            slot.signal(signal.SIGRTMIN)

    async def _focus_on_rarely_reached(self) -> list[str]:
        """Prefer the recipes for the branches that were rarely reached. Returns the branches."""
        coverage = await asyncio.to_thread(
            reports.measure_coverage,
            self._folder,
            self._config.min_branch_hits,
            by_the_clock=self._config.check_timing,
        )
        self._scheduler.focus_on(coverage.rarely_reached)
        return coverage.rarely_reached

    async def _send(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        start, number = loop.time(), 0
        while (now := loop.time()) < start + seconds:
            due = int((now - start) * self._config.rate)
            while number < due:
                number += await self._send_one()
            await asyncio.sleep(_STEP_SECONDS)

    async def _send_one(self) -> int:
        chosen = self._scheduler.next()
        if (
            chosen is not None
            and len(self._world.open_calls) < _MESSAGES_PER_CALL
            and self._scheduler.created_count % 3 == 0
            and not self._config.name_filter
        ):
            chosen = None
        if chosen is None:  # no material for the recipe: cause more calls to answer
            message = make_request(self._world, self._world.rng.choice(("asker", "doubter")))
            chosen = ("request: call the lying peer", MessageScript([message]))
        name, script = chosen
        mark = self._world.mark
        # no replica consumes the other addresses, so nothing there is accounted for
        if not script.messages[0].key.startswith(OTHER_ADDRESSES):
            self._state.recipe_by_mark[mark] = name
        for delay, message in script.delayed:
            self._spawn(self._send_later(mark, name, message, delay))
        try:
            row_lock = partial(self._hold_lock, script.row_lock)
            side, key = self._side, script.messages[0].key
            if (
                script.redeliveries
                and isinstance(side, RabbitSide)
                and key not in side.redelivering
            ):
                self._spawn(
                    side.redeliver(mark, name, script.messages, script.redeliveries, row_lock)
                )
            else:
                await row_lock()
                for message in script.messages:
                    await self._side.send(mark, name, message)
        except (OSError, UnicodeError) as error:
            raise RuntimeError(f"{name}: {error!r}") from error
        self._message_count += len(script.all_messages)
        return len(script.all_messages)

    async def _hold_lock(self, row_lock: RowLock | None) -> None:
        if row_lock is not None and self._locker is not None:
            await self._locker.hold(row_lock)

    def _spawn(self, step: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(step)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)

    async def _send_later(self, mark: str, name: str, message: WireMessage, delay: float) -> None:
        await asyncio.sleep(delay)
        await self._side.send(mark, name, message)

    def measure_memory(self) -> None:
        """Record the memory of each replica, in MB."""
        for slot in self._state.pool.slots:
            if slot.process is not None and slot.process.pid is not None:
                used = psutil.Process(slot.process.pid).memory_info().rss / _MB
                self._memory_by_replica.setdefault(f"replica {slot.number}", []).append(
                    round(used, 1)
                )

    def check_connections(self) -> None:
        """Record which connections were opened or lost since the fuzz began."""
        self._initial_connections = self._side.connections().since(self._initial_connections)

    async def wait_until_settled(self, limit: float) -> None:
        """Return when all mutated messages are accounted for, or none more was for `limit`
        seconds.
        """
        missing, end = -1, 0.0
        while True:
            found = await asyncio.to_thread(self._find_fates)
            if not found.missing:
                return
            if len(found.missing) != missing:
                missing, end = len(found.missing), time.time() + limit
            if time.time() > end:
                return
            await asyncio.sleep(1)

    def _find_fates(self) -> reports.Fates:
        side, sent = self._side, self._state.recipe_by_mark
        return reports.find_fates(
            dict(sent),
            self._recorded_fates,
            set(side.refused),
            set(side.dead),
            set(side.replied),
        )

    def make_report(self) -> Report:
        """Judge the run."""
        config, ledger, pool = self._config, self._state.ledger, self._state.pool
        # no logins: anyone who can write the database can answer under any agent's name
        if config.broker != "rabbitmq":
            for record in ledger.records.values():
                record.answers = [
                    each
                    for each in record.answers
                    if getattr(each.outcome, "value", None) != FORGED_RESULT
                ]
        fates = self._find_fates()
        reached = reports.measure_coverage(
            self._folder,
            0 if config.name_filter else config.min_branch_hits,
            by_the_clock=config.check_timing,
        )
        exits: Counter[str] = pool.exits
        quiet = reports.p99(
            ledger,
            self._phase_starts["quiet"] + config.quiet_seconds / 4,
            self._phase_starts["fuzz"],
        )
        fuzzed = reports.p99(ledger, self._phase_starts["fuzz"], self._phase_starts["end"])
        elapsed = self._phase_starts["end"] - self._phase_starts["fuzz"]
        connections = self._initial_connections
        # Without a database, a copy of a request may also run in another replica.
        in_process = {id_ for id_, entry in ledger.records.items() if entry.agent in IN_PROCESS}
        memory_growth = max(
            (used[-1] - used[0] for used in self._memory_by_replica.values()), default=0.0
        )
        findings = Report(
            broker=config.broker,
            seed=config.seed,
            seconds=config.seconds,
            messages=self._message_count,
            per_minute=round(self._message_count * 60 / elapsed, 1),
            recipes=len(set(self._state.recipe_by_mark.values())),
            requests=len(ledger.records),
            answers=ledger.answered_count,
            lost=len(ledger.open_requests),
            wrong=len(ledger.wrong_requests()),
            duplicated=len(ledger.duplicated_requests(in_process)),
            fell=exits["fell"] + exits["did not start"],
            bad_drains=sum(
                number for kind, number in exits.items() if kind.startswith("drain ended")
            ),
            reconnects=len(connections.opened),
            probes=connections.isolated,
            lost_connections=len(connections.closed),
            connections=[*connections.opened, *connections.closed],
            p99_quiet=quiet,
            p99_fuzz=fuzzed,
            slower=round(fuzzed / quiet, 2) if quiet else 0.0,
            memory=self._memory_by_replica,
            grown=round(memory_growth, 1),
            accounts=dict(fates.count_by_fate),
            closings=dict(self._side.count_by_close_reason),
            unaccounted=fates.missing,
            rows_held=self._locker.lock_count if self._locker else 0,
            branches=reached.count,
            unreached=reached.rarely_reached,
            defects=reached.defects,
            excluded=reached.excluded,
        )
        findings.honest = [
            f"{entry.agent} {entry.task_id}: "
            + " | ".join(str(answer.outcome)[:300] for answer in entry.answers)
            for entry in [
                *ledger.open_requests,
                *ledger.wrong_requests(),
                *ledger.duplicated_requests(in_process),
            ]
        ]
        reports.find_faults(findings, by_the_clock=config.check_timing)
        return findings
