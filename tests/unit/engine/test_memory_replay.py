"""Code that runs again from its start or from a checkpoint writes to its memory only once."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from itertools import count

import pytest

from fake_peer import FakePeer
from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.outcomes import Failed, FailureKind, Ok

from .agents import Gate
from .memories import MemoryTiers
from .mesh import Mesh
from .resuming import resume_and_sweep, stored_outcome

KINDS = pytest.mark.parametrize("kind", ["local", "surviving"])
int_peer = Peer("peer", int, int)


@KINDS
async def test_a_subtask_that_pauses_writes_to_memory_once(
    mesh: Mesh, client: FakePeer, peer: FakePeer, kind: str
) -> None:
    @agent("agent", version="1")
    async def pausing(ctx: TaskExecutionContext, number: int) -> list[int]:
        async def inside() -> list[int]:
            before = await ctx.memory.incr("n")
            await int_peer(1)
            return [before, await ctx.memory.incr("n")]

        return await ctx.subtask("pauses", inside)

    await mesh.replica(pausing, **MemoryTiers(mesh, kind)())
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(), 7)
    assert await client.reply(task_id) == Ok([1, 2])


@KINDS
@pytest.mark.parametrize("reads_first", [False, True])
async def test_a_cleared_memory_is_not_cleared_again_on_replay(
    mesh: Mesh, client: FakePeer, peer: FakePeer, kind: str, reads_first: bool
) -> None:
    """Writes of a recorded subtask must survive too.

    With `reads_first`, memory is loaded beforehand.
    """

    @agent("agent", version="1")
    async def clearing(ctx: TaskExecutionContext, number: int) -> list[str]:
        async def inside() -> None:
            await ctx.memory.set("inside", "1")

        if reads_first:
            await ctx.memory.get("outside")
        await ctx.memory.clear()
        await ctx.memory.set("outside", "1")
        await ctx.subtask("writes", inside)
        await int_peer(1)
        return await ctx.memory.keys()

    await mesh.replica(clearing, **MemoryTiers(mesh, kind)())
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(), 7)
    assert await client.reply(task_id) == Ok(["inside", "outside"])


@KINDS
async def test_a_resumed_operation_knows_its_writes_after_a_subtask_that_paused(
    mesh: Mesh, client: FakePeer, peer: FakePeer, kind: str
) -> None:
    """The recorded subtask does not pause again, so its pause must not shift later writes."""
    is_fixed = [False]

    @agent("agent", version="1")
    async def failing(ctx: TaskExecutionContext, number: int) -> int:
        async def inside() -> int:
            return await int_peer(1)

        await ctx.subtask("pauses", inside)
        found = await ctx.memory.incr("n")
        if not is_fixed[0]:
            raise ValueError("no")
        return found

    await mesh.replica(failing, **MemoryTiers(mesh, kind)())
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(), 7)
    assert isinstance(await client.reply(task_id), Failed)
    is_fixed[0] = True
    await resume_and_sweep(mesh, task_id)
    assert await stored_outcome(mesh, task_id) == Ok(1)
    assert len(peer.requests) == 1


@KINDS
async def test_a_subtask_that_failed_writes_once_when_its_operation_is_resumed(
    mesh: Mesh, client: FakePeer, kind: str
) -> None:
    is_fixed = [False]

    @agent("agent", version="1")
    async def failing(ctx: TaskExecutionContext, number: int) -> list[int]:
        async def whole() -> int:
            return await ctx.memory.incr("whole")

        async def broken() -> int:
            found = await ctx.memory.incr("broken")
            if not is_fixed[0]:
                raise ValueError("no")
            return found

        return [await ctx.subtask("whole", whole), await ctx.subtask("broken", broken)]

    await mesh.replica(failing, **MemoryTiers(mesh, kind)())
    task_id = await client.ask("agent", 1)
    assert isinstance(await client.reply(task_id), Failed)
    is_fixed[0] = True
    await resume_and_sweep(mesh, task_id)
    assert await stored_outcome(mesh, task_id) == Ok([1, 1])


@KINDS
async def test_a_subtask_running_while_another_is_saved_writes_once(
    mesh: Mesh, client: FakePeer, kind: str
) -> None:
    """The checkpoint of one subtask contains the writes of the other up to then."""
    tiers, gate = MemoryTiers(mesh, kind), Gate()

    @agent("agent", version="1")
    async def side_by_side(ctx: TaskExecutionContext, number: int) -> int:
        async def slow() -> int:
            found = await ctx.memory.incr("n")
            await gate()
            return found

        async def quick() -> None:
            await gate.wait_reached()

        found, _ = await asyncio.gather(ctx.subtask("slow", slow), ctx.subtask("quick", quick))
        return found

    first = await mesh.replica(side_by_side, **tiers())
    task_id = await client.ask("agent", 1)
    await mesh.events.wait(Step.SAVE, Phase.AFTER)
    await mesh.idle()
    await first.crash()
    gate.opened.set()
    await mesh.replica(side_by_side, **tiers())
    await mesh.advance(60)
    assert client.replies(task_id) == [Ok(1)]
    assert gate.visits == 2


@KINDS
async def test_a_subtask_resumed_from_progress_writes_once(
    mesh: Mesh, client: FakePeer, kind: str
) -> None:
    """A write after the saved progress is new, even if it looks like one made before it."""
    tiers, gate = MemoryTiers(mesh, kind), Gate()

    @agent("agent", version="1")
    async def counting(ctx: TaskExecutionContext, number: int) -> int:
        async def four() -> int:
            found = 0
            for done in range(ctx.saved_progress or 0, 4):
                found = await ctx.memory.incr("n")
                await ctx.save_progress(done + 1)
                if done == 1:
                    await gate()
            return found

        return await ctx.subtask("four", four)

    first = await mesh.replica(counting, **tiers())
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    await first.crash()
    gate.opened.set()
    await mesh.replica(counting, **tiers())
    await mesh.advance(60)
    assert client.replies(task_id) == [Ok(4)]


@pytest.mark.parametrize("pauses", [1, 2])
async def test_a_restarted_task_without_a_row_begins_with_an_empty_memory(
    mesh: Mesh, client: FakePeer, peer: FakePeer, pauses: int
) -> None:
    tiers, gate = MemoryTiers(mesh, "surviving"), Gate()

    @agent("agent", version="1")
    async def counting(ctx: TaskExecutionContext, number: int) -> int:
        found = await ctx.memory.incr("n")
        for item in range(pauses):
            await int_peer(item)
            found = await ctx.memory.incr("n")
        await gate()
        return found

    first = await mesh.replica(counting, durable=False, **tiers())
    task_id = await client.ask("agent", 1)
    for number in range(1, pauses + 1):
        await peer.respond(await peer.wait_for_request(number), 7)
    await gate.wait_reached()
    await first.crash()
    gate.opened.set()
    await mesh.replica(counting, durable=False, **tiers())
    for number in range(pauses + 1, 2 * pauses + 1):
        await peer.respond(await peer.wait_for_request(number), 7)
    assert await client.reply(task_id) == Ok(1 + pauses)


@KINDS
async def test_a_cancel_found_at_a_pause_preserves_the_memory_for_a_resume(
    mesh: Mesh, client: FakePeer, peer: FakePeer, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers, gate = MemoryTiers(mesh, kind), Gate()

    @agent("agent", version="1")
    async def pausing(ctx: TaskExecutionContext, number: int) -> int:
        found = await ctx.memory.incr("n")
        await gate()
        await int_peer(1)
        return found

    replica = await mesh.replica(pausing, **tiers())
    # The cancel comes late.
    monkeypatch.setattr(replica.worker.tasks, "cancel", lambda task_id, parent=None: False)
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    await client.cancel("agent", task_id)
    await mesh.idle()
    gate.opened.set()
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.CANCELLED
    await mesh.idle()
    assert await tiers.sql_snapshot(task_id) is not None
    assert peer.requests == []
    await resume_and_sweep(mesh, task_id)
    await peer.respond(await peer.wait_for_request(), 7)
    await mesh.idle()
    assert await stored_outcome(mesh, task_id) == Ok(1)


async def test_memory_written_after_an_unreadable_checkpoint_is_not_mistaken_for_it(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """The checkpoint knows only its version, and L1 holds more: all writes are repeated."""
    tiers, gate = MemoryTiers(mesh, "surviving"), Gate()

    @agent("agent", version="1")
    async def counting(ctx: TaskExecutionContext, number: int) -> int:
        await ctx.memory.incr("n")
        await int_peer(1)
        found = await ctx.memory.incr("n")
        await gate()
        return found

    first = await mesh.replica(counting, **tiers())
    tiers.l1.unavailable_methods.add("read")
    task_id = await client.ask("agent", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    tiers.l1.unavailable_methods.clear()
    await peer.respond(request, 7)
    await gate.wait_reached()
    assert tiers.l1.contents(task_id) == {"n": b"2"}
    await first.crash()
    gate.opened.set()
    await mesh.replica(counting, **tiers())
    await mesh.advance(60)
    assert client.replies(task_id) == [Ok(2)]


@pytest.mark.parametrize("early", [True, False])
async def test_a_zombie_that_finds_an_empty_l1_does_not_disturb_the_owner(
    mesh: Mesh, client: FakePeer, peer: FakePeer, early: bool
) -> None:
    """Without a fence in L1, the zombie writes before or during the new run.

    The new run detects that the memory is not its own and restores it from the checkpoint.
    """
    tiers, runs = MemoryTiers(mesh, "surviving"), count()
    zombie, other = Gate(), Gate()

    @agent("agent", version="1")
    async def counting(ctx: TaskExecutionContext, number: int) -> int:
        run = next(runs)
        if run == 1:
            await zombie()
        if run == 2 and early:
            await other()
        await ctx.memory.incr("n")
        await int_peer(1)
        if run == 2 and not early:
            await other()
        return await ctx.memory.incr("n")

    await mesh.replica(counting, **tiers(), sweep_interval=timedelta(hours=1))
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(), 7)
    await zombie.wait_reached()
    await mesh.replica(counting, **tiers())
    await mesh.advance(17)
    await other.wait_reached()
    tiers.l1.empty()
    zombie.opened.set()
    await mesh.idle()
    assert tiers.l1.contents(task_id) == {"n": b"2"}, "the zombie wrote this"
    assert client.replies(task_id) == []
    other.opened.set()
    await mesh.advance(60)
    assert client.replies(task_id) == [Ok(2)]
    assert next(runs) == (3 if early else 4)
