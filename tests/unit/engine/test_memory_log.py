"""Pauses hand the notes of memory writes to the task's log, where every later run finds them."""

from __future__ import annotations

from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.ids import TaskId
from meshpoint.model.outcomes import Failed, Ok
from meshpoint.working_memory.write_log import decode_writes

from .memories import MemoryTiers
from .mesh import Mesh
from .resuming import resume_and_sweep, stored_outcome

KINDS = pytest.mark.parametrize("kind", ["local", "surviving"])
int_peer = Peer("peer", int, int)
PAUSES, KEYS = 6, 5


def counting_agent(is_fixed: list[bool]) -> Any:
    """Counts up keys before each of its pauses; fails after the last until `is_fixed[0]`."""

    @agent("agent", version="1")
    async def counting(ctx: TaskExecutionContext, number: int) -> int:
        total = 0
        for _ in range(PAUSES):
            for key in range(KEYS):
                total += await ctx.memory.incr(f"n{key}")
            await int_peer(1)
        if not is_fixed[0]:
            raise ValueError("no")
        return total

    return counting


EXPECTED = KEYS * sum(range(1, PAUSES + 1))


async def answer_all(peer: FakePeer, count: int = PAUSES, first: int = 1) -> None:
    for number in range(first, count + 1):
        await peer.respond(await peer.wait_for_request(number), 7)


@KINDS
async def test_each_note_is_written_once(
    mesh: Mesh, client: FakePeer, peer: FakePeer, kind: str
) -> None:
    await mesh.replica(counting_agent([True]), **MemoryTiers(mesh, kind)())
    task_id = await client.ask("agent", 1)
    await answer_all(peer, PAUSES - 1)
    await peer.wait_for_request(PAUSES)
    row = mesh.store._tables.tasks[TaskId(task_id)]
    notes = decode_writes(entry[1:] for _, entry in row.log if entry[:1] == b"\x01")
    assert [note.calls for note in notes] == [
        pause for pause in range(PAUSES) for _ in range(KEYS)
    ]
    assert all(not each.memory_writes for each in await mesh.store.history(TaskId(task_id)))
    await answer_all(peer, first=PAUSES)
    assert await client.reply(task_id) == Ok(EXPECTED)
    assert mesh.store._tables.tasks[TaskId(task_id)].log == []


@KINDS
async def test_another_replica_repeats_no_write(
    mesh: Mesh, client: FakePeer, peer: FakePeer, kind: str
) -> None:
    tiers = MemoryTiers(mesh, kind)
    replica = await mesh.replica(counting_agent([True]), **tiers())
    task_id = await client.ask("agent", 1)
    for number in range(1, PAUSES + 1):
        request = await peer.wait_for_request(number)
        await mesh.idle()
        await replica.drain()
        replica = await mesh.replica(counting_agent([True]), **tiers())
        await peer.respond(request, 7)
    assert await client.reply(task_id) == Ok(EXPECTED)


@KINDS
async def test_a_resumed_operation_finds_the_notes_of_all_its_pauses(
    mesh: Mesh, client: FakePeer, peer: FakePeer, kind: str
) -> None:
    is_fixed = [False]
    await mesh.replica(counting_agent(is_fixed), **MemoryTiers(mesh, kind)())
    task_id = await client.ask("agent", 1)
    await answer_all(peer)
    assert isinstance(await client.reply(task_id), Failed)
    for is_last in (False, True):
        is_fixed[0] = is_last
        await resume_and_sweep(mesh, task_id)
        await answer_all(peer, len(peer.requests) + PAUSES - 1, len(peer.requests))
        await mesh.idle()
    assert await stored_outcome(mesh, task_id) == Ok(EXPECTED)


@KINDS
async def test_an_operation_cancelled_while_it_waited_keeps_its_notes(
    mesh: Mesh, client: FakePeer, peer: FakePeer, kind: str
) -> None:
    await mesh.replica(counting_agent([True]), **MemoryTiers(mesh, kind)())
    task_id = await client.ask("agent", 1)
    await answer_all(peer, 3)
    await peer.wait_for_request(4)
    await mesh.idle()
    await client.cancel("agent", task_id)
    assert isinstance(await client.reply(task_id), Failed)
    await resume_and_sweep(mesh, task_id)
    await answer_all(peer, 4 + PAUSES, 5)
    await mesh.idle()
    assert await stored_outcome(mesh, task_id) == Ok(EXPECTED)
