"""Tasks that kill their process must not affect other tasks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.tasks import TaskState
from meshpoint.ports.isolation import Exit, ExitKind, StopSignal

from .agents import Gate, ScriptedAgent, gated, gated_after
from .cells import KILLED, IsolatedRun, IsolatedRuns
from .faults import IN_DOUBT
from .mesh import Mesh, RunningReplica

LEASE = 17
"""Seconds after which tasks of a dead replica are rescued."""
ON_RECEIPT: dict[str, Any] = {"ack_policy": "on_receipt"}
RELEASES: dict[str, Any] = {"drain_timeout": timedelta(0), "release_timeout": timedelta(seconds=1)}
UNAVAILABLE_ISOLATION = Exit(ExitKind.NOT_STARTED, "could not start: the database is unavailable")


async def make_suspects(
    mesh: Mesh, client: FakePeer, agent: Any, gate: Gate, *inputs: Any, **options: Any
) -> list[str]:
    """Start tasks of `agent` and crash two replicas that run them, which makes them suspects."""
    tasks: list[str] = []
    for attempt in (1, 2):
        replica = await mesh.replica(agent, **ON_RECEIPT, **options)
        tasks = tasks or [await client.ask("agent", value) for value in inputs]
        if attempt > 1:
            await mesh.advance(LEASE)
        await gate.wait_reached(attempt * len(inputs))
        await replica.crash()
    return tasks


@dataclass
class Suspect:
    """A suspect that runs in its own process on behalf of `replica`, and waits at `gate`."""

    task: str
    agent: Any
    gate: Gate
    isolation: IsolatedRuns
    replica: RunningReplica
    run: IsolatedRun


async def isolate_suspect(mesh: Mesh, client: FakePeer, **options: Any) -> Suspect:
    gate = Gate()
    agent = gated("agent", gate)
    isolation = IsolatedRuns(mesh, agent)
    (task,) = await make_suspects(mesh, client, agent, gate, 1, isolation=isolation)
    replica = await mesh.replica(agent, isolation=isolation, **options)
    await mesh.advance(LEASE)
    run = await isolation.wait_for_run()
    return Suspect(task, agent, gate, isolation, replica, run)


async def test_a_suspect_runs_in_its_own_process(mesh: Mesh, client: FakePeer) -> None:
    gate = Gate()
    agent = gated("agent", gate)
    isolation = IsolatedRuns(mesh, agent)
    (task,) = await make_suspects(mesh, client, agent, gate, 1, isolation=isolation)
    assert isolation.all == []
    replica = await mesh.replica(agent, isolation=isolation, **ON_RECEIPT)
    await mesh.advance(LEASE)
    isolated_run = await isolation.wait_for_run()
    assert isolated_run.run.task_id == task
    assert replica.worker.runtime.slots.free == replica.worker.runtime.options.max_concurrency - 1
    gate.opened.set()
    assert await client.reply(task) == Ok("done")
    await mesh.idle()
    assert (replica.worker.runtime.slots.free, replica.worker.runtime.suspect_slots.free) == (
        10,
        1,
    )
    (event,) = mesh.events.matching(Step.ISOLATED)
    assert event.detail == {"attempt": 1, "rescues": 2}


async def test_only_deaths_in_isolation_count(mesh: Mesh, client: FakePeer) -> None:
    gate = Gate()
    agent = gated("agent", gate)
    isolation = IsolatedRuns(mesh, agent)
    (task,) = await make_suspects(
        mesh, client, agent, gate, 1, isolation=isolation, max_attempts=3
    )
    await mesh.replica(agent, isolation=isolation, max_attempts=3)
    await mesh.advance(LEASE)
    for attempt in (1, 2, 3):
        (await isolation.wait_for_run(attempt)).kill()
        await mesh.events.wait(Step.ISOLATED_PROCESS_DIED, count=attempt)
        await mesh.advance(10)
    reply = await client.reply(task)
    assert isinstance(reply, Failed)
    assert reply.message == (
        f"its segment ran 3 times and never finished; its last process {KILLED}"
    )
    assert len(isolation.all) == 3
    (event,) = mesh.events.matching(Step.DEAD_TASK)
    assert event.task_ids == (task,)
    assert (await mesh.task(task))[0].dead_reason == reply.message


async def test_one_suspect_runs_at_a_time_alongside_other_tasks(
    mesh: Mesh, client: FakePeer
) -> None:
    gate = Gate()
    agent = gated("agent", gate)
    isolation = IsolatedRuns(mesh, agent)
    tasks = await make_suspects(mesh, client, agent, gate, 1, 2, 3, isolation=isolation)
    await mesh.replica(agent, isolation=isolation)
    await mesh.advance(LEASE)
    first = await isolation.wait_for_run()
    await mesh.advance(10)
    assert isolation.all == [first]
    states = sorted([(await mesh.task(task))[0].state for task in tasks])
    assert states == [TaskState.READY, TaskState.READY, TaskState.RUNNING]
    gate.opened.set()
    assert await client.reply(await client.ask("agent", 4)) == Ok("done")
    assert [await client.reply(task) for task in tasks] == [Ok("done")] * 3
    assert len(isolation.all) == 3
    assert [(await mesh.task(task))[0].rescues for task in tasks] == [2, 2, 2]


async def test_a_suspect_that_pauses_is_cleared(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    gate = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Paused:
        await gate()
        return Paused([Call("call", "peer", 1)], b"")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Done[str]:
        return Done("done")

    agent = ScriptedAgent("agent", start, resume)
    isolation = IsolatedRuns(mesh, agent)
    (task,) = await make_suspects(mesh, client, agent, gate, 1, isolation=isolation)
    await mesh.replica(agent, isolation=isolation)
    await mesh.advance(LEASE)
    await isolation.wait_for_run()
    gate.opened.set()
    request = await peer.wait_for_request()
    assert (await mesh.task(task))[0].rescues == 0
    await peer.respond(request, 1)
    assert await client.reply(task) == Ok("done")
    assert len(isolation.all) == 1


async def test_a_later_segment_is_isolated_too(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    gate = Gate()
    agent = gated_after("agent", "peer", gate)
    isolation = IsolatedRuns(mesh, agent)
    replica = await mesh.replica(agent, isolation=isolation)
    task = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(), 1)
    for attempt in (1, 2):
        await gate.wait_reached(attempt)
        await replica.crash()
        replica = await mesh.replica(agent, isolation=isolation)
        await mesh.advance(LEASE)
    await isolation.wait_for_run()
    await gate.wait_reached(3)
    gate.opened.set()
    assert await client.reply(task) == Ok({"peer": 1})
    assert len(isolation.all) == 1


async def test_undeliverable_calls_resume_outside_the_isolated_process(
    mesh: Mesh, client: FakePeer
) -> None:
    gate = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Paused:
        await gate()
        return Paused([Call("call", "nobody", 1)], b"")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Done[str]:
        return Done(outcomes["call"].kind.value)

    agent = ScriptedAgent("agent", start, resume)
    isolation = IsolatedRuns(mesh, agent)
    (task,) = await make_suspects(mesh, client, agent, gate, 1, isolation=isolation)
    replica = await mesh.replica(agent, isolation=isolation)
    await mesh.advance(LEASE)
    isolated_run = await isolation.wait_for_run()
    gate.opened.set()
    await mesh.advance(60)
    assert await client.reply(task) == Ok("undeliverable")
    last = mesh.events.matching(Step.SEGMENT, Phase.BEFORE)[-1]
    assert (last.replica, isolated_run.is_done) == (replica.id, True)


async def test_a_cancel_reaches_the_isolated_process(mesh: Mesh, client: FakePeer) -> None:
    suspect = await isolate_suspect(mesh, client)
    await suspect.gate.wait_reached(3)
    await client.cancel("agent", suspect.task)
    reply = await client.reply(suspect.task)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.CANCELLED
    await mesh.idle()
    assert suspect.run.signals == [StopSignal.CANCEL]
    assert suspect.run.is_done


async def test_a_cancel_before_the_process_reads_its_row(mesh: Mesh, client: FakePeer) -> None:
    gate = Gate()
    agent = gated("agent", gate)
    isolation = IsolatedRuns(mesh, agent, Exit(ExitKind.DIED, KILLED))
    (task,) = await make_suspects(mesh, client, agent, gate, 1, isolation=isolation)

    def cancel(event: Event) -> None:
        if event.step is Step.ISOLATED:
            mesh.replicas[-1].worker.tasks.cancel(event.task_ids[0])

    mesh.events.hooks.append(cancel)
    await mesh.replica(agent, isolation=isolation)
    await mesh.advance(LEASE)
    reply = await client.reply(task)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.CANCELLED


@pytest.mark.parametrize("ignores_signals", [False, True])
async def test_a_drain_releases_a_suspect_without_counting_a_death(
    mesh: Mesh, client: FakePeer, ignores_signals: bool
) -> None:
    suspect = await isolate_suspect(mesh, client, **RELEASES)
    await suspect.gate.wait_reached(3)
    if ignores_signals:
        suspect.run.ignore_signals()
    await suspect.replica.drain()
    assert suspect.run.signals == [StopSignal.DRAIN]
    assert suspect.run.is_done
    summary = (await mesh.task(suspect.task))[0]
    assert (summary.state, summary.attempt, summary.rescues) == (TaskState.READY, 1, 2)
    suspect.gate.opened.set()
    await mesh.replica(suspect.agent, isolation=suspect.isolation)
    assert await client.reply(suspect.task) == Ok("done")


async def test_a_drain_kills_a_process_that_ignores_its_cancel(
    mesh: Mesh, client: FakePeer
) -> None:
    suspect = await isolate_suspect(mesh, client, **RELEASES)
    await suspect.gate.wait_reached(3)
    suspect.run.ignore_signals()
    await client.cancel("agent", suspect.task)
    await mesh.idle()
    assert suspect.run.signals == [StopSignal.CANCEL]
    await suspect.replica.drain()
    await mesh.idle()
    assert suspect.run.is_done


async def test_a_crashed_replica_ends_its_isolated_process_and_counts_a_rescue(
    mesh: Mesh, client: FakePeer
) -> None:
    suspect = await isolate_suspect(mesh, client)
    await suspect.replica.crash()
    await mesh.idle()
    assert suspect.run.is_done
    await mesh.replica(suspect.agent, isolation=suspect.isolation)
    await mesh.advance(LEASE)
    await suspect.isolation.wait_for_run(2)
    summary = (await mesh.task(suspect.task))[0]
    assert (summary.attempt, summary.rescues) == (1, 3)


async def test_a_task_that_also_kills_its_replicas_eventually_fails(
    mesh: Mesh, client: FakePeer
) -> None:
    gate = Gate()
    agent = gated("agent", gate)
    isolation = IsolatedRuns(mesh, agent)
    (task,) = await make_suspects(
        mesh, client, agent, gate, 1, isolation=isolation, max_attempts=1
    )
    for attempt in range(1, 10):
        replica = await mesh.replica(agent, isolation=isolation, max_attempts=1)
        await mesh.advance(LEASE)
        await isolation.wait_for_run(attempt)
        await replica.crash()
    await mesh.replica(agent, isolation=isolation, max_attempts=1)
    await mesh.advance(LEASE)
    reply = await client.reply(task)
    assert isinstance(reply, Failed)
    assert reply.message == "its replica was lost 11 times and no run of it finished"
    assert len(isolation.all) == 9


async def test_a_process_that_lost_its_task_is_killed(mesh: Mesh, client: FakePeer) -> None:
    suspect = await isolate_suspect(mesh, client)
    suspect.replica.worker.tasks.stop_lost(suspect.run.run)
    await mesh.idle()
    assert suspect.run.is_done
    assert (await mesh.task(suspect.task))[0].attempt == 1
    assert suspect.replica.worker.tasks.segments == {}


@pytest.mark.parametrize("fault", [OSError("no more processes"), UNAVAILABLE_ISOLATION])
async def test_a_process_that_cannot_start_counts_no_death(
    mesh: Mesh, client: FakePeer, fault: OSError | Exit
) -> None:
    gate = Gate()
    agent = gated("agent", gate)
    isolation = IsolatedRuns(mesh, agent, *[fault] * 3)
    (task,) = await make_suspects(
        mesh, client, agent, gate, 1, isolation=isolation, max_attempts=1
    )
    gate.opened.set()
    await mesh.replica(agent, isolation=isolation, max_attempts=1)
    await mesh.advance(LEASE + 20)
    assert await client.reply(task) == Ok("done")
    events = mesh.events.matching(Step.ISOLATED_PROCESS_DIED)
    assert [event.detail["counted"] for event in events] == [False] * 3


async def test_an_isolated_process_has_resources_of_its_own(mesh: Mesh, client: FakePeer) -> None:
    """If they cannot be had at first, no death is counted."""
    gate, entered = Gate(), list[int]()
    agent: Any = gated("agent", gate)

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[int]:
        entered.append(len(entered))
        if len(entered) == 4:  # three replicas have entered it before
            raise ConnectionError("no server")
        yield entered[-1]

    agent.lifespan = lifespan
    isolation = IsolatedRuns(mesh, agent)
    (task,) = await make_suspects(
        mesh, client, agent, gate, 1, isolation=isolation, max_attempts=1
    )
    gate.opened.set()
    await mesh.replica(agent, isolation=isolation, max_attempts=1)
    await mesh.advance(LEASE + 20)
    assert await client.reply(task) == Ok("done")
    (died,) = mesh.events.matching(Step.ISOLATED_PROCESS_DIED)
    assert died.detail["counted"] is False
    assert "ConnectionError: no server" in str(died.detail)
    assert len(entered) == 5
    assert isolation.all[-1].worker.runtime.resources == {agent.state_format: 4}


async def test_an_agent_that_cannot_be_imported_elsewhere_runs_alone(
    mesh: Mesh, client: FakePeer
) -> None:
    gate = Gate()
    agent = gated("agent", gate)
    isolation = IsolatedRuns(mesh, agent, Exit(ExitKind.IMPOSSIBLE, "cannot run the task"))
    (task,) = await make_suspects(mesh, client, agent, gate, 1, isolation=isolation)
    replica = await mesh.replica(agent, isolation=isolation)
    await mesh.advance(LEASE)
    await gate.wait_reached(3)
    assert replica.worker.runtime.slots.free == 0
    gate.opened.set()
    assert await client.reply(task) == Ok("done")
    await mesh.idle()
    assert replica.worker.runtime.slots.free == 10


async def test_without_processes_a_suspect_runs_while_nothing_else_does(
    mesh: Mesh, client: FakePeer
) -> None:
    gates = {1: Gate(), 2: Gate()}

    async def start(ctx: TaskExecutionContext, request: int) -> Done[str]:
        await gates[request]()
        return Done("done")

    agent = ScriptedAgent("agent", start)
    (suspect,) = await make_suspects(mesh, client, agent, gates[1], 1)
    replica = await mesh.replica(agent)
    other = await client.ask("agent", 2)
    await gates[2].wait_reached()
    await mesh.advance(LEASE)
    assert gates[1].visits == 2  # the other task still runs in the replica
    later = await client.ask("agent", 2)
    await mesh.advance(5)
    gates[2].opened.set()
    assert await client.reply(other) == Ok("done")
    await gates[1].wait_reached(3)
    assert gates[2].visits == 1  # no other task starts in the meantime
    gates[1].opened.set()
    assert [await client.reply(task) for task in (suspect, later)] == [Ok("done")] * 2
    await mesh.idle()
    assert (replica.worker.runtime.slots.free, replica.worker.runtime.suspect_slots.free) == (
        10,
        1,
    )


async def test_redelivered_requests_have_rows_before_any_of_them_runs(
    mesh: Mesh, client: FakePeer
) -> None:
    gate = Gate()
    agent = gated("agent", gate)
    tasks: list[str] = []
    for attempt in (1, 2):
        replica = await mesh.replica(agent, max_concurrency=6)
        tasks = tasks or [await client.ask("agent", number) for number in range(6)]
        await gate.wait_reached(6 * attempt)
        await replica.crash()
    unacked: list[int] = []

    def record_state(event: Event) -> None:
        if event.step is Step.SEGMENT and event.phase is Phase.BEFORE:
            unacked.append(mesh.unacked("agent") + mesh.waiting("agent"))

    mesh.events.hooks.append(record_state)
    replica = await mesh.replica(agent, max_concurrency=2)
    await gate.wait_reached(14)
    await mesh.idle()
    # When the first two run, they are acked: a crash would not raise their delivery counts again.
    assert set(unacked) <= {0, 4}
    gate.opened.set()
    assert [await client.reply(task) for task in tasks] == [Ok("done")] * 6


async def test_redelivered_requests_whose_commit_was_in_doubt_run_at_once(
    mesh: Mesh, client: FakePeer
) -> None:
    """The commit wrote them as running here, and other work took their slots in the meantime."""
    gate = Gate()
    agent = gated("agent", gate)
    first = await mesh.replica(agent)
    tasks = [await client.ask("agent", number) for number in range(3)]
    await gate.wait_reached(3)
    await first.crash()
    second = await mesh.replica(agent)
    await gate.wait_reached(6)
    third = await mesh.replica(agent, max_concurrency=3)
    third.store.fail("begin", IN_DOUBT)
    slots = third.worker.runtime.slots

    async def start_others() -> None:
        third.store.after.clear()
        slots.release(-3)

    third.store.after["begin"] = start_others
    await second.crash()
    await mesh.events.wait(Step.STORE_UNAVAILABLE)
    await mesh.advance(5)
    await gate.wait_reached(9)
    assert slots.free == -3
    slots.release(3)
    gate.opened.set()
    assert [await client.reply(task) for task in tasks] == [Ok("done")] * 3
    await mesh.idle()
    assert slots.free == 3
