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

from chaos.cast import Work
from chaos.crew import Crew
from chaos.ledger import Ledger
from chaos.stream import Stream
from meshpoint import wiring
from meshpoint.adapters.sql import migrations
from meshpoint.model.ids import new_id
from meshpoint.settings import MeshSettings
from servers import PostgresServer, RabbitServer, own_database

from . import report as reports
from .amqp import Letter
from .mesh import HONEST, IN_PROCESS, LOGIN, configuration
from .rabbit import Connections, RabbitSide
from .recipes import EVIL, FORGED, FORGED_RESULT, ME, ON_SERVERS, RECIPES, Cook, Hold, Scene, World, a_request
from .replica import main
from .report import Report
from .rows import ROWS, RowSide
from .second_session import SecondSession

_BUSY = 60.0
"""Publish timeout in seconds for the broker of a busy machine."""
_CALLS = 12
"""Target number of open calls to the lying peer."""
_STEP = 0.05
_STILL = 3.0
"""Seconds without progress after which a busy machine counts as having handled what it can."""
_ROUND = 2.0
"""Seconds of messages between two checks of the branches."""
_ROUNDS = 20
ELSEWHERE = ("ledger.", "nobody.", f"{EVIL}.", f"{ME}.")
"""Address prefixes without a consumer in this mesh."""
_MB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Wish:
    """Parameters of a run. `by_the_clock`: check rates and latencies too.

    `reached`: required hits of each judged branch.
    """

    seed: int
    seconds: float
    broker: str = "rabbitmq"
    rate: float = 85.0  # mutated messages per second
    honest: float = 6.0  # requests per second
    quiet: float = 10.0  # seconds of honest traffic alone before the fuzz
    patience: float = 120.0  # seconds to wait for the last answers, and then for empty queues
    by_the_clock: bool = True
    reached: int = reports.REACHED
    only: str = ""  # recipes whose names contain this
    keep: Path | None = None


@dataclass
class Running:
    """A run in progress, for display."""

    wish: Wish
    ledger: Ledger
    crew: Crew
    sent: dict[str, str] = field(default_factory=dict)  # recipes by mark
    began: float = field(default_factory=time.time)
    phase: str = "quiet"


Side = RabbitSide | RowSide
Watch = Callable[[Running], None]


async def run(
    wish: Wish, rabbit: RabbitServer | None, postgres: PostgresServer | None, watch: Watch | None = None
) -> Report:
    """Run on the given servers, or on SQLite files without servers.

    `watch` gets the run when it starts.
    """
    folder = Path(tempfile.mkdtemp(prefix="meshpoint-fuzz-"))
    try:
        async with _database(postgres, folder) as db_url:
            return await _run(wish, rabbit, db_url, folder, watch)
    finally:
        if wish.keep is not None:
            await asyncio.to_thread(shutil.copytree, folder, wish.keep, dirs_exist_ok=True)
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


async def _run(wish: Wish, rabbit: RabbitServer | None, db_url: str, folder: Path, watch: Watch | None) -> Report:
    namespace, ledger = f"fuzz-{new_id()}", Ledger()
    queue = folder / "queue.db"
    broker_url = rabbit.url if rabbit is not None else f"sqlite:///{queue}"
    world = World(random.Random(wish.seed))
    timeout = 10.0 if wish.by_the_clock else _BUSY
    mesh = MeshSettings(namespace=namespace, broker_url=broker_url, publish_timeout_seconds=timeout)
    broker = wiring.make_broker(mesh)
    config = partial(configuration, namespace, timeout)
    crew = Crew(folder, config, broker_url, db_url, seed=wish.seed, size=2, serve=main)
    stream = Stream(
        broker,
        ledger,
        seed=wish.seed,
        rate=wish.honest,
        in_flight=100,
        agents=HONEST,
        wanted=lambda number, chance: Work(number=number, rounds=1 + chance.randrange(2)),
        login=LOGIN if rabbit is not None else None,
    )
    async with crew, stream:
        running = Running(wish, ledger, crew)
        if watch is not None:
            watch(running)
        side: Side = RabbitSide(rabbit, namespace, world) if rabbit else RowSide(str(queue), namespace, world)
        sessions: AbstractAsyncContextManager[SecondSession | None] = (
            SecondSession(db_url) if rabbit else nullcontext()
        )
        async with side, sessions as session:
            fuzz = Fuzz(wish, running, side, world, session, folder)
            await fuzz.run(stream)
            running.phase = "last answers"
            await stream.all_answered(wish.patience)
            running.phase = "last messages"
            await fuzz.until_settled(wish.patience)
            fuzz.measure()
            fuzz.look_at_connections()
        running.phase = "drain"
        await crew.drain()
    running.phase = "verdict"
    return await asyncio.to_thread(fuzz.report)


class Fuzz:
    """Sends the recipes' messages alongside the honest stream, and measures."""

    def __init__(
        self,
        wish: Wish,
        running: Running,
        side: Side,
        world: World,
        session: SecondSession | None,
        folder: Path,
    ) -> None:
        self._wish, self._running, self._side, self._world, self._session = wish, running, side, world, session
        self._folder = folder
        unusable = ROWS.keys() if isinstance(side, RabbitSide) else FORGED | ON_SERVERS
        usable = [name for name in RECIPES if name not in unusable]
        self._spawned: set[asyncio.Task[None]] = set()
        self._cook = Cook(world, [name for name in usable if wish.only in name])
        self._memory: dict[str, list[float]] = {}
        self._connections = Connections()
        self._times: dict[str, float] = {}
        self._messages = 0

    async def run(self, stream: Stream) -> None:
        """First honest traffic alone, then the fuzz."""
        wish, running = self._wish, self._running
        honest = asyncio.create_task(stream.run(wish.quiet + wish.seconds))
        self._times["quiet"] = time.time()
        await asyncio.sleep(wish.quiet)
        self._times["fuzz"] = time.time()
        running.phase = "fuzz"
        for post in running.crew.posts:
            post.signal(signal.SIGUSR1)
        self._connections = self._side.connections()
        await self._send(wish.seconds / 4)
        if not wish.by_the_clock:  # a busy machine lags, and its replicas have not warmed up yet
            await self.until_settled(_STILL)
        self.measure()
        await self._send(wish.seconds * 3 / 4)
        if not wish.by_the_clock:
            await self._until_reached(stream)
        self._times["end"] = time.time()
        await asyncio.gather(*self._spawned)
        await self._side.all_told()
        await self._side.open_full()
        await honest

    async def _until_reached(self, stream: Stream) -> None:
        """Send more messages, for a limited number of rounds, until each judged branch is reached."""
        for _ in range(_ROUNDS):
            await self.until_settled(_STILL)
            for post in self._running.crew.posts:
                post.signal(signal.SIGRTMIN)
            await asyncio.gather(self._send(_ROUND), stream.run(_ROUND))
            found = await asyncio.to_thread(reports.reached, self._folder, self._wish.reached, by_the_clock=False)
            if not found.few:
                return

    async def _send(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        start, number = loop.time(), 0
        while (now := loop.time()) < start + seconds:
            due = int((now - start) * self._wish.rate)
            while number < due:
                number += await self._one()
            await asyncio.sleep(_STEP)

    async def _one(self) -> int:
        made = self._cook.next()
        if made is not None and len(self._world.calls) < _CALLS and self._cook.made % 3 == 0 and not self._wish.only:
            made = None
        if made is None:  # no material for the recipe: cause more calls to answer
            letter = a_request(self._world, self._world.chance.choice(("asker", "doubter")))
            made = ("request: call the lying peer", Scene([letter]))
        name, scene = made
        mark = self._world.mark
        # no replica consumes the other addresses, so nothing there is accounted for
        if not scene.letters[0].key.startswith(ELSEWHERE):
            self._running.sent[mark] = name
        for delay, letter in scene.later:
            self._spawn(self._send_later(mark, name, letter, delay))
        try:
            hold = partial(self._hold, scene.hold)
            side, key = self._side, scene.letters[0].key
            if scene.worn and isinstance(side, RabbitSide) and key not in side.wearing:
                self._spawn(side.wear(mark, name, scene.letters, scene.worn, hold))
            else:
                await hold()
                for letter in scene.letters:
                    await self._side.send(mark, name, letter)
        except (OSError, UnicodeError) as error:
            raise RuntimeError(f"{name}: {error!r}") from error
        self._messages += len(scene.all)
        return len(scene.all)

    async def _hold(self, hold: Hold | None) -> None:
        if hold is not None and self._session is not None:
            await self._session.hold(hold)

    def _spawn(self, step: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(step)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)

    async def _send_later(self, mark: str, name: str, letter: Letter, delay: float) -> None:
        await asyncio.sleep(delay)
        await self._side.send(mark, name, letter)

    def measure(self) -> None:
        """Record the memory of each replica, in MB."""
        for post in self._running.crew.posts:
            if post.process is not None and post.process.pid is not None:
                used = psutil.Process(post.process.pid).memory_info().rss / _MB
                self._memory.setdefault(f"replica {post.number}", []).append(round(used, 1))

    def look_at_connections(self) -> None:
        """Record which connections were opened or lost since the fuzz began."""
        self._connections = self._side.connections().since(self._connections)

    async def until_settled(self, limit: float) -> None:
        """Return when all mutated messages are accounted for, or none more was for `limit`
        seconds.
        """
        missing, end = -1, 0.0
        while True:
            found = await asyncio.to_thread(self._account)
            if not found.missing:
                return
            if len(found.missing) != missing:
                missing, end = len(found.missing), time.time() + limit
            if time.time() > end:
                return
            await asyncio.sleep(1)

    def _account(self) -> reports.Accounts:
        side, sent = self._side, self._running.sent
        return reports.account(dict(sent), self._folder, set(side.refused), set(side.dead), set(side.replied))

    def report(self) -> Report:
        """Judge the run."""
        wish, ledger, crew = self._wish, self._running.ledger, self._running.crew
        # no logins: anyone who can write the file can answer under any agent's name
        if wish.broker == "sqlite":
            for entry in ledger.entries.values():
                entry.answers = [
                    each for each in entry.answers if getattr(each.outcome, "value", None) != FORGED_RESULT
                ]
        accounts = self._account()
        reached = reports.reached(self._folder, 0 if wish.only else wish.reached, by_the_clock=wish.by_the_clock)
        exits: Counter[str] = crew.exits
        quiet = reports.p99(ledger, self._times["quiet"] + wish.quiet / 4, self._times["fuzz"])
        fuzzed = reports.p99(ledger, self._times["fuzz"], self._times["end"])
        spent = self._times["end"] - self._times["fuzz"]
        connections = self._connections
        # Without a database, a copy of a request may also run in another replica.
        in_process = {id_ for id_, entry in ledger.entries.items() if entry.agent in IN_PROCESS}
        grown = max((used[-1] - used[0] for used in self._memory.values()), default=0.0)
        found = Report(
            broker=wish.broker,
            seed=wish.seed,
            seconds=wish.seconds,
            messages=self._messages,
            per_minute=round(self._messages * 60 / spent, 1),
            recipes=len(set(self._running.sent.values())),
            requests=len(ledger.entries),
            answers=ledger.answered,
            lost=len(ledger.open),
            wrong=len(ledger.wrong()),
            duplicated=len(ledger.duplicated(in_process)),
            fell=exits["fell"] + exits["did not start"],
            bad_drains=sum(number for kind, number in exits.items() if kind.startswith("drain ended")),
            reconnects=len(connections.opened),
            probes=connections.apart,
            lost_connections=len(connections.closed),
            connections=[*connections.opened, *connections.closed],
            p99_quiet=quiet,
            p99_fuzz=fuzzed,
            slower=round(fuzzed / quiet, 2) if quiet else 0.0,
            memory=self._memory,
            grown=round(grown, 1),
            accounts=dict(accounts.by),
            closings=dict(self._side.closings),
            unaccounted=accounts.missing,
            rows_held=self._session.held if self._session else 0,
            branches=reached.count,
            unreached=reached.few,
            defects=reached.defects,
            excluded=reached.excluded,
        )
        found.honest = [
            f"{entry.agent} {entry.task_id}: " + " | ".join(str(answer.outcome)[:300] for answer in entry.answers)
            for entry in [*ledger.open, *ledger.wrong(), *ledger.duplicated(in_process)]
        ]
        reports.judge(found, by_the_clock=wish.by_the_clock)
        return found
