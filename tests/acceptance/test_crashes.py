"""A process killed exactly at a step: one outcome, and no second set of calls."""

import asyncio

import pytest

from meshpoint.model.outcomes import Ok

from .kit import Mesh, within

AROUND_THE_PAUSE = ["checkpoint:after", "dispatch:before", "dispatch:after", "mark:after", "ack:before", "ack:after"]


@pytest.mark.parametrize("step", AROUND_THE_PAUSE)
async def test_killed_around_its_pause(mesh: Mesh, step: str) -> None:
    config = mesh.rung.config("root")
    peer, client = await mesh.peer(), await mesh.client()
    doomed = await mesh.replica(config, "--at", step)
    reply = await client.send("root", {"numbers": [1, 2]})
    assert await doomed.ended() < 0
    await mesh.replica(config)
    answers = {}
    while len(answers) < 2:
        (call,) = await peer.asked()
        answers[call.sub_task_id] = call.input
        await call.answer(int(str(call.input)) * 10)
    assert (await within(reply)).outcome == Ok([10, 20])
    assert sorted(answers.values()) == [1, 2]  # one sub_task_id per call, however often it was sent
    assert client.duplicates == 0
    assert (await mesh.rows())["open"] == 0


AROUND_THE_END = ["claim:after", "segment:before", "segment:after", "end:before", "end:after", "reply:before"]


@pytest.mark.parametrize("step", AROUND_THE_END)
async def test_killed_around_its_end(mesh: Mesh, step: str) -> None:
    config = mesh.rung.config("root")
    peer, client = await mesh.peer(), await mesh.client()
    first = await mesh.replica(config)
    reply = await client.send("root", {"numbers": [1, 2]})
    one, two = await peer.asked(2)
    await first.wait("ack:after")
    await first.kill()
    doomed = await mesh.replica(config, "--at", step, "--skip", "1" if step == "claim:after" else "0")
    await one.answer(10)
    if step == "claim:after":
        await doomed.wait("claim:after")
    await two.answer(20)
    assert await doomed.ended() < 0
    await mesh.replica(config)
    assert (await within(reply)).outcome == Ok([10, 20])
    assert client.duplicates == 0
    assert (await mesh.rows())["open"] == 0


@pytest.mark.parametrize("step", ["reply:after", "mark:after"])
async def test_killed_after_its_reply(mesh: Mesh, step: str) -> None:
    """The reply may be sent twice, under the same id: its requester drops the second."""
    config = mesh.rung.config("root")
    peer, client = await mesh.peer(), await mesh.client()
    first = await mesh.replica(config)
    reply = await client.send("root", {"numbers": [1]})
    (call,) = await peer.asked()
    await first.wait("ack:after")
    await first.kill()
    doomed = await mesh.replica(config, "--at", step)
    await call.answer(10)
    assert (await within(reply)).outcome == Ok([10])
    assert await doomed.ended() < 0
    assert peer.requests.empty()


async def test_a_request_that_kills_its_process_is_answered_as_failed(mesh: Mesh) -> None:
    config = mesh.rung.config("poison", max_attempts=2)
    client = await mesh.client()
    await mesh.declare("poison")
    deadly = await client.send("poison", True)
    harmless = await client.send("poison", False)
    deaths = 0
    while not (deadly.done() and harmless.done()):
        replica = await mesh.replica(config)
        ended, answered = asyncio.ensure_future(replica.process.wait()), asyncio.gather(deadly, harmless)
        await asyncio.wait({ended, answered}, return_when=asyncio.FIRST_COMPLETED)
        deaths += ended.done()
        assert deaths < 10
    failed = (await within(deadly)).outcome
    assert "each run ended with its process" in failed.message
    assert (await within(harmless)).outcome == Ok("alive")
    assert deaths == 4  # two deliveries, then two runs under a lease
