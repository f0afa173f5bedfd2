"""Replicas of the last release without retries and signals, next to replicas of this one."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from pydantic_core import to_json

from earlier_sources import extract_release
from meshpoint import connect
from meshpoint.model.envelopes import signal_message
from meshpoint.model.ids import AgentName, TaskId, new_id
from meshpoint.model.mailbox import MailAccepted, SendSignal
from meshpoint.model.messages import response_queue
from meshpoint.model.outcomes import Failed, FailureKind, Ok

from .earlier_replica import EARLIER_BACKENDS, EarlierReplica
from .mesh import FakePeer, Mesh

pytestmark = pytest.mark.parametrize("backends", EARLIER_BACKENDS, indirect=True)
EARLIER = "2893b32c580ffdc43b985bb4f5ca5d407b6d483b"
ROOT, CLIENT = AgentName("root"), AgentName("client")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last release without retries and signals."""
    folder = extract_release(EARLIER, tmp_path_factory.mktemp("earlier"), "src", "alembic")
    if folder is None:
        pytest.skip("the history of the repository is not here")
    return folder


@asynccontextmanager
async def earlier_replica(sources: Path, config: Path) -> AsyncIterator[EarlierReplica]:
    replica = await EarlierReplica.start(sources, config)
    try:
        yield replica
    finally:
        await replica.stop()


def config_of(mesh: Mesh, name: str, version: str = "2") -> Path:
    """A busy machine may take long to record that a reply was sent; then it is sent again."""
    return mesh.backends.config(
        "root",
        entrypoint=f"earlier_agents:{name}",
        app_version=version,
        dispatch_lease_seconds=60,
    )


async def fail_first(peer: FakePeer, attempts: Counter[int]) -> None:
    """Fail the first attempt for each number, and answer the others, until cancelled."""
    while True:
        (request,) = await peer.next_requests()
        number = int(str(request.input))
        attempts[number] += 1
        if attempts[number] == 1:
            await request.respond(Failed(FailureKind.ERROR, "as planned"))
            await request.delivery.ack()
        else:
            await request.answer(10 * number)


async def test_retried_calls_have_one_outcome_in_both_releases(mesh: Mesh, sources: Path) -> None:
    """The earlier release treats some failures as final. It loses no outcome, and adds none."""
    config = config_of(mesh, "retrying")
    peer, client, attempts = await mesh.peer(), await mesh.client(), Counter[int]()
    replica = await mesh.replica(config)
    answering = asyncio.create_task(fail_first(peer, attempts))
    async with earlier_replica(sources, config) as earlier:
        replies = [await client.send("root", number) for number in range(8)]
        outcomes = [(await reply).outcome for reply in replies]
    answering.cancel()
    for number, outcome in enumerate(outcomes):
        if attempts[number] == 1:  # a failure that the earlier release recorded
            assert isinstance(outcome, Failed)
            assert outcome.kind is FailureKind.ERROR
        else:
            assert (outcome, attempts[number]) == (Ok(10 * number), 2)
    assert (client.duplicates, client.conflicts) == (0, 0)
    assert not any("dead_letter" in line for line in earlier.lines)
    assert replica.matching_events("dead_letter:info") == []
    counts = await mesh.row_counts()
    assert (counts["open"], counts["calls"]) == (0, 0)


async def test_a_signal_waits_for_this_release(mesh: Mesh, sources: Path) -> None:
    """The earlier release moves it to the dead letters, and leaves the task to this one."""
    config, task_id = config_of(mesh, "listening"), TaskId(new_id())
    client = await mesh.client()
    replica = await mesh.replica(config)
    reply = await client.send("root", 1, task_id=task_id)
    await replica.wait("checkpoint:after")
    replica.signal(signal.SIGTERM)
    await replica.wait_ended()
    message = signal_message(CLIENT, task_id, "chat", "1", 7, response_queue(CLIENT))
    async with earlier_replica(sources, config_of(mesh, "listening", "1")) as earlier:
        broker = mesh.broker()
        await broker.open()
        await broker.publish([(response_queue(ROOT), message)])
        await broker.close()
        await earlier.wait_for("type: 'signal' is not known")
        async with mesh.store() as store:
            command = SendSignal(task_id, ROOT, "1", "chat", to_json(7), CLIENT)
            accepted = [MailAccepted(is_ready=True)]
            assert await store.signal([command]) == accepted, "no replica had received it"
        await mesh.replica(config)
        assert (await reply).outcome == Ok(7)
    assert client.duplicates == 0


async def test_the_earlier_release_ignores_if_exists(mesh: Mesh, sources: Path) -> None:
    config, peer = config_of(mesh, "retrying"), await mesh.peer()
    await mesh.declare("root")
    answering = asyncio.create_task(peer.answer_all())
    url, namespace = mesh.backends.broker_url, mesh.backends.namespace
    async with (
        earlier_replica(sources, config),
        connect(url, namespace=namespace, name="client") as client,
    ):
        for _ in range(2):  # the second should raise TaskExists
            task = await client.send("root", 1, task_id="order-17", if_exists="reject")
            assert await task.result() == 10
    answering.cancel()
