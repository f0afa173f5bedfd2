"""Restores while Redis is empty, holds garbage, is unresponsive or is dead."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass

from redis.asyncio import Redis

from benchmarks.restoring import NAMESPACE, Restorer, same
from meshpoint.adapters.redis import RedisCheckpointCache
from meshpoint.errors import MeshpointError
from meshpoint.subtasks.checkpointer import AgentCheckpointer, CheckpointSource
from servers import Proxy, RedisServer, copy_key


@dataclass(frozen=True, slots=True)
class Phase:
    """One restore of every operation with Redis in the state `name`. `longest` is in seconds."""

    name: str
    restores: int
    redis: int
    sql: int
    why: str
    differing: int
    lost: int
    longest: float


class _Later:
    """A clock in seconds that advances only when the cache should try Redis again."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


async def ordeal(restorer: Restorer, server: RedisServer) -> list[Phase]:
    """Restore every operation in each state of `server`, which is running again afterwards."""
    async with Proxy(server.url) as proxy:
        later = _Later()
        cache = RedisCheckpointCache(proxy.url, namespace=NAMESPACE, secret=copy_key, clock=later)
        checkpointer = AgentCheckpointer(restorer.store, cache)
        try:
            states = _states(restorer, server, proxy, cache, later)
            return [await _phase(name, restorer, checkpointer) async for name in states]
        finally:
            await cache.close()


async def _states(
    restorer: Restorer, server: RedisServer, proxy: Proxy, cache: RedisCheckpointCache, later: _Later
) -> AsyncIterator[str]:
    """Put Redis into each state in turn, and yield its name."""
    for checkpoint in restorer.saved:
        await cache.put(checkpoint)
    yield "has every copy"
    await restorer.flush()
    yield "flushed"
    yield "healed"
    async with Redis.from_url(server.url) as raw:
        async for key in raw.scan_iter():
            await raw.set(key, os.urandom(5000))
    yield "holds garbage"
    for checkpoint in restorer.saved:
        await cache.put(checkpoint.model_copy(update={"seq": checkpoint.seq - 1}))
    yield "holds old copies"
    proxy.silence()
    yield "silent"
    proxy.resume()
    later.seconds += 60
    yield "answers again"
    await server.kill()
    yield "killed"
    await server.start()
    later.seconds += 60
    yield "started again"


async def _phase(name: str, restorer: Restorer, checkpointer: AgentCheckpointer) -> Phase:
    sources: Counter[CheckpointSource] = Counter()
    reasons: Counter[str] = Counter()
    differing = lost = 0
    longest = 0.0
    for checkpoint in restorer.saved:
        begun = time.perf_counter()
        try:
            found = await checkpointer.restore(checkpoint.operation_id, checkpoint.agent, seq=checkpoint.seq)
        except MeshpointError:
            found = None
        longest = max(longest, time.perf_counter() - begun)
        if found is None:
            lost += 1
            continue
        sources[found.source] += 1
        differing += not same(found, checkpoint)
        if found.fallback is not None:
            reasons[found.fallback] += 1
    why = ", ".join(f"{reason} {count}" for reason, count in reasons.items())
    count = len(restorer.saved)
    return Phase(
        name, count, sources[CheckpointSource.REDIS], sources[CheckpointSource.SQL], why, differing, lost, longest
    )
