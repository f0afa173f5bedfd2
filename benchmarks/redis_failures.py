"""Restores while Redis is empty, holds garbage, is unresponsive or is dead."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass

from redis.asyncio import Redis

from benchmarks.restorer import NAMESPACE, Restorer, is_same
from meshpoint.adapters.redis import RedisCheckpointCache
from meshpoint.errors import MeshpointError
from meshpoint.subtasks.checkpointer import AgentCheckpointer, CheckpointSource
from servers import Proxy, RedisServer, redis_data_key


@dataclass(frozen=True, slots=True)
class Phase:
    """One restore of every operation with Redis in the state `name`."""

    name: str
    restores: int
    redis: int
    sql: int
    reason: str
    different: int
    lost: int
    longest_seconds: float


class _RetryClock:
    """A clock in seconds that advances only when the cache should try Redis again."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


async def restore_through_failures(restorer: Restorer, server: RedisServer) -> list[Phase]:
    """Restore every operation in each state of `server`, which is running again afterwards."""
    async with Proxy(server.url) as proxy:
        clock = _RetryClock()
        cache = RedisCheckpointCache(
            proxy.url, namespace=NAMESPACE, secret=redis_data_key, clock=clock
        )
        checkpointer = AgentCheckpointer(restorer.store, cache)
        try:
            states = _redis_states(restorer, server, proxy, cache, clock)
            return [await _run_phase(name, restorer, checkpointer) async for name in states]
        finally:
            await cache.close()


async def _redis_states(
    restorer: Restorer,
    server: RedisServer,
    proxy: Proxy,
    cache: RedisCheckpointCache,
    clock: _RetryClock,
) -> AsyncIterator[str]:
    """Put Redis into each state in turn, and yield its name."""
    for checkpoint in restorer.saved_checkpoints:
        await cache.put(checkpoint)
    yield "has every copy"
    await restorer.flush()
    yield "flushed"
    yield "healed"
    async with Redis.from_url(server.url) as raw:
        async for key in raw.scan_iter():
            await raw.set(key, os.urandom(5000))
    yield "holds garbage"
    for checkpoint in restorer.saved_checkpoints:
        await cache.put(checkpoint.model_copy(update={"seq": checkpoint.seq - 1}))
    yield "holds old copies"
    proxy.silence()
    yield "silent"
    proxy.resume()
    clock.seconds += 60
    yield "answers again"
    await server.kill()
    yield "killed"
    await server.start()
    clock.seconds += 60
    yield "started again"


async def _run_phase(name: str, restorer: Restorer, checkpointer: AgentCheckpointer) -> Phase:
    sources: Counter[CheckpointSource] = Counter()
    reasons: Counter[str] = Counter()
    differing = lost = 0
    longest = 0.0
    for checkpoint in restorer.saved_checkpoints:
        started_at = time.perf_counter()
        try:
            restored = await checkpointer.restore(
                checkpoint.operation_id, checkpoint.agent, seq=checkpoint.seq
            )
        except MeshpointError:
            restored = None
        longest = max(longest, time.perf_counter() - started_at)
        if restored is None:
            lost += 1
            continue
        sources[restored.source] += 1
        differing += not is_same(restored, checkpoint)
        if restored.fallback is not None:
            reasons[restored.fallback] += 1
    miss_reason = ", ".join(f"{reason} {count}" for reason, count in reasons.items())
    count = len(restorer.saved_checkpoints)
    return Phase(
        name,
        count,
        sources[CheckpointSource.REDIS],
        sources[CheckpointSource.SQL],
        miss_reason,
        differing,
        lost,
        longest,
    )
