"""Publishing and acking in the commits of tasks: faults of the queues and of the network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

from faults import CommitCuttingProxy, LostPart
from meshpoint import Peer, TaskExecutionContext, agent
from meshpoint.adapters.postgres_queue import PostgresBroker
from meshpoint.adapters.sql import SqlStore
from meshpoint.adapters.sql.hand_over import QueueHandOver
from meshpoint.local import local_mesh
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import AgentName, new_id
from meshpoint.model.messages import request_queue
from meshpoint.model.tasks import TaskState
from meshpoint.model.transitions import Pause, PauseCommitted
from meshpoint.ports.broker import PublishResult
from meshpoint.testing.conformance.broker import a_message, send
from meshpoint.testing.conformance.build import AGENT, PEER, a_pause
from meshpoint.testing.conformance.hand_over import a_handed_over, deliver, prepared
from recorded_events import RecordedEvents

pytestmark = pytest.mark.servers

TO_PEER = request_queue(PEER)


@asynccontextmanager
async def open_broker(url: str, **options: Any) -> AsyncIterator[PostgresBroker]:
    broker = PostgresBroker(url, namespace="test", **options)
    await broker.open()
    for each in (AGENT, PEER):
        await broker.declare(each)
    yield broker
    await broker.close()


@asynccontextmanager
async def open_store(url: str) -> AsyncIterator[SqlStore]:
    store = SqlStore(url, namespace="test")
    await store.open()
    yield store
    await store.close()


@pytest.fixture
async def broker(postgres_url: str) -> AsyncIterator[PostgresBroker]:
    async with open_broker(postgres_url) as broker:
        yield broker


@pytest.fixture
async def store(postgres_url: str) -> AsyncIterator[SqlStore]:
    async with open_store(postgres_url) as store:
        yield store


async def a_sending_pause(broker: PostgresBroker) -> Pause:
    return a_handed_over(a_pause(), await prepared(broker, [(TO_PEER, a_message())]))


def is_handed_over(pause: Pause) -> bool:
    assert pause.hand_over is not None
    return pause.hand_over.is_done


async def test_a_message_that_cannot_be_stored_leaves_its_neighbors_to_the_ordinary_path(
    broker: PostgresBroker, store: SqlStore
) -> None:
    pauses = [await a_sending_pause(broker) for _ in range(2)]
    damaged = pauses[0].hand_over
    assert isinstance(damaged, QueueHandOver)
    damaged.messages = [damaged.messages[0]._replace(properties="\0")]
    results = await store.pause(pauses)
    for result in results:
        assert isinstance(result, PauseCommitted)
        assert len(result.dispatches) == 1
    assert not any(map(is_handed_over, pauses))
    assert await broker.depth(TO_PEER) == 0


async def test_requests_to_a_queue_that_was_dropped_stay_due(
    broker: PostgresBroker, store: SqlStore, postgres_url: str
) -> None:
    pauses = [await a_sending_pause(broker) for _ in range(2)]
    lost = pauses[0].hand_over
    assert isinstance(lost, QueueHandOver)
    lost.messages = [*lost.messages, lost.messages[0]._replace(queue=-1)]
    dropped, kept = await store.pause(pauses)
    assert isinstance(dropped, PauseCommitted)
    assert len(dropped.dispatches) == 1
    assert isinstance(kept, PauseCommitted)
    assert [is_handed_over(pause) for pause in pauses] == [False, True]
    assert await broker.depth(TO_PEER) == 1


async def test_messages_for_a_full_queue_are_not_prepared(postgres_url: str) -> None:
    async with open_broker(postgres_url, max_length=1) as broker:
        await send(broker, TO_PEER, a_message())
        assert await broker.prepare_hand_over([(TO_PEER, a_message())], ()) is None


async def test_large_messages_are_not_prepared(broker: PostgresBroker) -> None:
    large = replace(a_message(), body=bytes(5_000_000))
    assert await broker.prepare_hand_over([(TO_PEER, large)], ()) is None


async def test_a_delivery_that_was_requeued_meanwhile_stays_queued(
    broker: PostgresBroker, store: SqlStore, postgres_url: str
) -> None:
    """Another replica gets the request again, and finds the row."""
    delivery = await deliver(broker, request_queue(AGENT))
    hand_over = await prepared(broker, [(TO_PEER, a_message())], [delivery])
    await execute(postgres_url, "UPDATE meshpoint_queue_message SET holder = NULL")
    (result,) = await store.pause([a_handed_over(a_pause(), hand_over)])
    assert isinstance(result, PauseCommitted)
    assert hand_over.is_done
    assert await broker.depth(TO_PEER) == 1
    assert await broker.depth(request_queue(AGENT)) == 1


async def test_a_request_claimed_elsewhere_is_not_acked_with_its_reply(
    broker: PostgresBroker, postgres_url: str
) -> None:
    """Its new holder answers it too."""
    delivery = await deliver(broker, request_queue(AGENT))
    await execute(postgres_url, "UPDATE meshpoint_queue_message SET deliveries = 2, holder = 1")
    result = await broker.publish_acking((TO_PEER, a_message()), [delivery])
    assert result is PublishResult.ACCEPTED
    assert await broker.depth(TO_PEER) == 1
    await execute(postgres_url, "UPDATE meshpoint_queue_message SET holder = NULL")
    assert await broker.depth(request_queue(AGENT)) == 1


async def test_a_broker_without_a_lease_hands_nothing_over(
    broker: PostgresBroker, store: SqlStore, postgres_url: str
) -> None:
    pause = await a_sending_pause(broker)
    await execute(postgres_url, "DELETE FROM meshpoint_queue_holder")
    await store.pause([pause])
    assert not is_handed_over(pause)
    assert await broker.depth(TO_PEER) == 0


@pytest.mark.parametrize("lost", list(LostPart))
async def test_a_pause_whose_answer_is_lost_publishes_once(
    lost: LostPart, broker: PostgresBroker, postgres_url: str
) -> None:
    async with CommitCuttingProxy(postgres_url) as proxy, open_store(proxy.url) as store:
        await store.pause([await a_sending_pause(broker)])
        pause = await a_sending_pause(broker)
        proxy.cut_next(lost)
        (result,) = await store.pause([pause])
        assert proxy.cuts == 1
    # After a lost answer, the requests are found to be sent.
    assert isinstance(result, PauseCommitted)
    assert result.state is TaskState.WAITING
    assert len(result.dispatches) == (lost is LostPart.REQUEST)
    assert await broker.depth(TO_PEER) == 2


async def test_a_store_whose_login_may_not_write_the_queues_publishes_nothing(
    broker: PostgresBroker, postgres_url: str
) -> None:
    login = f"tasks_{new_id().replace('-', '')}"
    await execute(
        postgres_url,
        f"CREATE ROLE {login} LOGIN",
        f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {login}",
        f"REVOKE DELETE ON meshpoint_queue_message FROM {login}",
    )
    assert broker.lease_id is not None
    try:
        async with open_store(with_login(postgres_url, login)) as store:
            assert not await store.finds_lease(broker.lease_id)
            pause = await a_sending_pause(broker)  # as if it had been revoked after the start
            (result,) = await store.pause([pause])
            assert isinstance(result, PauseCommitted)
            assert len(result.dispatches) == 1
            assert not is_handed_over(pause)
    finally:
        await execute(postgres_url, f"DROP OWNED BY {login}", f"DROP ROLE {login}")


def with_login(url: str, login: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{login}@{rest.rpartition('@')[2]}"


async def execute(url: str, *statements: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


ask_peer = Peer("peer", int, int)


@agent("peer")
async def peer_agent(ctx: TaskExecutionContext, number: int) -> int:
    return number


@agent("root")
async def root_agent(ctx: TaskExecutionContext, count: int) -> int:
    asked = [ask_peer(number) for number in range(count)]
    timed = ask_peer.with_options(timeout=timedelta(minutes=1))
    return sum(await ctx.gather(*asked, timed(count)))


@pytest.mark.parametrize("shares_database", [True, False])
async def test_tasks_hand_over_if_the_queues_are_in_their_database(
    shares_database: bool, postgres_url: str, empty_postgres_url: str
) -> None:
    events = RecordedEvents()
    queues = postgres_url if shares_database else empty_postgres_url
    async with local_mesh(
        root_agent, peer_agent, broker_url=queues, db_url=postgres_url, observer=events
    ) as mesh:
        results = await asyncio.gather(*(mesh.call(root_agent, 3) for _ in range(5)))
        assert results == [6] * 5
        if not shares_database:
            await events.wait(Step.CONFIRM_SENT, Phase.AFTER)
    own = [event for event in events.all if event.agent == AgentName("root")]
    steps = {event.step for event in own if event.phase is Phase.AFTER}
    assert {Step.CHECKPOINT, Step.DISPATCH, Step.ACK, Step.CLAIM, Step.END, Step.REPLY} <= steps
    assert (Step.CONFIRM_SENT in steps) == (not shares_database)
