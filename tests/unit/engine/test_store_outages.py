"""A database that is unavailable or loses the response to COMMIT: nothing is lost or repeated."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.errors import StoreUnavailable
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import AgentName
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.tasks import TaskState

from .agents import Gate, asker, doubler, gated, gated_after
from .faults import IN_DOUBT, LOST_IN_DOUBT, NOT_COMMITTED
from .mesh import Mesh

OUTAGES = {
    "unavailable": [NOT_COMMITTED] * 3,
    "in doubt, committed": [IN_DOUBT],
    "in doubt, lost": [LOST_IN_DOUBT],
    "in doubt again and again": [LOST_IN_DOUBT, IN_DOUBT, IN_DOUBT, NOT_COMMITTED],
    "unavailable, then in doubt": [NOT_COMMITTED, IN_DOUBT, NOT_COMMITTED],
}


async def test_a_replica_starts_once_the_database_is_available(mesh: Mesh) -> None:
    replica = await mesh.launch(
        doubler, unavailable_service="store", startup_timeout=timedelta(seconds=30)
    )
    await mesh.advance(29)
    assert not replica.task.done()
    await mesh.advance(5)
    with pytest.raises(StoreUnavailable):
        await replica.task
    mesh.replicas.clear()


async def test_a_replica_can_stop_before_its_start_completes(mesh: Mesh) -> None:
    replica = await mesh.launch(
        doubler, unavailable_service="store", startup_timeout=timedelta(seconds=30)
    )
    await mesh.advance(1)
    replica.stop.set()
    await replica.task
    assert mesh.events.matching(Step.STARTED) == []
    mesh.replicas.clear()


async def test_a_replica_waits_for_the_database_at_the_start(mesh: Mesh, client: FakePeer) -> None:
    replica = await mesh.launch(
        doubler, unavailable_service="store", startup_timeout=timedelta(seconds=30)
    )
    await mesh.advance(10)
    replica.store.unavailable = False
    await mesh.advance(5)
    await mesh.events.wait(Step.STARTED)
    assert await client.reply(await client.ask("doubler", 1)) == Ok(2)


@pytest.mark.parametrize("faults", OUTAGES.values(), ids=OUTAGES)
@pytest.mark.parametrize(
    "method",
    ["lookup", "pause", "confirm_sent", "claim", "end", "record_progress", "unsent", "acquire"],
)
async def test_a_task_survives_a_database_outage_at_any_step(
    mesh: Mesh, client: FakePeer, peer: FakePeer, method: str, faults: list[str | None]
) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    await mesh.advance(20)  # the startup grace is over
    replica.store.fail(method, *faults)
    task_id = await client.ask("asker", 1)
    await mesh.advance(12)
    call_ids = {request.correlation_id for request in peer.requests}
    assert len(call_ids) == 1, "the calls were made twice"
    await peer.status(peer.requests[0], "working")
    await peer.respond(peer.requests[0], 1)
    await mesh.advance(12)
    assert set(map(str, client.replies(task_id))) == {str(Ok({"peer": 1}))}
    assert await mesh.state(task_id) is TaskState.COMPLETED
    assert len(mesh.events.matching(Step.SEGMENT, Phase.BEFORE)) == 2
    assert mesh.events.matching(Step.DEGRADED) == mesh.events.matching(Step.FENCED) == []
    assert mesh.unacked("asker") == mesh.waiting("asker") == 0
    assert replica.worker.runtime.slots.free == 10
    assert await mesh.store.unsent(AgentName("asker"), 100) == []


@pytest.mark.parametrize("faults", OUTAGES.values(), ids=OUTAGES)
async def test_a_task_survives_a_database_outage_at_its_begin(
    mesh: Mesh, client: FakePeer, faults: list[str | None]
) -> None:
    gate = Gate()
    replica = await mesh.replica(gated("agent", gate), ack_policy="on_receipt")
    replica.store.fail("begin", *faults)
    task_id = await client.ask("agent", 1)
    await mesh.advance(8)
    gate.opened.set()
    assert await client.reply(task_id) == Ok("done")
    assert gate.visits == 1
    assert await mesh.state(task_id) is TaskState.COMPLETED


@pytest.mark.parametrize("faults", OUTAGES.values(), ids=OUTAGES)
@pytest.mark.parametrize("state", ["unknown", "waiting", "running", "ended"])
async def test_a_cancel_survives_a_database_outage(
    mesh: Mesh, client: FakePeer, peer: FakePeer, faults: list[str | None], state: str
) -> None:
    gate, first = Gate(), Gate()
    agent = gated("agent", first) if state == "unknown" else gated_after("agent", "peer", gate)
    replica = await mesh.replica(agent)
    task_id = await client.ask("agent", 1)
    if state == "unknown":
        await first.wait_reached()
    else:
        request = await peer.wait_for_request()
        await mesh.idle()
        if state != "waiting":
            await peer.respond(request, 1)
            await gate.wait_reached()
        if state == "ended":
            gate.opened.set()
            await client.reply(task_id)
            await mesh.idle()
    replica.store.fail("cancel", *faults)
    await client.cancel("agent", task_id)
    await mesh.advance(15)
    (reply,) = client.replies(task_id)
    if state == "ended":
        assert reply == Ok({"peer": 1})
    else:
        assert isinstance(reply, Failed)
        assert reply.kind is FailureKind.CANCELLED
    assert peer.cancels() == ([request.correlation_id] if state == "waiting" else [])
    assert gate.cancelled + first.cancelled == (state in {"unknown", "running"})


async def test_a_claim_whose_response_was_lost_does_not_lose_the_task(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """The repeated claim finds that it completed the join, and the task runs."""
    replica = await mesh.replica(asker("asker", "peer"))
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    replica.store.fail("claim", IN_DOUBT, NOT_COMMITTED)
    await peer.respond(request, 1)
    await mesh.advance(5)
    assert client.replies(task_id) == [Ok({"peer": 1})]
    assert len(mesh.events.matching(Step.RESCUE)) == 0


async def test_a_task_whose_acquisition_was_in_doubt_is_rescued(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    gate = Gate()
    replica = await mesh.replica(gated_after("agent", "peer", gate), max_concurrency=1)
    tasks = [await client.ask("agent", number) for number in (1, 2)]
    for count in (1, 2):
        await peer.respond(await peer.wait_for_request(count), count)
    await gate.wait_reached()
    await mesh.advance(20)
    replica.store.fail("acquire", IN_DOUBT)
    gate.opened.set()
    await mesh.advance(5)
    assert len(client.replies()) == 1
    await mesh.advance(35)
    assert len(client.replies()) == 2
    for task_id in tasks:
        assert isinstance(await client.reply(task_id), Ok)


async def test_an_outage_is_reported_once(mesh: Mesh, client: FakePeer, peer: FakePeer) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    await client.ask("asker", 1)
    await peer.wait_for_request()
    await mesh.idle()
    for outages in (1, 2):
        replica.store.unavailable = True
        await mesh.advance(30)
        replica.store.unavailable = False
        await mesh.advance(3)
        assert (
            len(mesh.events.matching(Step.STORE_UNAVAILABLE))
            == len(mesh.events.matching(Step.STORE_AVAILABLE))
            == outages
        )


async def test_new_requests_stay_unacked_during_an_outage(mesh: Mesh, client: FakePeer) -> None:
    replica = await mesh.replica(doubler, max_concurrency=3)
    replica.store.unavailable = True
    tasks = [await client.ask("doubler", number) for number in range(9)]
    await mesh.advance(60)
    assert client.replies() == []
    assert (mesh.unacked("doubler"), mesh.waiting("doubler")) == (3, 6)
    replica.store.unavailable = False
    await mesh.advance(3)
    assert [await client.reply(task_id) for task_id in tasks] == [
        Ok(2 * number) for number in range(9)
    ]


def write_ids(replica: Any, method: str) -> list[Any]:
    """Arguments of every call of `method`. A repeated write must carry the same ids."""
    return [arguments for name, arguments in replica.store.arguments if name == method]


async def test_a_repeated_write_carries_the_same_ids(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    for method in ("pause", "claim", "end"):
        replica.store.fail(method, LOST_IN_DOUBT, IN_DOUBT)
    task_id = await client.ask("asker", 1)
    await mesh.advance(5)
    await peer.respond(peer.requests[0], 1)
    await mesh.advance(10)
    assert client.replies(task_id) == [Ok({"peer": 1})]
    for method in ("pause", "claim", "end"):
        first, *rest = write_ids(replica, method)
        assert len(rest) == 2
        assert all(other[0] == first[0] for other in rest)
