"""A second database session that locks task rows while messages for them arrive."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Self

import asyncpg

from .recipes import Hold

_MOST = 8
_PAUSE = 0.05
_LOOKS = 40
_INSERT = """
    INSERT INTO agent_paused_tasks
           (logical_task_id, agent_name, status, generation, fence, run_id, attempt, wake_at, checkpointed_at)
    VALUES ($1, 'nobody', 'running', 0, 0, '', 0, 0, 0) ON CONFLICT DO NOTHING RETURNING 1"""
_LOCK = "SELECT 1 FROM agent_paused_tasks WHERE logical_task_id = $1 FOR UPDATE"


class SecondSession:
    """Up to `_MOST` connections, each holding one lock for a while. Nothing is ever committed."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._holding: set[asyncio.Task[None]] = set()
        self.held = 0

    async def __aenter__(self) -> Self:
        self._pool = await asyncpg.create_pool(
            self._url, min_size=0, max_size=_MOST, server_settings={"lock_timeout": "500ms"}
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*self._holding)
        await self._pool.close()

    async def hold(self, hold: Hold) -> None:
        """Hold a lock as `hold` says. Without a delay, return only once it is held."""
        if len(self._holding) >= _MOST:
            return
        held = asyncio.Event()
        task = asyncio.create_task(self._held(hold, held))
        self._holding.add(task)
        task.add_done_callback(self._holding.discard)
        if not hold.after:
            await held.wait()

    async def _held(self, hold: Hold, held: asyncio.Event) -> None:
        try:
            await asyncio.sleep(hold.after)
            async with self._pool.acquire() as connection:
                transaction = connection.transaction()
                await transaction.start()
                try:
                    if await self._row(connection, hold):
                        self.held += 1
                        held.set()
                        await asyncio.sleep(hold.seconds)
                finally:
                    await transaction.rollback()
        finally:
            held.set()

    async def _row(self, connection: asyncpg.Connection, hold: Hold) -> bool:
        with suppress(asyncpg.LockNotAvailableError):
            if hold.unborn:
                return await connection.fetchval(_INSERT, hold.task_id) is not None
            for _ in range(_LOOKS if hold.after else 1):
                if await connection.fetchval(_LOCK, hold.task_id):
                    return True
                await asyncio.sleep(_PAUSE)
        return False
