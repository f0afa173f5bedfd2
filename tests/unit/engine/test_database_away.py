"""A database that is unavailable or loses the response to COMMIT: nothing is lost or repeated."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from meshpoint.errors import StoreUnavailable
from meshpoint.model.checkpoint import TaskState
from meshpoint.model.events import Phase, Step
from meshpoint.model.options import AckPolicy
from meshpoint.model.outcomes import Failed, FailureKind, Ok

from .agents import Gate, asker, doubler, gated, gated_after
from .faults import IN_DOUBT, LOST_IN_DOUBT, NOT_COMMITTED
from .mesh import Mesh
from .puppet import Puppet

OUTAGES = {
    "away": [NOT_COMMITTED] * 3,
    "in doubt, committed": [IN_DOUBT],
    "in doubt, lost": [LOST_IN_DOUBT],
    "in doubt again and again": [LOST_IN_DOUBT, IN_DOUBT, IN_DOUBT, NOT_COMMITTED],
    "away, then in doubt": [NOT_COMMITTED, IN_DOUBT, NOT_COMMITTED],
}


async def test_at_the_start(mesh: Mesh) -> None:
    running = await mesh.launch(doubler, away="store", startup_timeout=timedelta(seconds=30))
    await mesh.advance(29)
    assert not running.task.done()
    await mesh.advance(5)
    with pytest.raises(StoreUnavailable):
        await running.task
    mesh.replicas.clear()


async def test_stopped_before_the_start_is_done(mesh: Mesh) -> None:
    running = await mesh.launch(doubler, away="store", startup_timeout=timedelta(seconds=30))
    await mesh.advance(1)
    running.stop.set()
    await running.task
    assert mesh.events.of(Step.STARTED) == []
    mesh.replicas.clear()


async def test_at_the_start_for_a_while(mesh: Mesh, boss: Puppet) -> None:
    running = await mesh.launch(doubler, away="store", startup_timeout=timedelta(seconds=30))
    await mesh.advance(10)
    running.store.away = False
    await mesh.advance(5)
    await mesh.events.wait(Step.STARTED)
    assert await boss.reply(await boss.ask("doubler", 1)) == Ok(2)


@pytest.mark.parametrize("faults", OUTAGES.values(), ids=OUTAGES)
@pytest.mark.parametrize("method", ["lookup", "pause", "mark_sent", "claim", "end", "progress", "unsent", "take"])
async def test_at_any_step(mesh: Mesh, boss: Puppet, peer: Puppet, method: str, faults: list[str | None]) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    await mesh.advance(20)  # the startup grace is over
    replica.store.fail(method, *faults)
    task_id = await boss.ask("asker", 1)
    await mesh.advance(12)
    call_ids = {request.correlation_id for request in peer.requests}
    assert len(call_ids) == 1, "the calls were made twice"
    await peer.status(peer.requests[0], "working")
    await peer.respond(peer.requests[0], 1)
    await mesh.advance(12)
    assert set(map(str, boss.replies(task_id))) == {str(Ok({"peer": 1}))}
    assert await mesh.state(task_id) is TaskState.COMPLETED
    assert len(mesh.events.of(Step.SEGMENT, Phase.BEFORE)) == 2
    assert mesh.events.of(Step.DEGRADED) == mesh.events.of(Step.FENCED) == []
    assert mesh.unacked("asker") == mesh.waiting("asker") == 0
    assert replica.worker.site.slots.free == 10
    assert await mesh.store.unsent("asker", 100) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("faults", OUTAGES.values(), ids=OUTAGES)
async def test_in_a_begin(mesh: Mesh, boss: Puppet, faults: list[str | None]) -> None:
    gate = Gate()
    replica = await mesh.replica(gated("agent", gate), ack_policy=AckPolicy.ON_RECEIPT)
    replica.store.fail("begin", *faults)
    task_id = await boss.ask("agent", 1)
    await mesh.advance(8)
    gate.opened.set()
    assert await boss.reply(task_id) == Ok("done")
    assert gate.visits == 1
    assert await mesh.state(task_id) is TaskState.COMPLETED


@pytest.mark.parametrize("faults", OUTAGES.values(), ids=OUTAGES)
@pytest.mark.parametrize("state", ["unknown", "waiting", "running", "ended"])
async def test_in_a_cancel(mesh: Mesh, boss: Puppet, peer: Puppet, faults: list[str | None], state: str) -> None:
    gate, first = Gate(), Gate()
    agent = gated("agent", first) if state == "unknown" else gated_after("agent", "peer", gate)
    replica = await mesh.replica(agent)
    task_id = await boss.ask("agent", 1)
    if state == "unknown":
        await first.reach()
    else:
        request = await peer.request_number()
        await mesh.settle()
        if state != "waiting":
            await peer.respond(request, 1)
            await gate.reach()
        if state == "ended":
            gate.opened.set()
            await boss.reply(task_id)
            await mesh.settle()
    replica.store.fail("cancel", *faults)
    await boss.cancel("agent", task_id)
    await mesh.advance(15)
    (reply,) = boss.replies(task_id)
    if state == "ended":
        assert reply == Ok({"peer": 1})
    else:
        assert isinstance(reply, Failed)
        assert reply.kind is FailureKind.CANCELLED
    assert peer.cancels() == ([request.correlation_id] if state == "waiting" else [])
    assert gate.cancelled + first.cancelled == (state in {"unknown", "running"})


async def test_the_lost_answer_to_a_claim_does_not_lose_the_task(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    """The repeated claim finds that it completed the join, and the task runs."""
    replica = await mesh.replica(asker("asker", "peer"))
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    await mesh.settle()
    replica.store.fail("claim", IN_DOUBT, NOT_COMMITTED)
    await peer.respond(request, 1)
    await mesh.advance(5)
    assert boss.replies(task_id) == [Ok({"peer": 1})]
    assert len(mesh.events.of(Step.TAKE_OVER)) == 0


async def test_a_take_whose_answer_was_lost_is_taken_over(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    gate = Gate()
    replica = await mesh.replica(gated_after("agent", "peer", gate), max_concurrency=1)
    tasks = [await boss.ask("agent", number) for number in (1, 2)]
    for count in (1, 2):
        await peer.respond(await peer.request_number(count), count)
    await gate.reach()
    await mesh.advance(20)
    replica.store.fail("take", IN_DOUBT)
    gate.opened.set()
    await mesh.advance(5)
    assert len(boss.replies()) == 1
    await mesh.advance(35)
    assert len(boss.replies()) == 2
    for task_id in tasks:
        assert isinstance(await boss.reply(task_id), Ok)


async def test_an_outage_is_told_once(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    await boss.ask("asker", 1)
    await peer.request_number()
    await mesh.settle()
    for outage in (1, 2):
        replica.store.away = True
        await mesh.advance(30)
        replica.store.away = False
        await mesh.advance(3)
        assert len(mesh.events.of(Step.STORE_AWAY)) == len(mesh.events.of(Step.STORE_BACK)) == outage


async def test_new_requests_wait_for_the_database_un_acked(mesh: Mesh, boss: Puppet) -> None:
    replica = await mesh.replica(doubler, max_concurrency=3)
    replica.store.away = True
    tasks = [await boss.ask("doubler", number) for number in range(9)]
    await mesh.advance(60)
    assert boss.replies() == []
    assert (mesh.unacked("doubler"), mesh.waiting("doubler")) == (3, 6)
    replica.store.away = False
    await mesh.advance(3)
    assert [await boss.reply(task_id) for task_id in tasks] == [Ok(2 * number) for number in range(9)]


def written(replica: Any, method: str) -> list[Any]:
    """Arguments of every call of `method`. A repeated write must carry the same ids."""
    return [arguments for name, arguments in replica.store.arguments if name == method]


async def test_a_repeated_write_carries_the_same_ids(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    for method in ("pause", "claim", "end"):
        replica.store.fail(method, LOST_IN_DOUBT, IN_DOUBT)
    task_id = await boss.ask("asker", 1)
    await mesh.advance(5)
    await peer.respond(peer.requests[0], 1)
    await mesh.advance(10)
    assert boss.replies(task_id) == [Ok({"peer": 1})]
    for method in ("pause", "claim", "end"):
        first, *others = written(replica, method)
        assert len(others) == 2
        assert all(other[0] == first[0] for other in others)
