"""Tasks that kill their process must not affect other tasks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.checkpoint import TaskState
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.options import AckPolicy
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.ports.isolation import Ending, Exit, Word

from .agents import Gate, Scripted, gated, gated_after
from .cells import KILLED, Cells
from .faults import IN_DOUBT
from .mesh import Mesh
from .puppet import Puppet

LEASE = 17
"""Seconds after which tasks of a dead replica are rescued."""
ON_RECEIPT = {"ack_policy": AckPolicy.ON_RECEIPT}
UNABLE = Exit(Ending.UNSTARTED, "could not start: the database is unavailable")


async def suspected(mesh: Mesh, boss: Puppet, agent: Any, gate: Gate, *inputs: Any, **options: Any) -> list[str]:
    """Start tasks of `agent` and crash two replicas that run them, which makes them suspects."""
    tasks: list[str] = []
    for life in (1, 2):
        replica = await mesh.replica(agent, **ON_RECEIPT, **options)
        tasks = tasks or [await boss.ask("agent", value) for value in inputs]
        if life > 1:
            await mesh.advance(LEASE)
        await gate.reach(life * len(inputs))
        await replica.crash()
    return tasks


async def test_a_suspect_runs_in_a_process_of_its_own(mesh: Mesh, boss: Puppet) -> None:
    gate = Gate()
    agent = gated("agent", gate)
    cells = Cells(mesh, agent)
    (task,) = await suspected(mesh, boss, agent, gate, 1, isolation=cells)
    assert cells.all == []
    replica = await mesh.replica(agent, isolation=cells, **ON_RECEIPT)
    await mesh.advance(LEASE)
    cell = await cells.cell()
    assert cell.run.task_id == task
    assert replica.worker.site.slots.free == replica.worker.site.options.max_concurrency - 1
    gate.opened.set()
    assert await boss.reply(task) == Ok("done")
    await mesh.settle()
    assert (replica.worker.site.slots.free, replica.worker.site.apart.free) == (10, 1)
    (note,) = mesh.events.of(Step.ISOLATED)
    assert note.detail == {"attempt": 1, "rescues": 2}


async def test_only_deaths_apart_count(mesh: Mesh, boss: Puppet) -> None:
    gate = Gate()
    agent = gated("agent", gate)
    cells = Cells(mesh, agent)
    (task,) = await suspected(mesh, boss, agent, gate, 1, isolation=cells, max_attempts=3)
    await mesh.replica(agent, isolation=cells, max_attempts=3)
    await mesh.advance(LEASE)
    for death in (1, 2, 3):
        (await cells.cell(death)).kill()
        await mesh.events.wait(Step.ISOLATED_DIED, count=death)
        await mesh.advance(10)
    reply = await boss.reply(task)
    assert isinstance(reply, Failed)
    assert reply.message == (f"its segment was run 3 times and no run came to its end; its last process {KILLED}")
    assert len(cells.all) == 3
    (dead,) = mesh.events.of(Step.DEAD_TASK)
    assert dead.task_ids == (task,)
    assert (await mesh.task(task))[0].dead_reason == reply.message


async def test_one_suspect_at_a_time_and_others_beside_it(mesh: Mesh, boss: Puppet) -> None:
    gate = Gate()
    agent = gated("agent", gate)
    cells = Cells(mesh, agent)
    tasks = await suspected(mesh, boss, agent, gate, 1, 2, 3, isolation=cells)
    await mesh.replica(agent, isolation=cells)
    await mesh.advance(LEASE)
    first = await cells.cell()
    await mesh.advance(10)
    assert cells.all == [first]
    states = sorted([(await mesh.task(task))[0].state for task in tasks])
    assert states == [TaskState.READY, TaskState.READY, TaskState.RUNNING]
    gate.opened.set()
    assert await boss.reply(await boss.ask("agent", 4)) == Ok("done")
    assert [await boss.reply(task) for task in tasks] == [Ok("done")] * 3
    assert len(cells.all) == 3
    assert [(await mesh.task(task))[0].rescues for task in tasks] == [2, 2, 2]


async def test_a_suspect_that_pauses_is_none_any_more(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    gate = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Paused:
        await gate()
        return Paused([Call("call", "peer", 1)], b"")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Done[str]:
        return Done("done")

    agent = Scripted("agent", start, resume)
    cells = Cells(mesh, agent)
    (task,) = await suspected(mesh, boss, agent, gate, 1, isolation=cells)
    await mesh.replica(agent, isolation=cells)
    await mesh.advance(LEASE)
    await cells.cell()
    gate.opened.set()
    request = await peer.request_number()
    assert (await mesh.task(task))[0].rescues == 0
    await peer.respond(request, 1)
    assert await boss.reply(task) == Ok("done")
    assert len(cells.all) == 1


async def test_a_later_segment_is_isolated_too(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    gate = Gate()
    agent = gated_after("agent", "peer", gate)
    cells = Cells(mesh, agent)
    replica = await mesh.replica(agent, isolation=cells)
    task = await boss.ask("agent", 1)
    await peer.respond(await peer.request_number(), 1)
    for life in (1, 2):
        await gate.reach(life)
        await replica.crash()
        replica = await mesh.replica(agent, isolation=cells)
        await mesh.advance(LEASE)
    await cells.cell()
    await gate.reach(3)
    gate.opened.set()
    assert await boss.reply(task) == Ok({"peer": 1})
    assert len(cells.all) == 1


async def test_peers_that_cannot_be_reached_end_no_second_segment_there(mesh: Mesh, boss: Puppet) -> None:
    gate = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Paused:
        await gate()
        return Paused([Call("call", "nobody", 1)], b"")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Done[str]:
        return Done(outcomes["call"].kind.value)

    agent = Scripted("agent", start, resume)
    cells = Cells(mesh, agent)
    (task,) = await suspected(mesh, boss, agent, gate, 1, isolation=cells)
    replica = await mesh.replica(agent, isolation=cells)
    await mesh.advance(LEASE)
    cell = await cells.cell()
    gate.opened.set()
    await mesh.advance(60)
    assert await boss.reply(task) == Ok("undeliverable")
    last = mesh.events.of(Step.SEGMENT, Phase.BEFORE)[-1]
    assert (last.replica, cell.ended) == (replica.id, True)


async def test_a_cancel_reaches_the_process(mesh: Mesh, boss: Puppet) -> None:
    gate = Gate()
    agent = gated("agent", gate)
    cells = Cells(mesh, agent)
    (task,) = await suspected(mesh, boss, agent, gate, 1, isolation=cells)
    await mesh.replica(agent, isolation=cells)
    await mesh.advance(LEASE)
    cell = await cells.cell()
    await gate.reach(3)
    await boss.cancel("agent", task)
    reply = await boss.reply(task)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.CANCELLED
    await mesh.settle()
    assert cell.words == [Word.CANCEL]
    assert cell.ended


async def test_a_cancel_before_the_process_reads_its_row(mesh: Mesh, boss: Puppet) -> None:
    gate = Gate()
    agent = gated("agent", gate)
    cells = Cells(mesh, agent, Exit(Ending.DIED, KILLED))
    (task,) = await suspected(mesh, boss, agent, gate, 1, isolation=cells)

    def cancel(event: Event) -> None:
        if event.step is Step.ISOLATED:
            mesh.replicas[-1].worker.segments.cancel(event.task_ids[0])

    mesh.events.hooks.append(cancel)
    await mesh.replica(agent, isolation=cells)
    await mesh.advance(LEASE)
    reply = await boss.reply(task)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.CANCELLED


@pytest.mark.parametrize("deaf", [False, True])
async def test_a_drain_releases_a_suspect_and_counts_nothing(mesh: Mesh, boss: Puppet, deaf: bool) -> None:
    gate = Gate()
    agent = gated("agent", gate)
    cells = Cells(mesh, agent)
    (task,) = await suspected(mesh, boss, agent, gate, 1, isolation=cells)
    quick = {"drain_timeout": timedelta(0), "release_timeout": timedelta(seconds=1)}
    replica = await mesh.replica(agent, isolation=cells, **quick)
    await mesh.advance(LEASE)
    cell = await cells.cell()
    await gate.reach(3)
    if deaf:
        cell.hang()
    await replica.drain()
    assert cell.words == [Word.DRAIN]
    assert cell.ended
    summary = (await mesh.task(task))[0]
    assert (summary.state, summary.attempt, summary.rescues) == (TaskState.READY, 1, 2)
    gate.opened.set()
    await mesh.replica(agent, isolation=cells)
    assert await boss.reply(task) == Ok("done")


async def test_a_drain_ends_a_process_that_does_not_heed_its_cancel(mesh: Mesh, boss: Puppet) -> None:
    gate = Gate()
    agent = gated("agent", gate)
    cells = Cells(mesh, agent)
    (task,) = await suspected(mesh, boss, agent, gate, 1, isolation=cells)
    quick = {"drain_timeout": timedelta(0), "release_timeout": timedelta(seconds=1)}
    replica = await mesh.replica(agent, isolation=cells, **quick)
    await mesh.advance(LEASE)
    cell = await cells.cell()
    await gate.reach(3)
    cell.hang()
    await boss.cancel("agent", task)
    await mesh.settle()
    assert cell.words == [Word.CANCEL]
    await replica.drain()
    await mesh.settle()
    assert cell.ended


async def test_a_replica_that_dies_takes_the_process_along_and_counts_a_rescue(mesh: Mesh, boss: Puppet) -> None:
    gate = Gate()
    agent = gated("agent", gate)
    cells = Cells(mesh, agent)
    (task,) = await suspected(mesh, boss, agent, gate, 1, isolation=cells)
    replica = await mesh.replica(agent, isolation=cells)
    await mesh.advance(LEASE)
    cell = await cells.cell()
    await replica.crash()
    await mesh.settle()
    assert cell.ended
    await mesh.replica(agent, isolation=cells)
    await mesh.advance(LEASE)
    await cells.cell(2)
    summary = (await mesh.task(task))[0]
    assert (summary.attempt, summary.rescues) == (1, 3)


async def test_a_task_that_ends_its_replicas_too_does_not_go_on_for_ever(mesh: Mesh, boss: Puppet) -> None:
    gate = Gate()
    agent = gated("agent", gate)
    cells = Cells(mesh, agent)
    (task,) = await suspected(mesh, boss, agent, gate, 1, isolation=cells, max_attempts=1)
    for life in range(1, 10):
        replica = await mesh.replica(agent, isolation=cells, max_attempts=1)
        await mesh.advance(LEASE)
        await cells.cell(life)
        await replica.crash()
    await mesh.replica(agent, isolation=cells, max_attempts=1)
    await mesh.advance(LEASE)
    reply = await boss.reply(task)
    assert isinstance(reply, Failed)
    assert reply.message == "its replica was lost 11 times and no run came to its end"
    assert len(cells.all) == 9


async def test_a_process_that_lost_its_task_is_killed(mesh: Mesh, boss: Puppet) -> None:
    gate = Gate()
    agent = gated("agent", gate)
    cells = Cells(mesh, agent)
    (task,) = await suspected(mesh, boss, agent, gate, 1, isolation=cells)
    replica = await mesh.replica(agent, isolation=cells)
    await mesh.advance(LEASE)
    cell = await cells.cell()
    replica.worker.segments.lose(cell.run)
    await mesh.settle()
    assert cell.ended
    assert (await mesh.task(task))[0].attempt == 1
    assert replica.worker.segments.live == {}


@pytest.mark.parametrize("fault", [OSError("no more processes"), UNABLE])
async def test_a_process_that_cannot_start_counts_nothing(mesh: Mesh, boss: Puppet, fault: OSError | Exit) -> None:
    gate = Gate()
    agent = gated("agent", gate)
    cells = Cells(mesh, agent, *[fault] * 3)
    (task,) = await suspected(mesh, boss, agent, gate, 1, isolation=cells, max_attempts=1)
    gate.opened.set()
    await mesh.replica(agent, isolation=cells, max_attempts=1)
    await mesh.advance(LEASE + 20)
    assert await boss.reply(task) == Ok("done")
    notes = mesh.events.of(Step.ISOLATED_DIED)
    assert [note.detail["counted"] for note in notes] == [False] * 3


async def test_an_agent_that_cannot_be_imported_elsewhere_runs_alone(mesh: Mesh, boss: Puppet) -> None:
    gate = Gate()
    agent = gated("agent", gate)
    cells = Cells(mesh, agent, Exit(Ending.IMPOSSIBLE, "cannot run the task"))
    (task,) = await suspected(mesh, boss, agent, gate, 1, isolation=cells)
    replica = await mesh.replica(agent, isolation=cells)
    await mesh.advance(LEASE)
    await gate.reach(3)
    assert replica.worker.site.slots.free == 0
    gate.opened.set()
    assert await boss.reply(task) == Ok("done")
    await mesh.settle()
    assert replica.worker.site.slots.free == 10


async def test_without_processes_a_suspect_runs_while_nothing_else_does(mesh: Mesh, boss: Puppet) -> None:
    gates = {1: Gate(), 2: Gate()}

    async def start(ctx: TaskExecutionContext, request: int) -> Done[str]:
        await gates[request]()
        return Done("done")

    agent = Scripted("agent", start)
    (suspect,) = await suspected(mesh, boss, agent, gates[1], 1)
    replica = await mesh.replica(agent)
    other = await boss.ask("agent", 2)
    await gates[2].reach()
    await mesh.advance(LEASE)
    assert gates[1].visits == 2  # the other task still runs in the replica
    later = await boss.ask("agent", 2)
    await mesh.advance(5)
    gates[2].opened.set()
    assert await boss.reply(other) == Ok("done")
    await gates[1].reach(3)
    assert gates[2].visits == 1  # no other task starts in the meantime
    gates[1].opened.set()
    assert [await boss.reply(task) for task in (suspect, later)] == [Ok("done")] * 2
    await mesh.settle()
    assert (replica.worker.site.slots.free, replica.worker.site.apart.free) == (10, 1)


async def test_redelivered_requests_have_rows_before_any_of_them_runs(mesh: Mesh, boss: Puppet) -> None:
    gate = Gate()
    agent = gated("agent", gate)
    tasks: list[str] = []
    for life in (1, 2):
        replica = await mesh.replica(agent, max_concurrency=6)
        tasks = tasks or [await boss.ask("agent", number) for number in range(6)]
        await gate.reach(6 * life)
        await replica.crash()
    unacked: list[int] = []

    def note(event: Event) -> None:
        if event.step is Step.SEGMENT and event.phase is Phase.BEFORE:
            unacked.append(mesh.unacked("agent") + mesh.waiting("agent"))

    mesh.events.hooks.append(note)
    replica = await mesh.replica(agent, max_concurrency=2)
    await gate.reach(14)
    await mesh.settle()
    # When the first two run, they are acked: a crash would not raise their delivery counts again.
    assert set(unacked) <= {0, 4}
    gate.opened.set()
    assert [await boss.reply(task) for task in tasks] == [Ok("done")] * 6


async def test_redelivered_requests_whose_commit_was_in_doubt_run_at_once(mesh: Mesh, boss: Puppet) -> None:
    """The commit wrote them as running here, and other work took their slots in the meantime."""
    gate = Gate()
    agent = gated("agent", gate)
    first = await mesh.replica(agent)
    tasks = [await boss.ask("agent", number) for number in range(3)]
    await gate.reach(3)
    await first.crash()
    second = await mesh.replica(agent)
    await gate.reach(6)
    third = await mesh.replica(agent, max_concurrency=3)
    third.store.fail("begin", IN_DOUBT)
    slots = third.worker.site.slots

    async def others_come() -> None:
        third.store.after.clear()
        slots.give_back(-3)

    third.store.after["begin"] = others_come
    await second.crash()
    await mesh.events.wait(Step.STORE_AWAY)
    await mesh.advance(5)
    await gate.reach(9)
    assert slots.free == -3
    slots.give_back(3)
    gate.opened.set()
    assert [await boss.reply(task) for task in tasks] == [Ok("done")] * 3
    await mesh.settle()
    assert slots.free == 3
