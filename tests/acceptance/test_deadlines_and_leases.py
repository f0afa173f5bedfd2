"""Deadlines, leases and frozen replicas."""

import signal
import time
from pathlib import Path

from meshpoint.model.outcomes import Ok

from .mesh import SHORT_LEASE, Mesh, queue_of


async def test_a_call_to_a_peer_that_never_answers_times_out(mesh: Mesh) -> None:
    config = mesh.backends.config("root", sweep_interval_seconds=1)
    peer, client = await mesh.peer(), await mesh.client()
    replica = await mesh.replica(config)
    reply = await client.send("root", {"numbers": [1, 2], "timeout": 3})
    unanswered_call, _ = await peer.next_requests(2)
    await unanswered_call.answer(10)
    assert (await reply).outcome == Ok(
        [10, "timeout"] if unanswered_call.input == 1 else ["timeout", 10]
    )
    assert await replica.wait("expire:after")
    cancelled = await peer.cancels.get()
    assert cancelled.message.correlation_id != unanswered_call.sub_task_id


async def test_a_deadline_that_passed_without_a_replica_is_enforced_later(mesh: Mesh) -> None:
    config = mesh.backends.config("root", sweep_interval_seconds=1)
    peer, client = await mesh.peer(), await mesh.client()
    first = await mesh.replica(config)
    late = await client.send("root", {"numbers": [1], "timeout": 1})
    answered = await client.send("root", {"numbers": [2], "timeout": 1})
    calls = {call.input: call for call in await peer.next_requests(2)}
    await first.wait("ack:after", 2)
    await first.kill()
    deadline = calls[1].delivery.message.headers["x-deadline"]
    await calls[2].answer(20)  # waits in the queue, then takes precedence over the timeout
    while time.time() < float(deadline) + 1:
        await peer.broker.depth(queue_of("root"))
    await mesh.replica(config)
    assert (await answered).outcome == Ok([20])
    assert (await late).outcome == Ok(["timeout"])


async def test_a_frozen_replica_that_lost_its_lease_changes_nothing(
    mesh: Mesh, tmp_path: Path
) -> None:
    config, gate = mesh.backends.config("root", **SHORT_LEASE), tmp_path / "gate"
    gate.touch()
    peer, client = await mesh.peer(), await mesh.client()
    first = await mesh.replica(config)
    reply = await client.send("root", {"numbers": [1], "gate": str(gate)})
    (call,) = await peer.next_requests()
    await first.wait("ack:after")
    await first.kill()
    gate.unlink()
    # Freeze between transactions: a process frozen inside one would hold SQLite's only write lock.
    healthy = mesh.backends.config(
        "root", **SHORT_LEASE, sweep_interval_seconds=600, renew_interval_seconds=1
    )
    frozen = await mesh.replica(healthy, "--at", "end:before", "--do", "freeze")
    await frozen.wait("sweep:after", durable=True)
    await call.answer(10)
    await frozen.wait("ack:after")
    gate.touch()
    await frozen.wait("end:before")
    other = await mesh.replica(config)
    assert (await reply).outcome == Ok([10])
    assert await other.wait("rescue:after")
    frozen.signal(signal.SIGCONT)
    events = await frozen.wait("fenced:info")
    assert events[0]["detail"]["what"] == "end"
    assert client.duplicates == 0
    assert (await mesh.row_counts())["open"] == 0
