"""What the attempts of an operation leave behind: tokens, reasons, configuration, progress."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.agents.stateful import StatefulAgent
from meshpoint.engine.end import repeat_reply
from meshpoint.errors import ConfigurationError
from meshpoint.model.bodies import ResponseBody, parse_body
from meshpoint.model.calls import FIRST, Done, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.envelopes import encode_reply
from meshpoint.model.ids import AgentName, TaskId, resumed_id
from meshpoint.model.operations import OperationStatus
from meshpoint.model.options import StoreTimings
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.tasks import Reply, Requester, TaskState
from meshpoint.model.usage import Tokens, TokenUsage

from .mesh import Mesh, SharedStore
from .resuming import resume_and_sweep, stored_outcome

peer_agent = Peer("peer", int, int)


def use(ctx: TaskExecutionContext, tokens: int) -> None:
    ctx.token_usage.record(Tokens(input=tokens), model="small")


def total(outcome: Ok[Any] | Failed) -> int:
    return outcome.usage.total.input


def spending_agent(fixed: list[bool]) -> Any:
    """Spends 100 tokens in a subtask and 100 more before it fails, and 7 when it works."""

    @agent("agent")
    async def spending(ctx: TaskExecutionContext, number: int) -> int:
        def fetch() -> int:
            use(ctx, 100)
            return number

        await ctx.subtask("fetch", fetch)
        if not fixed[0]:
            use(ctx, 100)
            raise ValueError("no")
        use(ctx, 7)
        return number

    return spending


async def test_the_tokens_of_a_failed_attempt_count(mesh: Mesh, client: FakePeer) -> None:
    fixed = [False]
    await mesh.replica(spending_agent(fixed))
    task_id = await client.ask("agent", 1)
    assert total(await client.reply(task_id)) == 200
    await mesh.idle()
    await resume_and_sweep(mesh, task_id)
    assert total(await stored_outcome(mesh, task_id)) == 300
    fixed[0] = True
    await resume_and_sweep(mesh, task_id)
    outcome = await stored_outcome(mesh, task_id)
    assert outcome.usage.model_dump() == usage_of(307).model_dump()


def usage_of(tokens: int) -> TokenUsage:
    usage = TokenUsage()
    usage.record(Tokens(input=tokens), model="small")
    return usage


async def test_the_tokens_of_earlier_attempts_survive_a_pause(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """The replay of the resumed attempt counts nothing twice."""
    fixed = [False]

    @agent("agent")
    async def calling(ctx: TaskExecutionContext, number: int) -> int:
        def fetch() -> int:
            use(ctx, 100)
            return number

        await ctx.subtask("fetch", fetch)
        answer = await peer_agent(number)
        use(ctx, 10)
        if not fixed[0]:
            raise ValueError("no")
        await peer_agent(answer + 1)
        return answer

    await mesh.replica(calling)
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(1), Ok(1, usage=usage_of(1_000)))
    assert total(await client.reply(task_id)) == 1_110
    await mesh.idle()
    fixed[0] = True
    await resume_and_sweep(mesh, task_id)
    for count in (2, 3):
        await peer.respond(await peer.wait_for_request(count), Ok(1, usage=usage_of(5)))
        await mesh.idle()
    outcome = await stored_outcome(mesh, task_id)
    assert total(outcome) == 1_110 + 10 + 2 * 5
    assert outcome.usage.by_source["peer"].input == 1_010


async def test_the_tokens_of_three_failures_add_up(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """Also if a peer that was no longer needed answers after the failure."""
    failures = [ValueError("no")] * 3

    @agent("agent")
    async def racing(ctx: TaskExecutionContext, number: int) -> int:
        def fetch() -> int:
            use(ctx, 100)
            return number

        await ctx.subtask("fetch", fetch)
        await ctx.gather_outcomes(peer_agent(number), peer_agent(number + 1), join=FIRST)
        use(ctx, 10)
        if failures:
            raise failures.pop()
        return number

    await mesh.replica(racing)
    task_id = await client.ask("agent", 1)
    for attempt in range(4):
        if attempt:
            await resume_and_sweep(mesh, task_id)
        needed = await peer.wait_for_request(2 * attempt + 1)
        cancelled = await peer.wait_for_request(2 * attempt + 2)
        await peer.respond(needed, Ok(1, usage=usage_of(1_000)))
        await mesh.idle()
        await peer.respond(cancelled, Failed(FailureKind.CANCELLED, usage=usage_of(10_000)))
        await mesh.idle()
    outcome = await stored_outcome(mesh, task_id)
    assert total(outcome) == 100 + 4 * (10 + 1_000) + 3 * 10_000
    assert outcome.usage.by_source["peer"].input == 4 * 1_000 + 3 * 10_000
    operation = await mesh.store.operation(task_id)
    assert operation is not None
    assert operation.usage == outcome.usage


async def test_a_task_that_times_out_while_it_waits_reports_its_tokens(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    @agent("agent")
    async def calling(ctx: TaskExecutionContext, number: int) -> int:
        use(ctx, 20)
        await ctx.gather_outcomes(peer_agent(number), peer_agent(number + 1))
        return number

    await mesh.replica(calling)
    task_id = await client.ask("agent", 1, deadline=mesh.deadline_in(30))
    await peer.respond(await peer.wait_for_request(1), Ok(1, usage=usage_of(5)))
    await mesh.advance(32)
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    assert (reply.kind, total(reply)) == (FailureKind.TIMEOUT, 25)


async def test_a_cancelled_wait_keeps_its_tokens(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    @agent("agent")
    async def calling(ctx: TaskExecutionContext, number: int) -> int:
        def fetch() -> int:
            use(ctx, 100)
            return number

        await ctx.subtask("fetch", fetch)
        use(ctx, 20)
        return await peer_agent(number)

    await mesh.replica(calling)
    task_id = await client.ask("agent", 1)
    await peer.wait_for_request(1)
    await mesh.idle()
    await client.cancel("agent", task_id)
    await client.reply(task_id)
    await mesh.idle()
    await resume_and_sweep(mesh, task_id)
    await peer.respond(await peer.wait_for_request(2), Ok(1))
    await mesh.idle()
    assert total(await stored_outcome(mesh, task_id)) == 100 + 20 + 20


async def test_a_parent_counts_each_attempt_of_its_child_once(
    mesh: Mesh, client: FakePeer
) -> None:
    fixed, child = [False], Peer("agent", int, int)

    @agent("parent")
    async def parent(ctx: TaskExecutionContext, number: int) -> int:
        await ctx.subtask("once", int, 1)
        use(ctx, 1)
        return await child(number)

    await mesh.replica(parent, spending_agent(fixed))
    task_id = await client.ask("parent", 1)
    assert total(await client.reply(task_id)) == 201
    await mesh.idle()
    fixed[0] = True
    await resume_and_sweep(mesh, task_id)
    await mesh.advance(2)
    assert total(await stored_outcome(mesh, task_id)) == 201 + 1 + 7


@pytest.mark.parametrize("archive", [True, False])
async def test_every_failure_stays_in_the_history(
    mesh: Mesh, client: FakePeer, archive: bool
) -> None:
    timings = replace(StoreTimings(), checkpoint_history=1, checkpoint_archive=archive)
    mesh.store = SharedStore(mesh.clock, timings=timings)
    errors = ["first", "second", "third"]

    @agent("agent")
    async def failing(ctx: TaskExecutionContext, number: int) -> int:
        for name in "abc":
            await ctx.subtask(name, int, 1)
        if errors:
            raise ValueError(errors.pop(0))
        return number

    await mesh.replica(failing)
    task_id = await client.ask("agent", 1)
    await client.reply(task_id)
    await mesh.idle()
    for _ in range(2):
        await resume_and_sweep(mesh, task_id)
    reasons = [each.failure_reason for each in await mesh.store.history(task_id)]
    assert reasons == [f"ValueError: {name}" for name in ("first", "second", "third")]
    await resume_and_sweep(mesh, task_id)
    assert await stored_outcome(mesh, task_id) == Ok(1)
    after = [each.failure_reason for each in await mesh.store.history(task_id)]
    assert after == (reasons if archive else [])


def attempt_of(model: str, *, calls: bool = False, fails: bool = True) -> Any:
    """An agent on `model` whose code costs 10 tokens, and whose subtask 100 of the small one."""

    @agent("agent", version="1", config={"model": model})
    async def attempt(ctx: TaskExecutionContext, number: int) -> int:
        def fetch() -> int:
            use(ctx, 100)
            return number

        await ctx.subtask("fetch", fetch)
        ctx.token_usage.record(Tokens(input=10), model=model)
        if calls:
            await peer_agent(1)
            await peer_agent(2)
        if fails:
            raise ValueError(f"no, says {model}")
        return number

    return attempt


@pytest.mark.parametrize("archive", [True, False])
async def test_each_attempt_is_in_the_history_with_its_reason_model_and_tokens(
    mesh: Mesh, client: FakePeer, peer: FakePeer, archive: bool
) -> None:
    """Two attempts fail, one is cancelled while it waits, and the fourth completes."""
    mesh.store = SharedStore(
        mesh.clock, timings=replace(StoreTimings(), checkpoint_archive=archive)
    )
    replica = await mesh.replica(attempt_of("small"))
    task_id = await client.ask("agent", 1)
    assert total(await client.reply(task_id)) == 110
    await replica.drain()
    replica = await mesh.replica(attempt_of("large"))
    await resume_and_sweep(mesh, task_id)
    await replica.drain()
    replica = await mesh.replica(attempt_of("huge", calls=True))
    await resume_and_sweep(mesh, task_id)
    await peer.respond(await peer.wait_for_request(1), Ok(1, usage=usage_of(1_000)))
    await peer.wait_for_request(2)
    await mesh.idle()
    await client.cancel("agent", task_id)
    await mesh.idle()
    history = [each for each in await mesh.store.history(task_id) if each.failure_reason]
    assert [(each.failure_reason, each.agent_config["model"]) for each in history] == [
        ("ValueError: no, says small", "small"),
        ("ValueError: no, says large", "large"),
        ("cancelled on request", "huge"),
    ]
    for checkpoint, model in zip(history[:2], ("small", "large"), strict=True):
        assert checkpoint.error_details is not None
        assert f"ValueError: no, says {model}" in str(checkpoint.error_details["traceback"])
    assert [
        {model: used.input for model, used in each.token_usage.by_model.items()}
        for each in history
        if each.token_usage is not None
    ] == [
        {"small": 110},
        {"small": 110, "large": 10},
        {"small": 1_110, "large": 10, "huge": 10},
    ]
    summary = await mesh.store.operation(task_id)
    assert summary is not None
    assert summary.usage == history[2].token_usage
    await replica.drain()
    await mesh.replica(attempt_of("tiny", fails=False))
    await resume_and_sweep(mesh, task_id)
    outcome = await stored_outcome(mesh, task_id)
    assert total(outcome) == 110 + 10 + (10 + 1_000) + 10
    completed = await mesh.store.operation(task_id)
    assert completed is not None
    assert completed.usage == outcome.usage
    after = [each for each in await mesh.store.history(task_id) if each.failure_reason]
    assert after == (history if archive else [])


async def test_a_task_that_ends_at_a_pause_keeps_its_tokens(mesh: Mesh, client: FakePeer) -> None:
    """Its deadline passes while its code runs, so the pause becomes the end."""
    is_late = [True]

    @agent("agent")
    async def late(ctx: TaskExecutionContext, number: int) -> int:
        def fetch() -> int:
            use(ctx, 100)
            return number

        await ctx.subtask("fetch", fetch)
        use(ctx, 20)
        if is_late[0]:
            mesh.clock.advance(timedelta(seconds=6))
            await peer_agent(number)
        return number

    await mesh.replica(late)
    task_id = await client.ask("agent", 1, deadline=mesh.deadline_in(5))
    assert total(await client.reply(task_id)) == 120
    await mesh.idle()
    is_late[0] = False
    await resume_and_sweep(mesh, task_id)
    assert total(await stored_outcome(mesh, task_id)) == 140


async def test_a_checkpoint_has_the_declared_configuration(mesh: Mesh, client: FakePeer) -> None:
    config: Any = {"model": "small", "tools": {"search": {"api_key": "hunter2", "limit": 3}}}

    @agent("agent", type="analysis", config=config)
    async def failing(ctx: TaskExecutionContext, number: int) -> int:
        await ctx.subtask("a", int, 1)
        raise ValueError("no")

    await mesh.replica(failing, secret_keys=("limit",))
    task_id = await client.ask("agent", 1)
    await client.reply(task_id)
    for checkpoint in await mesh.store.history(task_id):
        assert checkpoint.agent_config == {
            "model": "small",
            "tools": {"search": {"api_key": None, "limit": None}},
            "type": "analysis",
            "exclusive": False,
            "preserve": False,
        }


def test_a_class_declares_its_configuration() -> None:
    class Configured(StatefulAgent[int, int, int]):
        name = "configured"
        agent_config = {"model": "small"}  # noqa: RUF012 - as users write it

        async def on_request(
            self, ctx: TaskExecutionContext, request: int, /
        ) -> Paused | Done[int]:
            return self.done(1)

    assert Configured().plan.config == {"model": "small"}


@pytest.mark.parametrize("config", [{"client": object()}, ["small"], {1: "small"}])
def test_a_configuration_that_is_not_json_is_refused(config: Any) -> None:
    with pytest.raises(ConfigurationError, match="agent 'agent', config"):

        @agent("agent", config=config)
        async def configured(ctx: TaskExecutionContext, number: int) -> int:
            return number


async def test_progress_is_complete_only_at_the_end(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    @agent("agent", subtasks=["a"])
    async def calling(ctx: TaskExecutionContext, number: int) -> int:
        await ctx.subtask("a", int, 1)
        return await peer_agent(number)

    await mesh.replica(calling)
    task_id = await client.ask("agent", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    waiting = await mesh.store.operation(task_id)
    assert waiting is not None
    assert (waiting.status, waiting.progress_pct) == (OperationStatus.WAITING, 99.0)
    await peer.respond(request, Ok(1))
    await client.reply(task_id)
    completed = await mesh.store.operation(task_id)
    assert completed is not None
    assert completed.progress_pct == 100.0


@pytest.mark.parametrize(("attempt", "tokens"), [(1, 5), (2, 0)])
def test_a_reply_repeated_to_a_later_attempt_has_no_tokens(attempt: int, tokens: int) -> None:
    """The attempt that received it first has counted them."""
    child = TaskId("child")
    outcome = Ok(1, (), TokenUsage(total=Tokens(input=5)))
    body = encode_reply(child, None, outcome, retry=1)
    stored = Reply(AgentName("agent"), child, TaskState.COMPLETED, body, Requester())
    again = Requester(parent_task_id=resumed_id(child, attempt))
    repeated = repeat_reply(stored, again)
    assert repeated.requester == again
    read = parse_body(ResponseBody, repeated.body).outcome()
    assert isinstance(read, Ok)
    assert (read.value, total(read)) == (1, tokens)
