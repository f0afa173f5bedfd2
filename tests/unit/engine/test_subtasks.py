"""Subtasks in a worker: each is saved before its result is returned, and never runs again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel

from fake_peer import FakePeer
from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.agents.stateful import Replies, StatefulAgent
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.operations import OperationStatus
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.tasks import TaskState
from run_log import RunLog

from .agents import Gate, Steps, doubler, sequential_agent
from .mesh import Mesh, RunningReplica
from .test_crash_points import crash_replica_at

BACKENDS = pytest.mark.parametrize("durable", [True, False])
int_peer = Peer("peer", int, int)


def write_calls(replica: RunningReplica, durable: bool = True) -> list[str]:
    """Calls of the worker's store, without the queries of the sweeper."""
    store = replica.store if durable else replica.memory
    read_methods = {
        "open",
        "due",
        "acquire",
        "expire",
        "rescue",
        "unsent",
        "keep_alives",
        "renew",
        "purge",
        "close",
    }
    return [name for name in store.calls if name not in read_methods]


@pytest.mark.parametrize("built", ["Subtasks", "TaskMemory"])
async def test_a_task_builds_neither_subtasks_nor_memory_unless_it_uses_them(
    mesh: Mesh, client: FakePeer, peer: FakePeer, built: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It pauses, resumes and ends without them."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError(built)

    @agent("caller")
    async def caller(ctx: TaskExecutionContext, number: int) -> int:
        return await int_peer(number)

    monkeypatch.setattr(f"meshpoint.engine.segment.{built}", refuse)
    await mesh.replica(caller)
    task_id = await client.ask("caller", 1)
    await peer.respond(await peer.wait_for_request(), Ok(2))
    assert await client.reply(task_id) == Ok(2)


async def test_the_first_subtask_writes_the_task_and_acks_its_request(
    mesh: Mesh, client: FakePeer
) -> None:
    steps = Steps()
    gate = steps.gate("a")
    replica = await mesh.replica(
        sequential_agent(steps, "a", "b", subtasks=["a", "b"], type="sums")
    )
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    await mesh.idle()
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0
    assert await mesh.state(task_id) is TaskState.RUNNING
    operation = await mesh.store.operation(task_id)
    assert operation is not None
    assert (operation.status, operation.type, operation.parameters) == (
        OperationStatus.RUNNING,
        "sums",
        1,
    )
    assert operation.owner == replica.id
    assert operation.checkpoint is None
    gate.opened.set()
    assert await client.reply(task_id) == Ok(3)
    await mesh.idle()
    assert write_calls(replica) == ["lookup", "begin", "save", "save", "end", "confirm_sent"]
    assert await mesh.store.history(task_id) == [], "a completed operation keeps no history"
    assert mesh.events.timeline(
        task_id, Step.BEGIN, Step.ACK, Step.SUBTASK, Step.SAVE, Step.END, Step.REPLY
    ) == [
        *("begin before", "begin after", "ack before", "ack after"),
        *("subtask before", "subtask after", "save before", "save after") * 2,
        *("end before", "end after", "reply before", "reply after"),
    ]


async def test_an_in_process_request_with_subtasks_stays_unacked(
    mesh: Mesh, client: FakePeer
) -> None:
    steps = Steps()
    gate = steps.gate("b")
    replica = await mesh.replica(sequential_agent(steps, "a", "b"), durable=False)
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    assert mesh.unacked("agent") == 1
    gate.opened.set()
    assert await client.reply(task_id) == Ok(3)
    await mesh.idle()
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0
    assert write_calls(replica, durable=False) == [
        "lookup",
        "begin",
        "save",
        "save",
        "end",
        "lookup",
        "confirm_sent",
    ]
    assert write_calls(replica) == []


async def test_a_task_without_subtasks_writes_nothing(mesh: Mesh, client: FakePeer) -> None:
    replica = await mesh.replica(doubler)
    assert await client.reply(await client.ask("doubler", 1)) == Ok(2)
    await mesh.idle()
    assert write_calls(replica) == ["lookup"]
    assert await mesh.store.operations() == []


async def test_a_task_with_a_row_becomes_an_operation(mesh: Mesh, client: FakePeer) -> None:
    replica = await mesh.replica(sequential_agent(Steps(), "a"), ack_policy="on_receipt")
    assert await client.reply(await client.ask("agent", 1)) == Ok(2)
    await mesh.idle()
    assert write_calls(replica) == ["lookup", "begin", "track", "save", "end", "confirm_sent"]


async def test_a_duplicate_during_a_subtask_is_acked(mesh: Mesh, client: FakePeer) -> None:
    steps = Steps()
    gate = steps.gate("a")
    await mesh.replica(sequential_agent(steps, "a"))
    request = client.request(1)
    await client.send("agent", request)
    await gate.wait_reached()
    await client.send("agent", request)
    await mesh.idle()
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0
    gate.opened.set()
    assert await client.reply(request.correlation_id) == Ok(2)
    assert steps.started.names == ["a"]


async def test_concurrent_first_segments_of_one_request_begin_one_task(
    mesh: Mesh, client: FakePeer
) -> None:
    """Both replicas have the request: the row of the first subtask decides which run stops."""
    steps, before = Steps(), Gate()

    @agent("agent", version="1")
    async def slow(ctx: TaskExecutionContext, number: int) -> int:
        await before()
        return await steps(ctx, "a", number)

    first, second = await mesh.replica(slow), await mesh.replica(slow)
    begin_gate = Gate()
    first.store.after["lookup"] = second.store.after["lookup"] = begin_gate
    request = client.request(1)
    await client.send("agent", request)
    await client.send("agent", request)
    await begin_gate.wait_reached(2)
    begin_gate.opened.set()
    await before.wait_reached(2)
    before.opened.set()
    assert await client.reply(request.correlation_id) == Ok(2)
    await mesh.idle()
    assert steps.started.names == ["a"]
    assert len(mesh.events.matching(Step.FENCED)) == 1
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_an_earlier_cancel_stops_the_first_subtask(
    mesh: Mesh, client: FakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, before = Steps(), Gate()

    @agent("agent", version="1")
    async def slow(ctx: TaskExecutionContext, number: int) -> int:
        await before()
        return await steps(ctx, "a", number)

    replica = await mesh.replica(slow)
    # The broadcast of the cancel is lost.
    monkeypatch.setattr(replica.worker.tasks, "cancel", lambda task_id: False)
    task_id = await client.ask("agent", 1)
    await before.wait_reached()
    await client.cancel("agent", task_id)
    await mesh.idle()
    before.opened.set()
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.CANCELLED
    assert steps.started.names == []
    assert mesh.unacked("agent") == 0


def pausing_agent(run_log: RunLog, subtasks: int = 2) -> Any:
    """Each subtask calls `peer` before it ends; the agent then calls `peer` once more."""

    @agent("agent", version="1")
    async def pausing(ctx: TaskExecutionContext, number: int) -> list[int]:
        async def call_in_subtask(name: str, number_: int) -> int:
            run_log(f"{name} begins")
            answer = await int_peer(number_)
            run_log(f"{name} ends")
            return answer

        run_log("top")
        answers = [
            await ctx.subtask(f"s{n}", call_in_subtask, f"s{n}", number + n)
            for n in range(subtasks)
        ]
        return [*answers, await int_peer(99)]

    return pausing


@BACKENDS
async def test_a_subtask_can_pause_and_replays_skip_its_calls(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    run_log = RunLog()
    await mesh.replica(pausing_agent(run_log), durable=durable)
    task_id = await client.ask("agent", 1)
    for count in (1, 2, 3):
        request = await peer.wait_for_request(count)
        await mesh.idle()
        await peer.respond(request, 10 * count)
    assert await client.reply(task_id) == Ok([10, 20, 30])
    assert run_log.names == [
        *("top", "s0 begins"),
        *("top", "s0 begins", "s0 ends", "s1 begins"),
        *("top", "s1 begins", "s1 ends"),
        "top",
    ]
    assert len(peer.requests) == 3
    reused = mesh.events.matching(Step.SUBTASK_REUSED)
    assert [event.detail["subtask"] for event in reused] == ["s0", "s0", "s1"]


async def test_calls_of_a_subtask_belong_to_it(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(pausing_agent(RunLog(), 1))
    task_id = await client.ask("agent", 1)
    for count in (1, 2):
        request = await peer.wait_for_request(count)
        await mesh.idle()
        operation = await mesh.store.operation(task_id)
        assert operation is not None
        await peer.respond(request, 0)
        await mesh.idle()
    assert operation is not None
    assert [child.subtask for child in operation.children] == ["s0", None]
    assert [child.id for child in operation.children] == [
        request.correlation_id for request in peer.requests
    ]


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
        return self.ask(Kept(number=number), {"more": int_peer(number)}, then=self.on_more)

    async def on_more(self, ctx: TaskExecutionContext, state: Kept, replies: Replies) -> Any:
        number = await self.steps(
            ctx, self.names[1], state.number + replies.value("more", int_peer)
        )
        return self.ask(Kept(number=number), {"last": int_peer(number)}, then=self.on_last)

    async def on_last(self, ctx: TaskExecutionContext, state: Kept, replies: Replies) -> Any:
        return self.done(
            await self.steps(ctx, self.names[2], state.number + replies.value("last", int_peer))
        )


@BACKENDS
async def test_handlers_can_run_subtasks(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    steps = Steps()
    replica = await mesh.replica(Stateful(steps), durable=durable)
    task_id = await client.ask("agent", 1)
    for count in (1, 2):
        await peer.respond(await peer.wait_for_request(count), 10)
    assert await client.reply(task_id) == Ok(24)
    assert steps.started.names == ["s0", "s1", "s2"]
    await mesh.idle()
    saved = [
        args[0].checkpoint
        for name, args in task_store(replica, durable).arguments
        if name == "save"
    ]
    assert [[record.generation for record in checkpoint.subtasks] for checkpoint in saved] == [
        [0],
        [0, 1],
        [0, 1, 2],
    ]
    assert [checkpoint.progress.percent for checkpoint in saved] == [33.33, 66.67, 100.0]


def task_store(replica: RunningReplica, durable: bool) -> Any:
    return replica.store if durable else replica.memory


async def test_a_rerun_handler_reuses_its_subtask(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    steps = Steps()
    first = await mesh.replica(Stateful(steps))
    crash_replica_at(
        mesh, first, Step.CHECKPOINT, Phase.BEFORE
    )  # of the pause after the first subtask
    task_id = await client.ask("agent", 1)
    await mesh.idle()
    await first.crash()
    second = await mesh.replica(Stateful(steps))
    await mesh.advance(17)
    request = await peer.wait_for_request()
    crash_replica_at(mesh, second, Step.CHECKPOINT, Phase.BEFORE)
    await peer.respond(request, 10)
    await mesh.idle()
    await second.crash()
    await mesh.replica(Stateful(steps))
    await mesh.advance(17)
    await peer.respond(await peer.wait_for_request(2), 10)
    assert await client.reply(task_id) == Ok(24)
    assert steps.started.names == ["s0", "s1", "s2"]


async def test_one_name_in_two_handlers_is_refused(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(Stateful(Steps(), "s0", "s0", "s2"))
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(), 10)
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    assert "two subtasks of this run are called 's0'" in reply.message


@BACKENDS
async def test_subtasks_can_begin_in_asyncio_tasks_of_a_framework(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    steps = Steps()

    @agent("agent", version="1")
    async def framework(ctx: TaskExecutionContext, number: int) -> list[int]:
        async with asyncio.TaskGroup() as tools:
            subtask_tasks = [
                tools.create_task(steps(ctx, name, number)) for name in ("left", "right")
            ]
        await int_peer(number)
        return [task.result() for task in subtask_tasks]

    await mesh.replica(framework, durable=durable)
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(), 10)
    assert await client.reply(task_id) == Ok([2, 2])
    assert steps.started.names == ["left", "right"]


async def test_a_caught_subtask_failure_is_raised_again_after_a_pause(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """The recorded error is raised again; a second run could succeed and take another path."""
    run_log = RunLog()

    def failing() -> int:
        run_log("failing")
        raise ConnectionError("no")

    @agent("agent", version="1")
    async def careful(ctx: TaskExecutionContext, number: int) -> int:
        try:
            number = await ctx.subtask("fetch", failing)
        except ConnectionError:
            number = await int_peer(number)
        return number

    await mesh.replica(careful)
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(), 10)
    assert await client.reply(task_id) == Ok(10)
    assert run_log.names == ["failing"]


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
        Step.CONFIRM_SENT: 2,
    }.items()
    for skip in range(skips)
    for phase in (Phase.BEFORE, Phase.AFTER)
]


def three_step_agent(steps: Steps) -> Any:
    """Two subtasks, a pause, then a third subtask."""

    @agent("agent", version="1")
    async def run_three(ctx: TaskExecutionContext, number: int) -> int:
        number = await steps(ctx, "a", number)
        number = await steps(ctx, "b", number)
        return await steps(ctx, "c", number + await int_peer(number))

    return run_three


@pytest.mark.parametrize(("step", "phase", "skip"), CRASHES)
async def test_subtasks_run_once_despite_a_crash_at_any_step(
    mesh: Mesh, client: FakePeer, peer: FakePeer, step: Step, phase: Phase, skip: int
) -> None:
    """Another replica continues the task, and saved subtasks do not run again."""
    steps = Steps()
    first = await mesh.replica(three_step_agent(steps))
    saved: list[str] = []

    def watch(event: Any) -> None:
        if event.step is Step.SAVE and event.phase is Phase.AFTER:
            saved.append(str(event.detail["subtask"]))
        if event.step is Step.SUBTASK and event.phase is Phase.BEFORE:
            assert event.detail["subtask"] not in saved, "a saved subtask runs again"

    mesh.events.hooks.append(watch)
    crash_replica_at_repeat(mesh, first, step, phase, skip)
    task_id = await client.ask("agent", 1)
    await mesh.idle()
    if peer.requests:
        await peer.respond(peer.requests[0], 10)
        await mesh.idle()
    await first.crash()
    await mesh.replica(three_step_agent(steps))
    await mesh.advance(25)
    answered = len(peer.requests) > 1 or not mesh.events.matching(Step.CLAIM, Phase.AFTER)
    if answered:
        await peer.respond(peer.requests[-1], 10)
    await mesh.advance(25)
    assert set(map(str, client.replies(task_id))) == {str(Ok(14))}
    assert len({request.correlation_id for request in peer.requests}) == 1
    assert saved == ["a", "b", "c"]
    assert await mesh.state(task_id) is TaskState.COMPLETED
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0
    assert await mesh.store.unsent(AgentName("agent"), 100) == []


def crash_replica_at_repeat(
    mesh: Mesh, replica: RunningReplica, step: Step, phase: Phase, skip: int
) -> None:
    """Like `crash_replica_at`, but ignore the first `skip` matching events."""
    if skip == 0:
        crash_replica_at(mesh, replica, step, phase)
        return

    def crash_on_event(event: Any) -> None:
        if (event.step, event.phase, event.replica) == (step, phase, replica.id):
            mesh.events.hooks.remove(crash_on_event)
            crash_replica_at_repeat(mesh, replica, step, phase, skip - 1)

    mesh.events.hooks.append(crash_on_event)


async def wait_until_visited(mesh: Mesh, gate: Gate, visits: int) -> None:
    while gate.visits < visits:
        await mesh.advance(1)


async def test_a_save_resets_the_rescue_count(mesh: Mesh, client: FakePeer) -> None:
    """A task with more subtasks than attempts completes even if each subtask is killed once."""
    names = [f"s{n}" for n in range(6)]
    steps = Steps()
    task_id = TaskId("")
    for name in names:
        replica = await mesh.replica(sequential_agent(steps, *names), max_attempts=2)
        task_id = task_id or await client.ask("agent", 0)
        gate = steps.gate(name)
        await wait_until_visited(mesh, gate, 1)
        await replica.crash()
        gate.opened.set()
    await mesh.replica(sequential_agent(steps, *names), max_attempts=2)
    await mesh.advance(17)
    assert await client.reply(task_id) == Ok(6)
    assert steps.started.names == [name for name in names for _ in range(2)]
    assert steps.ended.names == names


async def test_a_subtask_that_kills_its_process_ends_its_task(
    mesh: Mesh, client: FakePeer
) -> None:
    """The task fails with its recorded subtasks as the last checkpoint."""
    steps = Steps()
    gate = steps.gate("b")
    task_id = TaskId("")
    for attempt in range(1, 4):
        replica = await mesh.replica(sequential_agent(steps, "a", "b"), max_attempts=3)
        task_id = task_id or await client.ask("agent", 0)
        await wait_until_visited(mesh, gate, attempt)
        await replica.crash()
    await mesh.replica(sequential_agent(steps, "a", "b"), max_attempts=3)
    await mesh.advance(17)
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    error_message = "its segment ran 3 times and never finished; checkpoint available: resume with"
    assert reply.message == f"{error_message} `meshpoint tasks resume {task_id}`"
    last = await mesh.store.latest(task_id)
    assert last is not None
    assert last.failure_reason == reply.message
    assert last.progress.completed == ("a",)
