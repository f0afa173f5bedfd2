"""Real replica processes. A replica that ends is replaced."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import yaml

from servers import Proxy

from .replica import HEAVY, Order, main

AGENTS = ("root", "middle", "leaf", "viper", "stubborn")
QUICK = {
    "stateless_checkpointing": True,
    "session_service": "sql",
    "lease_seconds": 2,
    "max_attempts": 1000,  # the faults, not the requests, cause the failures here
    "renew_interval_seconds": 0.5,
    "sweep_interval_seconds": 0.2,
    "settle_time_seconds": 1,
    "dispatch_lease_seconds": 1,
    "drain_timeout_seconds": 5,
    "checkpoint_retry_time_seconds": 2,
    "incompatible_pause_seconds": 0.5,  # also the pause after a working memory was unavailable
    "db_pool_size": 3,
}
"""Timings that make faults show within seconds."""


def configuration(namespace: str, redis_url: str, broker_url: str, db_url: str) -> dict[str, Any]:
    """Configuration of a replica under chaos."""
    own = {"session_db_url": db_url, "memory_url": redis_url, **QUICK}
    few = {"max_attempts": 2}  # `viper` causes its own failures
    agents = [
        {"name": name, "entrypoint": f"chaos.cast:{name}", **own, **(few if name == "viper" else {})}
        for name in AGENTS
    ]
    return {"mesh": {"namespace": namespace, "broker_url": broker_url}, "agents": agents}


_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(HEAVY)
_FIRST_START = 120.0
"""Seconds until all replicas must serve, with all servers up."""
_LONGEST_DRAIN = 40.0
"""Seconds: four times what the configuration allows."""
LATE = "drain took too long"
"""Exit kind of a replica that had to be killed."""
_BREATH = 0.5
"""Seconds before a replica that did not get as far as serving is replaced."""


class CrewMissing(Exception):
    """The replicas did not start; carries their last output."""


@dataclass
class Post:
    """One place in the crew: its proxies and the process that fills it now."""

    number: int
    config: Path
    broker: Proxy
    database: Proxy
    process: ForkServerProcess | None = None
    serving: asyncio.Event = field(default_factory=asyncio.Event)
    frozen: bool = False
    told: signal.Signals | None = None
    told_at: float = 0.0
    incarnations: int = 0

    @property
    def fit(self) -> bool:
        """Whether its process serves, so that a fault may strike it."""
        return self.serving.is_set() and not self.frozen and self.told is None

    def signal(self, number: signal.Signals) -> None:
        """Send `number` unless the process has ended, which its keeper may not have noticed yet."""
        if self.process is None or self.process.pid is None:
            return
        if number is signal.SIGTERM:
            self.told_at = time.monotonic()
        try:
            os.kill(self.process.pid, number)
        except ProcessLookupError:
            return
        if number in {signal.SIGKILL, signal.SIGTERM}:
            self.told = self.told or number
            self.serving.clear()


Configure = Callable[[str, str], dict[str, Any]]
"""Makes a replica's configuration from its broker URL and database URL."""


class Crew:
    """`size` replicas, each serving every agent of `configure`. An async context manager."""

    def __init__(
        self,
        folder: Path,
        configure: Configure,
        broker_url: str,
        db_url: str,
        *,
        seed: int,
        size: int,
        serve: Callable[[Order, Connection], None] = main,
    ) -> None:
        self._folder, self._configured, self._seed, self._size, self._serve = folder, configure, seed, size, serve
        self._urls = broker_url, db_url
        self._agents = [each["name"] for each in configure(broker_url, db_url)["agents"]]
        self._keepers: list[asyncio.Task[None]] = []
        self._ending = False
        self._changed = asyncio.Event()
        self.posts: list[Post] = []
        self.exits: Counter[str] = Counter()
        self.double = 0.03

    async def __aenter__(self) -> Crew:
        for number in range(self._size):
            broker, database = await Proxy(self._urls[0]).__aenter__(), await Proxy(self._urls[1]).__aenter__()
            self.posts.append(Post(number, self._configure(number, broker, database), broker, database))
        self._keepers = [asyncio.create_task(self._keep(post)) for post in self.posts]
        try:
            async with asyncio.timeout(_FIRST_START):
                await asyncio.gather(*(post.serving.wait() for post in self.posts))
        except TimeoutError as error:
            await self.__aexit__()
            raise CrewMissing(
                f"not all replicas serve after {_FIRST_START:g} s: {dict(self.exits)}{self._last_words()}"
            ) from error
        return self

    async def __aexit__(self, *failure: object) -> None:
        self._ending = True
        self._kill_all()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for post in self.posts:
            await post.broker.__aexit__(None, None, None)
            await post.database.__aexit__(None, None, None)

    async def drain(self) -> None:
        """End every replica with SIGTERM.

        A replica that does not end is killed and counts as a failed drain.
        """
        self._ending = True
        for post in self.posts:
            post.signal(signal.SIGTERM)
        _, late = await asyncio.wait(self._keepers, timeout=_LONGEST_DRAIN + 1)
        if late:
            self._kill_all()
        await asyncio.gather(*self._keepers)

    def _kill_all(self) -> None:
        for post in self.posts:
            post.signal(signal.SIGKILL)

    async def fit(self) -> list[Post]:
        """Wait until at least one replica may be struck, and return all of them."""
        while not (fit := [post for post in self.posts if post.fit]):
            self._changed.clear()
            await self._changed.wait()
        return fit

    def _last_words(self) -> str:
        logs = [path.read_text(errors="replace")[-500:] for path in sorted(self._folder.glob("*.log"))]
        return "".join(f"\n{log}" for log in logs[-2:])

    def _configure(self, number: int, broker: Proxy, database: Proxy) -> Path:
        broker_url, db_url = self._urls
        through = [url if url.startswith("sqlite:") else proxy.url
                   for url, proxy in ((broker_url, broker), (db_url, database))]  # fmt: skip
        path = self._folder / f"replica-{number}.yaml"
        path.write_text(yaml.safe_dump(self._configured(*through)))
        return path

    async def _keep(self, post: Post) -> None:
        while not self._ending:
            served = await self._hold(post)
            if not served and not self._ending:
                await asyncio.sleep(_BREATH)

    async def _hold(self, post: Post) -> bool:
        """Run one process in this place until it ends; return whether it served every agent."""
        post.incarnations += 1
        post.told = None
        name = f"{post.number}-{post.incarnations:04}"
        order = Order(post.config, self._folder, name, f"{self._seed} {name}", self.double)
        ours, theirs = _FORKS.Pipe()
        process = _FORKS.Process(target=self._serve, args=(order, theirs))
        await asyncio.to_thread(process.start)
        theirs.close()
        post.process = process
        served = await self._listen(post, ours)
        await _readable(process.sentinel)
        process.join()
        post.process = None
        self._note_exit(post, name, process.exitcode or 0, served)
        process.close()
        post.frozen = False
        return served

    async def _listen(self, post: Post, ours: Connection) -> bool:
        """Read the process's pipe until it closes; return whether it served every agent."""
        agents = 0
        with ours:
            while True:
                await _readable(ours.fileno())
                try:
                    ours.recv_bytes()
                except (EOFError, OSError):
                    break
                agents += 1
                if agents == len(self._agents) and post.told is None:
                    post.serving.set()
                    self._changed.set()
        post.serving.clear()
        return agents == len(self._agents)

    def _note_exit(self, post: Post, name: str, code: int, served: bool) -> None:
        if post.told is signal.SIGKILL:
            kind = "killed"
        elif post.told is signal.SIGTERM and time.monotonic() > post.told_at + _LONGEST_DRAIN:
            kind = LATE
        elif post.told is signal.SIGTERM:
            kind = "drained" if code == 0 else f"drain ended with {code}"
        else:
            kind = "fell" if served else "did not start"
        self.exits[kind] += 1
        with (self._folder / "exits").open("a") as file:
            file.write(f"{time.time():.3f} {name} {kind} {code}\n")


async def _readable(file: int) -> None:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(file, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(file)
