"""An agent that is deployed before its peer, on real servers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from live import open_broker, serve_agent

from fake_peer import FakePeer
from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Step
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from servers import RabbitServer

late_peer = Peer("late", int, int)
WAIT: dict[str, Any] = {"undeliverable_after": timedelta(seconds=4)}


@agent("early", version="1")
async def early(ctx: TaskExecutionContext, number: int) -> int:
    return await late_peer(number)


@agent("late", version="1")
async def late(ctx: TaskExecutionContext, number: int) -> int:
    return number + 1


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Any) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/tasks.db"
    url: str = request.getfixturevalue("postgres_url")
    return url


async def test_the_order_of_deployment_does_not_matter(
    rabbit_server: RabbitServer, namespace: str, database: str
) -> None:
    async with open_broker(rabbit_server.url, namespace) as broker:
        client = await FakePeer(broker, "client").open()
        async with serve_agent(early, rabbit_server.url, namespace, database) as replica:
            task_id = await client.ask("early", 1)
            await replica.events.wait(Step.PEER_MISSING)
            async with serve_agent(late, rabbit_server.url, namespace, database):
                assert await client.reply(task_id) == Ok(2)


async def test_a_peer_that_never_starts_fails_the_call_after_a_kill(
    rabbit_server: RabbitServer, namespace: str, database: str
) -> None:
    async with open_broker(rabbit_server.url, namespace) as broker:
        client = await FakePeer(broker, "client").open()
        async with serve_agent(early, rabbit_server.url, namespace, database, **WAIT) as replica:
            task_id = await client.ask("early", 1)
            await replica.events.wait(Step.PEER_MISSING)
            replica.task.cancel()
        async with serve_agent(early, rabbit_server.url, namespace, database, **WAIT) as replica:
            failed = await client.reply(task_id)
            assert isinstance(failed, Failed)
            assert FailureKind.UNDELIVERABLE in failed.message
            # The time did not start over: only the first return of the call is reported.
            assert replica.events.matching(Step.PEER_MISSING) == []
