"""`TaskHandle.status` and `TaskHandle.complete`, for tasks in every state."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import BaseModel, Field

from fake_peer import FakePeer
from meshpoint import (
    AnswerRefused,
    OpenWait,
    OtherRequester,
    Question,
    QuestionNotOpen,
    TaskExecutionContext,
    TaskNotFound,
    TaskStatus,
    UnknownAgent,
    Waitable,
    agent,
)
from meshpoint import Mesh as Connection
from meshpoint.client import status_query, task_handle, transport
from meshpoint.engine import unknown_tasks
from meshpoint.model.envelopes import attach_message, attach_status
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.messages import AttachStatus, Header, MessageType, response_queue
from meshpoint.model.outcomes import Failed, Ok

from .agents import Gate, asker, gated
from .mesh import Mesh, connected

BACKENDS = pytest.mark.parametrize("durable", [True, False])
approval = Question("approval", bool)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask again at once."""
    monkeypatch.setattr(status_query, "_UNKNOWN_DELAYS", (0.01, 0.01))
    monkeypatch.setattr(task_handle, "COMPLETION_SECONDS", 0.0)


@pytest.fixture
def unanswered(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up at once. For tests in which no replica replies."""
    monkeypatch.setattr(status_query, "_REPLY_SECONDS", 0.05)
    monkeypatch.setattr(transport, "COMPLETION_SECONDS", 0.05)


@agent("asking")
async def asking(ctx: TaskExecutionContext, names: list[str]) -> list[bool]:
    waits = [
        ctx.wait_for(approval if name == "approval" else Question(name, bool), prompt=f"{name}?")
        for name in names
    ]
    return list(await ctx.gather(*waits))


@agent("napping")
async def napping(ctx: TaskExecutionContext, hours: float) -> None:
    await ctx.sleep(timedelta(hours=hours))


async def paused(mesh: Mesh, client: FakePeer, agent_name: str, request: Any) -> str:
    task_id = await client.ask(agent_name, request)
    await mesh.idle()
    return task_id


@BACKENDS
async def test_a_task_waiting_for_peers(
    mesh: Mesh, client: FakePeer, peer: FakePeer, connection: Connection, durable: bool
) -> None:
    for _ in range(2):
        await mesh.replica(asker("asker", "peer"), durable=durable)
    task_id = await paused(mesh, client, "asker", 1)
    status = await connection.task("asker", task_id).status()
    (wait,) = status.waits
    assert (status.state, status.is_served, status.is_suspended) == ("waiting", True, False)
    assert (wait.kind, wait.name, wait.question_id) == ("peer", "peer", None)
    assert wait.since == mesh.clock.now()
    assert status.wait_count == 1
    await peer.respond(await peer.wait_for_request(), "done")
    assert await client.reply(task_id) == Ok({"peer": "done"})
    assert len(client.messages) == 1  # a query attaches nothing


@BACKENDS
async def test_a_sleeping_task(
    mesh: Mesh, client: FakePeer, connection: Connection, durable: bool
) -> None:
    await mesh.replica(napping, durable=durable)
    task_id = await paused(mesh, client, "napping", 2)
    status = await connection.task("napping", task_id).status()
    now = mesh.clock.now()
    nap = OpenWait(kind="sleep", name="sleep", since=now, until=now + timedelta(hours=2))
    assert status.waits == (nap,)


@BACKENDS
async def test_a_task_waiting_for_people(
    mesh: Mesh, client: FakePeer, connection: Connection, durable: bool
) -> None:
    await mesh.replica(asking, durable=durable)
    task_id = await paused(mesh, client, "asking", ["approval", "colour"])
    handle = connection.task(asking, task_id)
    first, second = (await handle.status()).waits
    assert (first.kind, first.name, first.prompt) == ("question", "approval", "approval?")
    assert first.until is None
    assert first.question_id is not None
    await connection.complete(first.question_id, True)
    assert (await handle.status()).waits == (second,)
    await handle.complete(Question("colour", bool), False)
    assert await client.reply(TaskId(task_id)) == Ok([True, False])


def test_a_status_is_readable() -> None:
    since = datetime(2026, 1, 31, 12, 0, 5, 123456, UTC)
    waits = (
        OpenWait(kind="question", name="approval", since=since, prompt="Buy it?"),
        OpenWait(kind="sleep", name="sleep", since=since, until=since + timedelta(hours=2)),
    )
    dumped = TaskStatus(state="waiting", is_suspended=True, waits=waits, wait_count=3)
    status = TaskStatus.model_validate_json(dumped.model_dump_json())  # as a caller receives it
    assert str(status) == (
        "waiting: suspended; question 'approval' since 2026-01-31 12:00:05 UTC; "
        "sleep since 2026-01-31 12:00:05 UTC until 2026-01-31 14:00:05 UTC; and 1 more"
    )
    assert str(TaskStatus(state="running")) == "running"
    parked = TaskStatus(state="parked", reason="call 3: expected flights, recorded weather")
    assert str(parked) == "parked: call 3: expected flights, recorded weather"
    unserved = TaskStatus(state="unknown", is_served=False)
    assert str(unserved) == "unknown: no replica has replied"


class Decision(BaseModel):
    approved: bool
    amount: int = Field(default=1, gt=0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"approved": "maybe"}, "approval.approved: should be a boolean"),
        ({}, "approval.approved: is missing"),
        (object(), "approval: object cannot become JSON"),
        ({"approved": True, "amount": 0}, "approval: Decision: amount: Input should be greater"),
    ],
)
async def test_an_answer_that_does_not_fit_is_refused_in_one_line(
    mesh: Mesh, client: FakePeer, connection: Connection, value: Any, message: str
) -> None:
    await mesh.replica(asking)
    handle = connection.task(asking, "any")
    with pytest.raises(AnswerRefused) as refused:
        await handle.complete(Question("approval", Decision), value)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


@BACKENDS
async def test_a_task_in_its_first_segment(
    mesh: Mesh, client: FakePeer, connection: Connection, durable: bool
) -> None:
    gate = Gate()
    for _ in range(3):
        await mesh.replica(gated("agent", gate), durable=durable)
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    assert await connection.task("agent", task_id).status() == TaskStatus(state="running")
    gate.opened.set()
    assert await client.reply(task_id) == Ok("done")


async def test_an_ended_task(
    mesh: Mesh, client: FakePeer, connection: Connection, impatient: None
) -> None:
    await mesh.replica(napping)
    task = await connection.send(napping, 1)
    await mesh.idle()
    assert (await task.status()).state == "waiting"
    await mesh.advance(2 * 3600)
    await task.result()
    assert (await task.status()).state == "completed"
    async with connected(mesh) as other:
        assert (await other.task(napping, task.id).status()).state == "completed"
    cancelled = await connection.send(napping, 1)
    await mesh.idle()
    await cancelled.cancel()
    assert isinstance(await cancelled.outcome(), Failed)
    assert (await cancelled.status()).state == "cancelled"
    async with connected(mesh) as other:
        assert (await other.task(napping, cancelled.id).status()).state == "cancelled"


@BACKENDS
async def test_an_unknown_task(
    mesh: Mesh, client: FakePeer, connection: Connection, impatient: None, durable: bool
) -> None:
    await mesh.replica(napping, durable=durable)
    with pytest.raises(TaskNotFound, match="no task 'order-17' of 'napping'"):
        await connection.task(napping, "order-17").status()
    with pytest.raises(UnknownAgent):
        await connection.task("nobody", "order-17").status()


async def test_an_agent_without_replicas(
    mesh: Mesh, client: FakePeer, connection: Connection, unanswered: None
) -> None:
    replica = await mesh.replica(napping)
    task = await connection.send(napping, 1)
    await mesh.idle()
    await replica.drain()
    assert await task.status() == TaskStatus(state="unknown", is_served=False)
    with pytest.raises(QuestionNotOpen, match="no replica of 'napping' has replied"):
        await task.complete(approval, True)


@BACKENDS
async def test_a_stranger_learns_only_the_requester(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    await mesh.replica(asking, durable=durable)
    task_id = await paused(mesh, client, "asking", ["approval"])
    async with connected(mesh, "mallory") as mallory:
        with pytest.raises(OtherRequester, match="belongs to 'client', this client is 'mallory'"):
            await mallory.task("asking", task_id).status()


async def test_a_request_that_no_replica_has_received(
    mesh: Mesh, client: FakePeer, connection: Connection, impatient: None
) -> None:
    gate = Gate()
    await mesh.replica(gated("agent", gate), max_concurrency=1)
    await client.ask("agent", 1)
    await gate.wait_reached()
    task = await connection.send("agent", 2)
    await mesh.idle()
    assert await task.status() == TaskStatus(state="queued")
    gate.opened.set()
    assert await task.result() == "done"


async def test_a_question_must_be_the_only_one_of_its_name(
    mesh: Mesh, client: FakePeer, connection: Connection, impatient: None
) -> None:
    await mesh.replica(asking)
    task = await connection.send(asking, ["approval", "approval", "colour"])
    await mesh.idle()
    ids = [wait.question_id for wait in (await task.status()).waits if wait.name == "approval"]
    with pytest.raises(QuestionNotOpen) as caught:
        await task.complete(approval, True)
    text = f"task {task.id!r} asks 'approval' more than once: give question_id, one of "
    assert str(caught.value) == text + ", ".join(map(str, ids))
    for question_id in ids:
        await task.complete(approval, True, question_id=question_id)
    with pytest.raises(QuestionNotOpen, match="does not ask 'approval' now: it is waiting"):
        await task.complete(approval, True)
    with pytest.raises(AnswerRefused, match="'approval' was answered at "):
        await task.complete(approval, True, question_id=ids[0])
    with pytest.raises(QuestionNotOpen, match="is not the id of a 'colour' question"):
        await task.complete(Question("colour", bool), True, question_id=ids[0])
    with pytest.raises(AnswerRefused, match="colour"):
        await task.complete(Question("colour", bool), "red")  # type: ignore[misc]
    await task.complete(Question("colour", bool), False)
    assert await task.result() == [True, True, False]
    with pytest.raises(QuestionNotOpen, match="now: it has ended as completed"):
        await task.complete(approval, True)


async def test_many_waits_are_counted_and_not_all_listed(
    mesh: Mesh, client: FakePeer, peer: FakePeer, connection: Connection
) -> None:
    @agent("wide")
    async def wide(ctx: TaskExecutionContext, count: int) -> None:
        waits: list[Waitable[Any]] = [ctx.sleep(3600) for _ in range(count)]
        await ctx.gather(*waits, ctx.wait_for(approval))

    await mesh.replica(wide)
    task = await connection.send(wide, 150)
    await mesh.idle()
    status = await task.status()
    assert (len(status.waits), status.wait_count) == (100, 151)
    assert status.waits[0].name == "approval"


async def test_a_flood_of_unknown_ids_costs_no_broadcasts(
    mesh: Mesh, client: FakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unknown_tasks, "MAX_SEARCHES_PER_SECOND", 3)
    await mesh.replica(napping)
    sender = AgentName("client")
    for number in range(10):
        query = "q" if number % 2 else None
        message = attach_message(
            sender, TaskId(f"unknown-{number}"), response_queue(sender), query=query
        )
        await client.send_control("napping", message)
    await mesh.idle()
    statuses = [m.headers[Header.ATTACH] for m in client.messages if m.type is MessageType.STATUS]
    assert statuses.count("unknown") == 3
    assert statuses.count("queued") == 7
    await mesh.advance(2)
    await client.send_control(
        "napping", attach_message(sender, TaskId("later"), response_queue(sender))
    )
    await mesh.idle()
    assert client.messages[-1].headers[Header.ATTACH] == "unknown"


@pytest.mark.parametrize(
    ("known", "data", "expected"),
    [
        (AttachStatus.RECORDED, None, TaskStatus(state="unknown")),
        (AttachStatus.RECORDED, {"state": "dancing"}, TaskStatus(state="unknown")),
        (AttachStatus.RECORDED, {"state": "ready", "waits": 9}, TaskStatus(state="unknown")),
        (AttachStatus.RUNNING, {"state": "ready", "later": 1}, TaskStatus(state="ready")),
        (AttachStatus.QUEUED, {"state": "ready"}, TaskStatus(state="queued")),
        ("dancing", {}, TaskStatus(state="unknown", is_served=False)),
    ],
)
async def test_replies_from_other_releases_and_impostors(
    mesh: Mesh,
    connection: Connection,
    impatient: None,
    known: AttachStatus | str,
    data: Any,
    expected: TaskStatus,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not expected.is_served:  # the reply is dropped
        monkeypatch.setattr(status_query, "_REPLY_SECONDS", 0.05)
    other = await mesh.fake_peer("other")
    asked = asyncio.ensure_future(connection.task("other", "order-17").status())
    await other.wait_until(lambda: len(other.messages) > 0)
    query = other.messages[0]
    assert query.reply_to is not None
    for token in ("stale", str(query.headers[Header.QUERY])):
        envelope = attach_status(
            AgentName("other"),
            TaskId("order-17"),
            query.reply_to,
            AttachStatus.RECORDED,
            query=token,
            data={"state": "parked"} if token == "stale" else data,
        )
        assert envelope is not None
        if token != "stale":
            envelope[1].headers[Header.ATTACH.value] = str(known)
        await other.send_to_address(*envelope)
    assert await asked == expected
