"""A mesh moves to another broker, with tasks under way in the database that both share."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from meshpoint.model.messages import response_queue
from meshpoint.model.outcomes import Ok

from .fork_server import ForkServer
from .mesh import Backends, Mesh


async def test_tasks_under_way_end_while_the_replicas_move_to_another_broker(
    tmp_path: Path, namespace: str, amqp_url: str, postgres_url: str, fork_server: ForkServer
) -> None:
    old = Mesh(Backends(amqp_url, postgres_url, namespace, tmp_path), fork_server)
    new = Mesh(Backends(postgres_url, postgres_url, namespace, tmp_path), fork_server)
    try:
        old_peer, old_client = await old.peer(), await old.client()
        old_replica = await old.replica(old.backends.config("root"))
        waiting = await old_client.send("root", {"numbers": [1], "rounds": 2})
        (held,) = await old_peer.next_requests()
        new_peer, new_client = await new.peer(), await new.client()
        new_replica = await new.replica(new.backends.config("root"))
        later = await new_client.send("root", {"numbers": [2], "rounds": 2})
        async with asyncio.TaskGroup() as peers:
            answering = [peers.create_task(each.answer_all()) for each in (old_peer, new_peer)]
            assert (await later).outcome == Ok([20])
            await held.answer(10)  # the replica on the old broker continues the task
            assert (await waiting).outcome == Ok([10])
            for each in answering:
                each.cancel()
        assert old_replica.matching_events("claim:after")
        assert await old_peer.broker.depth(response_queue(held.peer)) == 0
        old_replica.signal(signal.SIGTERM)
        assert await old_replica.wait_ended() == 0
        assert (await new.row_counts())["open"] == 0
        assert new_replica.process.returncode is None
    finally:
        await old.close()
        await new.close()
