"""Tasks that stay in the process: no checkpointing, or a database that becomes unavailable."""

import pytest

from meshpoint.model.outcomes import Ok

from .kit import Mesh


@pytest.mark.parametrize("durable", [True, False])
async def test_an_agent_with_one_slot_that_calls_itself(mesh: Mesh, durable: bool) -> None:
    config = mesh.rung.config("selfish", max_concurrency=1, stateless_checkpointing=durable)
    client = await mesh.client()
    await mesh.replica(config)
    assert (await (await client.send("selfish", 3))).outcome == Ok(3)


async def test_without_checkpointing_the_answers_are_the_same_and_no_row_is_written(mesh: Mesh) -> None:
    peer, client = await mesh.peer(), await mesh.client()
    await mesh.replica(mesh.rung.config("root", stateless_checkpointing=False))
    reply = await client.send("root", {"numbers": [1, 2], "rounds": 2})
    for _ in range(4):
        (call,) = await peer.asked()
        await call.answer(int(str(call.input)) * 10)
    assert (await reply).outcome == Ok([10, 20])
    assert await mesh.rows() == {"tasks": 0, "calls": 0, "open": 0}
