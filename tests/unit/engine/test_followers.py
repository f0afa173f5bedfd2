"""Several connections follow one task, and some attach late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest

from fake_peer import FakePeer
from idle_loop import advance_loop
from meshpoint import Mesh as Connection
from meshpoint import (
    Question,
    QuestionUpdate,
    StatusUpdate,
    TaskHandle,
    TooManyFollowers,
    Update,
    agent,
)
from meshpoint.adapters.inprocess.store import InProcessStore
from meshpoint.engine.attaches import Attaches
from meshpoint.model.bodies import StatusBody
from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.envelopes import attach_message
from meshpoint.model.ids import AgentName
from meshpoint.model.outcomes import Ok
from meshpoint.model.questions import QuestionKey
from meshpoint.model.tasks import MAX_REPLY_ADDRESSES

from .agents import Gate, ScriptedAgent, asker
from .mesh import Mesh, connected

BACKENDS = pytest.mark.parametrize("durable", [True, False])
approval = Question("approval", bool)


@pytest.fixture
async def connections(mesh: Mesh) -> AsyncIterator[list[Connection]]:
    """More connections than a task has places."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(connected(mesh))
            for _ in range(MAX_REPLY_ADDRESSES + 1)
        ]


class Follower:
    """Reads the updates of a task in the background."""

    def __init__(self, handle: TaskHandle[Any], after: str | None = None) -> None:
        self.updates: list[Update] = []
        self.reading = asyncio.ensure_future(self._read(handle, after))
        # Not every test awaits the error of its streams; asyncio would log it in a later test.
        self.reading.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _read(self, handle: TaskHandle[Any], after: str | None) -> None:
        async for update in handle.updates(after=after):
            self.updates.append(update)

    @property
    def messages(self) -> list[Any]:
        return [each.message for each in self.updates if isinstance(each, StatusUpdate)]

    @property
    def kinds(self) -> list[str]:
        return [each.kind for each in self.updates]


async def follow(mesh: Mesh, connections: list[Connection], task_id: str) -> list[Follower]:
    """Follow a task of `agent` from each connection, one after another."""
    followers = []
    for connection in connections:
        followers.append(Follower(connection.task("agent", task_id)))
        await mesh.idle()
    return followers


def reporting_after(name: str, peer: str, gate: Gate) -> ScriptedAgent:
    """An agent that calls `peer`, and then reports when the gate opens."""

    async def start(ctx: TaskExecutionContext, request: Any) -> Paused:
        return Paused([Call(peer, peer, request)], b"state")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Done[str]:
        await ctx.update_status("resumed")
        await gate()
        await ctx.update_status("almost")
        return Done("done")

    return ScriptedAgent(name, start, resume)


@BACKENDS
async def test_each_follower_sees_the_updates_of_a_waiting_task_and_of_later_segments(
    mesh: Mesh,
    client: FakePeer,
    peer: FakePeer,
    connections: list[Connection],
    durable: bool,
) -> None:
    gate = Gate()
    for _ in range(2):
        await mesh.replica(reporting_after("agent", "peer", gate), durable=durable)
    task_id = await client.ask("agent", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    followers = await follow(mesh, connections[:3], task_id)
    await peer.status(request, "peer works")
    await mesh.idle()
    await peer.respond(request, "x")
    await gate.wait_reached()
    gate.opened.set()
    await mesh.advance(40)  # the addresses get the reply one after another
    for follower in followers:
        await follower.reading
        assert follower.messages == ["peer works", "resumed", "almost"]
        assert follower.kinds[-1] == "ended"
    assert client.statuses() == ["peer works", "resumed", "almost"]


@BACKENDS
async def test_the_last_followers_see_the_updates_if_some_come_during_a_later_segment(
    mesh: Mesh,
    client: FakePeer,
    peer: FakePeer,
    connections: list[Connection],
    durable: bool,
) -> None:
    gate = Gate()
    await mesh.replica(reporting_after("agent", "peer", gate), durable=durable)
    task_id = await client.ask("agent", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    followers = await follow(mesh, connections[:3], task_id)
    await peer.respond(request, "x")
    await gate.wait_reached()
    followers += await follow(mesh, connections[3:], task_id)
    gate.opened.set()
    await mesh.advance(40)
    last = followers[-MAX_REPLY_ADDRESSES:]
    assert [each.messages for each in last] == 4 * [["resumed", "almost"]]
    assert {each.kinds[-1] for each in last} == {"ended"}


async def test_each_follower_sees_the_updates_after_the_replica_was_lost(
    mesh: Mesh, client: FakePeer, peer: FakePeer, connections: list[Connection]
) -> None:
    gate = Gate()
    first = await mesh.replica(reporting_after("agent", "peer", gate))
    task_id = await client.ask("agent", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    followers = [Follower(each.task("agent", task_id)) for each in connections[:2]]
    await mesh.idle()
    await peer.respond(request, "x")
    await gate.wait_reached()
    await first.crash()
    await mesh.replica(reporting_after("agent", "peer", gate))
    await mesh.advance(60)
    await gate.wait_reached(2)
    gate.opened.set()
    await mesh.advance(40)  # the addresses get the reply one after another
    for follower in followers:
        await follower.reading
        assert follower.messages[:2] == ["resumed", "resumed"]
        assert follower.messages[-1] == "almost"
        assert [each.reset for each in follower.updates[:2]] == [False, True]


@BACKENDS
async def test_the_stream_of_a_follower_whose_place_was_taken_ends(
    mesh: Mesh,
    client: FakePeer,
    peer: FakePeer,
    connections: list[Connection],
    durable: bool,
) -> None:
    for _ in range(2):
        await mesh.replica(asker("agent", "peer"), durable=durable)
    task_id = await client.ask("agent", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    followers = await follow(mesh, connections, task_id)
    with pytest.raises(TooManyFollowers, match=f"follow task '{task_id}' of 'agent'"):
        await followers[0].reading
    again = Follower(connections[0].task("agent", task_id))
    with pytest.raises(TooManyFollowers):
        await again.reading
    advance_loop(61.0)
    await mesh.idle()
    again = Follower(connections[0].task("agent", task_id))
    await mesh.idle()
    with pytest.raises(TooManyFollowers):
        await followers[1].reading
    await peer.status(request, "works")
    await mesh.idle()
    await peer.respond(request, "x")
    await mesh.advance(40)
    for follower in (*followers[2:], again):
        await follower.reading
        assert follower.kinds == ["status", "ended"]


async def test_a_stream_in_the_first_segment_ends_when_its_place_is_taken(
    mesh: Mesh, client: FakePeer, connections: list[Connection]
) -> None:
    gate = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Done[str]:
        await gate()
        return Done("done")

    await mesh.replica(ScriptedAgent("agent", start))
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    followers = await follow(mesh, connections, task_id)
    for follower in followers[:2]:  # the requester keeps its place
        with pytest.raises(TooManyFollowers):
            await follower.reading
    gate.opened.set()
    await mesh.advance(40)  # the addresses get the reply one after another
    for follower in followers[2:]:
        await follower.reading
    assert await client.reply(task_id) == Ok("done")


async def test_a_stream_that_is_opened_again_in_the_first_segment_counts_as_a_new_one(
    mesh: Mesh, client: FakePeer, connections: list[Connection]
) -> None:
    gate = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Done[str]:
        await gate()
        await ctx.update_status("almost")
        return Done("done")

    await mesh.replica(ScriptedAgent("agent", start))
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    followers = await follow(mesh, connections[:4], task_id)
    advance_loop(61.0)
    await mesh.idle()
    followers += await follow(mesh, [connections[0], connections[4]], task_id)
    gate.opened.set()
    await mesh.idle()
    assert [each.messages for each in followers[3:]] == 3 * [["almost"]]
    with pytest.raises(TooManyFollowers):
        await followers[0].reading


async def test_a_requester_whose_place_was_taken_gets_the_result_and_takes_no_place(
    mesh: Mesh, peer: FakePeer, connections: list[Connection]
) -> None:
    await mesh.replica(asker("agent", "peer"))
    task = await connections[0].send("agent", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    result = asyncio.ensure_future(task.result())
    followers = await follow(mesh, connections[1:], task.id)
    for _ in range(3):
        advance_loop(121.0)
        await mesh.idle()
    assert not any(each.reading.done() for each in followers)
    await peer.respond(request, "x")
    await mesh.advance(40)
    advance_loop(121.0)
    assert await result == {"peer": "x"}


async def test_a_requester_gets_the_result_if_the_notice_of_its_lost_place_is_lost(
    mesh: Mesh,
    peer: FakePeer,
    connections: list[Connection],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def lose(*_: object) -> None:
        pass

    monkeypatch.setattr(Attaches, "_report_dropped", lose)
    await mesh.replica(asker("agent", "peer"))
    task = await connections[0].send("agent", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    result = asyncio.ensure_future(task.result())
    await follow(mesh, connections[1:], task.id)
    await peer.respond(request, "x")
    await mesh.advance(40)
    assert not result.done()
    advance_loop(1201.0)
    await mesh.idle()
    assert result.done()
    assert await result == {"peer": "x"}


async def test_followers_that_always_come_back_do_not_displace_each_other_at_once(
    mesh: Mesh,
    client: FakePeer,
    peer: FakePeer,
    connections: list[Connection],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attached: list[str] = []

    def build(sender: AgentName, *args: Any, **options: Any) -> Any:
        attached.append(sender)
        return attach_message(sender, *args, **options)

    monkeypatch.setattr("meshpoint.client.transport.attach_message", build)

    async def read(connection: Connection) -> None:
        for _ in range(20):
            with suppress(TooManyFollowers):
                async for _ in connection.task("agent", task_id).updates():
                    pass
                return
            await mesh.idle()

    await mesh.replica(asker("agent", "peer"))
    task_id = await client.ask("agent", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    readers = [asyncio.ensure_future(read(each)) for each in connections]
    for _ in range(30):
        await mesh.idle()
    assert len(attached) == len(connections)
    await peer.respond(request, "x")
    await mesh.advance(40)
    await asyncio.gather(*readers)


@BACKENDS
async def test_a_late_stream_begins_with_the_latest_status(
    mesh: Mesh, client: FakePeer, connections: list[Connection], durable: bool
) -> None:
    gate = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Done[str]:
        for number in range(3):
            await ctx.update_status(number)
        await gate()
        await ctx.update_status("last")
        return Done("done")

    for _ in range(2):
        await mesh.replica(ScriptedAgent("agent", start), durable=durable)
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    await mesh.idle()
    late = Follower(connections[0].task("agent", task_id))
    await mesh.idle()
    assert late.messages == [2]
    handle = connections[1].task("agent", task_id)
    result = asyncio.ensure_future(handle.result())
    await mesh.idle()
    later = Follower(handle)  # of a connection that has attached without a stream
    await mesh.idle()
    assert later.messages == [2]
    gate.opened.set()
    await mesh.advance(40)  # the addresses get the reply one after another
    for follower in (late, later):
        await follower.reading
        assert follower.messages == [2, "last"]
    assert await result == "done"
    assert client.statuses() == [0, 1, 2, "last"]


@agent("asking")
async def asking(ctx: TaskExecutionContext, count: int) -> list[bool]:
    waits = [ctx.wait_for(approval, prompt="Buy it?")]
    waits += [ctx.wait_for(f"q{number}", bool) for number in range(count - 1)]
    return list(await ctx.gather(*waits))


@BACKENDS
async def test_a_late_stream_shows_the_open_questions(
    mesh: Mesh, client: FakePeer, connections: list[Connection], durable: bool
) -> None:
    for _ in range(2):
        await mesh.replica(asking, durable=durable)
    task_id = await client.ask("asking", 2)
    await mesh.idle()
    followers = [Follower(each.task("asking", task_id)) for each in connections[:2]]
    await mesh.idle()
    for follower in followers:
        first, second = follower.updates
        assert isinstance(first, QuestionUpdate)
        assert isinstance(second, QuestionUpdate)
        assert (first.name, first.prompt) == ("approval", "Buy it?")
        assert (first.answer_schema, first.task_id) == ({"type": "boolean"}, task_id)
    again = Follower(connections[0].task("asking", task_id), followers[0].updates[0].id)
    await mesh.idle()
    assert [each.id for each in again.updates] == [followers[0].updates[1].id]
    for update in followers[0].updates:
        assert isinstance(update, QuestionUpdate)
        await connections[0].complete(update.question_id, True)
    await mesh.advance(40)
    for follower in (*followers, again):
        await follower.reading
        assert follower.kinds[-1] == "ended"


@BACKENDS
async def test_a_damaged_question_hides_no_other(
    mesh: Mesh,
    client: FakePeer,
    connections: list[Connection],
    durable: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find_questions = InProcessStore.find_questions

    async def find(store: InProcessStore, keys: Sequence[QuestionKey]) -> list[Any]:
        if any(key.name == "approval" for key in keys):
            raise ValueError("a stored value begins with unknown marker")
        return await find_questions(store, keys)

    monkeypatch.setattr(InProcessStore, "find_questions", find)
    await mesh.replica(asking, durable=durable)
    task_id = await client.ask("asking", 2)
    await mesh.idle()
    handle = connections[0].task("asking", task_id)
    follower = Follower(handle)
    await mesh.idle()
    (shown,) = follower.updates
    assert isinstance(shown, QuestionUpdate)
    assert shown.name == "q0"
    status = await handle.status()
    assert {wait.name: wait.question_id for wait in status.waits} == {
        "approval": None,
        "q0": shown.question_id,
    }


async def test_a_forwarded_update_is_encoded_once_and_a_dropped_one_not_at_all(
    mesh: Mesh,
    client: FakePeer,
    peer: FakePeer,
    connections: list[Connection],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoded: list[StatusBody] = []
    to_bytes = StatusBody.to_bytes

    def encode(body: StatusBody) -> bytes:
        encoded.append(body)
        return to_bytes(body)

    await mesh.replica(asker("asker", "peer"))
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    followers = [Follower(each.task("asker", task_id)) for each in connections[:2]]
    await mesh.idle()
    monkeypatch.setattr(StatusBody, "to_bytes", encode)
    for number in range(100):
        await peer.status(request, number)
    await mesh.idle()
    assert [each.messages for each in followers] == 2 * [list(range(20))]
    assert len(encoded) == 100 + 20  # of the peer, and of the agent
