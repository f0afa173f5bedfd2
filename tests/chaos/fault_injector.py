"""Applies the planned faults to replicas, servers and networks, and keeps a log of them."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from redis.asyncio import Redis

from meshpoint.ports.broker import Broker
from servers import PostgresServer, PrivateServer, RedisServer

from . import external_faults
from .fault_plan import Fault, FaultKind
from .load_generator import LoadGenerator
from .queue_server import QueueServer
from .replica_pool import ReplicaPool, ReplicaSlot

_STUBBORN_START_SECONDS = 1.0
"""Seconds until the stubborn code runs."""


@dataclass(frozen=True, slots=True)
class AppliedFault:
    """A fault that was applied, with the `time.time()` of its start and end."""

    kind: FaultKind
    description: str
    started_at: float
    ended_at: float


@dataclass
class FaultInjector:
    """The faults of one run."""

    pool: ReplicaPool
    queues: QueueServer
    postgres: PostgresServer
    redis: RedisServer
    generator: LoadGenerator
    broker: Broker
    db_url: str
    namespace: str
    applied: list[AppliedFault] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    active: set[str] = field(default_factory=set)
    _locks: defaultdict[PrivateServer, asyncio.Lock] = field(
        default_factory=lambda: defaultdict(asyncio.Lock)
    )
    _rolling_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, faults: list[Fault]) -> None:
        """Strike at the planned times.

        Returns when the last fault is over and all replicas serve.
        """
        start = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            for fault in faults:
                await asyncio.sleep(start + fault.at - asyncio.get_running_loop().time())
                group.create_task(self._apply(fault))
        await asyncio.gather(*(slot.serving.wait() for slot in self.pool.slots))

    async def _apply(self, fault: Fault) -> None:
        slot = await self._pick_slot(fault) if fault.kind in _REPLICA_FAULTS else None
        started_at = time.time()
        name = f"{fault.kind.value} {started_at:.3f}"
        self.active.add(name)
        description = await self._inject(fault, slot)
        self.active.discard(name)
        self.counts[fault.kind.value] += 1
        self.applied.append(AppliedFault(fault.kind, description, started_at, time.time()))

    async def _pick_slot(self, fault: Fault) -> ReplicaSlot:
        serving = await self.pool.wait_for_serving()
        return serving[int(fault.target * len(serving))]

    async def _inject(self, fault: Fault, slot: ReplicaSlot | None) -> str:
        if slot is not None:
            incarnation = slot.incarnation
            await _REPLICA_FAULTS[fault.kind](slot, fault)
            return f"replica {slot.number}-{incarnation:04}"
        if fault.kind is FaultKind.BROKER_RESTART:
            return await self._restart(self.queues.server, fault)
        if fault.kind is FaultKind.DATABASE_RESTART:
            return await self._restart(self.postgres, fault)
        if fault.kind is FaultKind.REDIS_RESTART:
            return await self._restart(self.redis, fault)
        if fault.kind in _EXTERNAL_FAULTS:
            return await _EXTERNAL_FAULTS[fault.kind](self, fault)
        if fault.kind is FaultKind.REDIS_FLUSH:
            return await self._flush_redis()
        return await self._roll_replicas()

    async def _restart(self, server: PrivateServer, fault: Fault) -> str:
        async with self._locks[server]:
            await server.stop(immediate=fault.immediate)
            await asyncio.sleep(fault.duration)
            await server.start()
        how = "immediate" if fault.immediate else "clean"
        self.counts[f"{fault.kind.value}, {how}"] += 1
        return f"{how}, down for {fault.duration:.1f} s plus its start"

    async def _lock_rows(self, fault: Fault) -> str:
        return await external_faults.lock_rows(self.db_url, fault.duration)

    async def _bad_replies(self, fault: Fault) -> str:
        rng = random.Random(fault.target)
        return await external_faults.send_with_bad_reply_queues(
            self.queues, self.namespace, self.broker, rng, fault.duration
        )

    async def _poison(self, fault: Fault) -> str:
        await self.generator.send_extra("viper")
        return "one request"

    async def _flood(self, fault: Fault) -> str:
        return await external_faults.send_flood(self.broker)

    async def _ignore_cancel(self, fault: Fault) -> str:
        """Keep every replica busy with code that ignores its cancel, then drain one."""
        for _ in range(2 * len(self.pool.slots)):
            await self.generator.send_extra("stubborn")
        await asyncio.sleep(_STUBBORN_START_SECONDS)
        slot = await self._pick_slot(fault)
        slot.signal(signal.SIGTERM)
        await slot.serving.wait()
        return f"replica {slot.number}"

    async def _flush_redis(self) -> str:
        async with self._locks[self.redis], Redis.from_url(self.redis.url) as redis:
            keys = await redis.dbsize()
            await redis.flushall()
        return f"{keys} keys"

    async def _roll_replicas(self) -> str:
        async with self._rolling_lock:
            for slot in self.pool.slots:
                await slot.serving.wait()
                slot.signal(signal.SIGTERM)
                await slot.serving.wait()
        return "all replicas"


async def _kill(slot: ReplicaSlot, fault: Fault) -> None:
    slot.signal(signal.SIGKILL)


async def _freeze(slot: ReplicaSlot, fault: Fault) -> None:
    process = slot.process
    assert process is not None
    slot.frozen = True
    slot.signal(signal.SIGSTOP)
    await asyncio.sleep(fault.duration)
    if slot.process is process:
        slot.signal(signal.SIGCONT)
        slot.frozen = False


async def _cut_broker(slot: ReplicaSlot, fault: Fault) -> None:
    slot.broker.cut()


async def _cut_database(slot: ReplicaSlot, fault: Fault) -> None:
    slot.database.cut()


async def _silence(slot: ReplicaSlot, fault: Fault) -> None:
    slot.broker.silence()
    slot.database.silence()
    await asyncio.sleep(fault.duration)
    slot.broker.resume()
    slot.database.resume()


async def _step_clock(slot: ReplicaSlot, fault: Fault) -> None:
    process = slot.process
    slot.signal(signal.SIGUSR2)
    await asyncio.sleep(fault.duration)
    if slot.process is process:
        slot.signal(signal.SIGUSR2)


_EXTERNAL_FAULTS: dict[FaultKind, Callable[[FaultInjector, Fault], Awaitable[str]]] = {
    FaultKind.LOCKED_ROWS: FaultInjector._lock_rows,
    FaultKind.BAD_REPLY_QUEUES: FaultInjector._bad_replies,
    FaultKind.POISON: FaultInjector._poison,
    FaultKind.FLOOD: FaultInjector._flood,
    FaultKind.IGNORED_CANCEL: FaultInjector._ignore_cancel,
}
_REPLICA_FAULTS: dict[FaultKind, Callable[[ReplicaSlot, Fault], Awaitable[None]]] = {
    FaultKind.KILL: _kill,
    FaultKind.FREEZE: _freeze,
    FaultKind.CUT_BROKER: _cut_broker,
    FaultKind.CUT_DATABASE: _cut_database,
    FaultKind.SILENCE: _silence,
    FaultKind.CLOCK_STEP: _step_clock,
}
