"""The database or the broker restarts under load: nothing is dead-lettered, nothing is lost.

The outage lasts MESHPOINT_OUTAGE_SECONDS; `make outages` sets it to a minute.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from faults import CommitCutter, Lost
from meshpoint.adapters.sql import migrations
from meshpoint.client import Client, Reply
from meshpoint.model.outcomes import Ok
from servers import PostgresServer, RabbitServer

from .kit import SHORT_LEASE, Mesh, PlayedPeer, Process, Rung
from .nursery import Nursery

OUTAGE = float(os.environ.get("MESHPOINT_OUTAGE_SECONDS", "5"))


@pytest.fixture
async def own_rung(tmp_path: Path, namespace: str, own_postgres: PostgresServer, own_rabbit: RabbitServer) -> Rung:
    """Servers that the test may stop."""
    await asyncio.to_thread(migrations.upgrade, own_postgres.url)
    return Rung(f"{own_rabbit.url}?heartbeat=5", own_postgres.url, namespace, tmp_path)


@pytest.fixture
async def mesh(own_rung: Rung, nursery: Nursery) -> AsyncIterator[Mesh]:
    running = Mesh(own_rung, nursery)
    yield running
    await running.close()


async def test_postgresql_stops_under_load(mesh: Mesh, own_postgres: PostgresServer) -> None:
    config = mesh.rung.config("root", **SHORT_LEASE, max_attempts=3)
    peer, client = await mesh.peer(), await mesh.client()
    replicas = [await mesh.replica(config) for _ in range(2)]
    async with asyncio.TaskGroup() as load:
        answering = load.create_task(peer.answer_all())
        before = await _send(client, 30)
        await _any_claim(replicas)
        await own_postgres.stop(immediate=True)
        during = await _send(client, 30)
        await asyncio.gather(*[replica.wait("store_away:noted") for replica in replicas])
        await asyncio.sleep(OUTAGE)  # the fault itself
        await own_postgres.start()
        await _all_answered(before + during)
        answering.cancel()
    assert client.conflicts == 0  # a message sent but not yet confirmed is sent again
    _nothing_given_up(replicas)


async def test_rabbitmq_stops_under_load(mesh: Mesh, own_rabbit: RabbitServer) -> None:
    config = mesh.rung.config("root", **SHORT_LEASE, max_attempts=3)
    peer, client = await mesh.peer(), await mesh.client()
    replicas = [await mesh.replica(config) for _ in range(2)]
    async with asyncio.TaskGroup() as load:
        before = await _send(client, 30)
        calls = await peer.asked(30)
        await own_rabbit.stop()
        await asyncio.sleep(OUTAGE)  # the fault itself
        await own_rabbit.start()
        answering = load.create_task(peer.answer_all())
        for call in calls:  # un-acked requests are redelivered too: both answers are sent
            await call.answer(int(str(call.input)) * 10)
        after = await _send(client, 10)
        await _all_answered(before + after)
        answering.cancel()
    assert client.conflicts == 0
    _nothing_given_up(replicas)


async def _send(client: Client, count: int) -> list[asyncio.Future[Reply]]:
    return [await client.send("root", {"numbers": [number]}) for number in range(count)]


async def _any_claim(replicas: list[Process]) -> None:
    """Wait until any replica claims its first responses."""
    claims = [asyncio.create_task(replica.wait("claim:after")) for replica in replicas]
    _, late = await asyncio.wait(claims, return_when=asyncio.FIRST_COMPLETED)
    for each in late:
        each.cancel()


async def _all_answered(waiting: list[asyncio.Future[Reply]]) -> None:
    for reply in waiting:
        outcome = (await reply).outcome
        assert isinstance(outcome, Ok)


def _nothing_given_up(replicas: list[Process]) -> None:
    for replica in replicas:
        assert replica.of("dead_letter:noted") == []
        assert replica.of("dead_task:noted") == []
        assert replica.process.returncode is None


async def test_a_task_whose_first_checkpoint_fails_goes_on_in_memory(
    mesh: Mesh, own_postgres: PostgresServer, tmp_path: Path
) -> None:
    config = mesh.rung.config("root", checkpoint_retry_time_seconds=1)
    peer, client = await mesh.peer(), await mesh.client()
    replica = await mesh.replica(config)
    gate = tmp_path / "gate"
    reply = await client.send("root", {"numbers": [1, 2], "gate": str(gate)})
    await replica.wait("segment:before")
    await own_postgres.stop(immediate=True)
    gate.touch()
    await replica.wait("degraded:noted")
    await _answer(peer, 2)
    assert (await reply).outcome == Ok([10, 20])
    await replica.wait("ack:after")
    await own_postgres.start()
    other = await client.send("root", {"numbers": [3]})
    await _answer(peer, 1)
    assert (await other).outcome == Ok([30])
    assert (await mesh.rows()) == {"tasks": 1, "calls": 0, "open": 0}


async def _answer(peer: PlayedPeer, count: int) -> None:
    for call in await peer.asked(count):
        await call.answer(int(str(call.input)) * 10)


@pytest.mark.parametrize("lost", list(Lost))
async def test_a_commit_whose_answer_is_lost(production: Rung, nursery: Nursery, lost: Lost) -> None:
    """Every COMMIT of the replica fails once, in turn: the run finds or repeats its write."""
    async with CommitCutter(production.db_url) as cutter:
        cut_rung = Rung(production.broker_url, cutter.url, production.namespace, production.folder)
        mesh = Mesh(cut_rung, nursery)
        try:
            peer, client = await mesh.peer(), await mesh.client()
            replica = await mesh.replica(cut_rung.config("root", sweep_interval_seconds=60, lease_seconds=60))
            for number in range(5):
                cutter.cut_next(lost)
                reply = await client.send("root", {"numbers": [number], "rounds": 2})
                for _ in range(2):
                    (call,) = await peer.asked()
                    cutter.cut_next(lost)
                    await call.answer(int(str(call.input)) * 10)
                assert (await reply).outcome == Ok([number * 10])
            assert cutter.cuts >= 10
            assert client.duplicates == 0
            assert peer.requests.empty()
            assert len(await replica.wait("dispatch:after", 10)) == 10  # no second set of calls
        finally:
            await mesh.close()
