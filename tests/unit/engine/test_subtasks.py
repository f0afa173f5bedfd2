"""Subtasks in a worker: each is saved before its result is returned, and never runs again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel

from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.agents.replies import Replies
from meshpoint.agents.stateful import StatefulAgent
from meshpoint.model.checkpoint import TaskState
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import TaskId
from meshpoint.model.operations import OperationStatus
from meshpoint.model.options import AckPolicy
from meshpoint.model.outcomes import Failed, FailureKind, Ok

from .agents import Gate, Ran, Steps, doubler, in_a_row
from .mesh import Mesh, Running
from .puppet import Puppet
from .test_crash_points import crash_at

HOMES = pytest.mark.parametrize("durable", [True, False])
asked = Peer("peer", int, int)


def writes(running: Running, durable: bool = True) -> list[str]:
    """Calls of the worker's store, without the queries of the sweeper."""
    store = running.store if durable else running.memory
    looks = {"open", "due", "take", "expire", "take_over", "unsent", "keep_alives", "renew", "purge", "close"}
    return [name for name in store.calls if name not in looks]


async def test_the_first_subtask_writes_the_task_and_acks_its_request(mesh: Mesh, boss: Puppet) -> None:
    steps = Steps()
    gate = steps.gate("a")
    replica = await mesh.replica(in_a_row(steps, "a", "b", subtasks=["a", "b"], type="sums"))
    task_id = await boss.ask("agent", 1)
    await gate.reach()
    await mesh.settle()
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0
    assert await mesh.state(task_id) is TaskState.RUNNING
    operation = await mesh.store.operation(task_id)
    assert operation is not None
    assert (operation.status, operation.type, operation.parameters) == (OperationStatus.RUNNING, "sums", 1)
    assert operation.owner == replica.id
    assert operation.checkpoint is None
    gate.opened.set()
    assert await boss.reply(task_id) == Ok(3)
    await mesh.settle()
    assert writes(replica) == ["lookup", "begin", "save", "save", "end", "mark_sent"]
    assert await mesh.store.history(task_id) == [], "a completed operation keeps no history"
    assert mesh.events.story(task_id, Step.BEGIN, Step.ACK, Step.SUBTASK, Step.SAVE, Step.END, Step.REPLY) == [
        *("begin before", "begin after", "ack before", "ack after"),
        *("subtask before", "subtask after", "save before", "save after") * 2,
        *("end before", "end after", "reply before", "reply after"),
    ]


async def test_in_memory_the_request_stays_unacked(mesh: Mesh, boss: Puppet) -> None:
    steps = Steps()
    gate = steps.gate("b")
    replica = await mesh.replica(in_a_row(steps, "a", "b"), durable=False)
    task_id = await boss.ask("agent", 1)
    await gate.reach()
    assert mesh.unacked("agent") == 1
    gate.opened.set()
    assert await boss.reply(task_id) == Ok(3)
    await mesh.settle()
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0
    assert writes(replica, durable=False) == ["lookup", "begin", "save", "save", "end", "lookup", "mark_sent"]
    assert writes(replica) == []


async def test_a_task_without_subtasks_writes_nothing(mesh: Mesh, boss: Puppet) -> None:
    replica = await mesh.replica(doubler)
    assert await boss.reply(await boss.ask("doubler", 1)) == Ok(2)
    await mesh.settle()
    assert writes(replica) == ["lookup"]
    assert await mesh.store.operations() == []


async def test_a_task_that_has_a_row_only_becomes_an_operation(mesh: Mesh, boss: Puppet) -> None:
    replica = await mesh.replica(in_a_row(Steps(), "a"), ack_policy=AckPolicy.ON_RECEIPT)
    assert await boss.reply(await boss.ask("agent", 1)) == Ok(2)
    await mesh.settle()
    assert writes(replica) == ["lookup", "begin", "track", "save", "end", "mark_sent"]


async def test_a_request_that_comes_again_meanwhile_is_acked(mesh: Mesh, boss: Puppet) -> None:
    steps = Steps()
    gate = steps.gate("a")
    await mesh.replica(in_a_row(steps, "a"))
    request = boss.request(1)
    await boss.send("agent", request)
    await gate.reach()
    await boss.send("agent", request)
    await mesh.settle()
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0
    gate.opened.set()
    assert await boss.reply(request.correlation_id) == Ok(2)
    assert steps.ran.names == ["a"]


async def test_two_first_segments_of_one_request_begin_one_task(mesh: Mesh, boss: Puppet) -> None:
    """Both replicas have the request: the row of the first subtask decides which run stops."""
    steps, before = Steps(), Gate()

    @agent("agent", version="1")
    async def slow(ctx: TaskExecutionContext, number: int) -> int:
        await before()
        return await steps(ctx, "a", number)

    first, second = await mesh.replica(slow), await mesh.replica(slow)
    both = Gate()
    first.store.after["lookup"] = second.store.after["lookup"] = both
    request = boss.request(1)
    await boss.send("agent", request)
    await boss.send("agent", request)
    await both.reach(2)
    both.opened.set()
    await before.reach(2)
    before.opened.set()
    assert await boss.reply(request.correlation_id) == Ok(2)
    await mesh.settle()
    assert steps.ran.names == ["a"]
    assert len(mesh.events.of(Step.FENCED)) == 1
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_a_cancel_that_came_first_stops_the_first_subtask(mesh: Mesh, boss: Puppet) -> None:
    steps, before = Steps(), Gate()

    @agent("agent", version="1")
    async def slow(ctx: TaskExecutionContext, number: int) -> int:
        await before()
        return await steps(ctx, "a", number)

    replica = await mesh.replica(slow)
    replica.worker.segments.cancel = lambda task_id: False  # type: ignore[method-assign]  # its broadcast is lost
    task_id = await boss.ask("agent", 1)
    await before.reach()
    await boss.cancel("agent", task_id)
    await mesh.settle()
    before.opened.set()
    reply = await boss.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.CANCELLED
    assert steps.ran.names == []
    assert mesh.unacked("agent") == 0


def pausing(ran: Ran, subtasks: int = 2) -> Any:
    """Each subtask calls `peer` before it ends; the agent then calls `peer` once more."""

    @agent("agent", version="1")
    async def pausing(ctx: TaskExecutionContext, number: int) -> list[int]:
        async def ask_inside(name: str, of: int) -> int:
            ran(f"{name} begins")
            answer = await ctx.call(asked(of))
            ran(f"{name} ends")
            return answer

        ran("top")
        answers = [await ctx.subtask(f"s{n}", ask_inside, f"s{n}", number + n) for n in range(subtasks)]
        return [*answers, await ctx.call(asked(99))]

    return pausing


@HOMES
async def test_a_subtask_may_pause_and_later_replays_skip_what_it_asked(
    mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool
) -> None:
    ran = Ran()
    await mesh.replica(pausing(ran), durable=durable)
    task_id = await boss.ask("agent", 1)
    for count in (1, 2, 3):
        request = await peer.request_number(count)
        await mesh.settle()
        await peer.respond(request, 10 * count)
    assert await boss.reply(task_id) == Ok([10, 20, 30])
    assert ran.names == [
        *("top", "s0 begins"),
        *("top", "s0 begins", "s0 ends", "s1 begins"),
        *("top", "s1 begins", "s1 ends"),
        "top",
    ]
    assert len(peer.requests) == 3
    reused = mesh.events.of(Step.SUBTASK_REUSED)
    assert [event.detail["subtask"] for event in reused] == ["s0", "s0", "s1"]


async def test_calls_of_a_subtask_belong_to_it(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    await mesh.replica(pausing(Ran(), 1))
    task_id = await boss.ask("agent", 1)
    for count in (1, 2):
        request = await peer.request_number(count)
        await mesh.settle()
        operation = await mesh.store.operation(task_id)
        assert operation is not None
        await peer.respond(request, 0)
        await mesh.settle()
    assert [child.subtask for child in operation.children] == ["s0", None]
    assert [child.id for child in operation.children] == [request.correlation_id for request in peer.requests]


class Kept(BaseModel):
    number: int


class Stateful(StatefulAgent[int, Kept, int]):
    """An agent with one subtask in each of its three handlers."""

    name = "agent"
    subtasks = ("s0", "s1", "s2")
    names: tuple[str, ...] = ("s0", "s1", "s2")

    def __init__(self, steps: Steps, *names: str) -> None:
        self.steps, self.names = steps, names or self.names

    async def on_request(self, ctx: TaskExecutionContext, number: int) -> Any:
        number = await self.steps(ctx, self.names[0], number)
        return self.ask(Kept(number=number), {"more": asked(number)}, then=self.on_more)

    async def on_more(self, ctx: TaskExecutionContext, state: Kept, replies: Replies) -> Any:
        number = await self.steps(ctx, self.names[1], state.number + replies.value("more", asked))
        return self.ask(Kept(number=number), {"last": asked(number)}, then=self.on_last)

    async def on_last(self, ctx: TaskExecutionContext, state: Kept, replies: Replies) -> Any:
        return self.done(await self.steps(ctx, self.names[2], state.number + replies.value("last", asked)))


@HOMES
async def test_handlers_with_subtasks(mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool) -> None:
    steps = Steps()
    replica = await mesh.replica(Stateful(steps), durable=durable)
    task_id = await boss.ask("agent", 1)
    for count in (1, 2):
        await peer.respond(await peer.request_number(count), 10)
    assert await boss.reply(task_id) == Ok(24)
    assert steps.ran.names == ["s0", "s1", "s2"]
    await mesh.settle()
    saved = [args[0].checkpoint for name, args in _store(replica, durable).arguments if name == "save"]
    assert [[each.generation for each in checkpoint.subtasks] for checkpoint in saved] == [[0], [0, 1], [0, 1, 2]]
    assert [checkpoint.progress.percent for checkpoint in saved] == [33.33, 66.67, 100.0]


def _store(replica: Running, durable: bool) -> Any:
    return replica.store if durable else replica.memory


async def test_a_handler_that_runs_again_reuses_its_subtask(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    steps = Steps()
    first = await mesh.replica(Stateful(steps))
    crash_at(mesh, first, Step.CHECKPOINT, Phase.BEFORE)  # of the pause after the first subtask
    task_id = await boss.ask("agent", 1)
    await mesh.settle()
    await first.crash()
    second = await mesh.replica(Stateful(steps))
    await mesh.advance(17)
    request = await peer.request_number()
    crash_at(mesh, second, Step.CHECKPOINT, Phase.BEFORE)
    await peer.respond(request, 10)
    await mesh.settle()
    await second.crash()
    await mesh.replica(Stateful(steps))
    await mesh.advance(17)
    await peer.respond(await peer.request_number(2), 10)
    assert await boss.reply(task_id) == Ok(24)
    assert steps.ran.names == ["s0", "s1", "s2"]


async def test_one_name_in_two_handlers_is_refused(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    await mesh.replica(Stateful(Steps(), "s0", "s0", "s2"))
    task_id = await boss.ask("agent", 1)
    await peer.respond(await peer.request_number(), 10)
    reply = await boss.reply(task_id)
    assert isinstance(reply, Failed)
    assert "two subtasks of this run are called 's0'" in reply.message


@HOMES
async def test_a_tool_of_a_framework_begins_subtasks_in_tasks_of_its_own(
    mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool
) -> None:
    steps = Steps()

    @agent("agent", version="1")
    async def framework(ctx: TaskExecutionContext, number: int) -> list[int]:
        async with asyncio.TaskGroup() as tools:
            made = [tools.create_task(steps(ctx, name, number)) for name in ("left", "right")]
        await ctx.call(asked(number))
        return [each.result() for each in made]

    await mesh.replica(framework, durable=durable)
    task_id = await boss.ask("agent", 1)
    await peer.respond(await peer.request_number(), 10)
    assert await boss.reply(task_id) == Ok([2, 2])
    assert steps.ran.names == ["left", "right"]


async def test_a_subtask_that_failed_and_was_caught_fails_in_the_same_way_after_a_pause(
    mesh: Mesh, boss: Puppet, peer: Puppet
) -> None:
    """The recorded error is raised again; a second run could succeed and take another path."""
    ran = Ran()

    def failing() -> int:
        ran("failing")
        raise ConnectionError("no")

    @agent("agent", version="1")
    async def careful(ctx: TaskExecutionContext, number: int) -> int:
        try:
            number = await ctx.subtask("fetch", failing)
        except ConnectionError:
            number = await ctx.call(asked(number))
        return number

    await mesh.replica(careful)
    task_id = await boss.ask("agent", 1)
    await peer.respond(await peer.request_number(), 10)
    assert await boss.reply(task_id) == Ok(10)
    assert ran.names == ["failing"]


CRASHES = [
    (step, phase, skip)
    for step, skips in {
        Step.RECEIVE: 1,
        Step.SEGMENT: 1,
        Step.BEGIN: 1,
        Step.ACK: 1,
        Step.SUBTASK: 3,
        Step.SAVE: 3,
        Step.CHECKPOINT: 1,
        Step.END: 1,
        Step.REPLY: 1,
        Step.MARK: 2,
    }.items()
    for skip in range(skips)
    for phase in (Phase.BEFORE, Phase.AFTER)
]


def three_steps(steps: Steps) -> Any:
    """Two subtasks, a pause, then a third subtask."""

    @agent("agent", version="1")
    async def three(ctx: TaskExecutionContext, number: int) -> int:
        number = await steps(ctx, "a", number)
        number = await steps(ctx, "b", number)
        return await steps(ctx, "c", number + await ctx.call(asked(number)))

    return three


@pytest.mark.parametrize(("step", "phase", "skip"), CRASHES)
async def test_a_crash_at_any_step(
    mesh: Mesh, boss: Puppet, peer: Puppet, step: Step, phase: Phase, skip: int
) -> None:
    """Another replica continues the task, and saved subtasks do not run again."""
    steps = Steps()
    first = await mesh.replica(three_steps(steps))
    saved: list[str] = []

    def watch(event: Any) -> None:
        if event.step is Step.SAVE and event.phase is Phase.AFTER:
            saved.append(str(event.detail["subtask"]))
        if event.step is Step.SUBTASK and event.phase is Phase.BEFORE:
            assert event.detail["subtask"] not in saved, "a saved subtask runs again"

    mesh.events.hooks.append(watch)
    _crash_at(mesh, first, step, phase, skip)
    task_id = await boss.ask("agent", 1)
    await mesh.settle()
    if peer.requests:
        await peer.respond(peer.requests[0], 10)
        await mesh.settle()
    await first.crash()
    await mesh.replica(three_steps(steps))
    await mesh.advance(25)
    answered = len(peer.requests) > 1 or not mesh.events.of(Step.CLAIM, Phase.AFTER)
    if answered:
        await peer.respond(peer.requests[-1], 10)
    await mesh.advance(25)
    assert set(map(str, boss.replies(task_id))) == {str(Ok(14))}
    assert len({request.correlation_id for request in peer.requests}) == 1
    assert saved == ["a", "b", "c"]
    assert await mesh.state(task_id) is TaskState.COMPLETED
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0
    assert await mesh.store.unsent("agent", 100) == []  # type: ignore[arg-type]


def _crash_at(mesh: Mesh, replica: Running, step: Step, phase: Phase, skip: int) -> None:
    """Like `crash_at`, but ignore the first `skip` matching events."""
    if skip == 0:
        crash_at(mesh, replica, step, phase)
        return

    def at(event: Any) -> None:
        if (event.step, event.phase, event.replica) == (step, phase, replica.id):
            mesh.events.hooks.remove(at)
            _crash_at(mesh, replica, step, phase, skip - 1)

    mesh.events.hooks.append(at)


async def _until_visited(mesh: Mesh, gate: Gate, visits: int) -> None:
    while gate.visits < visits:
        await mesh.advance(1)


async def test_a_save_is_a_step_forward(mesh: Mesh, boss: Puppet) -> None:
    """A task with more subtasks than attempts completes even if each subtask is killed once."""
    names = [f"s{n}" for n in range(6)]
    steps = Steps()
    task_id = TaskId("")
    for name in names:
        replica = await mesh.replica(in_a_row(steps, *names), max_attempts=2)
        task_id = task_id or await boss.ask("agent", 0)
        gate = steps.gate(name)
        await _until_visited(mesh, gate, 1)
        await replica.crash()
        gate.opened.set()
    await mesh.replica(in_a_row(steps, *names), max_attempts=2)
    await mesh.advance(17)
    assert await boss.reply(task_id) == Ok(6)
    assert steps.ran.names == [name for name in names for _ in range(2)]
    assert steps.ended.names == names


async def test_a_subtask_that_kills_its_process_ends_its_task(mesh: Mesh, boss: Puppet) -> None:
    """The task fails with its recorded subtasks as the last checkpoint."""
    steps = Steps()
    gate = steps.gate("b")
    task_id = TaskId("")
    for attempt in range(1, 4):
        replica = await mesh.replica(in_a_row(steps, "a", "b"), max_attempts=3)
        task_id = task_id or await boss.ask("agent", 0)
        await _until_visited(mesh, gate, attempt)
        await replica.crash()
    await mesh.replica(in_a_row(steps, "a", "b"), max_attempts=3)
    await mesh.advance(17)
    reply = await boss.reply(task_id)
    assert isinstance(reply, Failed)
    told = "its segment was run 3 times and no run came to its end; checkpoint available: resume with"
    assert reply.message == f"{told} `meshpoint tasks resume {task_id}`"
    last = await mesh.store.latest(task_id)
    assert last is not None
    assert last.failure_reason == reply.message
    assert last.progress.completed == ("a",)
