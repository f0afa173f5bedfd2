"""A request that kills its process every time.

`test_crash_matrix.py` covers crashes at each step.
"""

import asyncio

from meshpoint.model.outcomes import Failed, Ok

from .mesh import SHORT_LEASE, Mesh


async def test_a_request_that_kills_its_process_is_answered_as_failed(mesh: Mesh) -> None:
    config = mesh.backends.config("poison", **SHORT_LEASE, max_attempts=2)
    client = await mesh.client()
    await mesh.declare("poison")
    deadly = await client.send("poison", True)
    harmless = await client.send("poison", False)
    deaths = 0
    while not (deadly.done() and harmless.done()):
        replica = await mesh.replica(config)
        ended = asyncio.create_task(replica.wait_ended())
        answered = asyncio.create_task(asyncio.wait({deadly, harmless}))
        await asyncio.wait([ended, answered], return_when=asyncio.FIRST_COMPLETED)
        deaths += ended.done()
        assert deaths < 10
    failed = (await deadly).outcome
    assert isinstance(failed, Failed)
    assert "never finished" in failed.message
    assert (await harmless).outcome == Ok("alive")
    assert deaths == 4  # two deliveries, then two runs under a lease
