"""Operations that are resumed at their last pause: what runs again, and what is asked again."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from pydantic import BaseModel

from fake_peer import FakePeer
from meshpoint.agents.function import agent
from meshpoint.agents.stateful import Replies, StatefulAgent
from meshpoint.errors import ConfigurationError, NoCheckpoint, OperationNotFound, StepFailed
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.ids import TaskId
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.tasks import TaskState
from meshpoint.model.usage import Tokens, TokenUsage
from meshpoint.subtasks.resuming import resume_operation
from run_log import RunLog

from .agents import Gate
from .mesh import Mesh
from .resuming import int_peer, stored_outcome


class Work:
    """Functions for steps. `fail` fails until `is_fixed`."""

    def __init__(self) -> None:
        self.ran, self.is_fixed = RunLog(), False

    def note(self, what: str) -> str:
        self.ran(what)
        return what

    def fail(self, what: str) -> str:
        self.ran(what)
        if not self.is_fixed:
            raise ValueError("not fixed")
        return what


def operation_of(work: Work, gate: Gate | None = None, **options: Any) -> Any:
    """A caught failure before the pause; after it, a step, a failing step and a second call."""

    @agent("agent", **options)
    async def operating(ctx: TaskExecutionContext, number: int) -> list[Any]:
        await ctx.subtask("operation", work.note, "subtask")
        try:
            caught = await ctx.step("caught", work.fail, "caught")
        except StepFailed:
            caught = "failed"
        answers = await ctx.gather_outcomes(int_peer(number), int_peer(number + 1))
        ctx.token_usage.record(Tokens(input=5), model="m")
        await ctx.step("kept", work.note, "kept")
        if gate is not None and work.is_fixed:
            await gate()
        await ctx.step("failing", work.fail, "failing")
        answered = [each.value if isinstance(each, Ok) else each.kind.value for each in answers]
        return [caught, *answered]

    return operating


async def fail_after_pause(mesh: Mesh, client: FakePeer, peer: FakePeer, *answers: Any) -> TaskId:
    """Run the operation until it has failed after its peers gave these answers."""
    task_id = await client.ask("agent", 1)
    for count, answer in enumerate(answers, 1):
        await peer.respond(await peer.wait_for_request(count), answer)
    assert isinstance(await client.reply(task_id), Failed)
    await mesh.idle()
    return TaskId(task_id)


async def test_steps_and_results_are_reused(mesh: Mesh, client: FakePeer, peer: FakePeer) -> None:
    work = Work()
    await mesh.replica(operation_of(work))
    task_id = await fail_after_pause(mesh, client, peer, 10, 20)
    assert work.ran.take_new() == ["subtask", "caught", "kept", "failing"]
    work.is_fixed = True
    await resume_operation(mesh.store, task_id, resume_from="last-pause")
    await mesh.advance(2)
    assert await stored_outcome(mesh, task_id) == Ok(
        ["failed", 10, 20], usage=TokenUsage.model_validate(_usage(input_tokens=10))
    )
    assert work.ran.names == ["failing"]
    assert len(peer.requests) == 2


def _usage(input_tokens: int) -> dict[str, Any]:
    tokens = {"input": input_tokens, "output": 0, "cached": 0}
    return {"total": tokens, "by_model": {"m": tokens}, "by_source": {"agent": tokens}}


async def test_failed_calls_are_made_again_under_new_ids(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    work = Work()
    await mesh.replica(operation_of(work, resume_from="last-pause"))
    task_id = await fail_after_pause(mesh, client, peer, 10, Failed(FailureKind.ERROR, "no"))
    work.is_fixed = True
    await resume_operation(mesh.store, task_id)
    await mesh.advance(2)
    first, second, third = peer.requests
    assert third.correlation_id not in {first.correlation_id, second.correlation_id}
    assert "x-resume" not in third.headers
    assert await mesh.state(task_id) is TaskState.WAITING
    await peer.respond(third, 30)
    await mesh.idle()
    outcome = await stored_outcome(mesh, task_id)
    assert isinstance(outcome, Ok)
    assert outcome.value == ["failed", 10, 30]


async def test_a_resumed_attempt_survives_a_crash(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    work, gate = Work(), Gate()
    first = await mesh.replica(operation_of(work, gate))
    task_id = await fail_after_pause(mesh, client, peer, 10, 20)
    work.ran.take_new()
    work.is_fixed = True
    await resume_operation(mesh.store, task_id, resume_from="last-pause")
    await mesh.advance(2)
    await gate.wait_reached()
    await first.crash()
    gate.opened.set()
    await mesh.replica(operation_of(work, gate))
    await mesh.advance(25)
    outcome = await stored_outcome(mesh, task_id)
    assert isinstance(outcome, Ok)
    assert outcome.value == ["failed", 10, 20]
    assert work.ran.names == ["failing"]
    assert len(peer.requests) == 2


async def test_the_requester_gets_the_new_outcome_in_a_message_of_its_own(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    work = Work()
    await mesh.replica(operation_of(work))
    task_id = await fail_after_pause(mesh, client, peer, 10, 20)
    work.is_fixed = True
    await resume_operation(mesh.store, task_id, resume_from="last-pause")
    await mesh.advance(2)
    replies = client.replies(task_id)
    assert [isinstance(reply, Ok) for reply in replies] == [False, True]


class Kept(BaseModel):
    number: int


class Handlers(StatefulAgent[int, Kept, int]):
    """A step and a failing step in the handler after the pause."""

    name = "agent"
    resume_from = "last-pause"

    def __init__(self, work: Work) -> None:
        self.work = work

    async def on_request(self, ctx: TaskExecutionContext, number: int) -> Any:
        await ctx.subtask("operation", self.work.note, "subtask")
        return self.ask(Kept(number=number), {"more": int_peer(number)}, then=self.on_more)

    async def on_more(self, ctx: TaskExecutionContext, state: Kept, replies: Replies) -> Any:
        await ctx.memory.incr("count")
        await ctx.step("kept", self.work.note, "kept")
        await ctx.step("failing", self.work.fail, "failing")
        assert await ctx.memory.get("count") == b"1"
        return self.done(state.number + replies.value("more", int_peer))


async def test_a_class_resumes_in_its_last_handler(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    work = Work()
    await mesh.replica(Handlers(work))
    task_id = await fail_after_pause(mesh, client, peer, 10)
    work.ran.take_new()
    work.is_fixed = True
    await resume_operation(mesh.store, task_id)
    await mesh.advance(2)
    assert await stored_outcome(mesh, task_id) == Ok(11)
    assert work.ran.names == ["failing"]


async def test_new_calls_after_the_pause_are_not_answered_from_earlier_ones(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    is_fixed = [False]

    @agent("agent", resume_from="last-pause")
    async def calling(ctx: TaskExecutionContext, number: int) -> list[int]:
        await ctx.subtask("operation", int, 1)
        answers = [await int_peer(7), await int_peer(7)]
        if not is_fixed[0]:
            raise ValueError("no")
        return [*answers, await int_peer(7)]

    await mesh.replica(calling)
    task_id = await fail_after_pause(mesh, client, peer, 1, 2)
    is_fixed[0] = True
    await resume_operation(mesh.store, task_id)
    await mesh.advance(2)
    assert len({request.correlation_id for request in peer.requests}) == 3
    await peer.respond(peer.requests[-1], 3)
    await mesh.idle()
    assert await stored_outcome(mesh, task_id) == Ok([1, 2, 3])


async def test_steps_of_a_subtask_that_runs_again_run_again(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    work = Work()

    async def add_up(ctx: TaskExecutionContext, numbers: list[int]) -> str:
        return await ctx.step("inner", work.note, f"{sum(numbers)}")

    @agent("agent", resume_from="last-pause")
    async def adding(ctx: TaskExecutionContext, number: int) -> str:
        answers = await ctx.gather_outcomes(int_peer(1), int_peer(2))
        numbers = [each.value for each in answers if isinstance(each, Ok)]
        total = await ctx.subtask("total", partial(add_up, ctx), numbers)
        await ctx.step("outer", work.note, "outer")
        if len(numbers) < 2:
            raise ValueError("no")
        return total

    await mesh.replica(adding)
    task_id = await fail_after_pause(mesh, client, peer, 10, Failed(FailureKind.ERROR, "no"))
    assert work.ran.take_new() == ["10", "outer"]
    await resume_operation(mesh.store, task_id)
    await mesh.advance(2)
    await peer.respond(peer.requests[-1], 20)
    await mesh.idle()
    assert await stored_outcome(mesh, task_id) == Ok("30")
    assert work.ran.names == ["30"]


async def test_a_request_to_resume_follows_the_agents_choice(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    work = Work()
    await mesh.replica(operation_of(work, resume_from="last-pause"))
    request = client.request(1)
    await client.send("agent", request)
    for count in (1, 2):
        await peer.respond(await peer.wait_for_request(count), count)
    assert isinstance(await client.reply(request.correlation_id), Failed)
    await mesh.idle()
    work.ran.take_new()
    work.is_fixed = True
    await client.send("agent", client.request(1, request.correlation_id, resume="00000001"))
    await mesh.advance(2)
    assert work.ran.names == ["failing"]
    assert len(peer.requests) == 2


async def test_a_request_to_resume_is_not_lost_if_a_person_resumes_first(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    work = Work()
    replica = await mesh.replica(operation_of(work, resume_from="last-pause"))
    task_id = await fail_after_pause(mesh, client, peer, 10, 20)

    async def resume_as_a_person() -> None:
        """The operation fails again between the read of its last pause and the write."""
        del replica.store.after["last_pause"]
        await resume_operation(mesh.store, task_id)
        await mesh.advance(2)
        work.is_fixed = True

    replica.store.after["last_pause"] = resume_as_a_person
    await client.send("agent", client.request(1, task_id, resume="00000001"))
    await mesh.advance(10)
    assert [isinstance(reply, Ok) for reply in client.replies(task_id)] == [False, False, True]


async def test_an_operation_that_never_paused_starts_from_its_request(
    mesh: Mesh, client: FakePeer
) -> None:
    work = Work()

    @agent("agent", resume_from="last-pause")
    async def failing(ctx: TaskExecutionContext, number: int) -> str:
        await ctx.subtask("operation", work.note, "subtask")
        return await ctx.step("failing", work.fail, "failing")

    await mesh.replica(failing)
    task_id = TaskId(await client.ask("agent", 1))
    assert isinstance(await client.reply(task_id), Failed)
    await mesh.idle()
    with pytest.raises(NoCheckpoint, match=f"operation {task_id} has not paused"):
        await resume_operation(mesh.store, task_id, resume_from="last-pause")
    work.is_fixed = True
    await resume_operation(mesh.store, task_id)
    await mesh.advance(2)
    assert await stored_outcome(mesh, task_id) == Ok("failing")
    with pytest.raises(OperationNotFound):
        await resume_operation(mesh.store, TaskId("unknown"), resume_from="last-pause")


def test_an_unknown_place_is_refused() -> None:
    async def anything(ctx: TaskExecutionContext, number: int) -> int:
        return number

    with pytest.raises(ConfigurationError, match='write "start" or "last-pause"'):
        agent("agent", resume_from="middle")(anything)  # type: ignore[arg-type]
