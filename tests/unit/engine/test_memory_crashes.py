"""A replica crashes, drains or fails: the next run has the memory of the last checkpoint.

Every write happens once.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.agents.replies import Replies
from meshpoint.agents.stateful import StatefulAgent
from meshpoint.errors import MemoryUnavailable
from meshpoint.model.checkpoint import TaskState
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.outcomes import Failed, FailureKind, Ok

from .agents import Gate
from .memories import Places
from .mesh import Mesh
from .puppet import Puppet
from .resuming import result_of, resumed
from .test_crash_points import crash_at

KINDS = pytest.mark.parametrize("kind", ["local", "surviving"])
asked = Peer("peer", int, int)


class Turns:
    """At a named place in agent code, waits at a gate or fails.

    Callable, so that digests of closures ignore its contents.
    """

    def __init__(self) -> None:
        self.gates: dict[str, Gate] = {}
        self.failing: set[str] = set()

    async def __call__(self, place: str) -> None:
        if place in self.failing:
            raise ValueError(f"failed {place}")
        if place in self.gates:
            await self.gates[place]()

    def gate(self, place: str) -> Gate:
        return self.gates.setdefault(place, Gate())


async def _inside(ctx: TaskExecutionContext, turns: Turns, name: str) -> int:
    async def inside() -> int:
        count = await ctx.memory.incr("inside")
        await turns(f"in {name}")
        await ctx.memory.rpush("names", name)
        return count

    return await ctx.subtask(name, inside)


async def _half(ctx: TaskExecutionContext, turns: Turns, half: str) -> None:
    """Half of the agent's work: writes before, in, between and after two subtasks."""
    await ctx.memory.incr("outside")
    await _inside(ctx, turns, f"{half}1")
    await ctx.memory.rpush("log", half)
    await turns(f"between {half}")
    await _inside(ctx, turns, f"{half}2")
    await ctx.memory.incr("outside")
    await turns(f"after {half}")


async def _found(ctx: TaskExecutionContext) -> list[Any]:
    counts = [await ctx.memory.incr(key, 0) for key in ("outside", "inside")]
    lists = [await ctx.memory.lrange(key) for key in ("log", "names")]
    return [*counts, *([each.decode() for each in elements] for elements in lists)]


DONE_ONCE = [4, 4, ["a", "b"], ["a1", "a2", "b1", "b2"]]


def function_agent(turns: Turns) -> Any:
    @agent("agent", version="1")
    async def working(ctx: TaskExecutionContext, number: int) -> list[Any]:
        await _half(ctx, turns, "a")
        await ctx.call(asked(number))
        await _half(ctx, turns, "b")
        await ctx.call(asked(number + 1))
        return await _found(ctx)

    return working


class Handlers(StatefulAgent[int, int, list[Any]]):
    name = "agent"

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    async def on_request(self, ctx: TaskExecutionContext, number: int) -> Any:
        await _half(ctx, self.turns, "a")
        return self.ask(number, {"more": asked(number)}, then=self.on_more)

    async def on_more(self, ctx: TaskExecutionContext, number: int, replies: Replies) -> Any:
        await _half(ctx, self.turns, "b")
        return self.ask(number, {"more": asked(number + 1)}, then=self.on_last)

    async def on_last(self, ctx: TaskExecutionContext, number: int, replies: Replies) -> Any:
        return self.done(await _found(ctx))


FORMS = pytest.mark.parametrize("form", [function_agent, Handlers])


async def answered(mesh: Mesh, boss: Puppet, peer: Puppet, task_id: str, before: int = 0) -> Any:
    """Answer all calls after the first `before`, advance the clock, and return the result."""
    for _ in range(60):
        for request in peer.requests[before:]:
            await peer.respond(request, 7)
        before = len(peer.requests)
        await mesh.advance(1)
        if boss.replies(task_id):
            return boss.replies(task_id)[0]
    return None


PLACES = [f"{where} {half}" for half in "ab" for where in ("between", "after")]
PLACES += [f"in {half}{number}" for half in "ab" for number in (1, 2)]


@KINDS
@FORMS
async def test_writes_in_and_outside_of_subtasks_are_done_once_over_pauses(
    mesh: Mesh, boss: Puppet, peer: Puppet, kind: str, form: Any
) -> None:
    places = Places(mesh, kind)
    await mesh.replica(form(Turns()), **places())
    assert await answered(mesh, boss, peer, await boss.ask("agent", 1)) == Ok(DONE_ONCE)


@KINDS
@FORMS
@pytest.mark.parametrize("how", ["crash", "drain"])
@pytest.mark.parametrize("place", PLACES)
async def test_a_replica_ends_anywhere_and_another_writes_once(
    mesh: Mesh, boss: Puppet, peer: Puppet, kind: str, form: Any, place: str, how: str
) -> None:
    places, turns = Places(mesh, kind), Turns()
    gate = turns.gate(place)
    first = await mesh.replica(form(turns), **places(), drain_timeout=timedelta(0))
    task_id = await boss.ask("agent", 1)
    if place.split()[1].startswith("b"):
        await peer.respond(await peer.request_number(), 7)
    await gate.reach()
    await (first.crash() if how == "crash" else first.drain())
    turns.gates.clear()
    gate.opened.set()
    before = len(peer.requests)
    await mesh.replica(form(turns), **places())
    assert await answered(mesh, boss, peer, task_id, before) == Ok(DONE_ONCE)


CRASHES = [
    *((Step.BEGIN, phase) for phase in (Phase.BEFORE, Phase.AFTER)),
    *((Step.SAVE, phase) for phase in (Phase.BEFORE, Phase.AFTER)),
    *((Step.SEGMENT, phase) for phase in (Phase.BEFORE, Phase.AFTER)),
    *((Step.CHECKPOINT, phase) for phase in (Phase.BEFORE, Phase.AFTER)),
    *((Step.DISPATCH, phase) for phase in (Phase.BEFORE, Phase.AFTER)),
    *((Step.ACK, phase) for phase in (Phase.BEFORE, Phase.AFTER)),
    *((Step.CLAIM, phase) for phase in (Phase.BEFORE, Phase.AFTER)),
    *((Step.RESTORE, phase) for phase in (Phase.BEFORE, Phase.AFTER)),
    *((Step.END, phase) for phase in (Phase.BEFORE, Phase.AFTER)),
    *((Step.SUBTASK, phase) for phase in (Phase.BEFORE, Phase.AFTER)),
]


@KINDS
@FORMS
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(("step", "phase"), CRASHES)
async def test_a_crash_between_any_two_steps(
    mesh: Mesh, boss: Puppet, peer: Puppet, kind: str, form: Any, step: Step, phase: Phase, later: bool
) -> None:
    places = Places(mesh, kind)
    first = await mesh.replica(form(Turns()), **places())
    if later:
        task_id = await boss.ask("agent", 1)
        await peer.request_number()
        await mesh.settle()
    crash_at(mesh, first, step, phase)
    if not later:
        task_id = await boss.ask("agent", 1)
        await mesh.settle()
    else:
        await peer.respond(peer.requests[0], 7)
        await mesh.settle()
    await first.crash()
    await mesh.replica(form(Turns()), **places())
    assert await answered(mesh, boss, peer, task_id, int(later)) == Ok(DONE_ONCE)


@KINDS
@FORMS
async def test_a_resumed_operation_has_what_it_had_when_it_failed(
    mesh: Mesh, boss: Puppet, peer: Puppet, kind: str, form: Any
) -> None:
    places, turns = Places(mesh, kind), Turns()
    turns.failing.add("after b")
    await mesh.replica(form(turns), **places())
    task_id = await boss.ask("agent", 1)
    assert isinstance(await answered(mesh, boss, peer, task_id), Failed)
    assert await places.in_sql(task_id) is not None, "memory must be kept after a failure"
    if places.survives:
        assert places.l1.values(task_id)["outside"] == b"4"
    turns.failing.clear()
    await resumed(mesh, task_id)
    await answered_again(mesh, peer, task_id)
    assert await result_of(mesh, task_id) == Ok(DONE_ONCE)


@KINDS
@FORMS
async def test_a_resumed_operation_has_what_it_had_when_it_was_cancelled(
    mesh: Mesh, boss: Puppet, peer: Puppet, kind: str, form: Any
) -> None:
    places, turns = Places(mesh, kind), Turns()
    gate = turns.gate("after b")
    await mesh.replica(form(turns), **places())
    task_id = await boss.ask("agent", 1)
    await peer.respond(await peer.request_number(), 7)
    await gate.reach()
    await boss.cancel("agent", task_id)
    reply = await boss.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.CANCELLED
    await mesh.settle()
    turns.gates.clear()
    await resumed(mesh, task_id)
    await answered_again(mesh, peer, task_id)
    assert await result_of(mesh, task_id) == Ok(DONE_ONCE)


async def answered_again(mesh: Mesh, peer: Puppet, task_id: str, before: int = 1) -> None:
    for _ in range(20):
        for request in peer.requests[before:]:
            await peer.respond(request, 7)
        before = len(peer.requests)
        await mesh.advance(1)
    assert await mesh.state(task_id) is TaskState.COMPLETED


@KINDS
async def test_nothing_is_fetched_twice_that_memory_has(mesh: Mesh, boss: Puppet, peer: Puppet, kind: str) -> None:
    places, fetched = Places(mesh, kind), []

    @agent("agent", version="1")
    async def caching(ctx: TaskExecutionContext, pages: int) -> list[str]:
        found = []
        for number in range(pages):
            if (page := await ctx.memory.get(f"page:{number}")) is None:
                fetched.append(number)
                page = f"text {number}".encode()
                await ctx.memory.set(f"page:{number}", page)
            found.append(page.decode())
            await ctx.call(asked(number))
        return found

    await mesh.replica(caching, **places())
    task_id = await boss.ask("agent", 4)
    assert await answered(mesh, boss, peer, task_id) == Ok([f"text {number}" for number in range(4)])
    assert fetched == [0, 1, 2, 3]


@KINDS
async def test_reads_find_what_was_written_before(mesh: Mesh, boss: Puppet, peer: Puppet, kind: str) -> None:
    """Covers every kind of key, across a pause."""
    places = Places(mesh, kind)

    @agent("agent", version="1")
    async def keeping(ctx: TaskExecutionContext, number: int) -> list[Any]:
        memory = ctx.memory
        await memory.set("bytes", bytes(range(256)))
        await memory.hset("hash", {"f": b"\xff", "g": ""})
        await memory.sadd("set", "x", "y")
        await memory.zadd("zset", {"m": 0.1, "n": -1e300})
        await memory.rpush("list", "1", "2", "1")
        await memory.delete("never")
        await ctx.call(asked(1))
        return [
            await memory.get("bytes") == bytes(range(256)),
            await memory.hgetall("hash") == {b"f": b"\xff", b"g": b""},
            await memory.smembers("set") == {b"x", b"y"},
            await memory.zrange("zset") == [(b"n", -1e300), (b"m", 0.1)],
            await memory.lrange("list") == [b"1", b"2", b"1"],
            await memory.keys(),
        ]

    await mesh.replica(keeping, **places())
    task_id = await boss.ask("agent", 1)
    assert await answered(mesh, boss, peer, task_id) == Ok([*[True] * 5, ["bytes", "hash", "list", "set", "zset"]])


@KINDS
async def test_a_memory_cleared_before_a_pause_is_not_cleared_again_after_it(
    mesh: Mesh, boss: Puppet, peer: Puppet, kind: str
) -> None:
    places = Places(mesh, kind)

    @agent("agent", version="1")
    async def clearing(ctx: TaskExecutionContext, number: int) -> list[str]:
        await ctx.memory.clear()
        await ctx.memory.set("first", "1")
        await ctx.call(asked(1))
        await ctx.memory.clear()
        await ctx.memory.set("second", "2")
        await ctx.call(asked(2))
        return await ctx.memory.keys()

    await mesh.replica(clearing, **places())
    assert await answered(mesh, boss, peer, await boss.ask("agent", 1)) == Ok(["second"])


async def test_a_memory_is_cleared_beside_subtasks_that_are_saved(mesh: Mesh, boss: Puppet) -> None:
    """A checkpoint locks the operation and then the memory; clearing must wait for neither."""
    places, saving = Places(mesh, "surviving"), Gate()

    @agent("agent", version="1")
    async def busy(ctx: TaskExecutionContext, number: int) -> list[str]:
        await ctx.memory.set("x", "1")

        async def first() -> None:
            await asyncio.sleep(0)

        async def while_first_is_saved() -> None:
            await saving.reach()

        async def clear() -> None:
            await saving.reach()
            await mesh.settle()
            clearing = asyncio.create_task(ctx.memory.clear())
            await mesh.settle()
            saving.opened.set()
            await clearing

        await asyncio.gather(ctx.subtask("one", first), ctx.subtask("two", while_first_is_saved), clear())
        return await ctx.memory.keys()

    replica = await mesh.replica(busy, **places())
    replica.store.before["save"] = saving
    assert await boss.reply(await boss.ask("agent", 1)) == Ok([])


async def test_a_write_whose_waiter_was_cancelled_is_noted_all_the_same(
    mesh: Mesh, boss: Puppet, peer: Puppet
) -> None:
    places, gate = Places(mesh, "surviving"), Gate()

    @agent("agent", version="1")
    async def hasty(ctx: TaskExecutionContext, number: int) -> int:
        writing = asyncio.create_task(ctx.memory.incr("n"))
        if not gate.opened.is_set():
            await gate.reach()
            writing.cancel()
            gate.opened.set()
        await asyncio.wait([writing])
        await ctx.call(asked(1))
        return await ctx.memory.incr("n", 0)

    places.l1.after["execute"] = gate
    await mesh.replica(hasty, **places())
    assert await answered(mesh, boss, peer, await boss.ask("agent", 1)) == Ok(1)


@KINDS
async def test_a_write_in_doubt_is_in_the_next_checkpoint(mesh: Mesh, boss: Puppet, peer: Puppet, kind: str) -> None:
    places = Places(mesh, kind)

    class Trying(StatefulAgent[int, int, str]):
        name = "agent"

        async def on_request(self, ctx: TaskExecutionContext, number: int) -> Any:
            await ctx.memory.set("x", "0")
            return self.ask(0, {"more": asked(1)}, then=self.on_more)

        async def on_more(self, ctx: TaskExecutionContext, state: int, replies: Replies) -> Any:
            assert await ctx.memory.get("x") == b"0"
            with pytest.raises(MemoryUnavailable):
                await ctx.memory.set("x", "1")
            return self.ask(0, {"more": asked(2)}, then=self.on_last)

        async def on_last(self, ctx: TaskExecutionContext, state: int, replies: Replies) -> Any:
            return self.done((await ctx.memory.get("x") or b"").decode())

    await mesh.replica(Trying(), **places())
    task_id = await boss.ask("agent", 1)
    request = await peer.request_number()
    await mesh.settle()
    places.l1.in_doubt = 1
    await peer.respond(request, 1)
    request = await peer.request_number(2)
    await mesh.settle()
    places.l1.empty()
    await peer.respond(request, 1)
    assert await boss.reply(task_id) == Ok("1")
