"""Write access to Redis can destroy copies, but not forge them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from hashlib import blake2b

import pytest
import zstandard
from redis.asyncio import Redis

from meshpoint import TaskExecutionContext, agent
from meshpoint.adapters.redis.seal import SIZE
from meshpoint.local import local_mesh
from meshpoint.model.ids import TaskId, new_id
from meshpoint.model.outcomes import Failed, Ok
from meshpoint.operations import Operations

pytestmark = pytest.mark.servers


async def fetch(city: str) -> str:
    return f"honest news of {city}"


BROKEN = [True]


async def publish(news: str) -> str:
    if BROKEN[0]:
        raise ConnectionError("the printer does not answer")
    return f"printed: {news}"


@agent("press")
async def press(ctx: TaskExecutionContext, city: str) -> str:
    news = await ctx.subtask("fetch", fetch, city)
    return await ctx.subtask("publish", publish, news)


def previous_format(content: bytes) -> bytes:
    """A copy as the previous release wrote it, behind a digest that anyone can compute."""
    body = b"\x00" + content
    return blake2b(body, digest_size=16).hexdigest().encode() + b"\n" + body


def with_unkeyed_code(content: bytes) -> bytes:
    body = b"\x00" + content
    return blake2b(body, digest_size=SIZE).digest() + body


@pytest.mark.parametrize("forge", [previous_format, with_unkeyed_code])
async def test_a_forged_copy_does_not_change_a_deliverable(
    postgres_url: str, redis_url: str, forge: Callable[[bytes], bytes]
) -> None:
    BROKEN[0] = True
    namespace, task_id = f"m{new_id()}", TaskId(new_id())
    async with (
        local_mesh(press, db_url=postgres_url, namespace=namespace, checkpoint_cache_url=redis_url) as mesh,
        Redis.from_url(redis_url) as redis,
    ):
        assert isinstance((await (await mesh.send("press", "Rome", task_id=task_id))).outcome, Failed)
        key = f"{namespace}:checkpoint:{task_id}:press"
        copy = await redis.get(key)
        assert isinstance(copy, bytes)
        marker, content = copy[SIZE : SIZE + 1], copy[SIZE + 1 :]
        content = zstandard.decompress(content) if marker == b"\x01" else content
        assert b"honest news" in content
        await redis.set(key, forge(content.replace(b"honest news", b"forged news")), ex=timedelta(hours=1))
        BROKEN[0] = False
        async with Operations(postgres_url, namespace=namespace) as operations:
            await operations.resume(task_id)
            assert await operations.wait(task_id) == Ok("printed: honest news of Rome")
