"""Applies the planned faults to replicas, servers and networks, and keeps a log of them."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from redis.asyncio import Redis

from meshpoint.ports.broker import Broker
from servers import PostgresServer, PrivateServer, RabbitServer, RedisServer

from . import outsiders
from .crew import Crew, Post
from .plan import Fault, Kind
from .stream import Stream

_STUBBORN_STARTS = 1.0
"""Seconds until the stubborn code runs."""


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault that was applied: `what`, from `at` until `until` (both as `time.time()`)."""

    kind: Kind
    what: str
    at: float
    until: float


@dataclass
class Strikes:
    """The faults of one run."""

    crew: Crew
    rabbit: RabbitServer
    postgres: PostgresServer
    redis: RedisServer
    stream: Stream
    broker: Broker
    db_url: str
    namespace: str
    log: list[Strike] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    going_on: set[str] = field(default_factory=set)
    _broker: asyncio.Lock = field(default_factory=asyncio.Lock)
    _database: asyncio.Lock = field(default_factory=asyncio.Lock)
    _memory: asyncio.Lock = field(default_factory=asyncio.Lock)
    _rolling: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, faults: list[Fault]) -> None:
        """Strike at the planned times. Returns when the last fault is over and all replicas serve."""
        start = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as going_on:
            for fault in faults:
                await asyncio.sleep(start + fault.at - asyncio.get_running_loop().time())
                going_on.create_task(self._strike(fault))
        await asyncio.gather(*(post.serving.wait() for post in self.crew.posts))

    async def _strike(self, fault: Fault) -> None:
        post = await self._aim(fault) if fault.kind in _TO_A_REPLICA else None
        began = time.time()
        name = f"{fault.kind.value} {began:.3f}"
        self.going_on.add(name)
        what = await self._do(fault, post)
        self.going_on.discard(name)
        self.counts[fault.kind.value] += 1
        self.log.append(Strike(fault.kind, what, began, time.time()))

    async def _aim(self, fault: Fault) -> Post:
        fit = await self.crew.fit()
        return fit[int(fault.aim * len(fit))]

    async def _do(self, fault: Fault, post: Post | None) -> str:
        if post is not None:
            incarnation = post.incarnations
            await _TO_A_REPLICA[fault.kind](post, fault)
            return f"replica {post.number}-{incarnation:04}"
        if fault.kind is Kind.BROKER:
            return await self._restart(self._broker, self.rabbit, fault)
        if fault.kind is Kind.DATABASE:
            return await self._restart(self._database, self.postgres, fault)
        if fault.kind is Kind.REDIS:
            return await self._restart(self._memory, self.redis, fault)
        if fault.kind in _FROM_OUTSIDE:
            return await _FROM_OUTSIDE[fault.kind](self, fault)
        if fault.kind is Kind.FLUSH:
            return await self._flush()
        return await self._roll()

    async def _restart(self, lock: asyncio.Lock, server: PrivateServer, fault: Fault) -> str:
        async with lock:
            await server.stop(immediate=fault.immediate)
            await asyncio.sleep(fault.seconds)
            await server.start()
        how = "immediate" if fault.immediate else "clean"
        self.counts[f"{fault.kind.value}, {how}"] += 1
        return f"{how}, down for {fault.seconds:.1f} s plus its start"

    async def _lock(self, fault: Fault) -> str:
        return await outsiders.hold_rows(self.db_url, fault.seconds)

    async def _bad_replies(self, fault: Fault) -> str:
        chance = random.Random(fault.aim)
        return await outsiders.bad_replies(self.rabbit.url, self.namespace, self.broker, chance, fault.seconds)

    async def _poison(self, fault: Fault) -> str:
        await self.stream.ask("viper")
        return "one request"

    async def _flood(self, fault: Fault) -> str:
        return await outsiders.flood(self.broker)

    async def _swallow(self, fault: Fault) -> str:
        """Keep every replica busy with code that ignores its cancel, then drain one."""
        for _ in range(2 * len(self.crew.posts)):
            await self.stream.ask("stubborn")
        await asyncio.sleep(_STUBBORN_STARTS)
        post = await self._aim(fault)
        post.signal(signal.SIGTERM)
        await post.serving.wait()
        return f"replica {post.number}"

    async def _flush(self) -> str:
        async with self._memory, Redis.from_url(self.redis.url) as redis:
            keys = await redis.dbsize()
            await redis.flushall()
        return f"{keys} keys"

    async def _roll(self) -> str:
        async with self._rolling:
            for post in self.crew.posts:
                await post.serving.wait()
                post.signal(signal.SIGTERM)
                await post.serving.wait()
        return "all replicas"


async def _kill(post: Post, fault: Fault) -> None:
    post.signal(signal.SIGKILL)


async def _freeze(post: Post, fault: Fault) -> None:
    process = post.process
    assert process is not None
    post.frozen = True
    post.signal(signal.SIGSTOP)
    await asyncio.sleep(fault.seconds)
    if post.process is process:
        post.signal(signal.SIGCONT)
        post.frozen = False


async def _cut_broker(post: Post, fault: Fault) -> None:
    post.broker.cut()


async def _cut_database(post: Post, fault: Fault) -> None:
    post.database.cut()


async def _silence(post: Post, fault: Fault) -> None:
    post.broker.silence()
    post.database.silence()
    await asyncio.sleep(fault.seconds)
    post.broker.resume()
    post.database.resume()


async def _step_clock(post: Post, fault: Fault) -> None:
    process = post.process
    post.signal(signal.SIGUSR2)
    await asyncio.sleep(fault.seconds)
    if post.process is process:
        post.signal(signal.SIGUSR2)


_FROM_OUTSIDE: dict[Kind, Callable[[Strikes, Fault], Awaitable[str]]] = {
    Kind.LOCK: Strikes._lock,
    Kind.REPLIES: Strikes._bad_replies,
    Kind.POISON: Strikes._poison,
    Kind.FLOOD: Strikes._flood,
    Kind.SWALLOW: Strikes._swallow,
}
_TO_A_REPLICA: dict[Kind, Callable[[Post, Fault], Awaitable[None]]] = {
    Kind.KILL: _kill,
    Kind.FREEZE: _freeze,
    Kind.CUT_BROKER: _cut_broker,
    Kind.CUT_DATABASE: _cut_database,
    Kind.SILENCE: _silence,
    Kind.CLOCK: _step_clock,
}
