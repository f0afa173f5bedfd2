"""Readiness follows a replica from its start to its drain."""

from __future__ import annotations

from meshpoint.adapters.telemetry.health import Health
from meshpoint.model.events import Step
from meshpoint.model.ids import AgentName

from .agents import Gate, doubler, gated
from .mesh import Mesh

DOUBLER = AgentName("doubler")


async def test_a_replica_is_ready_while_it_serves(mesh: Mesh) -> None:
    replica = await mesh.launch(doubler, unavailable_service="broker")
    health = Health([DOUBLER], lambda: replica.broker.connected)
    mesh.events.hooks.append(health.emit)
    await mesh.idle()
    assert health.find_problem() == "starting: doubler"
    replica.broker.heal()
    await mesh.advance(5)
    assert health.find_problem() is None
    replica.broker.unavailable = True
    assert health.find_problem() == "broker unavailable, or a consumer not attached"
    replica.broker.heal()
    assert health.find_problem() is None
    replica.store.unavailable = True
    await mesh.advance(5)
    assert health.find_problem() == "database unavailable: doubler"
    replica.store.heal()
    await mesh.advance(10)
    assert health.find_problem() is None
    await replica.drain()
    assert health.find_problem() == "draining"


async def test_a_replica_is_not_ready_while_it_drains(mesh: Mesh) -> None:
    gate = Gate()
    replica = await mesh.replica(gated("gated", gate))
    health = Health([], lambda: replica.broker.connected)
    mesh.events.hooks.append(health.emit)
    async with mesh.client() as client:
        await client.send("gated", 1)
        await gate.wait_reached()
        replica.stop.set()
        await mesh.idle()
        assert (health.find_problem(), replica.task.done()) == ("draining", False)
        gate.opened.set()
        await replica.drain()


async def test_a_process_is_ready_once_all_its_agents_serve(mesh: Mesh) -> None:
    health = Health([DOUBLER, AgentName("gated")], lambda: True)
    mesh.events.hooks.append(health.emit)
    await mesh.replica(doubler)
    assert health.find_problem() == "starting: gated"
    await mesh.replica(gated("gated", Gate()))
    assert health.find_problem() is None


async def test_an_outage_of_an_isolated_process_ends_with_it(mesh: Mesh) -> None:
    replica = await mesh.replica(doubler)
    health = Health([], lambda: True)
    mesh.events.hooks.append(health.emit)
    runtime = replica.worker.runtime
    runtime.steps.emit(Step.STORE_UNAVAILABLE)  # reported by a process that then ended
    assert health.find_problem() == "database unavailable: doubler"
    await mesh.advance(5)
    assert health.find_problem() is None
