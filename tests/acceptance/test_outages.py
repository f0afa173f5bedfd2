"""The database or the broker restarts under load: nothing is dead-lettered, nothing is lost.

The outage lasts MESHPOINT_OUTAGE_SECONDS; `make outages` sets it to a minute.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from faults import CommitCuttingProxy, LostPart
from meshpoint import Signal, TaskCancelled, connect
from meshpoint.adapters.sql import migrations
from meshpoint.client import status_query, transport
from meshpoint.model.outcomes import Ok
from plain_client import PlainClient, Reply
from servers import PostgresServer, RabbitServer

from .fork_server import ForkServer
from .mesh import SHORT_LEASE, Backends, FakePeer, Mesh, Process

OUTAGE_SECONDS = float(os.environ.get("MESHPOINT_OUTAGE_SECONDS", "5"))


@pytest.fixture
async def own_backends(
    tmp_path: Path, namespace: str, own_postgres: PostgresServer, own_rabbit: RabbitServer
) -> Backends:
    """Servers that the test may stop."""
    await asyncio.to_thread(migrations.upgrade, own_postgres.url)
    return Backends(f"{own_rabbit.url}?heartbeat=5", own_postgres.url, namespace, tmp_path)


@pytest.fixture
async def mesh(own_backends: Backends, fork_server: ForkServer) -> AsyncIterator[Mesh]:
    running = Mesh(own_backends, fork_server)
    yield running
    await running.close()


async def test_no_request_is_lost_when_postgresql_restarts_under_load(
    mesh: Mesh, own_postgres: PostgresServer
) -> None:
    config = mesh.backends.config("root", **SHORT_LEASE, max_attempts=3)
    peer, client = await mesh.peer(), await mesh.client()
    replicas = [await mesh.replica(config) for _ in range(2)]
    async with asyncio.TaskGroup() as load:
        answering = load.create_task(peer.answer_all())
        before = await _send_requests(client, 30)
        await _wait_for_any_claim(replicas)
        await own_postgres.stop(immediate=True)
        during = await _send_requests(client, 30)
        await asyncio.gather(*[replica.wait("store_unavailable:info") for replica in replicas])
        await asyncio.sleep(OUTAGE_SECONDS)  # the fault itself
        await own_postgres.start()
        await _assert_all_answered(before + during)
        answering.cancel()
    assert client.conflicts == 0  # a message sent but not yet confirmed is sent again
    _assert_nothing_dead_lettered(replicas)


async def test_no_request_is_lost_when_rabbitmq_restarts_under_load(
    mesh: Mesh, own_rabbit: RabbitServer
) -> None:
    config = mesh.backends.config("root", **SHORT_LEASE, max_attempts=3)
    peer, client = await mesh.peer(), await mesh.client()
    replicas = [await mesh.replica(config) for _ in range(2)]
    async with asyncio.TaskGroup() as load:
        before = await _send_requests(client, 30)
        calls = await peer.next_requests(30)
        await own_rabbit.stop()
        await asyncio.sleep(OUTAGE_SECONDS)  # the fault itself
        await own_rabbit.start()
        answering = load.create_task(peer.answer_all())
        for call in calls:  # un-acked requests are redelivered too: both answers are sent
            await call.answer(int(str(call.input)) * 10)
        after = await _send_requests(client, 10)
        await _assert_all_answered(before + after)
        answering.cancel()
    assert client.conflicts == 0
    _assert_nothing_dead_lettered(replicas)


async def _send_requests(client: PlainClient, count: int) -> list[asyncio.Future[Reply]]:
    return [await client.send("root", {"numbers": [number]}) for number in range(count)]


async def _wait_for_any_claim(replicas: list[Process]) -> None:
    """Wait until any replica claims its first responses."""
    claims = [asyncio.create_task(replica.wait("claim:after")) for replica in replicas]
    _, pending = await asyncio.wait(claims, return_when=asyncio.FIRST_COMPLETED)
    for each in pending:
        each.cancel()


async def _assert_all_answered(waiting: list[asyncio.Future[Reply]]) -> None:
    for reply in waiting:
        outcome = (await reply).outcome
        assert isinstance(outcome, Ok)


def _assert_nothing_dead_lettered(replicas: list[Process]) -> None:
    for replica in replicas:
        assert replica.matching_events("dead_letter:info") == []
        assert replica.matching_events("dead_task:info") == []
        assert replica.process.returncode is None


async def test_a_task_whose_first_checkpoint_fails_continues_in_process(
    mesh: Mesh, own_postgres: PostgresServer, tmp_path: Path
) -> None:
    config = mesh.backends.config("root", checkpoint_retry_time_seconds=1)
    peer, client = await mesh.peer(), await mesh.client()
    replica = await mesh.replica(config)
    gate = tmp_path / "gate"
    reply = await client.send("root", {"numbers": [1, 2], "gate": str(gate)})
    await replica.wait("segment:before")
    await own_postgres.stop(immediate=True)
    gate.touch()
    await replica.wait("degraded:info")
    await _answer_next(peer, 2)
    assert (await reply).outcome == Ok([10, 20])
    await replica.wait("ack:after")
    await own_postgres.start()
    other = await client.send("root", {"numbers": [3]})
    await _answer_next(peer, 1)
    assert (await other).outcome == Ok([30])
    assert (await mesh.row_counts()) == {"tasks": 1, "calls": 0, "open": 0}


async def test_commands_for_tasks_in_a_stopped_database_hold_up_no_others(
    mesh: Mesh, own_postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpointing is off, so new tasks do not need the database."""
    monkeypatch.setattr(status_query, "_REPLY_SECONDS", 0.5)
    monkeypatch.setattr(transport, "COMPLETION_SECONDS", 600.0)
    peer, gate = await mesh.peer(), tmp_path / "gate"
    backends = mesh.backends
    async with connect(backends.broker_url, namespace=backends.namespace) as caller:
        first = await mesh.replica(backends.config("root"))
        cancelled, attached, signalled = [
            await caller.send("root", {"numbers": [number], "signals": number == 3})
            for number in (1, 2, 3)
        ]
        calls = {call.input: call for call in await peer.next_requests(3)}
        await first.wait("ack:after", 3)
        first.signal(signal.SIGTERM)  # a killed one might not have sent its acks yet
        await first.wait_ended()
        replica = await mesh.replica(backends.config("root", stateless_checkpointing=False))
        await own_postgres.stop(immediate=True)
        await cancelled.cancel()
        handle = caller.task("root", attached.id)
        assert not (await handle.status()).is_served
        signalling = asyncio.ensure_future(signalled.signal(Signal("chat", int), 7))
        await calls[2].answer(20)
        await calls[3].answer(30)
        await calls[1].update("looking")
        task = await caller.send("root", {"numbers": [], "gate": str(gate)})
        await replica.wait("segment:before")
        await replica.wait("claim:before")  # for an answer
        await task.cancel()  # arrives last
        with pytest.raises(TaskCancelled):
            await task.result()
        await own_postgres.start()
        await signalling
        assert (await attached.result(), await signalled.result()) == ([20], [30, 7])
        with pytest.raises(TaskCancelled):
            await cancelled.result()


async def _answer_next(peer: FakePeer, count: int) -> None:
    for call in await peer.next_requests(count):
        await call.answer(int(str(call.input)) * 10)


@pytest.mark.parametrize("lost", list(LostPart))
async def test_a_commit_whose_response_is_lost_takes_effect_once(
    production: Backends, fork_server: ForkServer, lost: LostPart
) -> None:
    """Every COMMIT of the replica fails once, in turn: the run finds or repeats its write."""
    async with CommitCuttingProxy(production.db_url) as cutter:
        cut_backends = Backends(
            production.broker_url, cutter.url, production.namespace, production.folder
        )
        mesh = Mesh(cut_backends, fork_server)
        try:
            peer, client = await mesh.peer(), await mesh.client()
            replica = await mesh.replica(
                cut_backends.config("root", sweep_interval_seconds=60, lease_seconds=60)
            )
            for number in range(5):
                cutter.cut_next(lost)
                reply = await client.send("root", {"numbers": [number], "rounds": 2})
                for _ in range(2):
                    (call,) = await peer.next_requests()
                    cutter.cut_next(lost)
                    await call.answer(int(str(call.input)) * 10)
                assert (await reply).outcome == Ok([number * 10])
            assert cutter.cuts >= 10
            assert client.duplicates == 0
            assert peer.requests.empty()
            assert len(await replica.wait("dispatch:after", 10)) == 10  # no second set of calls
        finally:
            await mesh.close()
