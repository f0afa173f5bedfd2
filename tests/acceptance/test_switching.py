"""Checkpointing switched on and off under load, in replicas that are drained or killed."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from meshpoint.adapters.sql import migrations
from meshpoint.model.outcomes import Ok
from plain_client import PlainClient, Reply
from servers import PostgresServer, RabbitServer

from .fork_server import ForkServer
from .mesh import HERE, SHORT_LEASE, Backends, FakePeer, Mesh, PeerRequest, Process, output_of

ON, OFF = True, False
SWITCHES = {
    "on to off": [(ON, ON), (ON, OFF), (OFF, OFF)],
    "off to on": [(OFF, OFF), (OFF, ON), (ON, ON)],
    "mixed": [(ON, OFF), (OFF, ON), (ON, OFF)],
    "off and on again": [(ON, ON), (OFF, OFF), (ON, ON)],
}


class Load:
    """Requests whose calls the peer answers only after the next switch."""

    def __init__(self, client: PlainClient, peer: FakePeer) -> None:
        self._client, self._peer = client, peer
        self._replies: list[tuple[int, asyncio.Future[Reply]]] = []
        self._held: list[PeerRequest] = []

    async def send(self, count: int) -> None:
        """Send requests, and hold their calls."""
        first = len(self._replies)
        for number in range(first, first + count):
            reply = await self._client.send("root", {"numbers": [number], "rounds": 2})
            self._replies.append((number, reply))
        self._held += await self._peer.next_requests(count)

    async def answer_held(self) -> None:
        held, self._held = self._held, []
        for call in held:
            await call.answer(int(str(call.input)) * 10)

    async def finish(self) -> None:
        """Answer everything, and check that each request got its own result once."""
        await self.answer_held()
        answering = asyncio.create_task(self._peer.answer_all())
        for number, reply in self._replies:
            assert (await reply).outcome == Ok([10 * number])
        answering.cancel()
        assert self._client.conflicts == 0


async def end(replica: Process, number: signal.Signals) -> None:
    replica.signal(number)
    await replica.wait_ended()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
async def test_no_answer_is_lost_while_checkpointing_is_switched(
    mesh: Mesh, switches: list[tuple[bool, bool]], number: signal.Signals
) -> None:
    """Both replicas are replaced at each switch, one after the other, while tasks wait."""
    configs = {
        setting: mesh.backends.config(
            "root", **SHORT_LEASE, stateless_checkpointing=setting, drain_timeout_seconds=0.5
        )
        for setting in (ON, OFF)
    }
    load = Load(await mesh.client(), await mesh.peer())
    replicas: list[Process] = []
    for settings in switches:
        for setting in settings:
            replicas.append(await mesh.replica(configs[setting]))
            if len(replicas) > 2:
                await end(replicas.pop(0), number)
        await load.answer_held()
        await load.send(6)
    await load.finish()
    for replica in mesh.processes:
        assert replica.matching_events("late:info") == []
        assert replica.matching_events("dead_letter:info") == []
    await asyncio.gather(*[end(replica, signal.SIGTERM) for replica in replicas])
    assert (await mesh.row_counts())["open"] == 0


async def test_a_replica_without_the_database_is_refused_in_one_line(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    memory = mesh.backends.config("root", stateless_checkpointing=OFF, session_service="memory")
    running = await mesh.replica(memory)
    await mesh.replica(mesh.backends.config("root", stateless_checkpointing=OFF))
    assert await running.wait_ended() != 0  # it drains and ends by itself
    command = [sys.executable, "-m", "meshpoint.cli", "run", str(memory), "--log-level", "error"]
    code, out, err = await output_of(*command)
    assert (code, out) == (2, b"")
    (line,) = err.decode().strip().splitlines()
    assert "agent.session_service: other replicas of 'root' store their tasks in a" in line
    assert "use session_service: sql" in line


@pytest.fixture
async def outage_mesh(
    tmp_path: Path,
    namespace: str,
    own_postgres: PostgresServer,
    own_rabbit: RabbitServer,
    fork_server: ForkServer,
) -> AsyncIterator[Mesh]:
    """A mesh on servers that the test may stop."""
    await asyncio.to_thread(migrations.upgrade, own_postgres.url)
    url = f"{own_rabbit.url}?heartbeat=5"
    running = Mesh(Backends(url, own_postgres.url, namespace, tmp_path), fork_server)
    yield running
    await running.close()


@asynccontextmanager
async def outage(replicas: list[Process], postgres: PostgresServer) -> AsyncIterator[None]:
    await postgres.stop(immediate=True)
    try:
        await asyncio.gather(*[each.wait("store_unavailable:info") for each in replicas])
        yield
    finally:
        await postgres.start()


async def test_switched_off_new_requests_do_not_wait_for_the_database(
    outage_mesh: Mesh, own_postgres: PostgresServer
) -> None:
    """Redelivered requests wait. The first has a row, from when checkpointing was on."""
    mesh, peer, client = outage_mesh, await outage_mesh.peer(), await outage_mesh.client()
    on = await mesh.replica(
        mesh.backends.config("root", **SHORT_LEASE), "--at", "ack:before", "--do", "freeze"
    )
    with_row = await client.send("root", {"numbers": [1]})
    (paused_call,) = await peer.next_requests()
    off = mesh.backends.config("root", **SHORT_LEASE, stateless_checkpointing=OFF)
    replicas = [await mesh.replica(off) for _ in range(2)]
    in_memory = await client.send("root", {"numbers": [2]})
    (memory_call,) = await peer.next_requests()
    async with outage(replicas, own_postgres):
        await on.kill()
        await paused_call.answer(10)
        (owner,) = [each for each in replicas if each.matching_events("checkpoint:after")]
        await owner.kill()
        new = await client.send("root", {"numbers": [3]})
        (new_call,) = await peer.next_requests()
        assert new_call.input == 3
        await new_call.answer(30)
        assert (await new).outcome == Ok([30])
        assert not with_row.done()
        assert not in_memory.done()
    assert (await with_row).outcome == Ok([10])
    (repeated_call,) = await peer.next_requests()
    assert repeated_call.input == 2
    await repeated_call.answer(20)
    assert (await in_memory).outcome == Ok([20])
    assert memory_call.sub_task_id != repeated_call.sub_task_id
    assert client.conflicts == 0
    assert peer.requests.empty()
