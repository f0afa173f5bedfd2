"""A replica whose working memory cannot be reached does not start: its tasks would hang."""

from __future__ import annotations

import asyncio
import socket

import pytest

from meshpoint import TaskExecutionContext, agent
from meshpoint.errors import MemoryUnavailable
from meshpoint.local import local_mesh


@agent("counter")
async def counter(ctx: TaskExecutionContext, n: int) -> int:
    return await ctx.memory.incrby("n", n)


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    return port


async def test_a_dead_memory_ends_the_start(closed_port: int) -> None:
    url = f"redis://127.0.0.1:{closed_port}"
    with pytest.raises(MemoryUnavailable, match=r"agent\.memory_url"):
        async with local_mesh(counter, memory_url=url, startup_timeout_seconds=0.1):
            await asyncio.Event().wait()


@pytest.mark.servers
async def test_a_memory_that_answers_does_not(redis_url: str) -> None:
    async with local_mesh(counter, memory_url=redis_url, startup_timeout_seconds=10) as mesh:
        await mesh.ask("counter", 1)
