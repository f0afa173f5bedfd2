"""One run of the application under load, from empty stores to the verdict."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx

from chaos.replica_pool import LATE_DRAIN, ReplicaPool
from chaos.task_history import event_lines, format_time
from meshpoint.adapters.sql import migrations
from meshpoint.model.ids import new_id
from servers import PostgresServer, RabbitServer, RedisServer, own_database

from .caller import Caller, CommandLine, Record
from .processes import Backend, make_configuration, replica_pool, service_pool

_OPEN_STATES = ("running", "waiting", "ready", "parked")
_KINDS = ("replica", "service")


@dataclass(frozen=True, slots=True)
class Servers:
    """The servers of a run. None of them is stopped."""

    rabbit: RabbitServer
    postgres: PostgresServer
    redis: RedisServer


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Parameters of a run."""

    seed: int
    seconds: float
    backend: Backend
    day_seconds: float = 2.0  # of the example: a reminder each day, a follow-up after three
    callers: int = 12  # incidents at a time
    kill_interval: float = 2.0  # mean seconds between two kills
    stall_timeout: float = 180.0  # seconds to wait for the next result at the end
    history_folder: Path = Path("application-histories")
    keep_all: bool = False  # write the history of every incident


@dataclass
class RunState:
    """A run in progress, and the verdict at its end."""

    config: RunConfig
    replicas: ReplicaPool
    services: ReplicaPool
    records: list[Record] = field(default_factory=list)
    kills: list[tuple[float, str]] = field(default_factory=list)
    started_at: float = field(default_factory=time.time)
    last_result_at: float = field(default_factory=time.time)
    phase: str = "kills"
    open_tasks: list[str] = field(default_factory=list)
    histories: list[Path] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """What happened, and what went wrong."""
        done = [record for record in self.records if record.results]
        exits = self.replicas.exits + self.services.exits
        return {
            "incidents": len(self.records),
            "with a result": len(done),
            "results read": sum(len(record.results) for record in done),
            "updates": sum(record.updates for record in self.records),
            "streams": sum(record.streams for record in self.records),
            "decided by HTTP": self._count_accepted("http"),
            "decided by CLI": self._count_accepted("cli"),
            "replicas killed": self.count_kills("replica"),
            "services killed": self.count_kills("service"),
            "replicas and services that fell": exits["fell"] + exits["did not start"],
            "drains that took too long": exits[LATE_DRAIN],
            "open tasks left": len(self.open_tasks),
            "lost": sum(not record.results for record in self.records),
            "with a problem": sum(bool(record.problems) for record in self.records),
        }

    @property
    def failures(self) -> dict[str, int]:
        """The counts that must be zero."""
        names = (
            "lost",
            "with a problem",
            "open tasks left",
            "replicas and services that fell",
            "drains that took too long",
        )
        return {name: count for name, count in self.counts.items() if name in names and count}

    def _count_accepted(self, channel: str) -> int:
        return sum(record.accepted[:1] == [channel] for record in self.records)

    def count_kills(self, kind: str) -> int:
        """Number of killed processes of a kind: "replica" or "service"."""
        return sum(name.startswith(kind) for _, name in self.kills)


OnStart = Callable[[RunState], None]


async def run(
    config: RunConfig, servers: Servers | None, on_start: OnStart | None = None
) -> RunState:
    """Run on the given servers, or on SQLite without servers. Returns the verdict."""
    folder = Path(tempfile.mkdtemp(prefix="meshpoint-application-"))
    try:
        async with open_application(config, servers, folder) as application:
            if on_start is not None:
                on_start(application.state)
            await application.load()
            await application.drain()
            await application.write_histories()
        return application.state
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, True)


@asynccontextmanager
async def open_application(
    config: RunConfig, servers: Servers | None, folder: Path
) -> AsyncIterator[Application]:
    """Serve the application with new stores."""
    variables = {"INCIDENT_DAY_SECONDS": str(config.day_seconds)}
    async with _stores(servers, folder) as urls:
        redis_url = None if servers is None else servers.redis.url
        make = partial(make_configuration, config.backend, f"application-{new_id()}", redis_url)
        replicas = replica_pool(folder / "replicas", make, urls, variables, config.seed)
        services, addresses = service_pool(folder / "services", make, urls, variables, config.seed)
        async with replicas, services:
            state = RunState(config, replicas, services)
            yield Application(state, addresses, folder)


@asynccontextmanager
async def _stores(servers: Servers | None, folder: Path) -> AsyncIterator[tuple[str, str]]:
    """URLs of the broker and of a database with tables."""
    if servers is None:
        url = f"sqlite:///{folder}/incidents.db"
        await asyncio.to_thread(migrations.upgrade, url)
        yield url, url
        return
    async with own_database(servers.postgres.url) as url:
        await asyncio.to_thread(migrations.upgrade, url)
        yield f"{servers.rabbit.url}?heartbeat=5", url


class Application:
    """The application that is served, its callers, and the killer of its processes."""

    def __init__(self, state: RunState, addresses: list[str], folder: Path) -> None:
        self.state, self.addresses, self._folder = state, addresses, folder
        self._is_killing = True
        self.config_file = folder / "replicas" / "replica-0.yaml"
        self.command_line = CommandLine(self.config_file)

    async def load(self) -> None:
        """Call and kill for the configured time, then wait for the last results.

        Continues after that time until a replica and a service have been killed.
        """
        config = self.state.config
        self.state.started_at = time.time()
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:
            callers = [
                asyncio.create_task(self._call_until_the_end(client))
                for _ in range(config.callers)
            ]
            await self._kill_until_the_end()
            self._is_killing = False
            self.state.phase, self.state.last_result_at = "last results", time.time()
            await self._wait_for_results(callers)
        await self._wait_for_open_tasks()

    async def drain(self) -> None:
        """Let every process end."""
        self.state.phase = "drain"
        await asyncio.gather(self.state.services.drain(), self.state.replicas.drain())

    def add_record(self) -> Record:
        """The next incident."""
        number = len(self.state.records)
        channels = {1: ("cli",), 5: ("http", "cli")}.get(number % 8, ("http",))
        record = Record(number, number % 5 != 4, channels)
        self.state.records.append(record)
        return record

    def caller(self, record: Record, client: httpx.AsyncClient) -> Caller:
        """The caller of an incident."""
        rng = random.Random(f"{self.state.config.seed} {record.number}")
        return Caller(record, self.addresses, client, self.command_line, rng, self._note_result)

    def _note_result(self) -> None:
        self.state.last_result_at = time.time()

    async def _call_until_the_end(self, client: httpx.AsyncClient) -> None:
        while self._is_killing:
            await self.caller(self.add_record(), client).run()

    async def _kill_until_the_end(self) -> None:
        rng = random.Random(f"{self.state.config.seed} kills")
        interval = self.state.config.kill_interval
        end = self.state.started_at + self.state.config.seconds
        while (pause := rng.uniform(0.2, 1.8) * interval) < end - time.time():
            await asyncio.sleep(pause)
            draw, target = rng.random(), rng.random()
            if draw < 0.05:  # all at once
                await asyncio.gather(*(self._kill(kind, None) for kind in _KINDS))
            else:
                await self._kill("replica" if draw < 0.65 else "service", target)
        for kind in _KINDS:
            if not self.state.count_kills(kind):
                await self._kill(kind, rng.random())

    async def _kill(self, kind: str, target: float | None) -> None:
        """Kill one process, or all of them."""
        pool = self.state.replicas if kind == "replica" else self.state.services
        serving = await pool.wait_for_serving()
        for slot in serving if target is None else [serving[int(target * len(serving))]]:
            self.state.kills.append((time.time(), f"{kind} {slot.number}-{slot.incarnation:04}"))
            slot.signal(signal.SIGKILL)

    async def _wait_for_results(self, callers: list[asyncio.Task[None]]) -> None:
        """Wait for all callers, or until there is no result for the stall timeout."""
        pending = set(callers)
        while pending:
            done, pending = await asyncio.wait(pending, timeout=1)
            for caller in done:
                caller.result()
            if time.time() > self.state.last_result_at + self.state.config.stall_timeout:
                break
        for caller in pending:
            caller.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    async def _wait_for_open_tasks(self) -> None:
        """Wait until no task is open, or until their number has not changed for a while."""
        self.state.phase = "last rows"
        previous, deadline = list[str](), 0.0
        while (open_tasks := await self._list_open_tasks()) and (
            open_tasks != previous or time.time() < deadline
        ):
            if open_tasks != previous:
                previous, deadline = open_tasks, time.time() + self.state.config.stall_timeout
            await asyncio.sleep(0.5)
        self.state.open_tasks = open_tasks

    async def _list_open_tasks(self) -> list[str]:
        states = [part for state in _OPEN_STATES for part in ("--state", state)]
        tasks = json.loads(await self._meshpoint("tasks", "list", "--json", *states))
        return sorted(f"{task['task_id']} {task['agent']} {task['state']}" for task in tasks)

    async def _meshpoint(self, *arguments: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "meshpoint.cli", *arguments),
            *("--config", str(self.config_file)),
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await process.communicate()
        return output.decode()

    async def write_histories(self) -> None:
        """Write a file for each failed incident: what its caller saw, events and kills."""
        state = self.state
        keep_all = state.config.keep_all
        failed = [
            record for record in state.records if keep_all or record.problems or not record.results
        ]
        if not failed and not state.failures:
            return
        destination = state.config.history_folder / f"{state.config.backend}-{state.config.seed}"
        destination.mkdir(parents=True, exist_ok=True)
        for record in failed if keep_all else failed[:20]:
            events = await asyncio.to_thread(
                event_lines, self._folder / "replicas", record.task_ids
            )
            lines = [
                *((at, f"caller: {text}") for at, text in record.lines),
                *((at, text) for at, _, text in events),
                *((at, f"KILLED {name}") for at, name in state.kills),
            ]
            text = "\n".join(f"{format_time(at)} {line}" for at, line in sorted(lines))
            rows = await self._meshpoint("tasks", "show", record.task_id)
            path = destination / f"incident-{record.number}.txt"
            path.write_text(
                f"{record.incident}\nproblems: {record.problems}\n\n{text}\n\n{rows}\n"
            )
            state.histories.append(path)
        if state.open_tasks:
            state.histories.append(destination / "open-tasks.txt")
            state.histories[-1].write_text("\n".join(state.open_tasks) + "\n")
        await asyncio.to_thread(
            shutil.copytree, self._folder, destination / "processes", dirs_exist_ok=True
        )
