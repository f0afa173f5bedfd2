"""Two replicas on real servers receive unreadable messages along with honest ones."""

from __future__ import annotations

import asyncio

from meshpoint.adapters.rabbitmq import connect
from meshpoint.model.ids import AgentName, new_id
from meshpoint.model.messages import dead_letter_queue, nested_queue, request_queue, response_queue
from meshpoint.model.outcomes import Ok
from unusual_content import OVERSIZED, UNDECODABLE, publish_raw

from .fork_server import ForkServer
from .mesh import Backends, Mesh

ROOT = AgentName("root")


async def test_unreadable_messages_do_not_affect_valid_ones(
    production: Backends, fork_server: ForkServer
) -> None:
    mesh = Mesh(production, fork_server)
    try:
        await _mix_bad_and_valid_messages(mesh)
    finally:
        await mesh.close()


async def _mix_bad_and_valid_messages(mesh: Mesh) -> None:
    backends = mesh.backends
    config = backends.config("root")
    peer, client = await mesh.peer(), await mesh.client()
    replicas = [await mesh.replica(config) for _ in range(2)]
    exchange = f"{backends.namespace}.mesh"
    keys = [request_queue(ROOT), nested_queue(ROOT), response_queue(ROOT), f"{ROOT}.broadcast"]
    async with asyncio.TaskGroup() as load:
        answer_task = load.create_task(peer.answer_all())
        replies = []
        for place, encoded in enumerate(UNDECODABLE.values()):
            replies.append(await client.send("root", {"numbers": [place]}))
            for key in keys:
                await publish_raw(backends.broker_url, exchange, key, encoded)
        for encoded, body in OVERSIZED.values():
            replies.append(await client.send("root", {"numbers": [1]}))
            for key in keys:
                await publish_raw(backends.broker_url, exchange, key, encoded, body)
        for reply in replies:
            assert isinstance((await reply).outcome, Ok)
        answer_task.cancel()
    # each replica receives broadcasts
    expected = (len(UNDECODABLE) + len(OVERSIZED)) * (len(keys) + 1)
    await _wait_for_dead_letters(backends, expected)
    for replica in replicas:
        assert replica.matching_events("broker_unavailable:info") == []
        assert replica.process.returncode is None
    last = await client.send("root", {"numbers": []})
    assert isinstance((await last).outcome, Ok)


async def _wait_for_dead_letters(backends: Backends, expected: int) -> None:
    """Wait for `expected` dead letters; each must be readable and have a short reason."""
    connection = await connect(backends.broker_url)
    queue = f"{backends.namespace}.{dead_letter_queue(ROOT)}"
    channel = (await connection.open_channel()).channel
    while ((await channel.queue_declare(queue, passive=True)).message_count or 0) < expected:
        await asyncio.sleep(0.05)
    for _ in range(expected):
        dead_letter = await channel.basic_get(queue, no_ack=True)
        assert len(str((dead_letter.header.properties.headers or {})["x-dead-reason"])) <= 500
    assert not (await channel.basic_get(queue, no_ack=True)).delivery_tag, new_id()
    await connection.close()
