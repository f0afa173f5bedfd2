"""Tasks that stay in the process: no checkpointing, or a database that becomes unavailable."""

import pytest

from meshpoint.model.outcomes import Ok

from .mesh import Mesh


@pytest.mark.parametrize("durable", [True, False])
async def test_an_agent_with_one_slot_can_call_itself(mesh: Mesh, durable: bool) -> None:
    config = mesh.backends.config("selfish", max_concurrency=1, stateless_checkpointing=durable)
    client = await mesh.client()
    await mesh.replica(config)
    assert (await (await client.send("selfish", 3))).outcome == Ok(3)


async def test_tasks_without_checkpointing_give_the_same_answers_and_write_no_row(
    mesh: Mesh,
) -> None:
    peer, client = await mesh.peer(), await mesh.client()
    await mesh.replica(mesh.backends.config("root", stateless_checkpointing=False))
    reply = await client.send("root", {"numbers": [1, 2], "rounds": 2})
    for _ in range(4):
        (call,) = await peer.next_requests()
        await call.answer(int(str(call.input)) * 10)
    assert (await reply).outcome == Ok([10, 20])
    assert await mesh.row_counts() == {"tasks": 0, "calls": 0, "open": 0}
