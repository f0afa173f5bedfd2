"""Deadlines, leases and frozen replicas."""

import signal
import time
from pathlib import Path

from meshpoint.model.outcomes import Ok

from .kit import SHORT_LEASE, Mesh, queue_of


async def test_a_peer_that_never_answers_ends_as_a_timeout(mesh: Mesh) -> None:
    config = mesh.rung.config("root", sweep_interval_seconds=1)
    peer, client = await mesh.peer(), await mesh.client()
    replica = await mesh.replica(config)
    reply = await client.send("root", {"numbers": [1, 2], "timeout": 3})
    first, _ = await peer.asked(2)
    await first.answer(10)
    assert (await reply).outcome == Ok([10, "timeout"] if first.input == 1 else ["timeout", 10])
    assert await replica.wait("expire:after")
    cancelled = await peer.cancels.get()
    assert cancelled.message.correlation_id != first.sub_task_id


async def test_a_deadline_that_passed_while_no_replica_lived(mesh: Mesh) -> None:
    config = mesh.rung.config("root", sweep_interval_seconds=1)
    peer, client = await mesh.peer(), await mesh.client()
    first = await mesh.replica(config)
    late = await client.send("root", {"numbers": [1], "timeout": 1})
    answered = await client.send("root", {"numbers": [2], "timeout": 1})
    calls = {call.input: call for call in await peer.asked(2)}
    await first.wait("ack:after", 2)
    await first.kill()
    deadline = calls[1].delivery.message.headers["x-deadline"]
    await calls[2].answer(20)  # waits in the queue, then takes precedence over the timeout
    while time.time() < float(deadline) + 1:
        await peer.broker.depth(queue_of("root"))
    await mesh.replica(config)
    assert (await answered).outcome == Ok([20])
    assert (await late).outcome == Ok(["timeout"])


async def test_a_frozen_replica_that_lost_its_lease_changes_nothing(mesh: Mesh, tmp_path: Path) -> None:
    config, gate = mesh.rung.config("root", **SHORT_LEASE), tmp_path / "gate"
    gate.touch()
    peer, client = await mesh.peer(), await mesh.client()
    first = await mesh.replica(config)
    reply = await client.send("root", {"numbers": [1], "gate": str(gate)})
    (call,) = await peer.asked()
    await first.wait("ack:after")
    await first.kill()
    gate.unlink()
    # Freeze between transactions: a process frozen inside one would hold SQLite's only write lock.
    calm = mesh.rung.config("root", **SHORT_LEASE, sweep_interval_seconds=600, renew_interval_seconds=1)
    frozen = await mesh.replica(calm, "--at", "end:before", "--do", "freeze")
    await frozen.wait("sweep:after", durable=True)
    await call.answer(10)
    await frozen.wait("ack:after")
    gate.touch()
    await frozen.wait("end:before")
    other = await mesh.replica(config)
    assert (await reply).outcome == Ok([10])
    assert await other.wait("take_over:after")
    frozen.signal(signal.SIGCONT)
    told = await frozen.wait("fenced:noted")
    assert told[0]["detail"]["what"] == "end"
    assert client.duplicates == 0
    assert (await mesh.rows())["open"] == 0
