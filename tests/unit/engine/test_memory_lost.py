"""A working memory that is lost, damaged or unavailable: it is restored or reported as lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.errors import AgentMisbehaved, ConsistencyError, MemoryUnavailable
from meshpoint.model.checkpoint import TaskState
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import TaskId
from meshpoint.model.memory import Held
from meshpoint.model.outcomes import Failed, Ok
from meshpoint.working_memory.packing import pack

from .agents import Gate, doubler
from .memories import Places
from .mesh import Mesh
from .puppet import Puppet

KINDS = pytest.mark.parametrize("kind", ["local", "surviving"])
asked = Peer("peer", int, int)


def remembering(gate: Gate | None = None, seen: list[Any] | None = None) -> Any:
    """Sets `x`, calls its peer, and returns the value found afterwards."""

    @agent("agent", version="1")
    async def remembering(ctx: TaskExecutionContext, number: int) -> str:
        await ctx.memory.set("x", "1")
        await ctx.call(asked(1))
        if gate is not None:
            await gate()
        found = await ctx.memory.get("x")
        if seen is not None:
            seen.append(ctx.memory.recovery)
        return "lost" if found is None else found.decode()

    return remembering


async def paused(mesh: Mesh, boss: Puppet, peer: Puppet, places: Places, agent: Any) -> tuple[TaskId, Any]:
    await mesh.replica(agent, **places())
    task_id = await boss.ask("agent", 1)
    request = await peer.request_number()
    await mesh.settle()
    return task_id, request


def damage_sql(mesh: Mesh, content: Callable[[bytes], bytes]) -> None:
    for row in mesh.store._tables.tasks.values():
        assert row.operation is not None
        row.operation.checkpoints = [
            each.model_copy(update={"l1_snapshot": content(each.l1_snapshot)}) if each.l1_snapshot else each
            for each in row.operation.checkpoints
        ]


def flipped(content: bytes) -> bytes:
    return content[:-20] + bytes([content[-20] ^ 1]) + content[-19:]


def damage_second(places: Places, **fields: Any) -> None:
    for agent_id, packed in places.snapshots.kept.items():
        places.snapshots.kept[agent_id] = replace(packed, **fields)


SECOND = {
    "emptied": lambda places: places.snapshots.kept.clear(),
    "cut off": lambda places: damage_second(places, chunks=()),
    "flipped": lambda places: damage_second(places, chunks=(b"junk",)),
    "of another digest": lambda places: damage_second(places, digest="1:00"),
    "of another order": lambda places: damage_second(places, order=99),
    "older": lambda places: places.snapshots.kept.update(
        {id_: pack(Held((), 1, 0), 0) for id_ in places.snapshots.kept}
    ),
    "no snapshot": lambda places: setattr(places.snapshots, "hopeless", True),
    "away": lambda places: setattr(places.snapshots, "away", True),
}


@pytest.mark.parametrize("l1", ["emptied", "evicted", "changed"])
@pytest.mark.parametrize("second", ["whole", *SECOND])
async def test_lost_before_a_resume_it_comes_from_the_next_place(
    mesh: Mesh, boss: Puppet, peer: Puppet, l1: str, second: str
) -> None:
    places, seen = Places(mesh, "surviving"), []
    task_id, request = await paused(mesh, boss, peer, places, remembering(seen=seen))
    {"emptied": places.l1.empty, "evicted": lambda: places.l1.evict("x")}.get(
        l1, lambda: places.l1.change("x", b"2")
    )()
    SECOND.get(second, lambda places: None)(places)
    await peer.respond(request, 7)
    assert await boss.reply(task_id) == Ok("1")
    (how,) = seen
    assert (how.source, how.verified, how.behind) == ("snapshot" if second == "whole" else "sql", True, False)


async def test_what_is_whole_in_l1_is_not_looked_for_elsewhere(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    places, seen = Places(mesh, "surviving"), []
    task_id, request = await paused(mesh, boss, peer, places, remembering(seen=seen))
    places.snapshots.away = True
    damage_sql(mesh, flipped)
    await peer.respond(request, 7)
    assert await boss.reply(task_id) == Ok("1")
    assert (seen[0].source, seen[0].verified, seen[0].keys) == ("l1", True, 1)


@pytest.mark.parametrize("damage", [flipped, lambda content: content[:-1], lambda content: b"junk"])
async def test_damaged_everywhere_it_is_an_error_that_the_answer_tells(
    mesh: Mesh, boss: Puppet, peer: Puppet, damage: Callable[[bytes], bytes]
) -> None:
    places = Places(mesh, "surviving")
    task_id, request = await paused(mesh, boss, peer, places, remembering())
    places.l1.empty()
    SECOND["flipped"](places)
    damage_sql(mesh, damage)
    await peer.respond(request, 7)
    reply = await boss.reply(task_id)
    assert isinstance(reply, Failed)
    assert "missing: 'x'" in reply.message
    assert await mesh.state(task_id) is TaskState.FAILED


@pytest.mark.parametrize("second", ["whole", "emptied"])
async def test_clear_gets_out_of_it_and_the_new_memory_is_kept_everywhere(
    mesh: Mesh, boss: Puppet, peer: Puppet, second: str
) -> None:
    places, errors = Places(mesh, "surviving"), []

    @agent("agent", version="1")
    async def clearing(ctx: TaskExecutionContext, number: int) -> str:
        try:
            await ctx.memory.set("x", "1")
        except ConsistencyError as error:
            errors.append(error)
            await ctx.memory.clear()
            await ctx.memory.set("x", "1")
        await ctx.call(asked(1))
        await ctx.call(asked(2))
        return (await ctx.memory.get("x") or b"lost").decode()

    task_id, request = await paused(mesh, boss, peer, places, clearing)
    places.l1.empty()
    SECOND["flipped"](places)
    damage_sql(mesh, flipped)
    await peer.respond(request, 7)
    request = await peer.request_number(2)
    await mesh.settle()
    assert errors[0].missing == ("x",)
    places.l1.empty()
    SECOND.get(second, lambda places: None)(places)
    await peer.respond(request, 7)
    assert await boss.reply(task_id) == Ok("1")
    assert len(errors) == 1


async def test_nothing_found_at_all_is_an_empty_memory_that_says_so(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    """The run then repeats the function's own writes."""
    places, seen = Places(mesh, "surviving"), []
    task_id, request = await paused(mesh, boss, peer, places, remembering(seen=seen))
    places.l1.empty()
    places.snapshots.kept.clear()
    for row in mesh.store._tables.tasks.values():
        row.operation.checkpoints = [  # type: ignore[union-attr]
            each.model_copy(update={"l1_snapshot": None})
            for each in row.operation.checkpoints  # type: ignore[union-attr]
        ]
    await peer.respond(request, 7)
    assert await boss.reply(task_id) == Ok("1")
    assert (seen[0].source, seen[0].verified, seen[0].behind) == ("none", False, True)


@pytest.mark.parametrize("loss", ["emptied", "evicted"])
@pytest.mark.parametrize("where", ["in the middle", "before a pause", "before a save"])
async def test_lost_in_a_segment_the_task_goes_on_from_its_checkpoint(
    mesh: Mesh, boss: Puppet, peer: Puppet, loss: str, where: str
) -> None:
    places, lost = Places(mesh, "surviving"), []

    def lose(here: str) -> None:
        if here == where and not lost:
            lost.append(here)
            places.l1.empty() if loss == "emptied" else places.l1.evict("x")

    @agent("agent", version="1")
    async def counting(ctx: TaskExecutionContext, number: int) -> int:
        async def inside() -> None:
            await ctx.memory.incr("x")
            lose("before a save")

        await ctx.memory.incr("x")
        await ctx.call(asked(1))
        await ctx.memory.incr("x")
        lose("in the middle")
        await ctx.memory.incr("x")
        await ctx.subtask("s", inside)
        await ctx.memory.incr("x")
        lose("before a pause")
        await ctx.call(asked(2))
        return await ctx.memory.incr("x", 0)

    await mesh.replica(counting, **places())
    task_id = await boss.ask("agent", 1)
    for count in (1, 2):
        for _ in range(60):
            await mesh.advance(1)
            if len(peer.requests) >= count:
                break
        await peer.respond(await peer.request_number(count), 7)
    assert await boss.reply(task_id) == Ok(5)
    assert lost == [where]
    assert len(mesh.events.of(Step.RELEASE, Phase.AFTER)) == 1


async def test_a_memory_that_is_lost_again_and_again_ends_the_task(mesh: Mesh, boss: Puppet) -> None:
    places, runs = Places(mesh, "surviving"), []

    @agent("agent", version="1")
    async def losing(ctx: TaskExecutionContext, number: int) -> None:
        await ctx.memory.set("x", "1")
        runs.append(number)
        places.l1.empty()
        await ctx.memory.get("x")

    await mesh.replica(losing, **places(), max_attempts=3)
    task_id = await boss.ask("agent", 1)
    await mesh.advance(600)
    assert isinstance(await boss.reply(task_id), Failed)
    assert len(runs) == 3


@KINDS
async def test_an_agent_may_go_on_without(mesh: Mesh, boss: Puppet, kind: str) -> None:
    places = Places(mesh, kind)

    @agent("agent", version="1")
    async def content(ctx: TaskExecutionContext, number: int) -> str:
        try:
            await ctx.memory.set("x", "1")
        except MemoryUnavailable:
            return "without"
        return "with"

    await mesh.replica(content, **places())
    places.l1.away.add("all")
    assert await boss.reply(await boss.ask("agent", 1)) == Ok("without")


@KINDS
async def test_a_task_that_cannot_go_on_without_goes_on_later(
    mesh: Mesh, boss: Puppet, peer: Puppet, kind: str
) -> None:
    places = Places(mesh, kind)
    task_id, request = await paused(mesh, boss, peer, places, remembering())
    places.l1.away.add("all")
    await peer.respond(request, 7)
    await mesh.advance(120)
    assert boss.replies() == []
    places.l1.away.clear()
    await mesh.advance(60)
    assert await boss.reply(task_id) == Ok("1")


async def test_a_pause_commits_while_it_is_away(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    places, seen = Places(mesh, "surviving"), []
    await mesh.replica(remembering(seen=seen), **places())
    places.l1.away.add("read")
    task_id = await boss.ask("agent", 1)
    request = await peer.request_number()
    await mesh.settle()
    latest = await mesh.store.latest(task_id)
    assert latest is not None
    assert latest.l1_snapshot_hash is not None
    assert latest.l1_snapshot_hash.startswith("absent:")
    places.l1.away.clear()
    await peer.respond(request, 7)
    assert await boss.reply(task_id) == Ok("1")
    assert (seen[0].source, seen[0].verified) == ("l1", False)


async def test_a_copy_that_could_not_be_put_is_put_with_the_next_checkpoint(mesh: Mesh, boss: Puppet) -> None:
    places, gate = Places(mesh, "surviving"), Gate()

    @agent("agent", version="1")
    async def working(ctx: TaskExecutionContext, number: int) -> str:
        async def write() -> None:
            await ctx.memory.set("x", "1")

        async def nothing() -> None:
            pass

        await ctx.subtask("writes", write)
        places.snapshots.away = False
        await ctx.subtask("does not", nothing)
        await gate()
        return (await ctx.memory.get("x") or b"lost").decode()

    first = await mesh.replica(working, **places())
    places.snapshots.away = True
    task_id = await boss.ask("agent", 1)
    await gate.reach()
    await first.crash()
    gate.opened.set()
    places.l1.empty()
    await mesh.replica(working, **places())
    await mesh.advance(60)
    assert boss.replies(task_id) == [Ok("1")]
    assert places.snapshots.puts == [2]


@KINDS
async def test_what_is_unchanged_is_not_written_again(mesh: Mesh, boss: Puppet, peer: Puppet, kind: str) -> None:
    places = Places(mesh, kind)

    @agent("agent", version="1")
    async def reading(ctx: TaskExecutionContext, rounds: int) -> None:
        async def read() -> None:
            await ctx.memory.get("x")

        await ctx.memory.set("x", "1")
        for number in range(rounds):
            await ctx.call(asked(number))
            await ctx.subtask(f"s{number}", read)

    replica = await mesh.replica(reading, **places())
    task_id = await boss.ask("agent", 3)
    for count in (1, 2, 3):
        await peer.respond(await peer.request_number(count), 7)
    await boss.reply(task_id)
    assert places.snapshots.puts == ([1] if places.survives else [])
    pauses = [args[0][0].checkpoint for name, args in replica.store.arguments if name == "pause"]
    saves = [args[0].checkpoint for name, args in replica.store.arguments if name == "save"]
    assert [each.l1_snapshot is not None for each in pauses if each] == [True]
    assert [each.l1_snapshot for each in saves] == [None] * 3
    assert len(pauses) == 3


@KINDS
async def test_a_task_without_memory_asks_nothing_of_it(mesh: Mesh, boss: Puppet, kind: str) -> None:
    places = Places(mesh, kind)
    replica = await mesh.replica(doubler, **places())
    assert await boss.reply(await boss.ask("doubler", 1)) == Ok(2)
    await mesh.settle()
    assert places.l1.done == {}
    assert "begin" not in replica.store.calls


@KINDS
async def test_a_memory_too_large_fails_the_task_and_names_its_largest_keys(
    mesh: Mesh, boss: Puppet, peer: Puppet, kind: str
) -> None:
    @agent("agent", version="1")
    async def hoarding(ctx: TaskExecutionContext, number: int) -> None:
        await ctx.memory.set_many({"small": "x", "large": "x" * 900, "larger": "x" * 2000})
        await ctx.call(asked(1))

    await mesh.replica(hoarding, **Places(mesh, kind)(), memory_max_bytes=2_900)
    reply = await boss.reply(await boss.ask("agent", 1))
    assert isinstance(reply, Failed)
    assert "its largest keys are 'larger': 2,006, 'large': 905, 'small': 6" in reply.message
    assert peer.requests == []


@KINDS
async def test_keys_have_their_own_times_over_a_pause(mesh: Mesh, boss: Puppet, peer: Puppet, kind: str) -> None:
    @agent("agent", version="1")
    async def timing(ctx: TaskExecutionContext, number: int) -> list[Any]:
        await ctx.memory.set("short", "1", ttl=timedelta(seconds=5))
        await ctx.memory.set("long", "1", ttl=timedelta(seconds=100))
        await ctx.memory.set("ever", "1")
        await ctx.call(asked(1))
        left = await ctx.memory.ttl("long")
        return [await ctx.memory.keys(), None if left is None else left.total_seconds()]

    await mesh.replica(timing, **Places(mesh, kind)())
    task_id = await boss.ask("agent", 1)
    request = await peer.request_number()
    await mesh.advance(40)
    await peer.respond(request, 7)
    assert await boss.reply(task_id) == Ok([["ever", "long"], 60.0])


@pytest.mark.parametrize("keep", [False, True])
async def test_a_completed_task_leaves_nothing_unless_it_is_kept(
    mesh: Mesh, boss: Puppet, peer: Puppet, keep: bool
) -> None:
    places = Places(mesh, "surviving")
    await mesh.replica(remembering(), **places(), memory_keep=keep)
    task_id = await boss.ask("agent", 1)
    await peer.respond(await peer.request_number(), 7)
    await boss.reply(task_id)
    await mesh.settle()
    assert places.l1.values(task_id) == ({"x": b"1"} if keep else {})
    assert len(places.snapshots.kept) == keep
    assert await places.in_sql(task_id) is None


@KINDS
async def test_a_task_in_memory_has_its_memory_over_pauses(mesh: Mesh, boss: Puppet, peer: Puppet, kind: str) -> None:
    places = Places(mesh, kind)
    await mesh.replica(remembering(), durable=False, **places())
    task_id = await boss.ask("agent", 1)
    await peer.respond(await peer.request_number(), 7)
    assert await boss.reply(task_id) == Ok("1")
    await mesh.settle()
    assert places.l1.values(task_id) == {}


async def test_a_segment_that_is_over_has_no_memory(mesh: Mesh, boss: Puppet) -> None:
    left: list[TaskExecutionContext] = []

    @agent("agent", version="1")
    async def leaving(ctx: TaskExecutionContext, number: int) -> None:
        await ctx.memory.set("x", "1")
        left.append(ctx)

    await mesh.replica(leaving)
    await boss.reply(await boss.ask("agent", 1))
    await mesh.settle()
    with pytest.raises(AgentMisbehaved, match="this one has ended"):
        await left[0].memory.get("x")


@pytest.mark.parametrize("does", ["write", "read", "clear", "pause"])
async def test_a_zombie_changes_nothing_and_is_stopped(mesh: Mesh, boss: Puppet, peer: Puppet, does: str) -> None:
    places, gates, went_on = Places(mesh, "surviving"), [], []
    doing: dict[str, Callable[[TaskExecutionContext], Awaitable[object]]] = {
        "write": lambda ctx: ctx.memory.set("x", "zombie"),
        "read": lambda ctx: ctx.memory.get("x"),
        "clear": lambda ctx: ctx.memory.clear(),
        "pause": lambda ctx: ctx.call(asked(2)),
    }

    @agent("agent", version="1")
    async def twice(ctx: TaskExecutionContext, number: int) -> str:
        await ctx.memory.set("x", "1")
        await ctx.call(asked(1))
        await ctx.memory.set("run", str(len(gates)))
        gates.append(gate := Gate())
        await gate()
        if gate is gates[0]:
            try:
                await doing[does](ctx)
            except Exception:  # as frameworks do: a stop is not an `Exception`
                went_on.append("caught")
            went_on.append(does)
        return (await ctx.memory.get("x") or b"lost").decode()

    await mesh.replica(twice, **places(), sweep_interval=timedelta(hours=1))
    task_id = await boss.ask("agent", 1)
    request = await peer.request_number()
    await mesh.settle()
    await peer.respond(request, 7)
    await mesh.settle()
    await mesh.replica(twice, **places())
    await mesh.advance(17)
    assert len(gates) == 2
    before, kept = places.l1.values(task_id), dict(places.snapshots.kept)
    gates[0].opened.set()
    await mesh.settle()
    assert went_on == []
    assert (places.l1.values(task_id), places.snapshots.kept) == (before, kept)
    assert before == {"x": b"1", "run": b"1"}
    gates[1].opened.set()
    assert await boss.reply(task_id) == Ok("1")
