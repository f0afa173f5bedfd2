"""Steps in a worker: each is recorded before its result is returned, and never runs again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
from pydantic import BaseModel

from fake_peer import FakePeer
from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.agents.stateful import Replies, StatefulAgent
from meshpoint.errors import AgentMisbehaved, IncompatibleState, StepFailed
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.ids import TaskId
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.tasks import TaskState
from meshpoint.model.usage import Tokens
from meshpoint.subtasks.resuming import resume_operation
from meshpoint.subtasks.step_records import StepRecord
from run_log import RunLog

from .agents import Gate
from .mesh import Mesh
from .resuming import stored_outcome
from .test_crash_points import crash_replica_at
from .test_subtasks import BACKENDS, write_calls

int_peer = Peer("peer", int, int)


class Work:
    """Functions for steps: `add_one(n)` records that it ran and returns n + 1."""

    def __init__(self, ran: RunLog | None = None) -> None:
        self.ran = ran or RunLog()
        self.gate: Gate | None = None
        self.is_dead = False
        """Set when the process of this code has died."""

    async def add_one(self, number: int) -> int:
        if self.is_dead:
            await asyncio.Event().wait()
        self.ran(f"{number}")
        if self.gate is not None:
            await self.gate()
        return number + 1

    def fail(self, message: str) -> int:
        self.ran("fail")
        raise ValueError(message)


def two_pauses(work: Work) -> Any:
    """Steps before, between and after two pauses, which all use one name."""

    @agent("agent")
    async def pausing(ctx: TaskExecutionContext, number: int) -> int:
        for _ in range(2):
            number = await ctx.step("add", work.add_one, number)
            number = await ctx.step("add", work.add_one, number)
            number += await int_peer(number)
        return await ctx.step("add", work.add_one, number)

    return pausing


@BACKENDS
async def test_a_step_runs_once_across_pauses(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    work = Work()
    await mesh.replica(two_pauses(work), durable=durable)
    task_id = await client.ask("agent", 1)
    for count in (1, 2):
        await peer.respond(await peer.wait_for_request(count), 10)
    assert await client.reply(task_id) == Ok(26)
    assert work.ran.names == ["1", "2", "13", "14", "25"]


async def test_the_first_step_writes_the_task_and_acks_its_request(
    mesh: Mesh, client: FakePeer
) -> None:
    work = Work()
    work.gate = Gate()

    @agent("agent")
    async def adding(ctx: TaskExecutionContext, number: int) -> int:
        number = await ctx.step("one", work.add_one, number)
        return await ctx.step("two", work.add_one, number)

    replica = await mesh.replica(adding)
    task_id = await client.ask("agent", 1)
    await work.gate.wait_reached()
    await mesh.idle()
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0
    assert await mesh.state(task_id) is TaskState.RUNNING
    assert await mesh.store.operation(task_id) is None
    work.gate.opened.set()
    assert await client.reply(task_id) == Ok(3)
    await mesh.idle()
    assert write_calls(replica) == ["lookup", "begin", "append", "append", "end", "confirm_sent"]
    assert mesh.events.timeline(
        task_id, Step.BEGIN, Step.ACK, Step.STEP, Step.RECORD, Step.END
    ) == [
        *("begin before", "begin after", "ack before", "ack after"),
        *("step before", "step after", "record before", "record after") * 2,
        *("end before", "end after"),
    ]


async def test_steps_that_end_together_are_written_together(mesh: Mesh, client: FakePeer) -> None:
    work = Work()
    work.gate = Gate()

    @agent("agent")
    async def concurrent(ctx: TaskExecutionContext, count: int) -> list[int]:
        steps = [ctx.step(f"add {n}", work.add_one, n) for n in range(count)]
        return await asyncio.gather(*steps)

    replica = await mesh.replica(concurrent)
    task_id = await client.ask("agent", 3)
    await work.gate.wait_reached(3)
    work.gate.opened.set()
    assert await client.reply(task_id) == Ok([1, 2, 3])
    assert write_calls(replica)[:3] == ["lookup", "begin", "append"]
    assert write_calls(replica).count("append") == 1
    [recorded] = mesh.events.matching(Step.RECORD, Phase.AFTER)
    assert recorded.detail["recorded"] == ["add 0", "add 1", "add 2"]


@pytest.mark.parametrize("phase", [Phase.BEFORE, Phase.AFTER])
@pytest.mark.parametrize("step", [Step.STEP, Step.RECORD])
@pytest.mark.parametrize("skip", [0, 1, 2, 4])
async def test_a_crash_repeats_only_a_step_that_is_not_recorded(
    mesh: Mesh, client: FakePeer, peer: FakePeer, step: Step, phase: Phase, skip: int
) -> None:
    work, seen = Work(), [0]
    dying = Work(work.ran)
    first = await mesh.replica(two_pauses(dying))

    def crash_at_last(event: Event) -> None:
        if (event.step, event.phase) == (step, phase):
            seen[0] += 1
            if seen[0] == skip + 1:
                dying.is_dead = True
                first.task.cancel()
                first.store.unavailable = first.broker.unavailable = True

    mesh.events.hooks.append(crash_at_last)
    task_id = await client.ask("agent", 1)
    for count in range(1, 3 if skip == 4 else 2 if skip == 2 else 1):
        await peer.respond(await peer.wait_for_request(count), 10)
    await mesh.idle()
    await first.crash()
    mesh.events.hooks.remove(crash_at_last)
    await mesh.replica(two_pauses(work))
    await mesh.advance(25)
    for count in range(1, 3):
        request = await peer.wait_for_request(count)
        await peer.respond(request, 10)
        await mesh.idle()
    assert await client.reply(task_id) == Ok(26)
    expected = ["1", "2", "13", "14", "25"]
    repeated = (step, phase) in {(Step.STEP, Phase.AFTER), (Step.RECORD, Phase.BEFORE)}
    assert work.ran.names == expected[: skip + repeated] + expected[skip:]


class Kept(BaseModel):
    number: int


class Handlers(StatefulAgent[int, Kept, int]):
    """A step in each of two handlers, under one name, and a gate after the second."""

    name = "agent"

    def __init__(self, work: Work, gate: Gate | None = None) -> None:
        self.work, self.gate = work, gate

    async def on_request(self, ctx: TaskExecutionContext, number: int) -> Any:
        number = await ctx.step("add", self.work.add_one, number)
        return self.ask(Kept(number=number), {"more": int_peer(number)}, then=self.on_more)

    async def on_more(self, ctx: TaskExecutionContext, state: Kept, replies: Replies) -> Any:
        number = state.number + replies.value("more", int_peer)
        number = await ctx.step("add", self.work.add_one, number)
        if self.gate is not None:
            await self.gate()
        return self.done(number)


@BACKENDS
async def test_a_pause_of_a_class_agent_ends_its_step_records(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    work = Work()
    replica = await mesh.replica(Handlers(work), durable=durable)
    task_id = await client.ask("agent", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    store = mesh.store if durable else replica.memory._inner
    row = store._tables.tasks[task_id]
    assert (row.log, row.state_format) == ([], "agent/1")
    await peer.respond(request, 10)
    assert await client.reply(task_id) == Ok(13)
    assert work.ran.names == ["1", "12"]


async def test_a_handler_that_runs_again_finds_its_steps(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    work, gate = Work(), Gate()
    first = await mesh.replica(Handlers(work, gate))
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(), 10)
    await gate.wait_reached()
    await first.crash()
    gate.opened.set()
    await mesh.replica(Handlers(work, gate))
    await mesh.advance(25)
    assert await client.reply(task_id) == Ok(13)
    assert work.ran.names == ["1", "12"]


@BACKENDS
async def test_a_failure_is_the_same_in_every_run(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    work, seen = Work(), list[str]()

    @agent("agent")
    async def failing(ctx: TaskExecutionContext, number: int) -> int:
        try:
            await ctx.step("fail", work.fail, "token password=hunter2")
        except StepFailed as error:
            seen.append(f"{error.step} {error.error_type} {error.kind} {error}")
        return await int_peer(number)

    await mesh.replica(failing, durable=durable)
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(), 10)
    assert await client.reply(task_id) == Ok(10)
    assert work.ran.names == ["fail"]
    message = "step 'fail' failed: ValueError: token password=***"
    assert seen == [f"fail ValueError error {message}"] * 2


async def test_an_unhandled_failure_fails_the_task(mesh: Mesh, client: FakePeer) -> None:
    work = Work()

    @agent("agent")
    async def failing(ctx: TaskExecutionContext, number: int) -> int:
        return await ctx.step("fail", work.fail, "no")

    await mesh.replica(failing)
    reply = await client.reply(await client.ask("agent", 1))
    assert isinstance(reply, Failed)
    assert (reply.kind, reply.message) == (
        FailureKind.ERROR,
        "step 'fail' failed: ValueError: no",
    )


async def test_a_result_without_a_json_form_fails_the_step(mesh: Mesh, client: FakePeer) -> None:
    @agent("agent")
    async def unrecordable(ctx: TaskExecutionContext, number: int) -> str:
        try:
            await ctx.step("lock", asyncio.Lock)
        except StepFailed as error:
            return str(error)
        return "recorded"

    await mesh.replica(unrecordable)
    reply = await client.reply(await client.ask("agent", 1))
    assert isinstance(reply, Ok)
    assert str(reply.value).startswith("step 'lock' failed: NotJson: it returned a Lock that")


MISUSES: dict[str, tuple[Callable[..., Awaitable[Any]], str]] = {}


Misuse = Callable[[TaskExecutionContext, Work], Awaitable[Any]]


def misuse(expected: str) -> Callable[[Misuse], Misuse]:
    """Register a wrong use of steps, which must fail the task with this text."""

    def register(function: Misuse) -> Misuse:
        MISUSES[function.__name__] = function, expected
        return function

    return register


@misuse("two open steps are called 'a': await the first one before the second")
async def two_open(ctx: TaskExecutionContext, work: Work) -> Any:
    return await asyncio.gather(ctx.step("a", work.add_one, 1), ctx.step("a", work.add_one, 2))


@misuse("step 'inner' begins inside step 'outer': record only one of them")
async def nested(ctx: TaskExecutionContext, work: Work) -> Any:
    async def outer() -> int:
        return await ctx.step("inner", work.add_one, 1)

    return await ctx.step("outer", outer)


@misuse("subtask 'inner' begins inside step 'outer': record only one of them")
async def subtask_inside(ctx: TaskExecutionContext, work: Work) -> Any:
    async def outer() -> int:
        return await ctx.subtask("inner", work.add_one, 1)

    return await ctx.step("outer", outer)


@misuse("agent called a peer while step 'call' was open: await a step before the next peer call")
async def peer_call_inside(ctx: TaskExecutionContext, work: Work) -> Any:
    async def call() -> int:
        return await int_peer(1)

    try:
        return await ctx.step("call", call)
    except StepFailed:
        return None


@misuse("agent called a peer while step 'a' was open")
async def open_at_a_pause(ctx: TaskExecutionContext, work: Work) -> Any:
    step = asyncio.create_task(ctx.step("a", work.add_one, 1))
    await int_peer(1)
    return await step


@misuse("'' is not a valid step name: use printable text of 1 to 200 characters")
async def empty_name(ctx: TaskExecutionContext, work: Work) -> Any:
    return await ctx.step("", work.add_one, 1)


@misuse("step 'write' changes ctx.memory: return the value and write it after the step")
async def memory_write(ctx: TaskExecutionContext, work: Work) -> Any:
    async def write() -> None:
        await ctx.memory.set("key", "value")

    return await ctx.step("write", write)


@pytest.mark.parametrize("name", sorted(MISUSES))
async def test_misuse_is_refused(mesh: Mesh, client: FakePeer, peer: FakePeer, name: str) -> None:
    function, expected = MISUSES[name]

    @agent("agent")
    async def misusing(ctx: TaskExecutionContext, number: int) -> Any:
        return await function(ctx, Work())

    await mesh.replica(misusing)
    reply = await client.reply(await client.ask("agent", 1))
    assert isinstance(reply, Failed)
    assert expected in reply.message
    assert peer.requests == []


@BACKENDS
async def test_tokens_used_in_a_step_count_once(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    ran = RunLog()

    @agent("agent")
    async def thinking(ctx: TaskExecutionContext, number: int) -> int:
        async def think() -> None:
            ran("think")
            ctx.token_usage.record(Tokens(input=3, output=1), model="m")
            thoughts: Any = ctx.flags.get("thoughts", 0)
            ctx.flags["thoughts"] = thoughts + 1

        for _ in range(2):
            await ctx.step("think", think)
            await int_peer(number)
        await ctx.step("think", think)
        thoughts: Any = ctx.flags["thoughts"]
        return int(thoughts)

    await mesh.replica(thinking, durable=durable)
    task_id = await client.ask("agent", 1)
    for count in (1, 2):
        await peer.respond(await peer.wait_for_request(count), 10)
    reply = await client.reply(task_id)
    assert isinstance(reply, Ok)
    assert (reply.value, reply.usage.total) == (3, Tokens(input=9, output=3))
    assert ran.names == ["think"] * 3


async def test_tokens_of_a_step_count_once_after_a_crash(mesh: Mesh, client: FakePeer) -> None:
    gate = Gate()

    @agent("agent")
    async def thinking(ctx: TaskExecutionContext, number: int) -> int:
        async def think() -> None:
            ctx.token_usage.record(Tokens(input=3), model="m")

        await ctx.step("think", think)
        await gate()
        return number

    first = await mesh.replica(thinking)
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    await first.crash()
    gate.opened.set()
    await mesh.replica(thinking)
    await mesh.advance(25)
    reply = await client.reply(task_id)
    assert isinstance(reply, Ok)
    assert reply.usage.total == Tokens(input=3)


async def test_steps_inside_a_subtask_survive_a_crash(mesh: Mesh, client: FakePeer) -> None:
    work, gate = Work(), Gate()

    @agent("agent")
    async def nested_agent(ctx: TaskExecutionContext, number: int) -> int:
        async def part(start: int) -> int:
            number = await ctx.step("add", work.add_one, start)
            await gate()
            return number

        number = await ctx.step("add", work.add_one, number)
        number = await ctx.subtask("part", part, number)
        return await ctx.step("add", work.add_one, number)

    first = await mesh.replica(nested_agent)
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    await first.crash()
    gate.opened.set()
    await mesh.replica(nested_agent)
    await mesh.advance(25)
    assert await client.reply(task_id) == Ok(4)
    assert work.ran.names == ["1", "2", "3"]


async def test_a_subtask_that_pauses_keeps_the_places_of_later_steps(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    work = Work()

    @agent("agent")
    async def pausing(ctx: TaskExecutionContext, number: int) -> int:
        async def part(start: int) -> int:
            number = await ctx.step("add", work.add_one, start)
            number += await int_peer(number)
            return await ctx.step("add", work.add_one, number)

        number = await ctx.subtask("part", part, number)
        number = await ctx.step("add", work.add_one, number)
        number += await int_peer(number)
        return await ctx.step("add", work.add_one, number)

    await mesh.replica(pausing)
    task_id = await client.ask("agent", 1)
    for count in (1, 2):
        await peer.respond(await peer.wait_for_request(count), 10)
        await mesh.idle()
    assert await client.reply(task_id) == Ok(25)
    assert work.ran.names == ["1", "12", "13", "24"]


async def test_a_new_attempt_from_the_beginning_drops_step_records(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    work, is_fixed = Work(), [False]

    @agent("agent")
    async def failing(ctx: TaskExecutionContext, number: int) -> int:
        await ctx.subtask("operation", int, 1)
        number = await ctx.step("add", work.add_one, number)
        number += await int_peer(number)
        number = await ctx.step("add", work.add_one, number)
        if not is_fixed[0]:
            raise ValueError("no")
        return number

    await mesh.replica(failing)
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(), 10)
    assert isinstance(await client.reply(task_id), Failed)
    is_fixed[0] = True
    await resume_operation(mesh.store, task_id)
    await mesh.advance(2)
    for request in peer.requests[1:]:
        await peer.respond(request, 10)
    await mesh.idle()
    assert await stored_outcome(mesh, task_id) == Ok(13)
    assert work.ran.names == ["1", "12"] * 2


async def test_a_step_that_was_not_there_before_parks_the_task(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    work, is_new = Work(), [False]

    @agent("agent")
    async def changing(ctx: TaskExecutionContext, number: int) -> int:
        if is_new[0]:
            await ctx.step("new", work.add_one, number)
        return await int_peer(number)

    await mesh.replica(changing)
    task_id = await client.ask("agent", 1)
    request = await peer.wait_for_request()
    is_new[0] = True
    await peer.respond(request, 10)
    await mesh.idle()
    summary, _ = await mesh.task(task_id)
    assert summary.state is TaskState.PARKED
    assert summary.parked_reason == "step 'new' before call 1 is not recorded"
    assert work.ran.names == []


async def test_an_unreadable_record_parks_the_task_even_if_its_code_catches_the_error(
    mesh: Mesh, client: FakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, gate = Work(), Gate()

    @agent("agent")
    async def catching(ctx: TaskExecutionContext, number: int) -> int:
        try:
            number = await ctx.step("step", work.add_one, number)
        except Exception:
            return -1
        await gate()
        return number

    first = await mesh.replica(catching)
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    await first.crash()
    with monkeypatch.context() as patch:
        unreadable = Mock(side_effect=IncompatibleState("a later version wrote it"))
        patch.setattr(StepRecord, "from_bytes", unreadable)
        second = await mesh.replica(catching, app_version="2")
        await mesh.advance(25)
        assert (await mesh.task(task_id))[0].parked_reason == "a later version wrote it"
        await second.drain()
    gate.opened.set()
    await mesh.replica(catching)
    await mesh.advance(2)
    assert await client.reply(task_id) == Ok(2)
    assert work.ran.names == ["1"]


async def test_what_a_mismatching_run_recorded_is_dropped(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """The older version continues with its own records, without the newer version's."""
    work, gate, is_new = Work(), Gate(), [False]

    async def text() -> str:
        work.ran("text")
        return "text"

    async def number_() -> int:
        work.ran("number")
        return 5

    @agent("agent")
    async def changing(ctx: TaskExecutionContext, number: int) -> int:
        await ctx.subtask("operation", int, 1)
        first: Any = await ctx.step("first", text if is_new[0] else number_)
        if is_new[0]:
            await ctx.step("kept", str if is_new[0] else work.add_one)
        else:
            await ctx.step("kept", work.add_one, number)
            await gate()
        return int(first)

    first = await mesh.replica(changing, app_version="1")
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    await first.crash()
    is_new[0] = True
    second = await mesh.replica(changing, app_version="2")
    await mesh.advance(25)
    summary, _ = await mesh.task(task_id)
    assert summary.state is TaskState.PARKED
    assert summary.parked_reason is not None
    assert summary.parked_reason.startswith("the recorded result of step 'first' does not fit")
    await second.drain()
    is_new[0] = False
    gate.opened.set()
    await mesh.store.unpark([TaskId(task_id)])
    await mesh.replica(changing, app_version="1")
    await mesh.advance(2)
    assert await client.reply(task_id) == Ok(5)
    assert work.ran.names == ["number", "1"]


async def test_a_cancelled_step_is_cancelled_in_every_run(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    work = Work()
    work.gate = Gate()
    cancelled = list[str]()

    @agent("agent")
    async def impatient(ctx: TaskExecutionContext, number: int) -> int:
        step = asyncio.create_task(ctx.step("slow", work.add_one, number))
        await asyncio.sleep(0)
        if not cancelled:
            assert work.gate is not None
            await work.gate.wait_reached()
        step.cancel()
        try:
            await step
        except asyncio.CancelledError:
            cancelled.append("slow")
        return await int_peer(number)

    await mesh.replica(impatient)
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(), 10)
    assert await client.reply(task_id) == Ok(10)
    assert (cancelled, work.ran.names) == (["slow"] * 2, ["1"])


async def test_a_zombie_records_nothing(mesh: Mesh, client: FakePeer) -> None:
    work, gates = Work(), list[Gate]()

    @agent("agent")
    async def slow(ctx: TaskExecutionContext, number: int) -> int:
        async def wait() -> int:
            gate = Gate()
            gates.append(gate)
            await gate()
            return len(gates)

        return await ctx.step("wait", wait)

    await mesh.replica(slow, sweep_interval=timedelta(hours=1))  # as if frozen
    task_id = await client.ask("agent", 1)
    await mesh.idle()
    await mesh.replica(slow)
    await mesh.advance(25)
    assert len(gates) == 2
    gates[0].opened.set()
    await mesh.idle()
    assert client.replies(task_id) == []
    assert [event.detail["what"] for event in mesh.events.matching(Step.FENCED)] == ["save"]
    gates[1].opened.set()
    assert await client.reply(task_id) == Ok(2)
    assert work.ran.names == []


async def test_a_cancel_stops_the_code_at_its_next_record(
    mesh: Mesh, client: FakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work()
    work.gate = Gate()

    @agent("agent")
    async def adding(ctx: TaskExecutionContext, number: int) -> int:
        number = await ctx.step("one", work.add_one, number)
        return await ctx.step("two", work.add_one, number)

    replica = await mesh.replica(adding)
    # The broadcast of the cancel is lost.
    monkeypatch.setattr(replica.worker.tasks, "cancel", lambda *_: False)
    task_id = await client.ask("agent", 1)
    await work.gate.wait_reached()
    await client.cancel("agent", task_id)
    await mesh.idle()
    work.gate.opened.set()
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.CANCELLED
    assert work.ran.names == ["1"]


@pytest.mark.parametrize("fault", ["not committed", "in doubt", "lost, in doubt"])
async def test_a_record_is_written_once_when_the_database_fails(
    mesh: Mesh, client: FakePeer, fault: str
) -> None:
    work = Work()

    @agent("agent")
    async def adding(ctx: TaskExecutionContext, number: int) -> int:
        number = await ctx.step("one", work.add_one, number)
        return await ctx.step("two", work.add_one, number)

    replica = await mesh.replica(adding)
    replica.store.fail("append", fault, None, fault)
    task_id = await client.ask("agent", 1)
    await mesh.advance(10)
    assert await client.reply(task_id) == Ok(3)
    assert work.ran.names == ["1", "2"]


async def test_a_step_of_a_subtask_that_runs_first_begins_no_second_task(
    mesh: Mesh, client: FakePeer
) -> None:
    """A step and a subtask begin the task at the same time; it becomes an operation."""
    work = Work()

    @agent("agent")
    async def both(ctx: TaskExecutionContext, number: int) -> list[int]:
        both = asyncio.gather(
            ctx.step("step", work.add_one, number), ctx.subtask("subtask", work.add_one, number)
        )
        return list(await both)

    replica = await mesh.replica(both)
    assert await client.reply(await client.ask("agent", 1)) == Ok([2, 2])
    await mesh.idle()
    calls = write_calls(replica)
    assert (calls.count("begin"), calls.count("track")) == (1, 1)


async def test_a_task_left_behind_cannot_begin_steps(mesh: Mesh, client: FakePeer) -> None:
    gate, refused = Gate(), list[str]()

    @agent("agent")
    async def leaving(ctx: TaskExecutionContext, number: int) -> int:
        async def later() -> None:
            await gate()
            try:
                await ctx.step("late", int, 1)
            except AgentMisbehaved as error:
                refused.append(str(error))

        left_behind.append(asyncio.create_task(later()))
        await gate.wait_reached()
        return number

    left_behind: list[asyncio.Task[None]] = []
    await mesh.replica(leaving)
    assert await client.reply(await client.ask("agent", 1)) == Ok(1)
    await mesh.idle()
    gate.opened.set()
    await left_behind[0]
    assert len(refused) == 1
    assert refused[0].startswith("an asyncio task that outlived its segment began step 'late'")


async def test_a_stopped_step_is_not_recorded(mesh: Mesh, client: FakePeer) -> None:
    """A drain cancels the code; the next replica runs the step."""
    work = Work()
    work.gate = Gate()

    @agent("agent")
    async def adding(ctx: TaskExecutionContext, number: int) -> int:
        return await ctx.step("one", work.add_one, number)

    first = await mesh.replica(adding, drain_timeout=timedelta(0))
    task_id = await client.ask("agent", 1)
    await work.gate.wait_reached()
    await first.drain()
    work.gate.opened.set()
    await mesh.replica(adding)
    await mesh.advance(25)
    assert await client.reply(task_id) == Ok(2)
    assert work.ran.names == ["1", "1"]


async def test_a_crashed_step_counts_no_progress_but_a_record_does(
    mesh: Mesh, client: FakePeer
) -> None:
    work, gate = Work(), Gate()

    @agent("agent")
    async def adding(ctx: TaskExecutionContext, number: int) -> int:
        await gate()
        number = await ctx.step("one", work.add_one, number)
        await gate()
        return number

    first = await mesh.replica(adding, ack_policy="on_receipt")
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    await first.crash()
    second = await mesh.replica(adding, ack_policy="on_receipt")
    await mesh.advance(25)
    attempt = (await mesh.task(task_id))[0].attempt
    assert attempt == 2
    gate.opened.set()
    crash_replica_at(mesh, second, Step.RECORD, Phase.AFTER)
    await mesh.idle()
    assert (await mesh.task(task_id))[0].attempt == 1
    await second.crash()
    await mesh.replica(adding)
    await mesh.advance(25)
    assert await client.reply(task_id) == Ok(2)
    assert work.ran.names == ["1"]
