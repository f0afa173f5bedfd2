"""A replica that cannot reach its working memory does not start, because its tasks would hang."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from meshpoint import TaskExecutionContext, agent
from meshpoint.adapters.redis import RedisWorkingMemory
from meshpoint.errors import ConfigurationError, MemoryUnavailable
from meshpoint.local import local_mesh
from servers import RedisServer, redis_client


@agent("counter")
async def count_up(ctx: TaskExecutionContext, n: int) -> int:
    return await ctx.memory.incr("n", n)


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


async def test_an_unreachable_memory_fails_the_start(closed_port: int) -> None:
    url = f"redis://127.0.0.1:{closed_port}"
    with pytest.raises(MemoryUnavailable, match=r"agent\.memory_url"):
        async with local_mesh(count_up, memory_url=url, startup_timeout_seconds=0.1):
            await asyncio.Event().wait()


@pytest.mark.servers
async def test_a_reachable_memory_lets_the_worker_start(redis_url: str) -> None:
    async with local_mesh(count_up, memory_url=redis_url, startup_timeout_seconds=10) as mesh:
        await mesh.call("counter", 1)


@pytest.fixture
async def restricted(own_redis: RedisServer) -> AsyncIterator[Callable[..., Awaitable[str]]]:
    """Factory for users with the given rights; returns their URL."""
    async with redis_client(own_redis.url) as admin:

        async def user(*rights: str) -> str:
            await admin.execute_command("ACL", "SETUSER", "limited", "on", ">secret", *rights)
            return own_redis.url.replace("redis://", "redis://limited:secret@")

        yield user
        await admin.execute_command("ACL", "DELUSER", "limited")
        await admin.config_set("maxmemory", "0")
        await admin.execute_command("REPLICAOF", "NO", "ONE")


@pytest.mark.parametrize(
    "rights",
    [
        ("~*", "-@all"),
        ("~*", "+@read", "+@connection"),
        ("~*", "+@all", "-@scripting"),
        ("~other:*", "+@all"),
        ("~*", "+@all", "<secret", ">changed"),
    ],
)
async def test_a_memory_without_write_permission_fails_the_start(
    restricted: Callable[..., Awaitable[str]], rights: tuple[str, ...]
) -> None:
    with pytest.raises(
        ConfigurationError, match=r"agent\.memory_url: Redis refuses: .+; correct the URL"
    ):
        async with local_mesh(count_up, memory_url=await restricted(*rights)):
            await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (("CONFIG", "SET", "maxmemory", "1"), "maxmemory"),
        (("REPLICAOF", "127.0.0.1", "1"), "read only|READONLY"),
    ],
)
async def test_a_read_only_memory_fails_the_start_with_its_reason(
    own_redis: RedisServer,
    restricted: Callable[..., Awaitable[str]],
    command: tuple[str, ...],
    reason: str,
) -> None:
    async with redis_client(own_redis.url) as admin:
        await admin.execute_command(*command)
    with pytest.raises(MemoryUnavailable, match=reason):
        async with local_mesh(count_up, memory_url=own_redis.url, startup_timeout_seconds=0.1):
            await asyncio.Event().wait()


async def test_a_memory_that_is_backing_off_repeats_the_reason(closed_port: int) -> None:
    memory = RedisWorkingMemory(f"redis://127.0.0.1:{closed_port}", namespace="test")
    for _ in range(2):
        with pytest.raises(MemoryUnavailable, match=r"refused|Connect call failed"):
            await memory.open()
    await memory.close()
