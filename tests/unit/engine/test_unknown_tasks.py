"""A task is reported as missing only if it certainly exists nowhere.

The broker of these tests is like RabbitMQ: it counts consumers, and does not show what they hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.adapters.inprocess.broker import InProcessBroker
from meshpoint.errors import BrokerUnavailable, StoreUnavailable
from meshpoint.model.calls import Call, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.envelopes import attach_message
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.messages import (
    Address,
    Header,
    Message,
    MessageType,
    nested_queue,
    request_queue,
    response_queue,
)
from meshpoint.ports.broker import SEARCH_SECONDS, RequestSearch

from .agents import Gate, ScriptedAgent, doubler, gated
from .mesh import Mesh, RunningReplica

REQUESTS, NESTED = request_queue(AgentName("doubler")), nested_queue(AgentName("doubler"))
CLIENT = AgentName("client")
DENIAL = b'{"replica": "other", "consumers": {"doubler.req": 9, "doubler.nested": 9}}'


@pytest.fixture
def consumers(monkeypatch: pytest.MonkeyPatch) -> dict[Address, int]:
    """The consumers that the broker counts. Each replica has one at each queue."""
    counts = {REQUESTS: 2, NESTED: 2}

    async def find_request(*_: object) -> RequestSearch:
        return RequestSearch(may_be_queued=False, consumers=counts)

    def deny_request(*_: object) -> Mapping[Address, int]:
        return {REQUESTS: 1, NESTED: 1}

    monkeypatch.setattr(InProcessBroker, "find_request", find_request)
    monkeypatch.setattr(InProcessBroker, "deny_request", deny_request)
    return counts


async def ask(client: FakePeer, task_id: str, agent: str = "doubler", **options: Any) -> None:
    message = attach_message(CLIENT, TaskId(task_id), response_queue(CLIENT), **options)
    await client.send_control(agent, message)


def replies(client: FakePeer) -> list[tuple[object, object]]:
    """Each status in reply to an attach, and whether it is certain."""
    return [
        (message.headers[Header.ATTACH], message.headers.get(Header.CERTAIN))
        for message in client.messages
        if message.type is MessageType.STATUS
    ]


def open_searches(replica: RunningReplica) -> list[str]:
    """The tokens of the searches that await denials."""
    return list(replica.worker.runner.settlement.attaches.unknown_tasks._denials)


@pytest.mark.parametrize("query", [None, "token"])
async def test_a_task_that_all_consumers_deny_exists_nowhere(
    mesh: Mesh, client: FakePeer, consumers: dict[Address, int], query: str | None
) -> None:
    replicas = [await mesh.replica(doubler) for _ in range(2)]
    await ask(client, "order-17", query=query)
    await mesh.idle()
    assert replies(client) == [("unknown", 1)]
    assert not any(
        each.worker.runner.settlement.attaches.unknown_tasks._denials for each in replicas
    )


@pytest.mark.parametrize("queue", [REQUESTS, NESTED])
async def test_a_consumer_that_does_not_deny_may_hold_the_request(
    mesh: Mesh, client: FakePeer, consumers: dict[Address, int], queue: Address
) -> None:
    """It belongs to a replica that is stopped, dead, or of an earlier release."""
    replicas = [await mesh.replica(doubler) for _ in range(2)]
    consumers[queue] += 1
    await ask(client, "order-17")
    await mesh.idle()
    assert replies(client) == []
    await mesh.advance(SEARCH_SECONDS)
    assert replies(client) == [("unknown", None)]
    assert not any(
        each.worker.runner.settlement.attaches.unknown_tasks._denials for each in replicas
    )


async def test_denials_that_come_too_late_do_not_count(
    mesh: Mesh,
    client: FakePeer,
    consumers: dict[Address, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The consumers may have been attached after the search."""
    broadcast = InProcessBroker.broadcast

    async def broadcast_late(self: InProcessBroker, *arguments: Any) -> None:
        mesh.clock.advance(timedelta(seconds=SEARCH_SECONDS))
        await broadcast(self, *arguments)

    monkeypatch.setattr(InProcessBroker, "broadcast", broadcast_late)
    for _ in range(2):
        await mesh.replica(doubler)
    await ask(client, "order-17")
    await mesh.idle()
    assert replies(client) == [("unknown", None)]


async def test_a_replica_denies_only_once(
    mesh: Mesh, client: FakePeer, consumers: dict[Address, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    broadcast = InProcessBroker.broadcast

    async def broadcast_twice(self: InProcessBroker, *arguments: Any) -> None:
        await broadcast(self, *arguments)
        await broadcast(self, *arguments)

    monkeypatch.setattr(InProcessBroker, "broadcast", broadcast_twice)
    await mesh.replica(doubler)
    await ask(client, "order-17")
    await mesh.idle()
    assert replies(client) == []


async def test_a_replica_does_not_deny_a_task_that_runs_here(
    mesh: Mesh, client: FakePeer, consumers: dict[Address, int]
) -> None:
    gate = Gate()
    for _ in range(2):
        await mesh.replica(gated("doubler", gate))
    task_id = await client.ask("doubler", 1)
    await gate.wait_reached()
    await ask(client, task_id)
    await mesh.idle()
    await mesh.advance(SEARCH_SECONDS)
    assert ("unknown", 1) not in replies(client)
    gate.opened.set()
    await client.reply(task_id)


async def test_a_task_that_pauses_during_the_search_has_a_row(
    mesh: Mesh, client: FakePeer, peer: FakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request was acked after the database had been asked for its row."""
    find_request, gate = InProcessBroker.find_request, Gate()

    async def find_after_pause(self: InProcessBroker, *arguments: Any) -> RequestSearch:
        gate.opened.set()
        await peer.wait_for_request()
        await mesh.idle()
        return await find_request(self, *arguments)

    monkeypatch.setattr(InProcessBroker, "find_request", find_after_pause)

    async def start(ctx: TaskExecutionContext, request: Any) -> Paused:
        await gate()
        return Paused([Call("peer", "peer", request)], b"state")

    await mesh.replica(ScriptedAgent("asker", start))
    task_id = await client.ask("asker", 1)
    await gate.wait_reached()
    await ask(client, task_id, "asker")
    await client.wait_until(lambda: bool(replies(client)))
    assert replies(client) == [("queued", None)]


@pytest.mark.parametrize("error", [BrokerUnavailable, StoreUnavailable])
async def test_nothing_is_certain_during_an_outage(
    mesh: Mesh, client: FakePeer, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    replica = await mesh.replica(doubler)

    async def fail(*_: object) -> Any:
        raise error("away")

    if error is BrokerUnavailable:
        monkeypatch.setattr(InProcessBroker, "find_request", fail)
    else:
        database = replica.worker.runtime.database
        assert database is not None
        monkeypatch.setattr(database.store, "lookup", fail)
    await ask(client, "order-17")
    await mesh.idle()
    assert replies(client) == [("unknown", None)]


async def test_only_replicas_of_the_agent_may_deny(
    mesh: Mesh, client: FakePeer, consumers: dict[Address, int]
) -> None:
    replica = await mesh.replica(doubler)
    await ask(client, "order-17")
    await mesh.idle()
    (token,) = open_searches(replica)
    for sender in ("client", "doubler"):
        body = b"{}" if sender == "doubler" else DENIAL
        denial = Message(MessageType.DENY, body, f"from {sender}", token, AgentName(sender))
        await client.send_control("doubler", denial)
    await mesh.idle()
    assert replies(client) == []
    assert len(mesh.dead_letters("doubler")) == 2
