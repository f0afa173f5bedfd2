"""Code that runs again from its start or from a checkpoint writes to its memory only once."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from itertools import count

import pytest

from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.outcomes import Failed, FailureKind, Ok

from .agents import Gate
from .memories import Places
from .mesh import Mesh
from .puppet import Puppet
from .resuming import result_of, resumed

KINDS = pytest.mark.parametrize("kind", ["local", "surviving"])
asked = Peer("peer", int, int)


@KINDS
async def test_a_subtask_that_pauses_writes_once(mesh: Mesh, boss: Puppet, peer: Puppet, kind: str) -> None:
    @agent("agent", version="1")
    async def pausing(ctx: TaskExecutionContext, number: int) -> list[int]:
        async def inside() -> list[int]:
            before = await ctx.memory.incr("n")
            await ctx.call(asked(1))
            return [before, await ctx.memory.incr("n")]

        return await ctx.subtask("pauses", inside)

    await mesh.replica(pausing, **Places(mesh, kind)())
    task_id = await boss.ask("agent", 1)
    await peer.respond(await peer.request_number(), 7)
    assert await boss.reply(task_id) == Ok([1, 2])


@KINDS
@pytest.mark.parametrize("looks", [False, True])
async def test_a_memory_that_was_cleared_is_not_cleared_again(
    mesh: Mesh, boss: Puppet, peer: Puppet, kind: str, looks: bool
) -> None:
    """Writes of a recorded subtask must survive too. With `looks`, memory is loaded beforehand."""

    @agent("agent", version="1")
    async def clearing(ctx: TaskExecutionContext, number: int) -> list[str]:
        async def inside() -> None:
            await ctx.memory.set("inside", "1")

        if looks:
            await ctx.memory.get("outside")
        await ctx.memory.clear()
        await ctx.memory.set("outside", "1")
        await ctx.subtask("writes", inside)
        await ctx.call(asked(1))
        return await ctx.memory.keys()

    await mesh.replica(clearing, **Places(mesh, kind)())
    task_id = await boss.ask("agent", 1)
    await peer.respond(await peer.request_number(), 7)
    assert await boss.reply(task_id) == Ok(["inside", "outside"])


@KINDS
async def test_a_resumed_operation_knows_its_writes_after_a_subtask_that_paused(
    mesh: Mesh, boss: Puppet, peer: Puppet, kind: str
) -> None:
    """The recorded subtask does not pause again, so its pause must not shift later writes."""
    works = [False]

    @agent("agent", version="1")
    async def failing(ctx: TaskExecutionContext, number: int) -> int:
        async def inside() -> int:
            return await ctx.call(asked(1))

        await ctx.subtask("pauses", inside)
        found = await ctx.memory.incr("n")
        if not works[0]:
            raise ValueError("no")
        return found

    await mesh.replica(failing, **Places(mesh, kind)())
    task_id = await boss.ask("agent", 1)
    await peer.respond(await peer.request_number(), 7)
    assert isinstance(await boss.reply(task_id), Failed)
    works[0] = True
    await resumed(mesh, task_id)
    assert await result_of(mesh, task_id) == Ok(1)
    assert len(peer.requests) == 1


@KINDS
async def test_a_subtask_that_failed_writes_once_when_its_operation_is_resumed(
    mesh: Mesh, boss: Puppet, kind: str
) -> None:
    works = [False]

    @agent("agent", version="1")
    async def failing(ctx: TaskExecutionContext, number: int) -> list[int]:
        async def whole() -> int:
            return await ctx.memory.incr("whole")

        async def broken() -> int:
            found = await ctx.memory.incr("broken")
            if not works[0]:
                raise ValueError("no")
            return found

        return [await ctx.subtask("whole", whole), await ctx.subtask("broken", broken)]

    await mesh.replica(failing, **Places(mesh, kind)())
    task_id = await boss.ask("agent", 1)
    assert isinstance(await boss.reply(task_id), Failed)
    works[0] = True
    await resumed(mesh, task_id)
    assert await result_of(mesh, task_id) == Ok([1, 1])


@KINDS
async def test_a_subtask_in_the_middle_when_another_was_saved_writes_once(
    mesh: Mesh, boss: Puppet, kind: str
) -> None:
    """The checkpoint of one subtask contains the writes of the other up to then."""
    places, gate = Places(mesh, kind), Gate()

    @agent("agent", version="1")
    async def side_by_side(ctx: TaskExecutionContext, number: int) -> int:
        async def slow() -> int:
            found = await ctx.memory.incr("n")
            await gate()
            return found

        async def quick() -> None:
            await gate.reach()

        found, _ = await asyncio.gather(ctx.subtask("slow", slow), ctx.subtask("quick", quick))
        return found

    first = await mesh.replica(side_by_side, **places())
    task_id = await boss.ask("agent", 1)
    await mesh.events.wait(Step.SAVE, Phase.AFTER)
    await mesh.settle()
    await first.crash()
    gate.opened.set()
    await mesh.replica(side_by_side, **places())
    await mesh.advance(60)
    assert boss.replies(task_id) == [Ok(1)]
    assert gate.visits == 2


@KINDS
async def test_a_subtask_goes_on_from_its_progress_and_writes_the_same_again(
    mesh: Mesh, boss: Puppet, kind: str
) -> None:
    """A write after the saved progress is new, even if it looks like one made before it."""
    places, gate = Places(mesh, kind), Gate()

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

    first = await mesh.replica(counting, **places())
    task_id = await boss.ask("agent", 1)
    await gate.reach()
    await first.crash()
    gate.opened.set()
    await mesh.replica(counting, **places())
    await mesh.advance(60)
    assert boss.replies(task_id) == [Ok(4)]


@pytest.mark.parametrize("pauses", [1, 2])
async def test_a_task_that_only_its_process_had_begins_again_with_an_empty_memory(
    mesh: Mesh, boss: Puppet, peer: Puppet, pauses: int
) -> None:
    places, gate = Places(mesh, "surviving"), Gate()

    @agent("agent", version="1")
    async def counting(ctx: TaskExecutionContext, number: int) -> int:
        found = await ctx.memory.incr("n")
        for each in range(pauses):
            await ctx.call(asked(each))
            found = await ctx.memory.incr("n")
        await gate()
        return found

    first = await mesh.replica(counting, durable=False, **places())
    task_id = await boss.ask("agent", 1)
    for number in range(1, pauses + 1):
        await peer.respond(await peer.request_number(number), 7)
    await gate.reach()
    await first.crash()
    gate.opened.set()
    await mesh.replica(counting, durable=False, **places())
    for number in range(pauses + 1, 2 * pauses + 1):
        await peer.respond(await peer.request_number(number), 7)
    assert await boss.reply(task_id) == Ok(1 + pauses)


@KINDS
async def test_a_cancel_that_a_pause_finds_leaves_the_memory_to_whoever_resumes(
    mesh: Mesh, boss: Puppet, peer: Puppet, kind: str
) -> None:
    places, gate = Places(mesh, kind), Gate()

    @agent("agent", version="1")
    async def pausing(ctx: TaskExecutionContext, number: int) -> int:
        found = await ctx.memory.incr("n")
        await gate()
        await ctx.call(asked(1))
        return found

    replica = await mesh.replica(pausing, **places())
    replica.worker.segments.cancel = lambda task_id, parent=None: False  # type: ignore[method-assign]  # it comes late
    task_id = await boss.ask("agent", 1)
    await gate.reach()
    await boss.cancel("agent", task_id)
    await mesh.settle()
    gate.opened.set()
    reply = await boss.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.CANCELLED
    await mesh.settle()
    assert await places.in_sql(task_id) is not None
    assert peer.requests == []
    await resumed(mesh, task_id)
    await peer.respond(await peer.request_number(), 7)
    await mesh.settle()
    assert await result_of(mesh, task_id) == Ok(1)


async def test_what_came_after_a_checkpoint_that_could_not_read_it_is_not_taken_for_it(
    mesh: Mesh, boss: Puppet, peer: Puppet
) -> None:
    """The checkpoint knows only its version, and L1 holds more: all writes are repeated."""
    places, gate = Places(mesh, "surviving"), Gate()

    @agent("agent", version="1")
    async def counting(ctx: TaskExecutionContext, number: int) -> int:
        await ctx.memory.incr("n")
        await ctx.call(asked(1))
        found = await ctx.memory.incr("n")
        await gate()
        return found

    first = await mesh.replica(counting, **places())
    places.l1.away.add("read")
    task_id = await boss.ask("agent", 1)
    request = await peer.request_number()
    await mesh.settle()
    places.l1.away.clear()
    await peer.respond(request, 7)
    await gate.reach()
    assert places.l1.values(task_id) == {"n": b"2"}
    await first.crash()
    gate.opened.set()
    await mesh.replica(counting, **places())
    await mesh.advance(60)
    assert boss.replies(task_id) == [Ok(2)]


@pytest.mark.parametrize("early", [True, False])
async def test_a_zombie_that_finds_l1_emptied_takes_nothing_from_the_run_that_has_the_task(
    mesh: Mesh, boss: Puppet, peer: Puppet, early: bool
) -> None:
    """Without a fence in L1, the zombie writes before or during the new run.

    The new run detects that the memory is not its own and restores it from the checkpoint.
    """
    places, runs = Places(mesh, "surviving"), count()
    zombie, other = Gate(), Gate()

    @agent("agent", version="1")
    async def counting(ctx: TaskExecutionContext, number: int) -> int:
        run = next(runs)
        if run == 1:
            await zombie()
        if run == 2 and early:
            await other()
        await ctx.memory.incr("n")
        await ctx.call(asked(1))
        if run == 2 and not early:
            await other()
        return await ctx.memory.incr("n")

    await mesh.replica(counting, **places(), sweep_interval=timedelta(hours=1))
    task_id = await boss.ask("agent", 1)
    await peer.respond(await peer.request_number(), 7)
    await zombie.reach()
    await mesh.replica(counting, **places())
    await mesh.advance(17)
    await other.reach()
    places.l1.empty()
    zombie.opened.set()
    await mesh.settle()
    assert places.l1.values(task_id) == {"n": b"2"}, "the zombie wrote this"
    assert boss.replies(task_id) == []
    other.opened.set()
    await mesh.advance(60)
    assert boss.replies(task_id) == [Ok(2)]
    assert next(runs) == (3 if early else 4)
