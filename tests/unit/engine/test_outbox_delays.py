"""Committed messages leave soon after an outage, and missing addresses delay no others."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.model.calls import Call
from meshpoint.model.events import Step
from meshpoint.model.ids import AgentName
from meshpoint.model.messages import Address
from meshpoint.model.outcomes import Ok

from .agents import asker, caller, doubler
from .mesh import Mesh


async def test_a_long_broker_outage_does_not_postpone_due_messages(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    replica.broker.fail("not committed", type="request")
    task_id = await client.ask("asker", 1)
    await mesh.idle()
    assert peer.requests == []
    replica.broker.unavailable = True
    await mesh.advance(200)
    replica.broker.unavailable = False
    await mesh.advance(6)
    await peer.respond(await peer.wait_for_request(), 2)
    assert await client.reply(task_id) == Ok({"peer": 2})


async def test_missing_requesters_do_not_delay_others_for_long(
    mesh: Mesh, client: FakePeer
) -> None:
    await mesh.replica(doubler, max_concurrency=2)
    for number in range(20):
        unreachable_request = replace(
            client.request(number), reply_to=Address("client.private.gone")
        )
        await client.send("doubler", unreachable_request)
    task_id = await client.ask("doubler", 7)
    await mesh.advance(40)
    assert await client.reply(task_id) == Ok(14)
    await mesh.idle()
    assert len(mesh.events.matching(Step.REPLY_UNROUTABLE)) == 20


async def test_a_returning_requester_is_answered(mesh: Mesh, client: FakePeer) -> None:
    await mesh.replica(doubler, max_concurrency=2)
    first = replace(client.request(1), app_id="late", reply_to=Address("late.resp"))
    await client.send("doubler", first)
    await mesh.advance(40)
    late = await mesh.fake_peer("late")
    second = replace(late.request(2))
    await late.send("doubler", second)
    assert await late.reply(second.correlation_id) == Ok(4)


async def test_in_process_tasks_are_swept_while_a_claim_waits_for_the_database(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    def call(request: Any) -> list[Call]:
        return [Call("only", request, 1, timeout=timedelta(seconds=20))]

    replica = await mesh.replica(caller("caller", call), undeliverable_after=timedelta())
    replica.store.fail_always("pause")
    in_memory = await client.ask("caller", "peer")
    await mesh.advance(10)
    await peer.wait_for_request()
    replica.store.heal()
    replica.broker.fail("not committed", type="request")
    await client.ask("caller", "nobody")
    await mesh.idle()
    replica.store.fail_always("claim")
    await mesh.advance(7)  # the sweeper finds the call undeliverable and cannot record it
    assert "claim" in replica.store.calls
    await mesh.advance(20)
    assert await client.reply(in_memory) == Ok({"only": "timeout"})


async def test_tombstones_are_purged_faster_than_they_are_created(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(asker("asker", "peer"), sweep_batch=1)
    task_ids = [await client.ask("asker", 1) for _ in range(25)]
    for number in range(1, 26):
        await peer.respond(await peer.wait_for_request(number), 2)
    for task_id in task_ids:
        await client.reply(task_id)
    mesh.clock.advance(timedelta(days=2))
    await mesh.advance(61)
    assert await mesh.store.tasks() == []


async def test_old_entries_of_timelines_are_pruned_batch_by_batch(
    mesh: Mesh, client: FakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, pruned = await mesh.replica(asker("asker", "peer")), list[int]()
    left = [5000, 5000, 17]

    async def prune(agent: AgentName, limit: int) -> int:
        pruned.append(left.pop(0) if left else 0)
        return pruned[-1]

    monkeypatch.setattr(replica.store, "prune_timelines", prune, raising=False)
    await mesh.advance(61)
    assert pruned == [5000, 5000, 17]
