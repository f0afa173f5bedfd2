"""A replica crashes, drains or fails: the next run has the memory of the last checkpoint.

Every write happens once.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.agents.stateful import Replies, StatefulAgent
from meshpoint.errors import MemoryUnavailable
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.tasks import TaskState

from .agents import Gate
from .memories import MemoryTiers
from .mesh import Mesh
from .resuming import resume_and_sweep, stored_outcome
from .test_crash_points import crash_replica_at

KINDS = pytest.mark.parametrize("kind", ["local", "surviving"])
int_peer = Peer("peer", int, int)


class Breakpoints:
    """At a named place in agent code, waits at a gate or fails.

    Callable, so that digests of closures ignore its contents.
    """

    def __init__(self) -> None:
        self.gates: dict[str, Gate] = {}
        self.failing_at: set[str] = set()

    async def __call__(self, breakpoint_name: str) -> None:
        if breakpoint_name in self.failing_at:
            raise ValueError(f"failed {breakpoint_name}")
        if breakpoint_name in self.gates:
            await self.gates[breakpoint_name]()

    def gate(self, breakpoint_name: str) -> Gate:
        return self.gates.setdefault(breakpoint_name, Gate())


async def _write_inside(ctx: TaskExecutionContext, breakpoints: Breakpoints, name: str) -> int:
    async def inside() -> int:
        count = await ctx.memory.incr("inside")
        await breakpoints(f"in {name}")
        await ctx.memory.rpush("names", name)
        return count

    return await ctx.subtask(name, inside)


async def _run_half(ctx: TaskExecutionContext, breakpoints: Breakpoints, half: str) -> None:
    """Half of the agent's work: writes before, in, between and after two subtasks."""
    await ctx.memory.incr("outside")
    await _write_inside(ctx, breakpoints, f"{half}1")
    await ctx.memory.rpush("log", half)
    await breakpoints(f"between {half}")
    await _write_inside(ctx, breakpoints, f"{half}2")
    await ctx.memory.incr("outside")
    await breakpoints(f"after {half}")


async def _read_contents(ctx: TaskExecutionContext) -> list[Any]:
    counts = [await ctx.memory.incr(key, 0) for key in ("outside", "inside")]
    lists = [await ctx.memory.lrange(key) for key in ("log", "names")]
    return [*counts, *([element_list.decode() for element_list in elements] for elements in lists)]


EXPECTED = [4, 4, ["a", "b"], ["a1", "a2", "b1", "b2"]]


def function_agent(breakpoints: Breakpoints) -> Any:
    @agent("agent", version="1")
    async def working(ctx: TaskExecutionContext, number: int) -> list[Any]:
        await _run_half(ctx, breakpoints, "a")
        await int_peer(number)
        await _run_half(ctx, breakpoints, "b")
        await int_peer(number + 1)
        return await _read_contents(ctx)

    return working


class Handlers(StatefulAgent[int, int, list[Any]]):
    name = "agent"

    def __init__(self, breakpoints: Breakpoints) -> None:
        self.turns = breakpoints

    async def on_request(self, ctx: TaskExecutionContext, number: int) -> Any:
        await _run_half(ctx, self.turns, "a")
        return self.ask(number, {"more": int_peer(number)}, then=self.on_more)

    async def on_more(self, ctx: TaskExecutionContext, number: int, replies: Replies) -> Any:
        await _run_half(ctx, self.turns, "b")
        return self.ask(number, {"more": int_peer(number + 1)}, then=self.on_last)

    async def on_last(self, ctx: TaskExecutionContext, number: int, replies: Replies) -> Any:
        return self.done(await _read_contents(ctx))


AGENT_KINDS = pytest.mark.parametrize("form", [function_agent, Handlers])


async def answer_all(
    mesh: Mesh, client: FakePeer, peer: FakePeer, task_id: str, before: int = 0
) -> Any:
    """Answer all calls after the first `before`, advance the clock, and return the result."""
    for _ in range(60):
        for request in peer.requests[before:]:
            await peer.respond(request, 7)
        before = len(peer.requests)
        await mesh.advance(1)
        if client.replies(task_id):
            return client.replies(task_id)[0]
    return None


BREAKPOINTS = [f"{position} {half}" for half in "ab" for position in ("between", "after")]
BREAKPOINTS += [f"in {half}{number}" for half in "ab" for number in (1, 2)]


@KINDS
@AGENT_KINDS
async def test_writes_in_and_outside_subtasks_are_applied_once_across_pauses(
    mesh: Mesh, client: FakePeer, peer: FakePeer, kind: str, form: Any
) -> None:
    tiers = MemoryTiers(mesh, kind)
    await mesh.replica(form(Breakpoints()), **tiers())
    assert await answer_all(mesh, client, peer, await client.ask("agent", 1)) == Ok(EXPECTED)


@KINDS
@AGENT_KINDS
@pytest.mark.parametrize("end", ["crash", "drain"])
@pytest.mark.parametrize("place", BREAKPOINTS)
async def test_writes_are_applied_once_wherever_a_replica_crashes(
    mesh: Mesh, client: FakePeer, peer: FakePeer, kind: str, form: Any, place: str, end: str
) -> None:
    tiers, breakpoints = MemoryTiers(mesh, kind), Breakpoints()
    gate = breakpoints.gate(place)
    first = await mesh.replica(form(breakpoints), **tiers(), drain_timeout=timedelta(0))
    task_id = await client.ask("agent", 1)
    if place.split()[1].startswith("b"):
        await peer.respond(await peer.wait_for_request(), 7)
    await gate.wait_reached()
    await (first.crash() if end == "crash" else first.drain())
    breakpoints.gates.clear()
    gate.opened.set()
    before = len(peer.requests)
    await mesh.replica(form(breakpoints), **tiers())
    assert await answer_all(mesh, client, peer, task_id, before) == Ok(EXPECTED)


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
@AGENT_KINDS
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(("step", "phase"), CRASHES)
async def test_writes_are_applied_once_after_a_crash_between_any_two_steps(
    mesh: Mesh,
    client: FakePeer,
    peer: FakePeer,
    kind: str,
    form: Any,
    step: Step,
    phase: Phase,
    later: bool,
) -> None:
    tiers = MemoryTiers(mesh, kind)
    first = await mesh.replica(form(Breakpoints()), **tiers())
    if later:
        task_id = await client.ask("agent", 1)
        await peer.wait_for_request()
        await mesh.idle()
    crash_replica_at(mesh, first, step, phase)
    if not later:
        task_id = await client.ask("agent", 1)
        await mesh.idle()
    else:
        await peer.respond(peer.requests[0], 7)
        await mesh.idle()
    await first.crash()
    await mesh.replica(form(Breakpoints()), **tiers())
    assert await answer_all(mesh, client, peer, task_id, int(later)) == Ok(EXPECTED)


@KINDS
@AGENT_KINDS
async def test_a_resumed_operation_has_the_memory_it_failed_with(
    mesh: Mesh, client: FakePeer, peer: FakePeer, kind: str, form: Any
) -> None:
    tiers, breakpoints = MemoryTiers(mesh, kind), Breakpoints()
    breakpoints.failing_at.add("after b")
    await mesh.replica(form(breakpoints), **tiers())
    task_id = await client.ask("agent", 1)
    assert isinstance(await answer_all(mesh, client, peer, task_id), Failed)
    assert await tiers.sql_snapshot(task_id) is not None, "memory must be kept after a failure"
    if tiers.durable:
        assert tiers.l1.contents(task_id)["outside"] == b"4"
    breakpoints.failing_at.clear()
    await resume_and_sweep(mesh, task_id)
    await answer_after_resume(mesh, peer, task_id)
    assert await stored_outcome(mesh, task_id) == Ok(EXPECTED)


@KINDS
@AGENT_KINDS
async def test_a_resumed_operation_has_the_memory_it_was_cancelled_with(
    mesh: Mesh, client: FakePeer, peer: FakePeer, kind: str, form: Any
) -> None:
    tiers, breakpoints = MemoryTiers(mesh, kind), Breakpoints()
    gate = breakpoints.gate("after b")
    await mesh.replica(form(breakpoints), **tiers())
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(), 7)
    await gate.wait_reached()
    await client.cancel("agent", task_id)
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.CANCELLED
    await mesh.idle()
    breakpoints.gates.clear()
    await resume_and_sweep(mesh, task_id)
    await answer_after_resume(mesh, peer, task_id)
    assert await stored_outcome(mesh, task_id) == Ok(EXPECTED)


async def answer_after_resume(mesh: Mesh, peer: FakePeer, task_id: str, before: int = 1) -> None:
    for _ in range(20):
        for request in peer.requests[before:]:
            await peer.respond(request, 7)
        before = len(peer.requests)
        await mesh.advance(1)
    assert await mesh.state(task_id) is TaskState.COMPLETED


@KINDS
async def test_pages_cached_in_memory_are_not_fetched_twice(
    mesh: Mesh, client: FakePeer, peer: FakePeer, kind: str
) -> None:
    tiers, fetched = MemoryTiers(mesh, kind), []

    @agent("agent", version="1")
    async def caching(ctx: TaskExecutionContext, pages: int) -> list[str]:
        found = []
        for number in range(pages):
            if (page := await ctx.memory.get(f"page:{number}")) is None:
                fetched.append(number)
                page = f"text {number}".encode()
                await ctx.memory.set(f"page:{number}", page)
            found.append(page.decode())
            await int_peer(number)
        return found

    await mesh.replica(caching, **tiers())
    task_id = await client.ask("agent", 4)
    assert await answer_all(mesh, client, peer, task_id) == Ok(
        [f"text {number}" for number in range(4)]
    )
    assert fetched == [0, 1, 2, 3]


@KINDS
async def test_reads_after_a_pause_see_earlier_writes(
    mesh: Mesh, client: FakePeer, peer: FakePeer, kind: str
) -> None:
    """Covers every kind of key, across a pause."""
    tiers = MemoryTiers(mesh, kind)

    @agent("agent", version="1")
    async def write_and_read(ctx: TaskExecutionContext, number: int) -> list[Any]:
        memory = ctx.memory
        await memory.set("bytes", bytes(range(256)))
        await memory.hset("hash", {"f": b"\xff", "g": ""})
        await memory.sadd("set", "x", "y")
        await memory.zadd("zset", {"m": 0.1, "n": -1e300})
        await memory.rpush("list", "1", "2", "1")
        await memory.delete("never")
        await int_peer(1)
        return [
            await memory.get("bytes") == bytes(range(256)),
            await memory.hgetall("hash") == {b"f": b"\xff", b"g": b""},
            await memory.smembers("set") == {b"x", b"y"},
            await memory.zrange("zset") == [(b"n", -1e300), (b"m", 0.1)],
            await memory.lrange("list") == [b"1", b"2", b"1"],
            await memory.keys(),
        ]

    await mesh.replica(write_and_read, **tiers())
    task_id = await client.ask("agent", 1)
    assert await answer_all(mesh, client, peer, task_id) == Ok(
        [*[True] * 5, ["bytes", "hash", "list", "set", "zset"]]
    )


@KINDS
async def test_a_clear_before_a_pause_is_not_repeated_after_it(
    mesh: Mesh, client: FakePeer, peer: FakePeer, kind: str
) -> None:
    tiers = MemoryTiers(mesh, kind)

    @agent("agent", version="1")
    async def clearing(ctx: TaskExecutionContext, number: int) -> list[str]:
        await ctx.memory.clear()
        await ctx.memory.set("first", "1")
        await int_peer(1)
        await ctx.memory.clear()
        await ctx.memory.set("second", "2")
        await int_peer(2)
        return await ctx.memory.keys()

    await mesh.replica(clearing, **tiers())
    assert await answer_all(mesh, client, peer, await client.ask("agent", 1)) == Ok(["second"])


async def test_a_memory_can_be_cleared_while_subtasks_are_saved(
    mesh: Mesh, client: FakePeer
) -> None:
    """A checkpoint locks the operation and then the memory; clearing must wait for neither."""
    tiers, save_gate = MemoryTiers(mesh, "surviving"), Gate()

    @agent("agent", version="1")
    async def busy(ctx: TaskExecutionContext, number: int) -> list[str]:
        await ctx.memory.set("x", "1")

        async def first() -> None:
            await asyncio.sleep(0)

        async def wait_for_first_save() -> None:
            await save_gate.wait_reached()

        async def clear() -> None:
            await save_gate.wait_reached()
            await mesh.idle()
            clearing = asyncio.create_task(ctx.memory.clear())
            await mesh.idle()
            save_gate.opened.set()
            await clearing

        await asyncio.gather(
            ctx.subtask("one", first), ctx.subtask("two", wait_for_first_save), clear()
        )
        return await ctx.memory.keys()

    replica = await mesh.replica(busy, **tiers())
    replica.store.before["save"] = save_gate
    assert await client.reply(await client.ask("agent", 1)) == Ok([])


async def test_a_write_whose_caller_was_cancelled_is_still_recorded(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    tiers, gate = MemoryTiers(mesh, "surviving"), Gate()

    @agent("agent", version="1")
    async def cancelling_writer(ctx: TaskExecutionContext, number: int) -> int:
        writing = asyncio.create_task(ctx.memory.incr("n"))
        if not gate.opened.is_set():
            await gate.wait_reached()
            writing.cancel()
            gate.opened.set()
        await asyncio.wait([writing])
        await int_peer(1)
        return await ctx.memory.incr("n", 0)

    tiers.l1.after["execute"] = gate
    await mesh.replica(cancelling_writer, **tiers())
    assert await answer_all(mesh, client, peer, await client.ask("agent", 1)) == Ok(1)


@KINDS
async def test_a_write_in_doubt_is_in_the_next_checkpoint(
    mesh: Mesh, client: FakePeer, peer: FakePeer, kind: str
) -> None:
    tiers = MemoryTiers(mesh, kind)

    class Trying(StatefulAgent[int, int, str]):
        name = "agent"

        async def on_request(self, ctx: TaskExecutionContext, number: int) -> Any:
            await ctx.memory.set("x", "0")
            return self.ask(0, {"more": int_peer(1)}, then=self.on_more)

        async def on_more(self, ctx: TaskExecutionContext, state: int, replies: Replies) -> Any:
            assert await ctx.memory.get("x") == b"0"
            with pytest.raises(MemoryUnavailable):
                await ctx.memory.set("x", "1")
            return self.ask(0, {"more": int_peer(2)}, then=self.on_last)

        async def on_last(self, ctx: TaskExecutionContext, state: int, replies: Replies) -> Any:
            return self.done((await ctx.memory.get("x") or b"").decode())

    await mesh.replica(Trying(), **tiers())
    task_id = await client.ask("agent", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    tiers.l1.writes_in_doubt = 1
    await peer.respond(request, 1)
    request = await peer.wait_for_request(2)
    await mesh.idle()
    tiers.l1.empty()
    await peer.respond(request, 1)
    assert await client.reply(task_id) == Ok("1")
