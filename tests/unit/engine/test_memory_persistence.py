"""What survives in working memory: counts, times of keys, missing copies, lost databases."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from datetime import timedelta
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.adapters.inprocess.working_memory import InProcessWorkingMemory
from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.agents.stateful import Replies, StatefulAgent
from meshpoint.errors import MemoryRefused, MemoryUnavailable
from meshpoint.model.agent_memory import AgentMemory
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import RunId, TaskId
from meshpoint.model.memory import (
    Command,
    Item,
    Kind,
    MemoryRecovery,
    MemorySource,
    Owner,
    PackedSnapshot,
)
from meshpoint.model.outcomes import Failed, FailureKind, Ok

from .agents import Gate
from .memories import MemoryTiers
from .mesh import Mesh
from .resuming import resume_and_sweep, stored_outcome
from .test_memory_crashes import KINDS, Breakpoints, answer_all

int_peer = Peer("peer", int, int)


def to_text(value: bytes | None) -> str:
    return "lost" if value is None else value.decode()


PAGES = 5


class PageStore:
    """Buys each page that is not in memory; fails once, at the place `fails` of the third page."""

    def __init__(self, fails: str, counts: str, lookup_kind: str = "get") -> None:
        self.fails, self.counts, self.lookup_kind = fails, counts, lookup_kind
        self.fetched: list[int] = []

    async def fetch_all(self, memory: AgentMemory) -> list[int]:
        existing = await self._initial_keys(memory)
        for page in range(PAGES):
            key = f"page:{page}"
            if key not in existing and not await self._has(memory, key):
                await self._fetch(memory, page)
        return [await memory.incr(key, 0) for key in ("before", "after")]

    async def _fetch(self, memory: AgentMemory, page: int) -> None:
        self._fail("fetch", page)
        self.fetched.append(page)
        if self.counts in {"before", "both"}:
            await memory.incr("before")
            self._fail("counted", page)
        await memory.set(f"page:{page}", "text")
        if self.counts in {"after", "both"}:
            await memory.incr("after")
        self._fail("bought", page)

    async def _initial_keys(self, memory: AgentMemory) -> set[str]:
        if self.lookup_kind == "keys at once":
            return set(await memory.keys("page:*"))
        return set()

    async def _has(self, memory: AgentMemory, key: str) -> bool:
        match self.lookup_kind:
            case "get":
                return await memory.get(key) is not None
            case "exists":
                return await memory.exists(key)
            case "get_many":
                return key in await memory.get_many([key])
            case "keys":
                return key in await memory.keys()
        return False

    def _fail(self, position: str, page: int) -> None:
        if page == 2 and self.fails == position:
            raise ValueError(position)

    @property
    def expected(self) -> list[int]:
        return [PAGES * (self.counts != "after"), PAGES * (self.counts != "before")]


def function_agent(store: PageStore, in_subtask: bool) -> Any:
    @agent("agent", version="1")
    async def run(ctx: TaskExecutionContext, number: int) -> list[int]:
        return await fetch_pages(ctx, store, in_subtask)

    return run


def handler_agent(store: PageStore, in_subtask: bool) -> Any:
    class Fetching(StatefulAgent[int, int, list[int]]):
        name = "agent"

        async def on_request(self, ctx: TaskExecutionContext, number: int) -> Any:
            return self.done(await fetch_pages(ctx, store, in_subtask))

    return Fetching()


async def fetch_pages(ctx: TaskExecutionContext, store: PageStore, in_subtask: bool) -> list[int]:
    async def begin() -> int:
        return await ctx.memory.incr("begun")

    async def fetch() -> list[int]:
        return await store.fetch_all(ctx.memory)

    await ctx.subtask("begin", begin)
    return await (ctx.subtask("buy", fetch) if in_subtask else fetch())


AGENT_KINDS = pytest.mark.parametrize("form", [function_agent, handler_agent])
INSIDE = pytest.mark.parametrize("inside", [True, False], ids=["in a subtask", "outside"])
FAILS = [
    *((fails, counts) for fails in ("fetch", "bought") for counts in ("before", "after", "both")),
    *(("counted", counts) for counts in ("before", "both")),
]


async def count_fetches_when_resumed(
    mesh: Mesh, client: FakePeer, store: PageStore, running: Any, kind: str
) -> Any:
    await mesh.replica(running, **MemoryTiers(mesh, kind)())
    task_id = await client.ask("agent", 1)
    assert isinstance(await client.reply(task_id), Failed)
    store.fails = ""
    await resume_and_sweep(mesh, task_id)
    return await stored_outcome(mesh, task_id)


@KINDS
@AGENT_KINDS
@INSIDE
@pytest.mark.parametrize(("fails", "counts"), FAILS)
async def test_fetched_pages_are_counted_once_when_the_operation_is_resumed(
    mesh: Mesh, client: FakePeer, kind: str, form: Any, inside: bool, fails: str, counts: str
) -> None:
    store = PageStore(fails, counts)
    assert await count_fetches_when_resumed(mesh, client, store, form(store, inside), kind) == Ok(
        store.expected
    )
    twice = [] if fails == "bought" else [2] * (fails == "counted")
    assert sorted(store.fetched) == sorted([*range(PAGES), *twice]), "a page was fetched again"


@KINDS
@INSIDE
@pytest.mark.parametrize("lookup", ["exists", "get_many", "keys", "keys at once"])
async def test_pages_are_counted_once_whatever_the_lookup_method(
    mesh: Mesh, client: FakePeer, kind: str, inside: bool, lookup: str
) -> None:
    store = PageStore("fetch", "both", lookup)
    assert await count_fetches_when_resumed(
        mesh, client, store, function_agent(store, inside), kind
    ) == Ok(store.expected)


LOSSES = pytest.mark.parametrize(
    ("kind", "lost"), [("local", 0), *(("surviving", loss) for loss in range(3))], ids=str
)
"""Number of tiers lost while the task waits: none, L1, or L1 and the snapshots."""


def lose_memory(tiers: MemoryTiers, lost: int) -> None:
    if lost > 0:
        tiers.l1.empty()
    if lost > 1:
        tiers.snapshots.stored.clear()


@LOSSES
@pytest.mark.parametrize("change", ["persist", "longer", "set again"])
async def test_a_change_of_only_the_expiry_survives_a_pause(
    mesh: Mesh, client: FakePeer, peer: FakePeer, kind: str, lost: int, change: str
) -> None:
    tiers = MemoryTiers(mesh, kind)

    @agent("agent", version="1")
    async def prolonging(ctx: TaskExecutionContext, number: int) -> str:
        await ctx.memory.set("x", "1", ttl=timedelta(minutes=1))
        await int_peer(1)
        match change:
            case "persist":
                await ctx.memory.expire("x", None)
            case "longer":
                await ctx.memory.expire("x", timedelta(days=7))
            case _:
                await ctx.memory.set("x", "1")
        await int_peer(2)
        return to_text(await ctx.memory.get("x"))

    await mesh.replica(prolonging, **tiers())
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(1), 7)
    request = await peer.wait_for_request(2)
    await mesh.advance(120)
    lose_memory(tiers, lost)
    await peer.respond(request, 7)
    assert await client.reply(task_id) == Ok("1")


@LOSSES
async def test_a_shortened_expiry_survives_a_pause(
    mesh: Mesh, client: FakePeer, peer: FakePeer, kind: str, lost: int
) -> None:
    tiers = MemoryTiers(mesh, kind)

    @agent("agent", version="1")
    async def shortening(ctx: TaskExecutionContext, number: int) -> str:
        await ctx.memory.set("x", "1")
        await int_peer(1)
        await ctx.memory.expire("x", timedelta(minutes=1))
        await int_peer(2)
        return to_text(await ctx.memory.get("x"))

    await mesh.replica(shortening, **tiers())
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(1), 7)
    request = await peer.wait_for_request(2)
    await mesh.advance(120)
    lose_memory(tiers, lost)
    await peer.respond(request, 7)
    assert await client.reply(task_id) == Ok("lost")


def fetching_agent(breakpoints: Breakpoints, found: list[Any], *, fails: bool = False) -> Any:
    """Writes a page in a subtask; a later run fails or calls its peer before it reads the page."""

    @agent("agent", version="1")
    async def fetching(ctx: TaskExecutionContext, number: int) -> str:
        async def fetch() -> None:
            await ctx.memory.set("page", "text")

        await ctx.subtask("fetch", fetch)
        await breakpoints("fetched")
        if fails and "fails" not in found:
            found.append("fails")
            raise ValueError("no")
        if not fails:
            await int_peer(1)
        page = to_text(await ctx.memory.get("page"))
        found.append(ctx.memory.recovery)
        return page

    return fetching


async def rescued_after_crash(
    mesh: Mesh, client: FakePeer, tiers: MemoryTiers, breakpoints: Breakpoints, fetching: Any
) -> TaskId:
    """Crash the first replica after the subtask and let a second one rescue the task."""
    gate = breakpoints.gate("fetched")
    first = await mesh.replica(fetching, **tiers())
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    await first.crash()
    breakpoints.gates.clear()
    assert await tiers.sql_snapshot(task_id) is None, (
        "a subtask's checkpoint must not store it in SQL"
    )
    tiers.l1.call_counts.clear()
    await mesh.replica(fetching, **tiers())
    await mesh.advance(40)
    return task_id


async def test_a_pause_keeps_a_memory_that_the_segment_did_not_use(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    tiers, breakpoints, found = MemoryTiers(mesh, "surviving"), Breakpoints(), list[Any]()
    task_id = await rescued_after_crash(
        mesh, client, tiers, breakpoints, fetching_agent(breakpoints, found)
    )
    request = await peer.wait_for_request()
    await mesh.idle()
    assert await tiers.sql_snapshot(task_id) is not None
    assert tiers.l1.call_counts["retain"] == 1, "L1 must be retained for the pause"
    lose_memory(tiers, 2)
    await peer.respond(request, 7)
    assert await client.reply(task_id) == Ok("text")
    assert found == [MemoryRecovery(MemorySource.SQL, 1, verified=True)]


async def test_a_pause_without_using_a_lost_memory_does_not_hide_the_loss(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    tiers, breakpoints, found = MemoryTiers(mesh, "surviving"), Breakpoints(), list[Any]()
    agent = fetching_agent(breakpoints, found)
    gate = breakpoints.gate("fetched")
    first = await mesh.replica(agent, **tiers())
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    await first.crash()
    breakpoints.gates.clear()
    tiers.l1.empty()
    tiers.snapshots.stored.clear()
    await mesh.replica(agent, **tiers())
    await mesh.advance(40)
    await peer.respond(await peer.wait_for_request(), 1)
    await client.reply(task_id)
    (recovery,) = found
    assert (recovery.source, recovery.verified, recovery.behind) == (
        MemorySource.NONE,
        False,
        True,
    )


async def test_a_pause_extends_the_expiry_of_l1(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    tiers = MemoryTiers(mesh, "surviving")

    class Asking(StatefulAgent[int, int, str]):
        name = "agent"

        async def on_request(self, ctx: TaskExecutionContext, number: int) -> Any:
            await ctx.memory.set("x", "1")
            return self.ask(0, {"more": int_peer(0)}, then=self.on_more)

        async def on_more(self, ctx: TaskExecutionContext, state: int, replies: Replies) -> Any:
            return self.ask(0, {"more": int_peer(1)}, then=self.on_last)

        async def on_last(self, ctx: TaskExecutionContext, state: int, replies: Replies) -> Any:
            return self.done(to_text(await ctx.memory.get("x")))

    await mesh.replica(Asking(), **tiers())
    task_id = await client.ask("agent", 1)
    request = await peer.wait_for_request(1)
    await mesh.idle()
    tiers.l1.call_counts.clear()
    await peer.respond(request, 7)
    request = await peer.wait_for_request(2)
    await mesh.idle()
    assert tiers.l1.call_counts == {"retain": 1}, "L1 got another command"
    await peer.respond(request, 7)
    assert await client.reply(task_id) == Ok("1")


async def test_a_failure_keeps_a_memory_that_the_segment_did_not_use(
    mesh: Mesh, client: FakePeer
) -> None:
    tiers, breakpoints, found = MemoryTiers(mesh, "surviving"), Breakpoints(), list[Any]()
    task_id = await rescued_after_crash(
        mesh, client, tiers, breakpoints, fetching_agent(breakpoints, found, fails=True)
    )
    assert isinstance(await client.reply(task_id), Failed)
    await mesh.idle()
    assert await tiers.sql_snapshot(task_id) is not None
    assert tiers.l1.call_counts["retain"] == 1
    lose_memory(tiers, 2)
    await resume_and_sweep(mesh, task_id)
    assert await stored_outcome(mesh, task_id) == Ok("text")
    assert found[1:] == [MemoryRecovery(MemorySource.SQL, 1, verified=True)]


class DatabaseBackup:
    """A copy of a task's current row, for a later `restore`."""

    def __init__(self, mesh: Mesh, task_id: TaskId) -> None:
        self._tables = mesh.store._tables
        row = self._tables.tasks[task_id]
        self._task_id, self._saved = (
            task_id,
            deepcopy({name: getattr(row, name) for name in row.__slots__}),
        )

    @property
    def fence(self) -> int:
        """Fence of the current row, not of the copy."""
        return self._tables.tasks[self._task_id].fence

    def restore(self) -> None:
        row = self._tables.tasks[self._task_id]
        for name, value in self._saved.items():
            setattr(row, name, value)
        self._tables.put(row)


async def test_a_task_continues_when_the_database_was_restored_to_before_l1(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """L1 knows a run with a higher fence, which the restored database does not."""
    tiers = MemoryTiers(mesh, "surviving")

    @agent("agent", version="1")
    async def counting(ctx: TaskExecutionContext, calls: int) -> int:
        for item in range(calls):
            await ctx.memory.incr("n")
            await int_peer(item)
        return await ctx.memory.incr("n")

    await mesh.replica(counting, **tiers())
    task_id = await client.ask("agent", 6)
    await peer.wait_for_request(1)
    await mesh.idle()
    backup = DatabaseBackup(mesh, task_id)
    for number in range(1, 5):
        await peer.respond(await peer.wait_for_request(number), 7)
    await peer.wait_for_request(5)
    await mesh.idle()
    future = backup.fence
    backup.restore()
    assert backup.fence + 1 < future, "the fence must stay lower even after the claim"
    await peer.respond(peer.requests[0], 7)
    await mesh.idle()
    assert len(peer.requests) == 6, "the task must continue before its fence has grown"
    assert await answer_all(mesh, client, peer, task_id, 5) == Ok(7)


@pytest.mark.parametrize("previous_memory", ["kept", "unavailable"])
async def test_a_new_task_with_a_reused_id_begins_with_an_empty_memory(
    mesh: Mesh, client: FakePeer, peer: FakePeer, previous_memory: str
) -> None:
    tiers = MemoryTiers(mesh, "surviving")

    @agent("agent", version="1")
    async def counting(ctx: TaskExecutionContext, calls: int) -> int:
        for item in range(calls):
            await ctx.memory.incr("n")
            await int_peer(item)
        return await ctx.memory.incr("n")

    await mesh.replica(counting, **tiers(), memory_keep=previous_memory == "kept")
    if previous_memory == "unavailable":
        tiers.l1.unavailable_methods.add("forget")
    task_id = await client.ask("agent", 4, task_id="again")
    assert await answer_all(mesh, client, peer, task_id) == Ok(5)
    assert tiers.l1.contents(task_id) == {"n": b"5"}
    mesh.clock.advance(timedelta(days=2))
    await mesh.advance(130)
    assert await mesh.state(task_id) is None
    client.messages.clear()
    await client.ask("agent", 0, task_id="again")
    assert await answer_all(mesh, client, peer, task_id, 4) == Ok(1)


async def test_a_snapshot_newer_than_a_restored_database_is_not_used(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """Its order is higher than the last checkpoint's, so no current run wrote it."""
    tiers, breakpoints = MemoryTiers(mesh, "surviving"), Breakpoints()
    found: list[MemoryRecovery] = []

    @agent("agent", version="1")
    async def walk(ctx: TaskExecutionContext, number: int) -> list[str]:
        await ctx.memory.set("start", "1")
        direction = await int_peer(1)

        async def step(number: int, way: int) -> None:
            await ctx.memory.set(f"way {way}: {number}", "1")

        for item in range(4):
            await ctx.subtask(f"step {item}", step, item, direction)
            if item == 1:
                await breakpoints(f"halfway {direction}")
        await breakpoints(f"there {direction}")
        keys = await ctx.memory.keys()
        assert ctx.memory.recovery is not None
        found.append(ctx.memory.recovery)
        return keys

    there_gate, halfway_gate = breakpoints.gate("there 7"), breakpoints.gate("halfway 8")
    first = await mesh.replica(walk, **tiers())
    task_id = await client.ask("agent", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    backup = DatabaseBackup(mesh, task_id)
    await peer.respond(request, 7)
    await there_gate.wait_reached()
    await first.crash()
    [lost_snapshot] = tiers.snapshots.stored.values()
    backup.restore()
    second = await mesh.replica(walk, **tiers())
    await peer.respond(request, 8)
    await mesh.advance(20)
    await halfway_gate.wait_reached()
    await second.crash()
    last = await mesh.store.latest(task_id)
    assert last is not None
    assert lost_snapshot.order > last.seq
    tiers.l1.empty()
    breakpoints.gates.clear()
    await mesh.replica(walk, **tiers())
    reply = await answer_all(mesh, client, peer, task_id, 1)
    assert reply == Ok(["start", "way 8: 2", "way 8: 3"]), "the pause's and the unrecorded steps"
    assert [(recovery.source, recovery.behind) for recovery in found] == [(MemorySource.SQL, True)]


@KINDS
@pytest.mark.parametrize(
    "wrapping", ["in a group", "in a group in a group", "chained", "a group as cause"]
)
async def test_a_task_without_its_memory_is_released_however_the_error_is_wrapped(
    mesh: Mesh, client: FakePeer, kind: str, wrapping: str
) -> None:
    tiers = MemoryTiers(mesh, kind)

    async def concurrent(ctx: TaskExecutionContext) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(ctx.memory.incr("a"))
            group.create_task(ctx.memory.incr("b"))

    @agent("agent", version="1")
    async def wrapping_agent(ctx: TaskExecutionContext, number: int) -> int:
        match wrapping:
            case "in a group":
                await concurrent(ctx)
            case "in a group in a group":
                async with asyncio.TaskGroup() as group:
                    group.create_task(concurrent(ctx))
            case _:
                try:
                    await (ctx.memory.incr("a") if wrapping == "chained" else concurrent(ctx))
                except Exception as error:
                    raise RuntimeError("the tool failed") from error
        return 1

    await mesh.replica(wrapping_agent, **tiers())
    tiers.l1.unavailable_methods.add("execute")
    task_id = await client.ask("agent", 1)
    await mesh.advance(3)
    assert client.replies(task_id) == []
    tiers.l1.unavailable_methods.clear()
    await mesh.advance(20)
    assert client.replies(task_id) == [Ok(1)]


async def test_an_agent_error_fails_the_task_despite_an_earlier_memory_outage(
    mesh: Mesh, client: FakePeer
) -> None:
    """`__context__` alone is not a cause: the code handled that error."""
    tiers = MemoryTiers(mesh, "surviving")

    @agent("agent", version="1")
    async def failing_agent(ctx: TaskExecutionContext, number: int) -> int:
        try:
            return await ctx.memory.incr("a")
        except MemoryUnavailable:
            raise ValueError("no way without") from None

    await mesh.replica(failing_agent, **tiers())
    tiers.l1.unavailable_methods.add("execute")
    reply = await client.reply(await client.ask("agent", 1))
    assert isinstance(reply, Failed)
    assert "no way without" in reply.message


async def test_a_task_past_its_deadline_ends_despite_a_memory_outage(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    tiers = MemoryTiers(mesh, "surviving")

    @agent("agent", version="1")
    async def counting(ctx: TaskExecutionContext, number: int) -> int:
        await ctx.memory.incr("n")
        await int_peer(1)
        return await ctx.memory.incr("n")

    await mesh.replica(counting, **tiers())
    task_id = await client.ask("agent", 1, deadline=mesh.deadline_in(30))
    request = await peer.wait_for_request()
    await mesh.idle()
    tiers.l1.unavailable_methods.add("all")
    await peer.respond(request, 7)
    await mesh.advance(20)
    assert client.replies(task_id) == []
    assert mesh.events.matching(Step.RELEASE, Phase.AFTER, task_id), "the task must be released"
    await mesh.advance(60)
    [reply] = client.replies(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.TIMEOUT


@pytest.mark.parametrize("fault", ["nothing else", "a failed read", "a refused command"])
async def test_a_run_after_a_checkpoint_that_failed_to_read_l1_recovers_from_l1(
    mesh: Mesh, client: FakePeer, fault: str
) -> None:
    """The version is known; neither a failed read nor a refused command makes it doubtful."""
    tiers, breakpoints, found = MemoryTiers(mesh, "surviving"), Breakpoints(), list[Any]()
    written, saved = breakpoints.gate("written"), breakpoints.gate("saved")

    @agent("agent", version="1")
    async def writing(ctx: TaskExecutionContext, number: int) -> str:
        async def first() -> None:
            await ctx.memory.rpush("list", "1")

        async def second() -> None:
            await ctx.memory.set("x", "1")
            if fault == "a refused command":
                with pytest.raises(MemoryRefused):
                    await ctx.memory.get("list")
            await breakpoints("written")
            if fault == "a failed read":
                with pytest.raises(MemoryUnavailable):
                    await ctx.memory.get("x")

        await ctx.subtask("first", first)
        await ctx.subtask("second", second)
        await breakpoints("saved")
        value = to_text(await ctx.memory.get("x"))
        found.append(ctx.memory.recovery)
        return value

    first = await mesh.replica(writing, **tiers())
    task_id = await client.ask("agent", 1)
    await written.wait_reached()
    tiers.l1.unavailable_methods |= {"execute", "read"} if fault == "a failed read" else {"read"}
    written.opened.set()
    await saved.wait_reached()
    tiers.l1.unavailable_methods.clear()
    await first.crash()
    breakpoints.gates.clear()
    await mesh.replica(writing, **tiers())
    await mesh.advance(40)
    assert client.replies(task_id) == [Ok("1")]
    assert [recovery.source for recovery in found] == [MemorySource.L1]


def three_step_agent(breakpoints: Breakpoints) -> Any:
    @agent("agent", version="1")
    async def three_steps(ctx: TaskExecutionContext, number: int) -> str:
        async def write() -> None:
            await ctx.memory.set("x", "1")

        async def read() -> str:
            return to_text(await ctx.memory.get("x"))

        await ctx.subtask("write", write)
        await breakpoints("written")
        await ctx.subtask("read", read)
        await breakpoints("read")
        return to_text(await ctx.memory.get("x"))

    return three_steps


@pytest.mark.parametrize("cause", ["the process died", "the tier was unavailable"])
async def test_a_missing_snapshot_is_stored_by_the_next_run(
    mesh: Mesh, client: FakePeer, cause: str
) -> None:
    tiers, breakpoints, put_gate = MemoryTiers(mesh, "surviving"), Breakpoints(), Gate()
    written, read, put = breakpoints.gate("written"), breakpoints.gate("read"), tiers.snapshots.put

    async def unfinished(agent_id: str, packed: PackedSnapshot) -> bool:
        await put_gate()
        return await put(agent_id, packed)

    first = await mesh.replica(three_step_agent(breakpoints), **tiers())
    if cause == "the process died":
        tiers.snapshots.put = unfinished  # type: ignore[method-assign]  # a fake
    tiers.snapshots.unavailable = cause == "the tier was unavailable"
    task_id = await client.ask("agent", 1)
    await (put_gate if cause == "the process died" else written).wait_reached()
    await first.crash()
    tiers.snapshots.unavailable, tiers.snapshots.put = False, put  # type: ignore[method-assign]  # a fake
    assert tiers.snapshots.put_orders == []
    written.opened.set()
    second = await mesh.replica(three_step_agent(breakpoints), **tiers())
    await mesh.advance(40)
    await read.wait_reached()
    await second.crash()
    assert tiers.snapshots.put_orders != []
    tiers.l1.empty()
    breakpoints.gates.clear()
    await mesh.replica(three_step_agent(breakpoints), **tiers())
    await mesh.advance(40)
    assert client.replies(task_id) == [Ok("1")]


async def test_a_cancelled_snapshot_is_stored_with_the_next_checkpoint(
    mesh: Mesh, client: FakePeer
) -> None:
    tiers, breakpoints, put_gate = MemoryTiers(mesh, "surviving"), Breakpoints(), Gate()
    end, put = breakpoints.gate("end"), tiers.snapshots.put

    async def slow(agent_id: str, packed: PackedSnapshot) -> bool:
        if packed.order == 2 and not put_gate.opened.is_set():
            await put_gate()
        return await put(agent_id, packed)

    tiers.snapshots.put = slow  # type: ignore[method-assign]  # a fake

    @agent("agent", version="1")
    async def cancelling_writer(ctx: TaskExecutionContext, number: int) -> str:
        async def write() -> None:
            await ctx.memory.set("x", "1")

        async def nothing() -> None: ...

        async def begin() -> None:
            await ctx.memory.set("y", "1")

        await ctx.subtask("begin", begin)
        writing = asyncio.create_task(ctx.subtask("write", write))
        if not put_gate.opened.is_set():
            await put_gate.wait_reached()
            writing.cancel()
            put_gate.opened.set()
        await asyncio.wait([writing])
        await ctx.subtask("nothing", nothing)
        await breakpoints("end")
        return to_text(await ctx.memory.get("x"))

    first = await mesh.replica(cancelling_writer, **tiers())
    task_id = await client.ask("agent", 1)
    await end.wait_reached()
    await first.crash()
    tiers.l1.empty()
    breakpoints.gates.clear()
    await mesh.replica(cancelling_writer, **tiers())
    await mesh.advance(40)
    assert client.replies(task_id) == [Ok("1")]


async def test_the_snapshot_is_stored_before_a_peer_is_called(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """A fast response could otherwise resume the task elsewhere before the copy exists."""
    tiers, put_gate = MemoryTiers(mesh, "surviving"), Gate()
    put = tiers.snapshots.put

    async def slow(agent_id: str, packed: PackedSnapshot) -> bool:
        await put_gate()
        return await put(agent_id, packed)

    tiers.snapshots.put = slow  # type: ignore[method-assign]  # a fake

    @agent("agent", version="1")
    async def asking(ctx: TaskExecutionContext, number: int) -> str:
        await ctx.memory.set("x", "1")
        await int_peer(1)
        return to_text(await ctx.memory.get("x"))

    await mesh.replica(asking, **tiers())
    task_id = await client.ask("agent", 1)
    await put_gate.wait_reached()
    await mesh.idle()
    assert peer.requests == []
    put_gate.opened.set()
    await peer.respond(await peer.wait_for_request(), 7)
    assert await client.reply(task_id) == Ok("1")


async def test_a_late_write_is_fenced(mesh: Mesh) -> None:
    memory, owner = InProcessWorkingMemory(mesh.clock), Owner("agent:task", RunId("run"), 1)
    old = (await memory.replace(owner, (), expected_version=0)).version
    new, _ = await memory.execute(owner, [Command("SET", "x", (b"new",))], expected_version=old)
    with pytest.raises(MemoryUnavailable):
        await memory.execute(owner, [Command("SET", "x", (b"old",))], expected_version=old)
    for seen in (0, old):
        with pytest.raises(MemoryUnavailable):
            await memory.replace(owner, [Item("x", Kind.STRING, b"old")], expected_version=seen)
    contents = await memory.read(owner.agent_id)
    assert ({item.key: item.content for item in contents.items}, contents.version) == (
        {"x": b"new"},
        new,
    )
    assert (await memory.execute(owner, [Command("GET", "x")], expected_version=old))[1] == [
        b"new"
    ], "reads pass"
