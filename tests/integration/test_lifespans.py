"""Resources that an agent holds once per replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count
from typing import Any

import pytest
from pydantic import TypeAdapter

from meshpoint import Done, Outcomes, Paused, Peer, TaskExecutionContext
from meshpoint.errors import ConfigurationError
from meshpoint.local import local_mesh
from meshpoint.testing import TestMesh


class Counter:
    """Returns which client it has."""

    name, state_format = "counter", "counter/1"
    peer: Peer[Any, Any] = Peer("counter", TypeAdapter(Any), TypeAdapter(Any))

    def __init__(self, lifespan: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        self.lifespan = lifespan

    async def start(self, ctx: TaskExecutionContext, request: Any) -> Paused | Done[Any]:
        return Done(ctx.resources)

    async def resume(
        self, ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes
    ) -> Paused | Done[Any]:
        raise NotImplementedError


async def test_each_replica_enters_and_leaves_its_own() -> None:
    """The same asyncio task enters and leaves, as cancel scopes need."""
    open_clients, numbers = set[int](), count()

    @asynccontextmanager
    async def client() -> AsyncIterator[int]:
        number, task = next(numbers), asyncio.current_task()
        open_clients.add(number)
        async with asyncio.timeout(None):
            yield number
        assert asyncio.current_task() is task
        open_clients.remove(number)

    agent = Counter(client)
    async with local_mesh(agent) as first, local_mesh(agent) as second:
        assert [await first.call("counter", None) for _ in range(2)] == [0, 0]
        assert await second.call("counter", None) == 1
        assert open_clients == {0, 1}
    assert open_clients == set()


async def test_an_error_at_the_start_is_one_line() -> None:
    @asynccontextmanager
    async def client() -> AsyncIterator[None]:
        raise ConnectionError("no server\nat all")
        yield

    with pytest.raises(ConfigurationError) as caught:
        async with local_mesh(Counter(client)):
            await asyncio.Event().wait()
    assert str(caught.value) == (
        "agent 'counter', lifespan: failed: ConnectionError: no server at all; "
        "check the services that it uses"
    )


@asynccontextmanager
async def exits() -> AsyncIterator[None]:
    raise SystemExit(3)
    yield


@asynccontextmanager
async def is_cancelled() -> AsyncIterator[None]:
    raise asyncio.CancelledError
    yield


def returns_nothing() -> Any:
    return None


@pytest.mark.parametrize("lifespan", [exits, is_cancelled, returns_nothing])
async def test_an_odd_failure_at_the_start_is_one_line(lifespan: Any) -> None:
    with pytest.raises(ConfigurationError, match="agent 'counter', lifespan: failed"):
        async with local_mesh(Counter(lifespan)):
            await asyncio.Event().wait()


async def test_a_start_that_takes_too_long_is_given_up() -> None:
    is_left = asyncio.Event()

    @asynccontextmanager
    async def client() -> AsyncIterator[None]:
        try:
            await asyncio.Event().wait()
            yield
        finally:
            is_left.set()

    with pytest.raises(ConfigurationError, match=r"did not start within 0\.01 seconds"):
        async with local_mesh(Counter(client), startup_timeout_seconds=0.01):
            await asyncio.Event().wait()
    assert is_left.is_set()


async def test_resources_that_fail_stop_the_replica() -> None:
    """Another one replaces it, with new resources."""
    fails = asyncio.Event()

    @asynccontextmanager
    async def client() -> AsyncIterator[int]:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            yield 1

    async def fail() -> None:
        await fails.wait()
        raise ConnectionError("lost")

    async def serve() -> None:
        async with local_mesh(Counter(client)) as mesh:
            assert await mesh.call("counter", None) == 1
            fails.set()
            await asyncio.Event().wait()

    with pytest.raises(ConfigurationError, match=r"ended while the replica was running: .*lost"):
        await serve()


async def test_an_error_at_the_end_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    @asynccontextmanager
    async def client() -> AsyncIterator[int]:
        yield 1
        raise ConnectionError("half closed")

    agent = Counter(client)
    async with local_mesh(agent) as mesh:
        assert await mesh.call("counter", None) == 1
    assert "half closed" in caplog.text


async def test_a_replica_that_replaces_a_killed_one_has_its_own() -> None:
    numbers = count()

    @asynccontextmanager
    async def client() -> AsyncIterator[int]:
        yield next(numbers)

    agent = Counter(client)
    async with TestMesh(agent) as mesh:
        mesh.crash(before="reply")
        assert await mesh.call("counter", None) == 1
