"""A working memory that is lost, damaged or unavailable: it is restored or reported as lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.errors import AgentMisbehaved, ConsistencyError, MemoryUnavailable
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import TaskId
from meshpoint.model.memory import MemoryContents
from meshpoint.model.outcomes import Failed, Ok
from meshpoint.model.tasks import TaskState
from meshpoint.working_memory.packing import pack

from .agents import Gate, doubler
from .memories import MemoryTiers
from .mesh import Mesh

KINDS = pytest.mark.parametrize("kind", ["local", "surviving"])
int_peer = Peer("peer", int, int)


def remembering_agent(gate: Gate | None = None, seen: list[Any] | None = None) -> Any:
    """Sets `x`, calls its peer, and returns the value found afterwards."""

    @agent("agent", version="1")
    async def remember(ctx: TaskExecutionContext, number: int) -> str:
        await ctx.memory.set("x", "1")
        await int_peer(1)
        if gate is not None:
            await gate()
        found = await ctx.memory.get("x")
        if seen is not None:
            seen.append(ctx.memory.recovery)
        return "lost" if found is None else found.decode()

    return remember


async def start_and_pause(
    mesh: Mesh, client: FakePeer, peer: FakePeer, tiers: MemoryTiers, agent: Any
) -> tuple[TaskId, Any]:
    await mesh.replica(agent, **tiers())
    task_id = await client.ask("agent", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    return task_id, request


def damage_sql(mesh: Mesh, content: Callable[[bytes], bytes]) -> None:
    for row in mesh.store._tables.tasks.values():
        assert row.operation is not None
        row.operation.checkpoints = [
            checkpoint.model_copy(update={"l1_snapshot": content(checkpoint.l1_snapshot)})
            if checkpoint.l1_snapshot
            else checkpoint
            for checkpoint in row.operation.checkpoints
        ]


def flip_byte(content: bytes) -> bytes:
    return content[:-20] + bytes([content[-20] ^ 1]) + content[-19:]


def damage_snapshot(tiers: MemoryTiers, **fields: Any) -> None:
    for agent_id, packed in tiers.snapshots.stored.items():
        tiers.snapshots.stored[agent_id] = replace(packed, **fields)


SNAPSHOT_DAMAGE: dict[str, Callable[[MemoryTiers], object]] = {
    "emptied": lambda tiers: tiers.snapshots.stored.clear(),
    "cut off": lambda places: damage_snapshot(places, chunks=()),
    "flipped": lambda places: damage_snapshot(places, chunks=(b"junk",)),
    "of another digest": lambda places: damage_snapshot(places, digest="1:00"),
    "of another order": lambda places: damage_snapshot(places, order=99),
    "older": lambda places: places.snapshots.stored.update(
        {id_: pack(MemoryContents((), 1, 0), 0) for id_ in places.snapshots.stored}
    ),
    "no snapshot": lambda places: setattr(places.snapshots, "corrupt", True),
    "unavailable": lambda places: setattr(places.snapshots, "unavailable", True),
}


@pytest.mark.parametrize("l1", ["emptied", "evicted", "changed"])
@pytest.mark.parametrize("second", ["whole", *SNAPSHOT_DAMAGE])
async def test_a_memory_lost_before_a_resume_is_recovered_from_the_next_tier(
    mesh: Mesh, client: FakePeer, peer: FakePeer, l1: str, second: str
) -> None:
    tiers, seen = MemoryTiers(mesh, "surviving"), list[Any]()
    task_id, request = await start_and_pause(
        mesh, client, peer, tiers, remembering_agent(seen=seen)
    )
    l1_damage: dict[str, Callable[[], object]] = {
        "emptied": tiers.l1.empty,
        "evicted": lambda: tiers.l1.evict("x"),
    }
    l1_damage.get(l1, lambda: tiers.l1.corrupt("x", b"2"))()
    if damage := SNAPSHOT_DAMAGE.get(second):
        damage(tiers)
    await peer.respond(request, 7)
    assert await client.reply(task_id) == Ok("1")
    (recovery,) = seen
    assert (recovery.source, recovery.verified, recovery.behind) == (
        "snapshot" if second == "whole" else "sql",
        True,
        False,
    )


async def test_an_intact_l1_is_used_without_reading_other_tiers(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    tiers, seen = MemoryTiers(mesh, "surviving"), list[Any]()
    task_id, request = await start_and_pause(
        mesh, client, peer, tiers, remembering_agent(seen=seen)
    )
    tiers.snapshots.unavailable = True
    damage_sql(mesh, flip_byte)
    await peer.respond(request, 7)
    assert await client.reply(task_id) == Ok("1")
    assert (seen[0].source, seen[0].verified, seen[0].keys) == ("l1", True, 1)


@pytest.mark.parametrize(
    "damage", [flip_byte, lambda content: content[:-1], lambda content: b"junk"]
)
async def test_a_memory_damaged_in_every_tier_fails_the_task(
    mesh: Mesh, client: FakePeer, peer: FakePeer, damage: Callable[[bytes], bytes]
) -> None:
    tiers = MemoryTiers(mesh, "surviving")
    task_id, request = await start_and_pause(mesh, client, peer, tiers, remembering_agent())
    tiers.l1.empty()
    SNAPSHOT_DAMAGE["flipped"](tiers)
    damage_sql(mesh, damage)
    await peer.respond(request, 7)
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    assert "missing: 'x'" in reply.message
    assert await mesh.state(task_id) is TaskState.FAILED


@pytest.mark.parametrize("second", ["whole", "emptied"])
async def test_a_damaged_memory_can_be_cleared_and_is_stored_in_every_tier(
    mesh: Mesh, client: FakePeer, peer: FakePeer, second: str
) -> None:
    tiers, errors = MemoryTiers(mesh, "surviving"), []

    @agent("agent", version="1")
    async def clearing(ctx: TaskExecutionContext, number: int) -> str:
        try:
            await ctx.memory.set("x", "1")
        except ConsistencyError as error:
            errors.append(error)
            await ctx.memory.clear()
            await ctx.memory.set("x", "1")
        await int_peer(1)
        await int_peer(2)
        return (await ctx.memory.get("x") or b"lost").decode()

    task_id, request = await start_and_pause(mesh, client, peer, tiers, clearing)
    tiers.l1.empty()
    SNAPSHOT_DAMAGE["flipped"](tiers)
    damage_sql(mesh, flip_byte)
    await peer.respond(request, 7)
    request = await peer.wait_for_request(2)
    await mesh.idle()
    assert errors[0].missing == ("x",)
    tiers.l1.empty()
    if damage := SNAPSHOT_DAMAGE.get(second):
        damage(tiers)
    await peer.respond(request, 7)
    assert await client.reply(task_id) == Ok("1")
    assert len(errors) == 1


async def test_a_memory_missing_everywhere_is_empty_and_marked_as_lost(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """The run then repeats the function's own writes."""
    tiers, seen = MemoryTiers(mesh, "surviving"), list[Any]()
    task_id, request = await start_and_pause(
        mesh, client, peer, tiers, remembering_agent(seen=seen)
    )
    tiers.l1.empty()
    tiers.snapshots.stored.clear()
    for row in mesh.store._tables.tasks.values():
        row.operation.checkpoints = [  # type: ignore[union-attr]  # it has one
            checkpoint.model_copy(update={"l1_snapshot": None})
            for checkpoint in row.operation.checkpoints  # type: ignore[union-attr]  # it has one
        ]
    await peer.respond(request, 7)
    assert await client.reply(task_id) == Ok("1")
    assert (seen[0].source, seen[0].verified, seen[0].behind) == ("none", False, True)


@pytest.mark.parametrize("loss", ["emptied", "evicted"])
@pytest.mark.parametrize("moment", ["in the middle", "before a pause", "before a save"])
async def test_a_memory_lost_in_a_segment_is_restored_from_the_checkpoint(
    mesh: Mesh, client: FakePeer, peer: FakePeer, loss: str, moment: str
) -> None:
    tiers, lost = MemoryTiers(mesh, "surviving"), list[Any]()

    def lose(tiers_: str) -> None:
        if tiers_ == moment and not lost:
            lost.append(tiers_)
            tiers.l1.empty() if loss == "emptied" else tiers.l1.evict("x")

    @agent("agent", version="1")
    async def counting(ctx: TaskExecutionContext, number: int) -> int:
        async def inside() -> None:
            await ctx.memory.incr("x")
            lose("before a save")

        await ctx.memory.incr("x")
        await int_peer(1)
        await ctx.memory.incr("x")
        lose("in the middle")
        await ctx.memory.incr("x")
        await ctx.subtask("s", inside)
        await ctx.memory.incr("x")
        lose("before a pause")
        await int_peer(2)
        return await ctx.memory.incr("x", 0)

    await mesh.replica(counting, **tiers())
    task_id = await client.ask("agent", 1)
    for count in (1, 2):
        for _ in range(60):
            await mesh.advance(1)
            if len(peer.requests) >= count:
                break
        await peer.respond(await peer.wait_for_request(count), 7)
    assert await client.reply(task_id) == Ok(5)
    assert lost == [moment]
    assert len(mesh.events.matching(Step.RELEASE, Phase.AFTER)) == 1


async def test_a_memory_that_is_lost_repeatedly_fails_the_task(
    mesh: Mesh, client: FakePeer
) -> None:
    tiers, runs = MemoryTiers(mesh, "surviving"), []

    @agent("agent", version="1")
    async def losing(ctx: TaskExecutionContext, number: int) -> None:
        await ctx.memory.set("x", "1")
        runs.append(number)
        tiers.l1.empty()
        await ctx.memory.get("x")

    await mesh.replica(losing, **tiers(), max_attempts=3)
    task_id = await client.ask("agent", 1)
    await mesh.advance(600)
    assert isinstance(await client.reply(task_id), Failed)
    assert len(runs) == 3


@KINDS
async def test_an_agent_can_continue_without_memory(
    mesh: Mesh, client: FakePeer, kind: str
) -> None:
    tiers = MemoryTiers(mesh, kind)

    @agent("agent", version="1")
    async def content(ctx: TaskExecutionContext, number: int) -> str:
        try:
            await ctx.memory.set("x", "1")
        except MemoryUnavailable:
            return "without"
        return "with"

    await mesh.replica(content, **tiers())
    tiers.l1.unavailable_methods.add("all")
    assert await client.reply(await client.ask("agent", 1)) == Ok("without")


@KINDS
async def test_a_task_that_needs_its_memory_is_retried_later(
    mesh: Mesh, client: FakePeer, peer: FakePeer, kind: str
) -> None:
    tiers = MemoryTiers(mesh, kind)
    task_id, request = await start_and_pause(mesh, client, peer, tiers, remembering_agent())
    tiers.l1.unavailable_methods.add("all")
    await peer.respond(request, 7)
    await mesh.advance(120)
    assert client.replies() == []
    tiers.l1.unavailable_methods.clear()
    await mesh.advance(60)
    assert await client.reply(task_id) == Ok("1")


async def test_a_pause_commits_while_the_memory_is_unavailable(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    tiers, seen = MemoryTiers(mesh, "surviving"), list[Any]()
    await mesh.replica(remembering_agent(seen=seen), **tiers())
    tiers.l1.unavailable_methods.add("read")
    task_id = await client.ask("agent", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    latest = await mesh.store.latest(task_id)
    assert latest is not None
    assert latest.l1_snapshot_hash is not None
    assert latest.l1_snapshot_hash.startswith("absent:")
    tiers.l1.unavailable_methods.clear()
    await peer.respond(request, 7)
    assert await client.reply(task_id) == Ok("1")
    assert (seen[0].source, seen[0].verified) == ("l1", False)


async def test_a_failed_snapshot_is_stored_with_the_next_checkpoint(
    mesh: Mesh, client: FakePeer
) -> None:
    tiers, gate = MemoryTiers(mesh, "surviving"), Gate()

    @agent("agent", version="1")
    async def working(ctx: TaskExecutionContext, number: int) -> str:
        async def write() -> None:
            await ctx.memory.set("x", "1")

        async def nothing() -> None:
            pass

        await ctx.subtask("writes", write)
        tiers.snapshots.unavailable = False
        await ctx.subtask("does not", nothing)
        await gate()
        return (await ctx.memory.get("x") or b"lost").decode()

    first = await mesh.replica(working, **tiers())
    tiers.snapshots.unavailable = True
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    await first.crash()
    gate.opened.set()
    tiers.l1.empty()
    await mesh.replica(working, **tiers())
    await mesh.advance(60)
    assert client.replies(task_id) == [Ok("1")]
    assert tiers.snapshots.put_orders == [2]


@KINDS
async def test_an_unchanged_memory_is_not_written_again(
    mesh: Mesh, client: FakePeer, peer: FakePeer, kind: str
) -> None:
    tiers = MemoryTiers(mesh, kind)

    @agent("agent", version="1")
    async def reading(ctx: TaskExecutionContext, rounds: int) -> None:
        async def read() -> None:
            await ctx.memory.get("x")

        await ctx.memory.set("x", "1")
        for number in range(rounds):
            await int_peer(number)
            await ctx.subtask(f"s{number}", read)

    replica = await mesh.replica(reading, **tiers())
    task_id = await client.ask("agent", 3)
    for count in (1, 2, 3):
        await peer.respond(await peer.wait_for_request(count), 7)
    await client.reply(task_id)
    assert tiers.snapshots.put_orders == ([1] if tiers.durable else [])
    pauses = [args[0][0].checkpoint for name, args in replica.store.arguments if name == "pause"]
    saves = [args[0].checkpoint for name, args in replica.store.arguments if name == "save"]
    assert [pause.l1_snapshot is not None for pause in pauses if pause] == [True]
    assert [each.l1_snapshot for each in saves] == [None] * 3
    assert len(pauses) == 3


@KINDS
async def test_a_task_that_uses_no_memory_causes_no_memory_calls(
    mesh: Mesh, client: FakePeer, kind: str
) -> None:
    tiers = MemoryTiers(mesh, kind)
    replica = await mesh.replica(doubler, **tiers())
    assert await client.reply(await client.ask("doubler", 1)) == Ok(2)
    await mesh.idle()
    assert tiers.l1.call_counts == {}
    assert "begin" not in replica.store.calls


@KINDS
async def test_a_memory_too_large_fails_the_task_and_names_its_largest_keys(
    mesh: Mesh, client: FakePeer, peer: FakePeer, kind: str
) -> None:
    @agent("agent", version="1")
    async def hoarding(ctx: TaskExecutionContext, number: int) -> None:
        await ctx.memory.set_many({"small": "x", "large": "x" * 900, "larger": "x" * 2000})
        await int_peer(1)

    await mesh.replica(hoarding, **MemoryTiers(mesh, kind)(), memory_max_bytes=2_900)
    reply = await client.reply(await client.ask("agent", 1))
    assert isinstance(reply, Failed)
    assert "its largest keys are 'larger': 2,006, 'large': 905, 'small': 6" in reply.message
    assert peer.requests == []


@KINDS
async def test_keys_keep_their_expiry_across_a_pause(
    mesh: Mesh, client: FakePeer, peer: FakePeer, kind: str
) -> None:
    @agent("agent", version="1")
    async def timing(ctx: TaskExecutionContext, number: int) -> list[Any]:
        await ctx.memory.set("short", "1", ttl=timedelta(seconds=5))
        await ctx.memory.set("long", "1", ttl=timedelta(seconds=100))
        await ctx.memory.set("ever", "1")
        await int_peer(1)
        ttl = await ctx.memory.ttl("long")
        return [await ctx.memory.keys(), None if ttl is None else ttl.total_seconds()]

    await mesh.replica(timing, **MemoryTiers(mesh, kind)())
    task_id = await client.ask("agent", 1)
    request = await peer.wait_for_request()
    await mesh.advance(40)
    await peer.respond(request, 7)
    assert await client.reply(task_id) == Ok([["ever", "long"], 60.0])


@pytest.mark.parametrize("keep", [False, True])
async def test_a_completed_task_leaves_no_memory_unless_preserved(
    mesh: Mesh, client: FakePeer, peer: FakePeer, keep: bool
) -> None:
    tiers = MemoryTiers(mesh, "surviving")
    await mesh.replica(remembering_agent(), **tiers(), memory_keep=keep)
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(), 7)
    await client.reply(task_id)
    await mesh.idle()
    assert tiers.l1.contents(task_id) == ({"x": b"1"} if keep else {})
    assert len(tiers.snapshots.stored) == keep
    assert await tiers.sql_snapshot(task_id) is None


@KINDS
async def test_an_in_process_task_keeps_its_memory_across_pauses(
    mesh: Mesh, client: FakePeer, peer: FakePeer, kind: str
) -> None:
    tiers = MemoryTiers(mesh, kind)
    await mesh.replica(remembering_agent(), durable=False, **tiers())
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(), 7)
    assert await client.reply(task_id) == Ok("1")
    await mesh.idle()
    assert tiers.l1.contents(task_id) == {}


async def test_an_ended_segment_cannot_use_its_memory(mesh: Mesh, client: FakePeer) -> None:
    contexts: list[TaskExecutionContext] = []

    @agent("agent", version="1")
    async def leaving(ctx: TaskExecutionContext, number: int) -> None:
        await ctx.memory.set("x", "1")
        contexts.append(ctx)

    await mesh.replica(leaving)
    await client.reply(await client.ask("agent", 1))
    await mesh.idle()
    with pytest.raises(AgentMisbehaved, match="this one has ended"):
        await contexts[0].memory.get("x")


@pytest.mark.parametrize("action", ["write", "read", "clear", "pause"])
async def test_a_zombie_changes_nothing_and_is_stopped(
    mesh: Mesh, client: FakePeer, peer: FakePeer, action: str
) -> None:
    tiers, gates, continued = MemoryTiers(mesh, "surviving"), list[Gate](), []
    actions: dict[str, Callable[[TaskExecutionContext], Awaitable[object]]] = {
        "write": lambda ctx: ctx.memory.set("x", "zombie"),
        "read": lambda ctx: ctx.memory.get("x"),
        "clear": lambda ctx: ctx.memory.clear(),
        "pause": lambda ctx: int_peer(2),
    }

    @agent("agent", version="1")
    async def twice(ctx: TaskExecutionContext, number: int) -> str:
        await ctx.memory.set("x", "1")
        await int_peer(1)
        await ctx.memory.set("run", str(len(gates)))
        gates.append(gate := Gate())
        await gate()
        if gate is gates[0]:
            try:
                await actions[action](ctx)
            except Exception:  # as frameworks do: a stop is not an `Exception`
                continued.append("caught")
            continued.append(action)
        return (await ctx.memory.get("x") or b"lost").decode()

    await mesh.replica(twice, **tiers(), sweep_interval=timedelta(hours=1))
    task_id = await client.ask("agent", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    await peer.respond(request, 7)
    await mesh.idle()
    await mesh.replica(twice, **tiers())
    await mesh.advance(17)
    assert len(gates) == 2
    before, stored_snapshots = tiers.l1.contents(task_id), dict(tiers.snapshots.stored)
    gates[0].opened.set()
    await mesh.idle()
    assert continued == []
    assert (tiers.l1.contents(task_id), tiers.snapshots.stored) == (before, stored_snapshots)
    assert before == {"x": b"1", "run": b"1"}
    gates[1].opened.set()
    assert await client.reply(task_id) == Ok("1")
