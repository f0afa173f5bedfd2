"""What survives in working memory: counts, times of keys, missing copies, lost databases."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from datetime import timedelta
from typing import Any

import pytest

from meshpoint.adapters.inprocess.working_memory import InProcessWorkingMemory
from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.agents.replies import Replies
from meshpoint.agents.stateful import StatefulAgent
from meshpoint.errors import MemoryRefused, MemoryUnavailable
from meshpoint.model.agent_memory import AgentMemory, MemoryRecovery, MemorySource
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import RunId, TaskId
from meshpoint.model.memory import Command, Item, Kind, Owner, Packed
from meshpoint.model.outcomes import Failed, FailureKind, Ok

from .agents import Gate
from .memories import Places
from .mesh import Mesh
from .puppet import Puppet
from .resuming import result_of, resumed
from .test_memory_crashes import KINDS, Turns, answered

asked = Peer("peer", int, int)


def text(value: bytes | None) -> str:
    return "lost" if value is None else value.decode()


PAGES = 5


class Shop:
    """Buys each page that is not in memory; fails once, at the place `fails` of the third page."""

    def __init__(self, fails: str, counts: str, looks: str = "get") -> None:
        self.fails, self.counts, self.looks = fails, counts, looks
        self.fetched: list[int] = []

    async def buy_all(self, memory: AgentMemory) -> list[int]:
        have = await self._looked_once(memory)
        for page in range(PAGES):
            key = f"page:{page}"
            if key not in have and not await self._has(memory, key):
                await self._buy(memory, page)
        return [await memory.incr(key, 0) for key in ("before", "after")]

    async def _buy(self, memory: AgentMemory, page: int) -> None:
        self._fail("fetch", page)
        self.fetched.append(page)
        if self.counts in {"before", "both"}:
            await memory.incr("before")
            self._fail("counted", page)
        await memory.set(f"page:{page}", "text")
        if self.counts in {"after", "both"}:
            await memory.incr("after")
        self._fail("bought", page)

    async def _looked_once(self, memory: AgentMemory) -> set[str]:
        if self.looks == "keys at once":
            return set(await memory.keys("page:*"))
        return set()

    async def _has(self, memory: AgentMemory, key: str) -> bool:
        match self.looks:
            case "get":
                return await memory.get(key) is not None
            case "exists":
                return await memory.exists(key)
            case "get_many":
                return key in await memory.get_many([key])
            case "keys":
                return key in await memory.keys()
        return False

    def _fail(self, place: str, page: int) -> None:
        if page == 2 and self.fails == place:
            raise ValueError(place)

    @property
    def expected(self) -> list[int]:
        return [PAGES * (self.counts != "after"), PAGES * (self.counts != "before")]


def in_function(shop: Shop, inside: bool) -> Any:
    @agent("agent", version="1")
    async def buying(ctx: TaskExecutionContext, number: int) -> list[int]:
        return await bought(ctx, shop, inside)

    return buying


def in_handler(shop: Shop, inside: bool) -> Any:
    class Buying(StatefulAgent[int, int, list[int]]):
        name = "agent"

        async def on_request(self, ctx: TaskExecutionContext, number: int) -> Any:
            return self.done(await bought(ctx, shop, inside))

    return Buying()


async def bought(ctx: TaskExecutionContext, shop: Shop, inside: bool) -> list[int]:
    async def begin() -> int:
        return await ctx.memory.incr("begun")

    async def buy() -> list[int]:
        return await shop.buy_all(ctx.memory)

    await ctx.subtask("begin", begin)
    return await (ctx.subtask("buy", buy) if inside else buy())


FORMS = pytest.mark.parametrize("form", [in_function, in_handler])
INSIDE = pytest.mark.parametrize("inside", [True, False], ids=["in a subtask", "outside"])
FAILS = [
    *((fails, counts) for fails in ("fetch", "bought") for counts in ("before", "after", "both")),
    *(("counted", counts) for counts in ("before", "both")),
]


async def counted_when_resumed(mesh: Mesh, boss: Puppet, shop: Shop, running: Any, kind: str) -> Any:
    await mesh.replica(running, **Places(mesh, kind)())
    task_id = await boss.ask("agent", 1)
    assert isinstance(await boss.reply(task_id), Failed)
    shop.fails = ""
    await resumed(mesh, task_id)
    return await result_of(mesh, task_id)


@KINDS
@FORMS
@INSIDE
@pytest.mark.parametrize(("fails", "counts"), FAILS)
async def test_what_is_bought_is_counted_once_when_its_operation_is_resumed(
    mesh: Mesh, boss: Puppet, kind: str, form: Any, inside: bool, fails: str, counts: str
) -> None:
    shop = Shop(fails, counts)
    assert await counted_when_resumed(mesh, boss, shop, form(shop, inside), kind) == Ok(shop.expected)
    twice = [] if fails == "bought" else [2] * (fails == "counted")
    assert sorted(shop.fetched) == sorted([*range(PAGES), *twice]), "a page was fetched again"


@KINDS
@INSIDE
@pytest.mark.parametrize("looks", ["exists", "get_many", "keys", "keys at once"])
async def test_however_it_looks_for_what_it_has(
    mesh: Mesh, boss: Puppet, kind: str, inside: bool, looks: str
) -> None:
    shop = Shop("fetch", "both", looks)
    assert await counted_when_resumed(mesh, boss, shop, in_function(shop, inside), kind) == Ok(shop.expected)


LOST = pytest.mark.parametrize(("kind", "lost"), [("local", 0), *(("surviving", lost) for lost in range(3))], ids=str)
"""Number of tiers lost while the task waits: none, L1, or L1 and the snapshots."""


def lose(places: Places, lost: int) -> None:
    if lost > 0:
        places.l1.empty()
    if lost > 1:
        places.snapshots.kept.clear()


@LOST
@pytest.mark.parametrize("how", ["persist", "longer", "set again"])
async def test_a_change_of_a_keys_own_time_alone_survives_a_pause(
    mesh: Mesh, boss: Puppet, peer: Puppet, kind: str, lost: int, how: str
) -> None:
    places = Places(mesh, kind)

    @agent("agent", version="1")
    async def prolonging(ctx: TaskExecutionContext, number: int) -> str:
        await ctx.memory.set("x", "1", ttl=timedelta(minutes=1))
        await ctx.call(asked(1))
        match how:
            case "persist":
                await ctx.memory.expire("x", None)
            case "longer":
                await ctx.memory.expire("x", timedelta(days=7))
            case _:
                await ctx.memory.set("x", "1")
        await ctx.call(asked(2))
        return text(await ctx.memory.get("x"))

    await mesh.replica(prolonging, **places())
    task_id = await boss.ask("agent", 1)
    await peer.respond(await peer.request_number(1), 7)
    request = await peer.request_number(2)
    await mesh.advance(120)
    lose(places, lost)
    await peer.respond(request, 7)
    assert await boss.reply(task_id) == Ok("1")


@LOST
async def test_a_time_that_was_made_shorter_is_not_forgotten_in_a_pause(
    mesh: Mesh, boss: Puppet, peer: Puppet, kind: str, lost: int
) -> None:
    places = Places(mesh, kind)

    @agent("agent", version="1")
    async def shortening(ctx: TaskExecutionContext, number: int) -> str:
        await ctx.memory.set("x", "1")
        await ctx.call(asked(1))
        await ctx.memory.expire("x", timedelta(minutes=1))
        await ctx.call(asked(2))
        return text(await ctx.memory.get("x"))

    await mesh.replica(shortening, **places())
    task_id = await boss.ask("agent", 1)
    await peer.respond(await peer.request_number(1), 7)
    request = await peer.request_number(2)
    await mesh.advance(120)
    lose(places, lost)
    await peer.respond(request, 7)
    assert await boss.reply(task_id) == Ok("lost")


def fetching(turns: Turns, found: list[Any], *, fails: bool = False) -> Any:
    """Writes a page in a subtask; a later run fails or calls its peer before it reads the page."""

    @agent("agent", version="1")
    async def fetching(ctx: TaskExecutionContext, number: int) -> str:
        async def fetch() -> None:
            await ctx.memory.set("page", "text")

        await ctx.subtask("fetch", fetch)
        await turns("fetched")
        if fails and "fails" not in found:
            found.append("fails")
            raise ValueError("no")
        if not fails:
            await ctx.call(asked(1))
        page = text(await ctx.memory.get("page"))
        found.append(ctx.memory.recovery)
        return page

    return fetching


async def taken_over(mesh: Mesh, boss: Puppet, places: Places, turns: Turns, fetching: Any) -> TaskId:
    """Crash the first replica after the subtask and let a second one rescue the task."""
    gate = turns.gate("fetched")
    first = await mesh.replica(fetching, **places())
    task_id = await boss.ask("agent", 1)
    await gate.reach()
    await first.crash()
    turns.gates.clear()
    assert await places.in_sql(task_id) is None, "a subtask's checkpoint must not store it in SQL"
    places.l1.done.clear()
    await mesh.replica(fetching, **places())
    await mesh.advance(40)
    return task_id


async def test_the_pause_of_a_segment_that_does_not_use_its_memory_keeps_it(
    mesh: Mesh, boss: Puppet, peer: Puppet
) -> None:
    places, turns, found = Places(mesh, "surviving"), Turns(), list[Any]()
    task_id = await taken_over(mesh, boss, places, turns, fetching(turns, found))
    request = await peer.request_number()
    await mesh.settle()
    assert await places.in_sql(task_id) is not None
    assert places.l1.done["retain"] == 1, "L1 must be retained for the pause"
    lose(places, 2)
    await peer.respond(request, 7)
    assert await boss.reply(task_id) == Ok("text")
    assert found == [MemoryRecovery(MemorySource.SQL, 1, verified=True)]


async def test_the_pause_of_a_segment_that_does_not_use_a_lost_memory_does_not_hide_the_loss(
    mesh: Mesh, boss: Puppet, peer: Puppet
) -> None:
    places, turns, found = Places(mesh, "surviving"), Turns(), list[Any]()
    agent = fetching(turns, found)
    gate = turns.gate("fetched")
    first = await mesh.replica(agent, **places())
    task_id = await boss.ask("agent", 1)
    await gate.reach()
    await first.crash()
    turns.gates.clear()
    places.l1.empty()
    places.snapshots.kept.clear()
    await mesh.replica(agent, **places())
    await mesh.advance(40)
    await peer.respond(await peer.request_number(), 1)
    await boss.reply(task_id)
    (how,) = found
    assert (how.source, how.verified, how.behind) == (MemorySource.NONE, False, True)


async def test_the_pause_of_a_task_whose_memory_is_in_sql_extends_the_time_of_l1(
    mesh: Mesh, boss: Puppet, peer: Puppet
) -> None:
    places = Places(mesh, "surviving")

    class Asking(StatefulAgent[int, int, str]):
        name = "agent"

        async def on_request(self, ctx: TaskExecutionContext, number: int) -> Any:
            await ctx.memory.set("x", "1")
            return self.ask(0, {"more": asked(0)}, then=self.on_more)

        async def on_more(self, ctx: TaskExecutionContext, state: int, replies: Replies) -> Any:
            return self.ask(0, {"more": asked(1)}, then=self.on_last)

        async def on_last(self, ctx: TaskExecutionContext, state: int, replies: Replies) -> Any:
            return self.done(text(await ctx.memory.get("x")))

    await mesh.replica(Asking(), **places())
    task_id = await boss.ask("agent", 1)
    request = await peer.request_number(1)
    await mesh.settle()
    places.l1.done.clear()
    await peer.respond(request, 7)
    request = await peer.request_number(2)
    await mesh.settle()
    assert places.l1.done == {"retain": 1}, "L1 got another command"
    await peer.respond(request, 7)
    assert await boss.reply(task_id) == Ok("1")


async def test_a_segment_that_fails_without_using_its_memory_keeps_it(mesh: Mesh, boss: Puppet) -> None:
    places, turns, found = Places(mesh, "surviving"), Turns(), list[Any]()
    task_id = await taken_over(mesh, boss, places, turns, fetching(turns, found, fails=True))
    assert isinstance(await boss.reply(task_id), Failed)
    await mesh.settle()
    assert await places.in_sql(task_id) is not None
    assert places.l1.done["retain"] == 1
    lose(places, 2)
    await resumed(mesh, task_id)
    assert await result_of(mesh, task_id) == Ok("text")
    assert found[1:] == [MemoryRecovery(MemorySource.SQL, 1, verified=True)]


class Backup:
    """A copy of a task's current row, for a later `restore`."""

    def __init__(self, mesh: Mesh, task_id: TaskId) -> None:
        self._tables = mesh.store._tables
        row = self._tables.tasks[task_id]
        self._task_id, self._was = task_id, deepcopy({name: getattr(row, name) for name in row.__slots__})

    @property
    def fence(self) -> int:
        """Fence of the current row, not of the copy."""
        return self._tables.tasks[self._task_id].fence

    def restore(self) -> None:
        row = self._tables.tasks[self._task_id]
        for name, value in self._was.items():
            setattr(row, name, value)
        self._tables.put(row)


async def test_a_task_goes_on_when_the_database_went_back_behind_l1(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    """L1 knows a run with a higher fence, which the restored database does not."""
    places = Places(mesh, "surviving")

    @agent("agent", version="1")
    async def counting(ctx: TaskExecutionContext, calls: int) -> int:
        for each in range(calls):
            await ctx.memory.incr("n")
            await ctx.call(asked(each))
        return await ctx.memory.incr("n")

    await mesh.replica(counting, **places())
    task_id = await boss.ask("agent", 6)
    await peer.request_number(1)
    await mesh.settle()
    backup = Backup(mesh, task_id)
    for number in range(1, 5):
        await peer.respond(await peer.request_number(number), 7)
    await peer.request_number(5)
    await mesh.settle()
    future = backup.fence
    backup.restore()
    assert backup.fence + 1 < future, "the fence must stay lower even after the claim"
    await peer.respond(peer.requests[0], 7)
    await mesh.settle()
    assert len(peer.requests) == 6, "the task must continue before its fence has grown"
    assert await answered(mesh, boss, peer, task_id, 5) == Ok(7)


@pytest.mark.parametrize("why", ["kept", "away"])
async def test_a_new_task_with_the_id_of_one_whose_memory_is_still_there_begins_with_none(
    mesh: Mesh, boss: Puppet, peer: Puppet, why: str
) -> None:
    places = Places(mesh, "surviving")

    @agent("agent", version="1")
    async def counting(ctx: TaskExecutionContext, calls: int) -> int:
        for each in range(calls):
            await ctx.memory.incr("n")
            await ctx.call(asked(each))
        return await ctx.memory.incr("n")

    await mesh.replica(counting, **places(), memory_keep=why == "kept")
    if why == "away":
        places.l1.away.add("forget")
    task_id = await boss.ask("agent", 4, task_id="again")
    assert await answered(mesh, boss, peer, task_id) == Ok(5)
    assert places.l1.values(task_id) == {"n": b"5"}
    mesh.clock.advance(timedelta(days=2))
    await mesh.advance(130)
    assert await mesh.state(task_id) is None
    boss.letters.clear()
    await boss.ask("agent", 0, task_id="again")
    assert await answered(mesh, boss, peer, task_id, 4) == Ok(1)


async def test_a_snapshot_of_a_lost_future_is_not_taken(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    """Its order is higher than the last checkpoint's, so no current run wrote it."""
    places, turns = Places(mesh, "surviving"), Turns()
    found: list[MemoryRecovery] = []

    @agent("agent", version="1")
    async def walking(ctx: TaskExecutionContext, number: int) -> list[str]:
        await ctx.memory.set("start", "1")
        way = await ctx.call(asked(1))

        async def step(number: int, way: int) -> None:
            await ctx.memory.set(f"way {way}: {number}", "1")

        for each in range(4):
            await ctx.subtask(f"step {each}", step, each, way)
            if each == 1:
                await turns(f"halfway {way}")
        await turns(f"there {way}")
        keys = await ctx.memory.keys()
        assert ctx.memory.recovery is not None
        found.append(ctx.memory.recovery)
        return keys

    there, halfway = turns.gate("there 7"), turns.gate("halfway 8")
    first = await mesh.replica(walking, **places())
    task_id = await boss.ask("agent", 1)
    request = await peer.request_number()
    await mesh.settle()
    backup = Backup(mesh, task_id)
    await peer.respond(request, 7)
    await there.reach()
    await first.crash()
    [of_the_lost] = places.snapshots.kept.values()
    backup.restore()
    second = await mesh.replica(walking, **places())
    await peer.respond(request, 8)
    await mesh.advance(20)
    await halfway.reach()
    await second.crash()
    last = await mesh.store.latest(task_id)
    assert last is not None
    assert of_the_lost.order > last.seq
    places.l1.empty()
    turns.gates.clear()
    await mesh.replica(walking, **places())
    reply = await answered(mesh, boss, peer, task_id, 1)
    assert reply == Ok(["start", "way 8: 2", "way 8: 3"]), "the pause's and the unrecorded steps"
    assert [(each.source, each.behind) for each in found] == [(MemorySource.SQL, True)]


@KINDS
@pytest.mark.parametrize("how", ["in a group", "in a group in a group", "chained", "a group as cause"])
async def test_a_task_is_given_back_whatever_the_errors_wrapping(
    mesh: Mesh, boss: Puppet, kind: str, how: str
) -> None:
    places = Places(mesh, kind)

    async def together(ctx: TaskExecutionContext) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(ctx.memory.incr("a"))
            group.create_task(ctx.memory.incr("b"))

    @agent("agent", version="1")
    async def wrapping(ctx: TaskExecutionContext, number: int) -> int:
        match how:
            case "in a group":
                await together(ctx)
            case "in a group in a group":
                async with asyncio.TaskGroup() as group:
                    group.create_task(together(ctx))
            case _:
                try:
                    await (ctx.memory.incr("a") if how == "chained" else together(ctx))
                except Exception as error:
                    raise RuntimeError("the tool failed") from error
        return 1

    await mesh.replica(wrapping, **places())
    places.l1.away.add("execute")
    task_id = await boss.ask("agent", 1)
    await mesh.advance(3)
    assert boss.replies(task_id) == []
    places.l1.away.clear()
    await mesh.advance(20)
    assert boss.replies(task_id) == [Ok(1)]


async def test_an_error_of_the_code_itself_fails_the_task_though_the_memory_was_away_before(
    mesh: Mesh, boss: Puppet
) -> None:
    """`__context__` alone is not a cause: the code handled that error."""
    places = Places(mesh, "surviving")

    @agent("agent", version="1")
    async def clumsy(ctx: TaskExecutionContext, number: int) -> int:
        try:
            return await ctx.memory.incr("a")
        except MemoryUnavailable:
            raise ValueError("no way without") from None

    await mesh.replica(clumsy, **places())
    places.l1.away.add("execute")
    reply = await boss.reply(await boss.ask("agent", 1))
    assert isinstance(reply, Failed)
    assert "no way without" in reply.message


async def test_a_task_past_its_deadline_ends_though_its_memory_is_away(
    mesh: Mesh, boss: Puppet, peer: Puppet
) -> None:
    places = Places(mesh, "surviving")

    @agent("agent", version="1")
    async def counting(ctx: TaskExecutionContext, number: int) -> int:
        await ctx.memory.incr("n")
        await ctx.call(asked(1))
        return await ctx.memory.incr("n")

    await mesh.replica(counting, **places())
    task_id = await boss.ask("agent", 1, deadline=mesh.in_seconds(30))
    request = await peer.request_number()
    await mesh.settle()
    places.l1.away.add("all")
    await peer.respond(request, 7)
    await mesh.advance(20)
    assert boss.replies(task_id) == []
    assert mesh.events.of(Step.RELEASE, Phase.AFTER, task_id), "the task must be released"
    await mesh.advance(60)
    [reply] = boss.replies(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.TIMEOUT


@pytest.mark.parametrize("what", ["nothing else", "a failed read", "a refused command"])
async def test_a_checkpoint_that_cannot_read_l1_finds_it_later(mesh: Mesh, boss: Puppet, what: str) -> None:
    """The version is known; neither a failed read nor a refused command makes it doubtful."""
    places, turns, found = Places(mesh, "surviving"), Turns(), list[Any]()
    written, saved = turns.gate("written"), turns.gate("saved")

    @agent("agent", version="1")
    async def writing(ctx: TaskExecutionContext, number: int) -> str:
        async def first() -> None:
            await ctx.memory.rpush("list", "1")

        async def second() -> None:
            await ctx.memory.set("x", "1")
            if what == "a refused command":
                with pytest.raises(MemoryRefused):
                    await ctx.memory.get("list")
            await turns("written")
            if what == "a failed read":
                with pytest.raises(MemoryUnavailable):
                    await ctx.memory.get("x")

        await ctx.subtask("first", first)
        await ctx.subtask("second", second)
        await turns("saved")
        value = text(await ctx.memory.get("x"))
        found.append(ctx.memory.recovery)
        return value

    first = await mesh.replica(writing, **places())
    task_id = await boss.ask("agent", 1)
    await written.reach()
    places.l1.away |= {"execute", "read"} if what == "a failed read" else {"read"}
    written.opened.set()
    await saved.reach()
    places.l1.away.clear()
    await first.crash()
    turns.gates.clear()
    await mesh.replica(writing, **places())
    await mesh.advance(40)
    assert boss.replies(task_id) == [Ok("1")]
    assert [each.source for each in found] == [MemorySource.L1]


def three_steps(turns: Turns) -> Any:
    @agent("agent", version="1")
    async def three_steps(ctx: TaskExecutionContext, number: int) -> str:
        async def write() -> None:
            await ctx.memory.set("x", "1")

        async def read() -> str:
            return text(await ctx.memory.get("x"))

        await ctx.subtask("write", write)
        await turns("written")
        await ctx.subtask("read", read)
        await turns("read")
        return text(await ctx.memory.get("x"))

    return three_steps


@pytest.mark.parametrize("how", ["the process died", "the place was away"])
async def test_a_copy_that_was_not_put_is_put_by_the_next_run(mesh: Mesh, boss: Puppet, how: str) -> None:
    places, turns, putting = Places(mesh, "surviving"), Turns(), Gate()
    written, read, put = turns.gate("written"), turns.gate("read"), places.snapshots.put

    async def unfinished(agent_id: str, packed: Packed) -> bool:
        await putting()
        return await put(agent_id, packed)

    first = await mesh.replica(three_steps(turns), **places())
    if how == "the process died":
        places.snapshots.put = unfinished  # type: ignore[method-assign]
    places.snapshots.away = how == "the place was away"
    task_id = await boss.ask("agent", 1)
    await (putting if how == "the process died" else written).reach()
    await first.crash()
    places.snapshots.away, places.snapshots.put = False, put  # type: ignore[method-assign]
    assert places.snapshots.puts == []
    written.opened.set()
    second = await mesh.replica(three_steps(turns), **places())
    await mesh.advance(40)
    await read.reach()
    await second.crash()
    assert places.snapshots.puts != []
    places.l1.empty()
    turns.gates.clear()
    await mesh.replica(three_steps(turns), **places())
    await mesh.advance(40)
    assert boss.replies(task_id) == [Ok("1")]


async def test_a_copy_whose_put_was_cancelled_is_put_with_the_next_checkpoint(mesh: Mesh, boss: Puppet) -> None:
    places, turns, putting = Places(mesh, "surviving"), Turns(), Gate()
    end, put = turns.gate("end"), places.snapshots.put

    async def slow(agent_id: str, packed: Packed) -> bool:
        if packed.order == 2 and not putting.opened.is_set():
            await putting()
        return await put(agent_id, packed)

    places.snapshots.put = slow  # type: ignore[method-assign]

    @agent("agent", version="1")
    async def hasty(ctx: TaskExecutionContext, number: int) -> str:
        async def write() -> None:
            await ctx.memory.set("x", "1")

        async def nothing() -> None: ...

        async def begin() -> None:
            await ctx.memory.set("y", "1")

        await ctx.subtask("begin", begin)
        writing = asyncio.create_task(ctx.subtask("write", write))
        if not putting.opened.is_set():
            await putting.reach()
            writing.cancel()
            putting.opened.set()
        await asyncio.wait([writing])
        await ctx.subtask("nothing", nothing)
        await turns("end")
        return text(await ctx.memory.get("x"))

    first = await mesh.replica(hasty, **places())
    task_id = await boss.ask("agent", 1)
    await end.reach()
    await first.crash()
    places.l1.empty()
    turns.gates.clear()
    await mesh.replica(hasty, **places())
    await mesh.advance(40)
    assert boss.replies(task_id) == [Ok("1")]


async def test_the_copy_is_put_before_a_peer_is_asked(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    """A fast response could otherwise resume the task elsewhere before the copy exists."""
    places, putting = Places(mesh, "surviving"), Gate()
    put = places.snapshots.put

    async def slow(agent_id: str, packed: Packed) -> bool:
        await putting()
        return await put(agent_id, packed)

    places.snapshots.put = slow  # type: ignore[method-assign]

    @agent("agent", version="1")
    async def asking(ctx: TaskExecutionContext, number: int) -> str:
        await ctx.memory.set("x", "1")
        await ctx.call(asked(1))
        return text(await ctx.memory.get("x"))

    await mesh.replica(asking, **places())
    task_id = await boss.ask("agent", 1)
    await putting.reach()
    await mesh.settle()
    assert peer.requests == []
    putting.opened.set()
    await peer.respond(await peer.request_number(), 7)
    assert await boss.reply(task_id) == Ok("1")


async def test_what_comes_late_undoes_nothing(mesh: Mesh) -> None:
    memory, owner = InProcessWorkingMemory(mesh.clock), Owner("agent:task", RunId("run"), 1)
    old = (await memory.replace(owner, (), seen=0)).version
    new, _ = await memory.execute(owner, [Command("SET", "x", (b"new",))], seen=old)
    with pytest.raises(MemoryUnavailable):
        await memory.execute(owner, [Command("SET", "x", (b"old",))], seen=old)
    for seen in (0, old):
        with pytest.raises(MemoryUnavailable):
            await memory.replace(owner, [Item("x", Kind.STRING, b"old")], seen=seen)
    held = await memory.read(owner.agent_id)
    assert ({item.key: item.content for item in held.items}, held.version) == ({"x": b"new"}, new)
    assert (await memory.execute(owner, [Command("GET", "x")], seen=old))[1] == [b"new"], "reads pass"
