"""Deploys while tasks wait: records hold, and what a release cannot continue is parked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.agents.function import FunctionAgent, agent
from meshpoint.agents.peer import Peer
from meshpoint.agents.versions import AgentVersions
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import TaskId
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.tasks import TaskState
from meshpoint.model.usage import Tokens
from run_log import RunLog

from .agents import Gate
from .mesh import Mesh

_text_peer = Peer("peer", str, str)


def writer(run_log: RunLog, edit: Callable[[str], Any] | None = None) -> FunctionAgent[str, str]:
    """An agent that passes the result of a subtask to `peer`. `edit` changes the subtask."""

    @agent("agent", version="1")
    async def write(ctx: TaskExecutionContext, topic: str) -> str:
        def draft_before(topic: str) -> str:
            run_log("draft")
            return topic

        def draft_after(topic: str) -> str:
            run_log("edited draft")
            assert edit is not None
            return str(edit(topic))

        draft = await ctx.subtask("draft", draft_after if edit else draft_before, topic)
        answer = await _text_peer(draft)
        return f"{draft}: {answer}"

    return write


@pytest.mark.parametrize("edit", [str.strip, str.upper])
async def test_an_edited_subtask_does_not_run_again_in_waiting_tasks(
    mesh: Mesh, client: FakePeer, peer: FakePeer, edit: Callable[[str], Any]
) -> None:
    run_log = RunLog()
    old = await mesh.replica(writer(run_log))
    task_id = await client.ask("agent", " rome ")
    request = await peer.wait_for_request()
    await mesh.idle()
    await old.crash()
    await mesh.replica(writer(run_log, edit))
    await peer.respond(request, "yes")
    assert await client.reply(task_id) == Ok(" rome : yes")
    assert run_log.names == ["draft"]
    assert len(peer.requests) == 1
    assert mesh.events.matching(Step.RELEASE) == []


async def test_an_edited_subtask_does_not_run_again_in_a_rescued_task(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    run_log = RunLog()
    old = await mesh.replica(writer(run_log))
    task_id = await client.ask("agent", "rome")
    request = await peer.wait_for_request()
    await mesh.idle()
    await old.crash()
    new = await mesh.replica(writer(run_log, str.upper))
    await peer.respond(request, "yes")
    await new.crash()
    await mesh.replica(writer(run_log, str.title))
    await mesh.advance(30)
    assert client.replies(task_id) == [Ok("rome: yes")]
    assert run_log.names == ["draft"]


async def test_other_arguments_of_a_recorded_subtask_are_a_warning(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    def research(depth: int) -> FunctionAgent[str, int]:
        async def measure(topic: str, depth: int) -> int:
            return depth * len(topic)

        @agent("agent", version="1")
        async def run(ctx: TaskExecutionContext, topic: str) -> int:
            size = await ctx.subtask("measure", measure, topic, depth)
            await _text_peer(topic)
            return size

        return run

    old = await mesh.replica(research(2))
    task_id = await client.ask("agent", "rome")
    request = await peer.wait_for_request()
    await mesh.idle()
    await old.crash()
    await mesh.replica(research(3))
    await peer.respond(request, "yes")
    assert await client.reply(task_id) == Ok(8)
    (warning,) = mesh.events.matching(Step.SUBTASK_DIFFERS)
    assert warning.detail == {"subtask": "measure", "why": "input 'depth' differs"}


_OTHER_PATH = "call 1: expected hotels, recorded peer"


def caller(
    *peers: str, before: Callable[[TaskExecutionContext], Awaitable[object]] | None = None
) -> FunctionAgent[str, list[str]]:
    """An agent that asks `peers` one after the other."""

    @agent("agent", version="1")
    async def ask_all(ctx: TaskExecutionContext, topic: str) -> list[str]:
        if before is not None:
            await before(ctx)
        return [await Peer(peer, str, str)(topic) for peer in peers]

    return ask_all


async def parked_task(mesh: Mesh, client: FakePeer, peer: FakePeer, **headers: Any) -> str:
    """A task of a release that calls `peer`, parked by a release that calls `hotels` first."""
    old = await mesh.replica(caller("peer"), app_version="1.0")
    task_id = await client.ask("agent", "rome", **headers)
    request = await peer.wait_for_request()
    await mesh.idle()
    await old.crash()
    await mesh.replica(caller("hotels", "peer"), app_version="1.1")
    await peer.respond(request, "yes")
    await mesh.events.wait(Step.PARKED)
    await mesh.idle()
    return task_id


async def test_another_path_through_peer_calls_parks_the_task(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    task_id = await parked_task(mesh, client, peer)
    summary, _ = await mesh.task(task_id)
    assert (summary.state, summary.parked_reason) == (TaskState.PARKED, _OTHER_PATH)
    (version,) = summary.tried_versions
    assert (version[:8], summary.attempt) == ("1.1+src:", 1)
    (event,) = mesh.events.matching(Step.PARKED)
    assert event.detail == {"reason": _OTHER_PATH, "version": version}
    await mesh.advance(60)
    assert len(mesh.events.matching(Step.SEGMENT, Phase.BEFORE)) == 2, "it was tried once"
    assert client.replies() == []


@pytest.mark.parametrize("version", ["1.0", "1.2"])
async def test_a_parked_task_continues_with_a_version_that_fits(
    mesh: Mesh, client: FakePeer, peer: FakePeer, version: str
) -> None:
    """The old version comes back, or a fixed one arrives."""
    task_id = await parked_task(mesh, client, peer)
    await mesh.replicas[-1].crash()
    await mesh.replica(caller("peer"), app_version=version)
    assert await client.reply(task_id) == Ok(["yes"])
    assert len(peer.requests) == 1


async def test_a_parked_task_continues_with_corrected_code_under_the_same_app_version(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    @agent("agent", version="1")
    async def corrected(ctx: TaskExecutionContext, topic: str) -> list[str]:
        return [await Peer("peer", str, str)(topic)]

    task_id = await parked_task(mesh, client, peer)
    await mesh.replicas[-1].crash()
    await mesh.replica(corrected, app_version="1.1")
    assert await client.reply(task_id) == Ok(["yes"])


async def test_a_parked_task_is_tried_again_by_a_running_replica_with_another_version(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """Both versions run during a deploy. The old one takes back what the new one parked."""
    old = caller("peer", "peer", "peer")
    await mesh.replica(old, app_version="1.0")
    task_id = await client.ask("agent", "rome")
    request = await peer.wait_for_request()
    await mesh.idle()
    await mesh.replicas[-1].crash()
    await mesh.replica(caller("hotels"), app_version="1.1", sweep_interval=timedelta(days=1))
    await peer.respond(request, "1")
    await mesh.events.wait(Step.PARKED)
    await mesh.replica(old, app_version="1.0")
    for count in (2, 3):
        await mesh.advance(20)
        await peer.respond(await peer.wait_for_request(count), str(count))
    await mesh.advance(20)
    assert client.replies(task_id) == [Ok(["1", "2", "3"])]
    assert len(peer.requests) == 3


async def test_a_parked_task_is_tried_again_once_it_is_offered(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    task_id = await parked_task(mesh, client, peer)
    assert await mesh.store.unpark([TaskId(task_id)]) == [True]
    await mesh.advance(2)
    assert len(mesh.events.matching(Step.PARKED)) == 2
    summary, _ = await mesh.task(task_id)
    (version,) = summary.tried_versions
    assert version.startswith("1.1+src:")


async def test_nothing_of_a_mismatching_run_is_kept(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    async def count(ctx: TaskExecutionContext) -> None:
        await ctx.memory.incr("starts")

    async def spend(ctx: TaskExecutionContext) -> None:
        await asyncio.gather(ctx.subtask("spend", count, ctx))  # as a framework's tool
        ctx.token_usage.record(Tokens(input=5, output=5), model="small")

    @agent("agent", version="1")
    async def before(ctx: TaskExecutionContext, topic: str) -> dict[str, Any]:
        await count(ctx)
        await ctx.subtask("plan", lambda: topic)
        await _text_peer(topic)
        return {
            "starts": await ctx.memory.get("starts"),
            "subtasks": list(ctx.progress.completed),
            "tokens": ctx.token_usage.total.input,
        }

    old = await mesh.replica(before, app_version="1.0")
    task_id = await client.ask("agent", "rome")
    request = await peer.wait_for_request()
    await mesh.idle()
    await old.crash()
    new = await mesh.replica(caller("hotels", before=spend), app_version="1.1")
    await peer.respond(request, "yes")
    await mesh.events.wait(Step.PARKED)
    await new.crash()
    await mesh.replica(before, app_version="1.0")
    assert await client.reply(task_id) == Ok({"starts": "1", "subtasks": ["plan"], "tokens": 0})


async def test_a_recorded_result_of_another_type_parks_the_task(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    def measurer(function: Callable[[str], Any]) -> FunctionAgent[str, str]:
        @agent("agent", version="1")
        async def measure(ctx: TaskExecutionContext, topic: str) -> str:
            try:
                size = await ctx.subtask("measure", function, topic)
            except Exception as error:  # no result counts after the code has caught the error
                size = str(error)
            return f"{size} {await _text_peer(topic)}"

        return measure

    def length(topic: str) -> int:
        return len(topic)

    def words(topic: str) -> list[str]:
        raise AssertionError("a recorded subtask runs again")

    old = await mesh.replica(measurer(length), app_version="1.0")
    task_id = await client.ask("agent", "rome")
    request = await peer.wait_for_request()
    await mesh.idle()
    await old.crash()
    new = await mesh.replica(measurer(words), app_version="1.1")
    await peer.respond(request, "yes")
    (event,) = await mesh.events.wait(Step.PARKED)
    assert "subtask 'measure': its recorded result no longer fits" in str(event.detail["reason"])
    await mesh.idle()
    await new.crash()
    await mesh.replica(measurer(length), app_version="1.0")
    assert await client.reply(task_id) == Ok("4 yes")


async def test_a_recorded_result_of_another_type_parks_a_rescued_first_segment(
    mesh: Mesh, client: FakePeer
) -> None:
    gate = Gate()

    def measurer(function: Callable[[str], Any]) -> FunctionAgent[str, str]:
        @agent("agent", version="1")
        async def measure(ctx: TaskExecutionContext, topic: str) -> str:
            size = await ctx.subtask("measure", function, topic)
            await gate()
            return str(size)

        return measure

    def length(topic: str) -> int:
        return len(topic)

    def words(topic: str) -> list[str]:
        raise AssertionError("a recorded subtask runs again")

    old = await mesh.replica(measurer(length), app_version="1.0")
    task_id = await client.ask("agent", "rome")
    await gate.wait_reached()
    await old.crash()
    new = await mesh.replica(measurer(words), app_version="1.1")
    await mesh.advance(30)
    assert await mesh.state(task_id) is TaskState.PARKED
    await new.crash()
    gate.opened.set()
    await mesh.replica(measurer(length), app_version="1.0")
    assert await client.reply(task_id) == Ok("4")


async def timeout_message(client: FakePeer, task_id: str) -> str:
    """The message of the reply to a task that has ended at its deadline."""
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.TIMEOUT
    return reply.message


async def test_a_parked_task_ends_at_its_deadline(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    task_id = await parked_task(mesh, client, peer, deadline=mesh.deadline_in(20))
    await mesh.advance(19)
    assert client.replies(task_id) == []
    await mesh.advance(2)
    message = await timeout_message(client, task_id)
    assert message.endswith(f"while it was parked: {_OTHER_PATH}")


async def test_a_ready_task_that_no_replica_reads_ends_at_its_deadline(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    old = await mesh.replica(caller("peer"))
    task_id = await client.ask("agent", "rome", deadline=mesh.deadline_in(20))
    request = await peer.wait_for_request()
    await mesh.idle()
    await old.crash()

    @agent("agent", version="2")
    async def new(ctx: TaskExecutionContext, topic: str) -> str:
        raise AssertionError("it reads no state of version 1")

    await mesh.replica(new)
    await peer.respond(request, "yes")
    await mesh.advance(19)
    assert await mesh.state(task_id) is TaskState.READY
    assert mesh.events.matching(Step.ACQUIRE, Phase.AFTER) == [], "it is not cycled"
    await mesh.advance(2)
    message = await timeout_message(client, task_id)
    assert message == "the task's deadline has passed while it was ready"


async def test_a_lost_task_that_no_replica_reads_ends_at_its_deadline(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    gate = Gate()

    @agent("agent", version="1")
    async def hang(ctx: TaskExecutionContext, topic: str) -> str:
        answer = await _text_peer(topic)
        await gate()
        return answer

    old = await mesh.replica(hang)
    task_id = await client.ask("agent", "rome", deadline=mesh.deadline_in(120))
    await peer.respond(await peer.wait_for_request(), "yes")
    await gate.wait_reached()
    await old.crash()
    await mesh.replica(answering("2", "new"))
    await mesh.advance(60)
    assert await mesh.state(task_id) is TaskState.READY
    (rescue,) = mesh.events.matching(Step.RESCUE, Phase.AFTER)
    assert rescue.task_ids == (task_id,)
    await mesh.advance(61)
    message = await timeout_message(client, task_id)
    assert message == "the task's deadline has passed while it was ready"


async def test_an_overdue_task_ends_although_all_slots_are_taken(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    gate = Gate()

    @agent("agent", version="1")
    async def run(ctx: TaskExecutionContext, topic: str) -> str:
        if topic == "long":
            await gate()
        return await _text_peer(topic)

    await mesh.replica(run, max_concurrency=1)
    task_id = await client.ask("agent", "rome", deadline=mesh.deadline_in(20))
    request = await peer.wait_for_request()
    await mesh.idle()
    await client.ask("agent", "long")
    await gate.wait_reached()
    await peer.respond(request, "yes")
    await mesh.advance(21)
    await timeout_message(client, task_id)
    gate.opened.set()
    await peer.respond(await peer.wait_for_request(2), "yes")
    await mesh.idle()
    assert len(client.replies()) == 2


async def test_a_parked_task_fails_after_the_limit(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    task_id = await parked_task(mesh, client, peer)
    mesh.clock.advance(timedelta(days=30))
    await mesh.advance(2)
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    assert (reply.kind, reply.message) == (
        FailureKind.ERROR,
        f"no version continued the parked task: {_OTHER_PATH}",
    )
    assert await mesh.state(task_id) is TaskState.FAILED


@pytest.mark.parametrize(
    "options", [{"parked_limit": timedelta()}, {"durable": False}], ids=["no limit", "in memory"]
)
async def test_a_task_fails_at_once_where_no_other_release_can_have_it(
    mesh: Mesh, client: FakePeer, peer: FakePeer, options: dict[str, Any]
) -> None:
    runs: list[int] = []

    @agent("agent", version="1")
    async def wander(ctx: TaskExecutionContext, topic: str) -> str:
        runs.append(1)
        return await _text_peer(f"{topic} {len(runs)}")

    await mesh.replica(wander, **options)
    task_id = await client.ask("agent", "rome")
    await peer.respond(await peer.wait_for_request(), "yes")
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.ERROR
    assert reply.message.startswith("call 1: peer.0 has another input than recorded; agent: ")


async def test_a_parked_task_keeps_its_requester_waiting(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await parked_task(mesh, client, peer, idle_timeout=30)
    before = len(client.statuses())
    await mesh.advance(40)
    assert len(client.statuses()) > before


async def test_a_cancel_during_a_mismatching_run_ends_the_task(
    mesh: Mesh, client: FakePeer, peer: FakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()

    async def wait(ctx: TaskExecutionContext) -> None:
        await gate()

    old = await mesh.replica(caller("peer"), app_version="1.0")
    task_id = await client.ask("agent", "rome")
    request = await peer.wait_for_request()
    await mesh.idle()
    await old.crash()
    new = await mesh.replica(caller("hotels", before=wait), app_version="1.1")
    await peer.respond(request, "yes")
    await gate.wait_reached()
    monkeypatch.setattr(new.worker.tasks, "cancel", lambda task_id: False)  # the broadcast is lost
    await client.cancel("agent", task_id)
    await mesh.idle()
    gate.opened.set()
    await mesh.advance(10)
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.CANCELLED


def answering(version: str, answer: str) -> FunctionAgent[str, str]:
    """A version of an agent that asks `peer` and adds `answer`."""

    @agent("agent", version=version)
    async def ask(ctx: TaskExecutionContext, topic: str) -> str:
        return f"{answer} {await _text_peer(topic)}"

    return ask


async def test_two_versions_in_one_process_continue_old_tasks_and_take_new_ones(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    v1, v2 = answering("1", "old"), answering("2", "new")
    old = await mesh.replica(v1)
    first = await client.ask("agent", "rome")
    request = await peer.wait_for_request()
    await mesh.idle()
    await old.crash()
    await mesh.replica(AgentVersions([v2, v1]))
    second = await client.ask("agent", "oslo")
    await peer.respond(request, "yes")
    assert await client.reply(first) == Ok("old yes")
    await peer.respond(await peer.wait_for_request(2), "yes")
    assert await client.reply(second) == Ok("new yes")
    summary, _ = await mesh.task(second)
    assert summary.state_format == v2.state_format


async def test_a_first_segment_is_restarted_by_the_version_that_began_it(
    mesh: Mesh, client: FakePeer
) -> None:
    gate, run_log = Gate(), RunLog()

    def stepper(version: str) -> FunctionAgent[str, str]:
        @agent("agent", version=version)
        async def step(ctx: TaskExecutionContext, topic: str) -> str:
            def note(topic: str) -> str:
                run_log(version)
                return version

            begun_by = await ctx.subtask("note", note, topic)
            await gate()
            return f"{begun_by}, {version}"

        return step

    v1, v2 = stepper("1"), stepper("2")
    old = await mesh.replica(v1)
    task_id = await client.ask("agent", "rome")
    await gate.wait_reached()
    await old.crash()
    gate.opened.set()
    await mesh.replica(AgentVersions([v2, v1]))
    await mesh.advance(20)
    assert await client.reply(task_id) == Ok("1, 1")
    assert run_log.names == ["1"]


async def test_ready_tasks_that_no_replica_reads_are_reported_once(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    v1 = answering("1", "old")
    old = await mesh.replica(v1)
    task_id = await client.ask("agent", "rome")
    request = await peer.wait_for_request()
    await mesh.idle()
    await old.crash()
    await mesh.replica(answering("2", "new"))
    await peer.respond(request, "yes")
    await mesh.advance(300)
    assert await mesh.state(task_id) is TaskState.READY
    (event,) = mesh.events.matching(Step.UNREAD)
    assert event.detail == {"format": v1.state_format, "tasks": 1}
