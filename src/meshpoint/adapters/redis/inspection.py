"""What `meshpoint doctor` reads of a Redis."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ResponseError

from meshpoint.adapters.redis.connection import RedisConnection
from meshpoint.errors import Unavailable
from meshpoint.ports.inspection import CacheFacts


class RedisInspection:
    """`meshpoint.ports.inspection.CacheInspection`.

    Args:
        url: The Redis.
        setting: The configuration key of `url`, named in errors.
        namespace: The namespace of the mesh, whose keys the login must be able to write.
        timeout: Limit for each request.
    """

    def __init__(self, url: str, *, setting: str, namespace: str, timeout: timedelta) -> None:
        self._key = f"{namespace}:doctor".encode()
        self._connection = RedisConnection(
            url,
            setting=setting,
            unavailable=Unavailable,
            timeout=timeout,
            retry_after=timedelta(),
            connections=1,
        )

    async def read(self) -> CacheFacts:
        """Check that the login may run scripts on the namespace's keys, and read all facts.

        Raises:
            ConfigurationError: Redis refuses the login, or it lacks a permission.
            Unavailable: Redis does not answer.
        """
        await self._connection.check_login(self._key)
        memory = await self._info("memory")
        persistence = await self._info("persistence")
        eviction = memory.get("maxmemory_policy")
        seconds, microseconds = await self._connection.execute("its clock", lambda r: r.time())
        now = datetime.fromtimestamp(seconds, UTC) + timedelta(microseconds=microseconds)
        return CacheFacts(
            None if eviction is None else str(eviction),
            True if persistence.get("aof_enabled") == 1 else await self._saves(),
            now,
        )

    async def close(self) -> None:
        """Disconnect."""
        await self._connection.close()

    async def _saves(self) -> bool | None:
        """Whether Redis writes snapshots to disk; `None` if the login may not read that."""

        async def read(redis: Redis) -> Any:
            try:
                return await redis.config_get("save")
            except (NoPermissionError, ResponseError):  # managed services have no CONFIG
                return None

        found = await self._connection.execute("its settings", read)
        return None if found is None else bool(found.get("save"))

    async def _info(self, section: str) -> dict[str, Any]:
        async def read(redis: Redis) -> Any:
            try:
                return await redis.info(section)
            except (NoPermissionError, ResponseError):
                return {}

        found: dict[str, Any] = await self._connection.execute("its settings", read)
        return found
