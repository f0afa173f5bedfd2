"""Copies of checkpoints in Redis.

Redis may be slow, full, away or empty at any time. Whoever asks then waits for one timeout at most; for a while after
it, nobody waits at all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.exceptions import RedisError, ResponseError

from meshpoint.adapters.redis.copies import decoded, encoded
from meshpoint.errors import CheckpointError, ConfigurationError
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.subtasks import AgentCheckpoint
from meshpoint.ports.checkpoint_cache import CacheUnavailable

_CONNECTIONS = 4
_CONNECTION: dict[str, Any] = {
    "socket_timeout": None,  # the timeout is ours
    "socket_connect_timeout": None,
    "protocol": 2,  # needs no greeting
}

# uvloop raises RuntimeError for a transport that was closed between two awaits; the driver ValueError where something
# that is no Redis answers.
_DRIVER_ERRORS = (RedisError, OSError, RuntimeError, ValueError, EOFError)


class RedisCheckpointCache:
    """One copy for each operation and agent, under `{namespace}:checkpoint:{analysis_id}:{agent_type}`.

    A request takes `timeout` at most. After one that failed, Redis is not asked for `retry_after`; then one request
    tries, while the others are still refused. `clock` counts seconds. For one event loop.

    Raises:
        ConfigurationError: `url` is none of a Redis.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str,
        ttl: timedelta = timedelta(days=7),
        timeout: timedelta = timedelta(milliseconds=500),
        retry_after: timedelta = timedelta(seconds=5),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis = Redis.from_pool(_pool(url))
        self._namespace = namespace
        self._ttl = ttl
        self._timeout = timeout.total_seconds()
        self._retry_after = retry_after.total_seconds()
        self._clock = clock
        self._retry_at: float | None = None  # set while Redis is taken to be away

    async def put(self, checkpoint: AgentCheckpoint) -> None:
        """Replace the copy, and let it live for `ttl`."""
        key = self._key(checkpoint.operation_id, checkpoint.agent)
        self._refuse_while_away(key)
        copy = await encoded(checkpoint)
        await self._ask(key, lambda: self._redis.set(key, copy, px=self._ttl))

    async def get(self, operation_id: TaskId, agent: AgentName) -> AgentCheckpoint | None:
        """The copy; None: there is none."""
        key = self._key(operation_id, agent)
        stored = await self._ask(key, lambda: self._redis.get(key))
        if stored is None:
            return None
        try:
            checkpoint = await decoded(stored)
        except CheckpointError as error:
            raise CheckpointError(f"{key}: {error}") from error
        if (checkpoint.operation_id, checkpoint.agent) != (operation_id, agent):
            raise CheckpointError(f"{key}: it is of {checkpoint.operation_id!r} and {checkpoint.agent!r}")
        return checkpoint

    async def forget(self, operation_id: TaskId, agent: AgentName) -> None:
        """Delete the copy."""
        key = self._key(operation_id, agent)
        await self._ask(key, lambda: self._redis.unlink(key))

    async def close(self) -> None:
        """Release every connection."""
        with suppress(*_DRIVER_ERRORS):
            async with asyncio.timeout(self._timeout):
                await self._redis.aclose()

    def _key(self, operation_id: TaskId, agent: AgentName) -> str:
        return f"{self._namespace}:checkpoint:{operation_id}:{agent}"

    async def _ask(self, key: str, request: Callable[[], Awaitable[Any]]) -> Any:
        """What Redis answers to `request`.

        Raises:
            CacheUnavailable: it did not, or is not asked now.
            CheckpointError: the key holds a list, a hash or the like.
        """
        self._refuse_while_away(key)
        if self._retry_at is not None:
            self._pause()  # for the others, while this one tries
        try:
            async with asyncio.timeout(self._timeout):
                answer = await request()
        except _DRIVER_ERRORS as error:
            if isinstance(error, ResponseError) and str(error).startswith("WRONGTYPE"):
                self._retry_at = None
                raise CheckpointError(f"{key}: it is no string") from error
            self._pause()
            problem = f"no answer within {self._timeout} s" if type(error) is TimeoutError else str(error)
            raise CacheUnavailable(f"Redis, {key}: {problem or type(error).__name__}") from error
        self._retry_at = None
        return answer

    def _refuse_while_away(self, key: str) -> None:
        if self._retry_at is not None and self._clock() < self._retry_at:
            raise CacheUnavailable(f"Redis, {key}: not asked, it did not answer lately")

    def _pause(self) -> None:
        self._retry_at = self._clock() + self._retry_after


def _pool(url: str) -> BlockingConnectionPool:
    try:
        pool = BlockingConnectionPool.from_url(url, max_connections=_CONNECTIONS, timeout=None, **_CONNECTION)
        pool.connection_kwargs["decode_responses"] = False  # whatever the URL says
        pool.connection_class(**pool.connection_kwargs)  # refuses unknown options; connects nowhere
    except (RedisError, ValueError, TypeError):
        # The cause is not told: it may hold the password.
        raise ConfigurationError(
            "agent.checkpoint_cache_url",
            "is no URL of a Redis",
            "write redis://user:password@host:6379/0, or rediss://… for TLS",
        ) from None
    return pool
