"""Committed messages leave soon after an outage, and missing addresses delay no others."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from meshpoint.model.calls import Call
from meshpoint.model.events import Step
from meshpoint.model.messages import Address
from meshpoint.model.outcomes import Ok

from .agents import asker, caller, doubler
from .mesh import Mesh
from .puppet import Puppet


async def test_a_long_outage_of_the_broker_does_not_put_off_what_is_due(
    mesh: Mesh, boss: Puppet, peer: Puppet
) -> None:
    running = await mesh.replica(asker("asker", "peer"))
    running.broker.fail("not committed", type="request")
    task_id = await boss.ask("asker", 1)
    await mesh.settle()
    assert peer.requests == []
    running.broker.away = True
    await mesh.advance(200)
    running.broker.away = False
    await mesh.advance(6)
    await peer.respond(await peer.request_number(), 2)
    assert await boss.reply(task_id) == Ok({"peer": 2})


async def test_requesters_that_are_gone_hold_up_nobody_for_long(mesh: Mesh, boss: Puppet) -> None:
    await mesh.replica(doubler, max_concurrency=2)
    for number in range(20):
        gone = replace(boss.request(number), reply_to=Address("boss.private.gone"))
        await boss.send("doubler", gone)
    task_id = await boss.ask("doubler", 7)
    await mesh.advance(40)
    assert await boss.reply(task_id) == Ok(14)
    await mesh.settle()
    assert len(mesh.events.of(Step.REPLY_UNROUTABLE)) == 20


async def test_a_requester_that_comes_back_is_answered(mesh: Mesh, boss: Puppet) -> None:
    await mesh.replica(doubler, max_concurrency=2)
    first = replace(boss.request(1), app_id="late", reply_to=Address("late.resp"))
    await boss.send("doubler", first)
    await mesh.advance(40)
    late = await mesh.puppet("late")
    second = replace(late.request(2))
    await late.send("doubler", second)
    assert await late.reply(second.correlation_id) == Ok(4)


async def test_memory_is_looked_after_while_a_claim_of_the_sweeper_waits_for_the_database(
    mesh: Mesh, boss: Puppet, peer: Puppet
) -> None:
    def call(request: Any) -> list[Call]:
        return [Call("only", request, 1, timeout=timedelta(seconds=20))]

    running = await mesh.replica(caller("caller", call))
    running.store.fail_always("pause")
    in_memory = await boss.ask("caller", "peer")
    await mesh.advance(10)
    await peer.request_number()
    running.store.heal()
    running.broker.fail("not committed", type="request")
    await boss.ask("caller", "nobody")
    await mesh.settle()
    running.store.fail_always("claim")
    await mesh.advance(7)  # the sweeper finds the call undeliverable and cannot record it
    assert "claim" in running.store.calls
    await mesh.advance(20)
    assert await boss.reply(in_memory) == Ok({"only": "timeout"})


async def test_tombstones_go_faster_than_they_come(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    await mesh.replica(asker("asker", "peer"), sweep_batch=1)
    task_ids = [await boss.ask("asker", 1) for _ in range(25)]
    for number in range(1, 26):
        await peer.respond(await peer.request_number(number), 2)
    for task_id in task_ids:
        await boss.reply(task_id)
    mesh.clock.advance(timedelta(days=2))
    await mesh.advance(61)
    assert await mesh.store.tasks() == []
