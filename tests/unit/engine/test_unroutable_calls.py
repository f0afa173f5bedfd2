"""A call waits for its peer's first replica, so that the order of a deployment does not matter."""

from __future__ import annotations

from datetime import timedelta

import pytest

from fake_peer import FakePeer
from meshpoint.engine import dispatch
from meshpoint.model.calls import Call
from meshpoint.model.events import Step
from meshpoint.model.ids import AgentName
from meshpoint.model.messages import request_queue
from meshpoint.model.outcomes import Ok

from .agents import asker, caller, doubler
from .faults import NOT_COMMITTED
from .mesh import Mesh, RunningReplica

UNDELIVERABLE = Ok({"doubler": "undeliverable"})
BACKENDS = pytest.mark.parametrize("durable", [True, False])


def attempts(replica: RunningReplica, peer: str = "doubler") -> int:
    """Number of requests for `peer` that the replica published, with or without success."""
    address = request_queue(AgentName(peer))
    return sum(sent == address for sent, _ in replica.broker.published)


@BACKENDS
async def test_a_peer_may_start_after_its_caller(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    await mesh.replica(asker("asker", "doubler"), durable=durable)
    task_id = await client.ask("asker", 1)
    await mesh.advance(10)
    await mesh.replica(doubler)
    await mesh.advance(10)
    assert await client.reply(task_id) == Ok({"doubler": 2})
    (missing,) = mesh.events.matching(Step.PEER_MISSING)
    assert missing.detail == {"peer": "doubler", "seconds": 30.0}
    assert mesh.events.matching(Step.UNDELIVERABLE) == []


async def test_a_missing_peer_is_reported_once_a_minute(mesh: Mesh, client: FakePeer) -> None:
    """Also if recording the first answer of the broker fails, and for each later task."""
    replica = await mesh.replica(asker("asker", "doubler"))
    replica.store.fail("record_unroutable", NOT_COMMITTED)
    await client.ask("asker", 1)
    await mesh.advance(30)
    await client.ask("asker", 2)
    await mesh.advance(29)
    assert attempts(replica) > 4
    assert len(mesh.events.matching(Step.PEER_MISSING)) == 1
    await mesh.advance(2)
    await client.ask("asker", 3)
    await mesh.advance(2)
    assert len(mesh.events.matching(Step.PEER_MISSING)) == 2


async def test_only_so_many_missing_peers_are_reported_within_a_minute(
    mesh: Mesh, client: FakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agent code chooses the names of its peers."""
    monkeypatch.setattr(dispatch, "_MAX_REPORTED_PEERS", 2)
    await mesh.replica(asker("asker", "first", "second", "third"))
    await client.ask("asker", 1)
    await mesh.advance(5)
    assert len(mesh.events.matching(Step.PEER_MISSING)) == 2
    await mesh.advance(60)
    await client.ask("asker", 2)
    await mesh.advance(5)
    assert len(mesh.events.matching(Step.PEER_MISSING)) == 4


@BACKENDS
async def test_a_peer_that_never_starts_is_undeliverable(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    replica = await mesh.replica(asker("asker", "doubler"), durable=durable)
    task_id = await client.ask("asker", 1)
    await mesh.advance(29)
    assert client.replies(task_id) == []
    assert 5 <= attempts(replica) <= 8
    await mesh.advance(3)
    assert await client.reply(task_id) == UNDELIVERABLE
    assert len(mesh.events.matching(Step.UNDELIVERABLE)) == 1


async def test_another_replica_continues_to_count(mesh: Mesh, client: FakePeer) -> None:
    replica = await mesh.replica(asker("asker", "doubler"))
    task_id = await client.ask("asker", 1)
    await mesh.advance(20)
    await replica.crash()
    await mesh.replica(asker("asker", "doubler"))
    await mesh.advance(8)
    assert client.replies(task_id) == []
    await mesh.advance(4)
    assert await client.reply(task_id) == UNDELIVERABLE


@pytest.mark.parametrize("outage", [12, 300])
async def test_an_outage_that_no_replica_survived_starts_the_time_anew(
    mesh: Mesh, client: FakePeer, outage: float
) -> None:
    """The broker and all replicas stop and start together, the peer's last."""
    replica = await mesh.replica(asker("asker", "doubler"))
    task_id = await client.ask("asker", 1)
    await mesh.advance(25)
    await replica.crash()
    mesh.clock.advance(timedelta(seconds=outage + 10))  # the next attempt was due after 10
    await mesh.replica(asker("asker", "doubler"))
    await mesh.advance(20)
    assert client.replies(task_id) == []
    await mesh.replica(doubler)
    await mesh.advance(10)
    assert await client.reply(task_id) == Ok({"doubler": 2})


async def test_a_broker_outage_starts_the_time_anew(mesh: Mesh, client: FakePeer) -> None:
    replica = await mesh.replica(asker("asker", "doubler"))
    task_id = await client.ask("asker", 1)
    await mesh.advance(25)
    replica.broker.unavailable = True
    await mesh.advance(60)
    replica.broker.unavailable = False
    await mesh.advance(30)
    assert client.replies(task_id) == []
    await mesh.advance(20)
    assert await client.reply(task_id) == UNDELIVERABLE


async def test_an_outage_counts_for_the_next_replica_too(mesh: Mesh, client: FakePeer) -> None:
    replica = await mesh.replica(asker("asker", "doubler"))
    task_id = await client.ask("asker", 1)
    await mesh.advance(25)
    replica.broker.unavailable = True
    await mesh.advance(10)
    replica.broker.unavailable = False
    await mesh.advance(15)
    await replica.crash()
    await mesh.replica(asker("asker", "doubler"))
    await mesh.advance(5)
    assert client.replies(task_id) == []
    await mesh.advance(30)
    assert await client.reply(task_id) == UNDELIVERABLE


@BACKENDS
async def test_a_call_waits_no_longer_than_its_timeout(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    await mesh.replica(asker("asker", "doubler", timeout=timedelta(seconds=10)), durable=durable)
    task_id = await client.ask("asker", 1)
    await mesh.advance(9)
    assert client.replies(task_id) == []
    await mesh.advance(3)
    assert await client.reply(task_id) == UNDELIVERABLE


@BACKENDS
async def test_without_a_wait_a_call_fails_at_once(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    replica = await mesh.replica(
        asker("asker", "doubler"), durable=durable, undeliverable_after=timedelta()
    )
    task_id = await client.ask("asker", 1)
    assert await client.reply(task_id) == UNDELIVERABLE
    assert attempts(replica) == 1
    assert "record_unroutable" not in [*replica.store.calls, *replica.memory.calls]


async def test_the_last_attempt_ignores_the_back_off(mesh: Mesh, client: FakePeer) -> None:
    """Failing calls of other tasks have put the address into a long back-off."""
    await mesh.replica(asker("asker", "doubler"))
    for _ in range(3):
        await client.ask("asker", 1)
        await mesh.advance(25)
    task_id = await client.ask("asker", 7)
    await mesh.advance(29)
    await client.ask("asker", 1)  # fails, and starts the back-off again
    await mesh.idle()
    await mesh.replica(doubler)
    await mesh.advance(2)
    assert await client.reply(task_id) == Ok({"doubler": 14})


async def test_a_lost_record_starts_the_time_later(mesh: Mesh, client: FakePeer) -> None:
    replica = await mesh.replica(asker("asker", "doubler"))
    replica.store.fail("record_unroutable", NOT_COMMITTED)
    task_id = await client.ask("asker", 1)
    await mesh.advance(32)
    assert client.replies(task_id) == []
    await mesh.advance(8)
    assert await client.reply(task_id) == UNDELIVERABLE


async def test_a_missing_peer_delays_no_other(mesh: Mesh, client: FakePeer) -> None:
    calls = [Call("missing", "nobody", 1), Call("running", "doubler", 1)]
    await mesh.replica(doubler)
    await mesh.replica(caller("caller", lambda _: calls))
    task_id = await client.ask("caller", 1)
    await mesh.advance(1)
    (_, rows) = await mesh.task(task_id)
    assert [row.outcome for row in rows] == [None, "ok"]
    await mesh.advance(31)
    assert await client.reply(task_id) == Ok({"missing": "undeliverable", "running": 2})
