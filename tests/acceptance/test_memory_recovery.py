"""An agent waits with 200 pages in memory; L1 and its replica are lost; no byte of them is."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis

from meshpoint.model.outcomes import Ok
from servers import RedisServer, redis_client

from .fork_server import ForkServer
from .mesh import Backends, Mesh
from .page_collector import digest_of

pytestmark = [pytest.mark.servers, pytest.mark.slow]

PAGES = 200
DAY_MS = 24 * 3600 * 1000
"""Lifetime in L1 of a running task's memory, in milliseconds; a waiting task's is longer."""


@pytest.fixture
async def mesh(production: Backends, fork_server: ForkServer) -> AsyncIterator[Mesh]:
    running = Mesh(production, fork_server)
    yield running
    await running.close()


@pytest.fixture
async def redis(own_redis: RedisServer) -> AsyncIterator[Redis]:
    """Direct connection to the replicas' Redis, which only this test uses and may flush."""
    async with redis_client(own_redis.url) as raw:
        yield raw


async def wait_until_stored(redis: Redis, namespace: str) -> None:
    """Return once a waiting task's memory is stored everywhere.

    Extending its lifetime in L1 is the last step.
    """
    (head,) = [key async for key in redis.scan_iter(f"{namespace}:L1:*:head")]
    while await redis.pttl(head) <= DAY_MS:
        pass


async def expire_l1(redis: Redis, namespace: str) -> None:
    """Expire everything in L1."""
    keys = [key async for key in redis.scan_iter(f"{namespace}:L1:*")]
    assert len(keys) == PAGES + 2, "expected the pages, the head and the index"
    for key in keys:
        await redis.pexpire(key, 1)
    while await redis.exists(*keys):
        pass


async def lose_nothing(redis: Redis, namespace: str) -> None:
    pass


async def lose_l1(redis: Redis, namespace: str) -> None:
    await expire_l1(redis, namespace)
    assert await redis.keys(f"{namespace}:l1_snapshot:*"), "the snapshot expired too"


async def lose_redis(redis: Redis, namespace: str) -> None:
    await expire_l1(redis, namespace)
    await redis.flushall()


Loss = Callable[[Redis, str], Awaitable[None]]
LOSSES_WITH_SOURCE: list[tuple[Loss, str]] = [
    (lose_nothing, "l1"),
    (lose_l1, "snapshot"),
    (lose_redis, "sql"),
]


@pytest.mark.parametrize(
    ("lose", "source"), LOSSES_WITH_SOURCE, ids=[source for _, source in LOSSES_WITH_SOURCE]
)
async def test_another_replica_recovers_every_page_without_fetching_any(
    mesh: Mesh, redis: Redis, own_redis: RedisServer, tmp_path: Path, lose: Loss, source: str
) -> None:
    options = {"entrypoint": "page_collector:collector", "memory_url": own_redis.url}
    config, fetched = mesh.backends.config("collector", **options), tmp_path / "fetched"
    peer, client = await mesh.peer(), await mesh.client()
    first = await mesh.replica(config)
    reply = await client.send("collector", {"pages": PAGES, "fetched": str(fetched)})
    (asked,) = await peer.next_requests()
    await wait_until_stored(redis, mesh.backends.namespace)
    await lose(redis, mesh.backends.namespace)
    await first.kill()
    assert first.process.returncode == -signal.SIGKILL

    await asked.answer(1)
    second = await mesh.replica(config)
    outcome = (await reply).outcome

    lines = [line.split() for line in fetched.read_text().splitlines()]
    assert [int(number) for number, _ in lines] == list(range(PAGES)), "a page was fetched twice"
    assert outcome == Ok(digest_of(digest for _, digest in lines))
    (recovered,) = await second.wait("memory_recovered")
    assert recovered["detail"] == {"source": source, "keys": PAGES}
    assert [event["detail"]["source"] for event in first.matching_events("memory_recovered")] == [
        "none"
    ]
    assert not second.matching_events("memory_problem")
