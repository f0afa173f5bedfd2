"""A second database session that locks task rows while messages for them arrive."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Self

import asyncpg

from .recipes import RowLock

_MAX_LOCKS = 8
_RETRY_PAUSE = 0.05
_MAX_TRIES = 40
_INSERT = """
    INSERT INTO agent_paused_tasks
           (logical_task_id, agent_name, status, generation, fence, run_id, attempt,
            wake_at, checkpointed_at)
    VALUES ($1, 'nobody', 'running', 0, 0, '', 0, 0, 0) ON CONFLICT DO NOTHING RETURNING 1"""
_LOCK = "SELECT 1 FROM agent_paused_tasks WHERE logical_task_id = $1 FOR UPDATE"


class RowLocker:
    """Up to `_MAX_LOCKS` connections, each holding one lock for a while. None commits."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock_tasks: set[asyncio.Task[None]] = set()
        self.lock_count = 0

    async def __aenter__(self) -> Self:
        self._pool = await asyncpg.create_pool(
            self._url, min_size=0, max_size=_MAX_LOCKS, server_settings={"lock_timeout": "500ms"}
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*self._lock_tasks)
        await self._pool.close()

    async def hold(self, row_lock: RowLock) -> None:
        """Hold a lock as `hold` says. Without a delay, return only once it is held."""
        if len(self._lock_tasks) >= _MAX_LOCKS:
            return
        acquired = asyncio.Event()
        task = asyncio.create_task(self._keep_locked(row_lock, acquired))
        self._lock_tasks.add(task)
        task.add_done_callback(self._lock_tasks.discard)
        if not row_lock.delay:
            await acquired.wait()

    async def _keep_locked(self, row_lock: RowLock, acquired: asyncio.Event) -> None:
        try:
            await asyncio.sleep(row_lock.delay)
            async with self._pool.acquire() as connection:
                transaction = connection.transaction()
                await transaction.start()
                try:
                    if await self._try_lock(connection, row_lock):
                        self.lock_count += 1
                        acquired.set()
                        await asyncio.sleep(row_lock.seconds)
                finally:
                    await transaction.rollback()
        finally:
            acquired.set()

    async def _try_lock(self, connection: asyncpg.Connection, row_lock: RowLock) -> bool:
        with suppress(asyncpg.LockNotAvailableError):
            if row_lock.before_insert:
                return await connection.fetchval(_INSERT, row_lock.task_id) is not None
            for _ in range(_MAX_TRIES if row_lock.delay else 1):
                if await connection.fetchval(_LOCK, row_lock.task_id):
                    return True
                await asyncio.sleep(_RETRY_PAUSE)
        return False
