"""The replicas: real processes, kept at strength. One that dies is followed by a new one in its place."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import yaml

from servers import Proxy

from .replica import HEAVY, Order, main

AGENTS = ("root", "middle", "leaf")
QUICK = {
    "stateless_checkpointing": True,
    "session_service": "sql",
    "lease_seconds": 2,
    "max_attempts": 1000,  # no request is to blame for what happens here
    "renew_interval_seconds": 0.5,
    "sweep_interval_seconds": 0.2,
    "settle_time_seconds": 1,
    "dispatch_lease_seconds": 1,
    "drain_timeout_seconds": 5,
    "checkpoint_retry_time_seconds": 2,
    "incompatible_pause_seconds": 0.5,  # after a working memory could not be had, too
    "db_pool_size": 3,
}
"""Timings at which faults show within seconds."""
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(HEAVY)
_FIRST_START = 120.0
"""Seconds for all replicas to serve, on servers that are up."""
_BREATH = 0.5
"""Seconds before a place is filled again whose replica did not come to serve."""


class CrewMissing(Exception):
    """The replicas did not come to serve; holds what they said."""


@dataclass
class Post:
    """One place in the crew, with a network of its own, and the process that holds it now."""

    number: int
    config: Path
    broker: Proxy
    database: Proxy
    process: ForkServerProcess | None = None
    serving: asyncio.Event = field(default_factory=asyncio.Event)
    frozen: bool = False
    told: signal.Signals | None = None
    incarnations: int = 0

    @property
    def fit(self) -> bool:
        """Whether a fault may strike here: its process serves."""
        return self.serving.is_set() and not self.frozen and self.told is None

    def signal(self, number: signal.Signals) -> None:
        """Send `number`, if there is still somebody to get it."""
        if self.process is not None and self.process.pid is not None:
            if number in {signal.SIGKILL, signal.SIGTERM}:
                self.told = number
                self.serving.clear()
            os.kill(self.process.pid, number)


class Crew:
    """`size` replicas, each serving every agent. An async context manager."""

    def __init__(
        self, folder: Path, namespace: str, broker_url: str, db_url: str, redis_url: str, *, seed: int, size: int
    ) -> None:
        self._folder, self._namespace, self._seed, self._size = folder, namespace, seed, size
        self._urls = broker_url, db_url
        self._redis_url = redis_url
        self._keepers: list[asyncio.Task[None]] = []
        self._ending = False
        self._changed = asyncio.Event()
        self.posts: list[Post] = []
        self.exits: Counter[str] = Counter()
        self.double = 0.03

    async def __aenter__(self) -> Crew:
        for number in range(self._size):
            broker, database = await Proxy(self._urls[0]).__aenter__(), await Proxy(self._urls[1]).__aenter__()
            self.posts.append(Post(number, self._configure(number, broker.url, database.url), broker, database))
        self._keepers = [asyncio.create_task(self._keep(post)) for post in self.posts]
        try:
            async with asyncio.timeout(_FIRST_START):
                await asyncio.gather(*(post.serving.wait() for post in self.posts))
        except TimeoutError as error:
            await self.__aexit__()
            raise CrewMissing(
                f"no full crew after {_FIRST_START:g} s: {dict(self.exits)}{self._last_words()}"
            ) from error
        return self

    async def __aexit__(self, *failure: object) -> None:
        self._ending = True
        for post in self.posts:
            post.signal(signal.SIGKILL)
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for post in self.posts:
            await post.broker.__aexit__(None, None, None)
            await post.database.__aexit__(None, None, None)

    async def drain(self) -> None:
        """End every replica with SIGTERM, for good."""
        self._ending = True
        for post in self.posts:
            post.signal(signal.SIGTERM)
        await asyncio.gather(*self._keepers)

    async def fit(self) -> list[Post]:
        """The places that a fault may strike, as soon as there is one."""
        while not (fit := [post for post in self.posts if post.fit]):
            self._changed.clear()
            await self._changed.wait()
        return fit

    def _last_words(self) -> str:
        logs = [path.read_text(errors="replace")[-500:] for path in sorted(self._folder.glob("*.log"))]
        return "".join(f"\n{log}" for log in logs[-2:])

    def _configure(self, number: int, broker_url: str, db_url: str) -> Path:
        agents = [
            {
                "name": name,
                "entrypoint": f"chaos.cast:{name}",
                "session_db_url": db_url,
                "memory_url": self._redis_url,
                **QUICK,
            }
            for name in AGENTS
        ]
        mesh = {"namespace": self._namespace, "broker_url": broker_url}
        path = self._folder / f"replica-{number}.yaml"
        path.write_text(yaml.safe_dump({"mesh": mesh, "agents": agents}))
        return path

    async def _keep(self, post: Post) -> None:
        while not self._ending:
            served = await self._hold(post)
            if not served and not self._ending:
                await asyncio.sleep(_BREATH)

    async def _hold(self, post: Post) -> bool:
        """Fill the place once, until its process has ended; whether it served."""
        post.incarnations += 1
        post.told = None
        name = f"{post.number}-{post.incarnations:04}"
        order = Order(post.config, self._folder, name, f"{self._seed} {name}", self.double)
        ours, theirs = _FORKS.Pipe()
        process = _FORKS.Process(target=main, args=(order, theirs))
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
        """Hear the process until its end of the pipe is closed; whether it served every agent."""
        agents = 0
        with ours:
            while True:
                await _readable(ours.fileno())
                try:
                    ours.recv_bytes()
                except (EOFError, OSError):
                    break
                agents += 1
                if agents == len(AGENTS) and post.told is None:
                    post.serving.set()
                    self._changed.set()
        post.serving.clear()
        return agents == len(AGENTS)

    def _note_exit(self, post: Post, name: str, code: int, served: bool) -> None:
        if post.told is signal.SIGKILL:
            kind = "killed"
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
