"""Write access to Redis can destroy copies, but not forge them."""

from __future__ import annotations

import asyncio
import sys
import tracemalloc
from collections.abc import Callable
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path

import pytest
import zstandard
from redis.asyncio import Redis

from meshpoint import Peer, TaskExecutionContext, agent
from meshpoint.adapters.redis.seal import CODE_BYTES
from meshpoint.local import local_mesh
from meshpoint.model.ids import TaskId, new_id
from meshpoint.model.outcomes import Failed, Ok
from meshpoint.operations import Operations
from servers import redis_client

pytestmark = pytest.mark.servers


async def fetch(city: str) -> str:
    return f"honest news of {city}"


BROKEN_CODE = [True]


async def publish(updates: str) -> str:
    if BROKEN_CODE[0]:
        raise ConnectionError("the printer does not answer")
    return f"printed: {updates}"


@agent("press")
async def press_agent(ctx: TaskExecutionContext, city: str) -> str:
    updates = await ctx.subtask("fetch", fetch, city)
    return await ctx.subtask("publish", publish, updates)


GATES: list[tuple[asyncio.Event, asyncio.Event]] = []
"""Per test: an event set when `gate` is called, and an event that lets it answer."""


@agent("gate")
async def gate_agent(ctx: TaskExecutionContext, city: str) -> str:
    reached, opened = GATES[-1]
    reached.set()
    await opened.wait()
    return city


@agent("careful")
async def careful_agent(ctx: TaskExecutionContext, city: str) -> str:
    """Fail with the same subtask error again after the pause."""
    try:
        await ctx.subtask("publish", publish, city)
    except ConnectionError as error:
        await Peer("gate", str, str)(city)
        return str(error)
    return "printed"


def to_previous_format(content: bytes, marker: bytes = b"\x00") -> bytes:
    """A copy as the previous release wrote it, with a digest that anyone can compute."""
    body = marker + content
    return blake2b(body, digest_size=16).hexdigest().encode() + b"\n" + body


def to_unkeyed_format(content: bytes, marker: bytes = b"\x00") -> bytes:
    body = marker + content
    return blake2b(body, digest_size=CODE_BYTES).digest() + body


FORGERIES = pytest.mark.parametrize("forge", [to_previous_format, to_unkeyed_format])
Forge = Callable[..., bytes]


async def read_copy(redis: Redis, key: str) -> bytes:
    """The checkpoint in a copy."""
    while (copy := await redis.get(key)) is None:  # noqa: ASYNC110  Redis has no event for it
        await asyncio.sleep(0.01)
    assert isinstance(copy, bytes)
    marker, content = copy[CODE_BYTES : CODE_BYTES + 1], copy[CODE_BYTES + 1 :]
    return zstandard.decompress(content) if marker == b"\x03" else content


@FORGERIES
async def test_a_forged_copy_does_not_change_a_deliverable(
    postgres_url: str, redis_url: str, forge: Forge
) -> None:
    BROKEN_CODE[0] = True
    namespace, task_id = f"m{new_id()}", TaskId(new_id())
    async with (
        local_mesh(
            press_agent, db_url=postgres_url, namespace=namespace, checkpoint_cache_url=redis_url
        ) as mesh,
        redis_client(redis_url) as redis,
    ):
        assert isinstance(
            await (await mesh.send("press", "Rome", task_id=task_id)).outcome(), Failed
        )
        key = f"{namespace}:checkpoint:{task_id}:press"
        content = await read_copy(redis, key)
        assert b"honest news" in content
        await redis.set(
            key, forge(content.replace(b"honest news", b"forged news")), ex=timedelta(hours=1)
        )
        BROKEN_CODE[0] = False
        async with Operations(postgres_url, namespace=namespace) as operations:
            await operations.resume(task_id)
            assert await operations.wait(task_id) == Ok("printed: honest news of Rome")


@FORGERIES
async def test_a_forged_copy_is_not_decompressed(
    postgres_url: str, redis_url: str, forge: Forge
) -> None:
    BROKEN_CODE[0] = True
    namespace, task_id = f"m{new_id()}", TaskId(new_id())
    bomb = forge(zstandard.compress(bytes(400_000_000)), b"\x01")
    assert len(bomb) < 45_000
    async with (
        local_mesh(
            press_agent, db_url=postgres_url, namespace=namespace, checkpoint_cache_url=redis_url
        ) as mesh,
        redis_client(redis_url) as redis,
    ):
        assert isinstance(
            await (await mesh.send("press", "Rome", task_id=task_id)).outcome(), Failed
        )
        await redis.set(f"{namespace}:checkpoint:{task_id}:press", bomb, ex=timedelta(hours=1))
        BROKEN_CODE[0] = False
        tracemalloc.start()
        try:
            async with Operations(postgres_url, namespace=namespace) as operations:
                await operations.resume(task_id)
                assert await operations.wait(task_id) == Ok("printed: honest news of Rome")
            assert tracemalloc.get_traced_memory()[1] < 50_000_000
        finally:
            tracemalloc.stop()


@FORGERIES
async def test_a_forged_failure_imports_nothing(
    postgres_url: str,
    redis_url: str,
    forge: Forge,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "module_of_a_forger.py").write_text("Error = ValueError\n")
    monkeypatch.syspath_prepend(tmp_path)
    BROKEN_CODE[0] = True
    reached, opened = asyncio.Event(), asyncio.Event()
    GATES.append((reached, opened))
    namespace, task_id = f"m{new_id()}", TaskId(new_id())
    async with (
        local_mesh(
            careful_agent,
            gate_agent,
            db_url=postgres_url,
            namespace=namespace,
            checkpoint_cache_url=redis_url,
        ) as mesh,
        redis_client(redis_url) as redis,
    ):
        task = await mesh.send("careful", "Rome", task_id=task_id)
        await reached.wait()
        key = f"{namespace}:checkpoint:{task_id}:careful"
        content = await read_copy(redis, key)
        assert b"builtins:ConnectionError" in content
        forged = content.replace(b"builtins:ConnectionError", b"module_of_a_forger:Error")
        await redis.set(key, forge(forged), ex=timedelta(hours=1))
        opened.set()
        assert await task.outcome() == Ok("the printer does not answer")
    assert "module_of_a_forger" not in sys.modules
