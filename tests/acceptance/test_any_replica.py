"""Any live replica receives the peers' responses and continues the task."""

import asyncio
import signal

from meshpoint.model.outcomes import Ok

from .mesh import Mesh


async def test_responses_for_a_killed_replica_are_handled_by_another(mesh: Mesh) -> None:
    config = mesh.backends.config("root")
    peer, client = await mesh.peer(), await mesh.client()
    first = await mesh.replica(config)
    reply = await client.send("root", {"numbers": [1, 2, 3], "rounds": 2})
    calls = await peer.next_requests(3)
    await first.wait("ack:after")
    await first.kill()
    second = await mesh.replica(config)
    for call in calls:
        await call.answer(int(str(call.input)) * 10)
    for call in await peer.next_requests(3):
        await call.answer(int(str(call.input)) * 100)
    assert (await reply).outcome == Ok([100, 200, 300])
    assert len(await second.wait("segment:after")) == 2
    assert client.duplicates == 0


async def test_a_response_that_arrives_between_commit_and_ack_is_not_lost(mesh: Mesh) -> None:
    config = mesh.backends.config("root")
    peer, client = await mesh.peer(), await mesh.client()
    slow = await mesh.replica(config, "--at", "ack:before", "--do", "freeze")
    reply = await client.send("root", {"numbers": [7]})
    (call,) = await peer.next_requests()
    other = await mesh.replica(config)  # the frozen replica still holds the request un-acked
    await call.answer(70)
    assert (await reply).outcome == Ok([70])
    assert await other.wait("claim:after")
    slow.signal(signal.SIGCONT)
    await slow.wait("ack:after")
    assert client.duplicates == 0
    assert peer.requests.empty()


async def test_two_replicas_share_the_responses_of_one_task(mesh: Mesh) -> None:
    config = mesh.backends.config("root")
    peer, client = await mesh.peer(), await mesh.client()
    replicas = [await mesh.replica(config) for _ in range(2)]
    reply = await client.send("root", {"numbers": list(range(40))})
    for call in await peer.next_requests(40):
        await call.answer(call.input)
    assert (await reply).outcome == Ok(list(range(40)))
    with_events = [
        asyncio.create_task(replica.wait("segment:after", generation=1)) for replica in replicas
    ]
    await asyncio.wait(with_events, return_when=asyncio.FIRST_COMPLETED)
    for each in with_events:
        each.cancel()
    await asyncio.gather(*with_events, return_exceptions=True)
    assert (
        sum(len(replica.matching_events("segment:before", generation=1)) for replica in replicas)
        == 1
    )
