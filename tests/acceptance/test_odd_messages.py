"""Two replicas on real servers receive unreadable messages along with honest ones."""

from __future__ import annotations

import asyncio

from meshpoint.adapters.rabbitmq import connect
from meshpoint.model.ids import AgentName, new_id
from meshpoint.model.messages import dead_letters_of, nested_of, requests_of, responses_of
from meshpoint.model.outcomes import Ok
from odd_content import OVERSIZED, UNDECODABLE, publish_raw

from .kit import Mesh, Rung
from .nursery import Nursery

ROOT = AgentName("root")


async def test_bad_messages_cost_no_honest_one(production: Rung, nursery: Nursery) -> None:
    mesh = Mesh(production, nursery)
    try:
        await _bad_messages_beside_honest_ones(mesh)
    finally:
        await mesh.close()


async def _bad_messages_beside_honest_ones(mesh: Mesh) -> None:
    rung = mesh.rung
    config = rung.config("root")
    peer, client = await mesh.peer(), await mesh.client()
    replicas = [await mesh.replica(config) for _ in range(2)]
    exchange = f"{rung.namespace}.mesh"
    keys = [requests_of(ROOT), nested_of(ROOT), responses_of(ROOT), f"{ROOT}.broadcast"]
    async with asyncio.TaskGroup() as load:
        answering = load.create_task(peer.answer_all())
        replies = []
        for place, encoded in enumerate(UNDECODABLE.values()):
            replies.append(await client.send("root", {"numbers": [place]}))
            for key in keys:
                await publish_raw(rung.broker_url, exchange, key, encoded)
        for encoded, body in OVERSIZED.values():
            replies.append(await client.send("root", {"numbers": [1]}))
            for key in keys:
                await publish_raw(rung.broker_url, exchange, key, encoded, body)
        for reply in replies:
            assert isinstance((await reply).outcome, Ok)
        answering.cancel()
    # each replica receives broadcasts
    expected = (len(UNDECODABLE) + len(OVERSIZED)) * (len(keys) + 1)
    await _dead(rung, expected)
    for replica in replicas:
        assert replica.of("broker_away:noted") == []
        assert replica.process.returncode is None
    last = await client.send("root", {"numbers": []})
    assert isinstance((await last).outcome, Ok)


async def _dead(rung: Rung, expected: int) -> None:
    """Wait for `expected` dead letters; each must be readable and have a short reason."""
    wired = await connect(rung.broker_url)
    queue = f"{rung.namespace}.{dead_letters_of(ROOT)}"
    channel = (await wired.open_channel()).channel
    while ((await channel.queue_declare(queue, passive=True)).message_count or 0) < expected:
        await asyncio.sleep(0.05)
    for _ in range(expected):
        letter = await channel.basic_get(queue, no_ack=True)
        assert len(str((letter.header.properties.headers or {})["x-dead-reason"])) <= 500
    assert not (await channel.basic_get(queue, no_ack=True)).delivery_tag, new_id()
    await wired.close()
