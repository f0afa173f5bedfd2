"""A result carries token usage and artifacts; a context keeps its fields across pauses."""

from __future__ import annotations

from typing import Any

import pytest

from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.usage import Tokens, TokenUsage

from .agents import Gate, Scripted
from .mesh import Mesh
from .puppet import Puppet

HOMES = pytest.mark.parametrize("durable", [True, False])


def used(tokens: int, model: str = "small") -> TokenUsage:
    usage = TokenUsage()
    usage.record(Tokens(input=tokens), model=model)
    return usage


def two_pauses(gate: Gate | None = None) -> Scripted:
    """Uses one token in each of three segments, and calls both peers in the first two."""

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        return await segment(ctx, 0)

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Any:
        return await segment(ctx, int(state))

    async def segment(ctx: TaskExecutionContext, number: int) -> Any:
        ctx.token_usage.record(Tokens(input=1), model="big")
        ctx.produced_artifacts.append({"from": f"segment {number}"})
        ctx.flags[str(number)] = True
        ctx.response_buffer += str(number)
        if gate is not None:
            await gate()
        if number == 2:
            flags = dict(ctx.flags)
            return Done({"flags": flags, "text": ctx.response_buffer}, ({"last": True},))
        return Paused([Call("a", "peer", 1), Call("b", "other", 2)], str(number + 1).encode())

    return Scripted("agent", start, resume)


@HOMES
async def test_tokens_are_counted_by_peer_and_handed_up(
    mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool
) -> None:
    other = await mesh.puppet("other")
    await mesh.replica(two_pauses(), durable=durable)
    task_id = await boss.ask("agent", 1)
    for count in (1, 2):
        await peer.respond(await peer.request_number(count), Ok(1, usage=used(10)))
        await other.respond(
            await other.request_number(count), Failed(FailureKind.ERROR, "no", usage=used(100, "other"))
        )
    reply = await boss.reply(task_id)
    assert isinstance(reply, Ok)
    usage = reply.usage
    assert usage.total.input == 3 + 20 + 200
    assert {name: tokens.input for name, tokens in usage.by_source.items()} == {"agent": 3, "peer": 20, "other": 200}
    assert {name: tokens.input for name, tokens in usage.by_model.items()} == {"big": 3, "small": 20, "other": 200}
    assert reply.value == {"flags": {"0": True, "1": True, "2": True}, "text": "012"}
    assert list(reply.artifacts) == [{"from": f"segment {number}"} for number in range(3)] + [{"last": True}]


async def test_a_segment_that_runs_again_counts_once(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    other, gate = await mesh.puppet("other"), Gate()
    replica = await mesh.replica(two_pauses(gate))
    task_id = await boss.ask("agent", 1)
    for count in (1, 2):
        await gate.reach(2 * count - 1)
        gate.opened.set()
        await peer.respond(await peer.request_number(count), Ok(1, usage=used(10)))
        request = await other.request_number(count)
        await mesh.settle()
        gate.opened.clear()
        await other.respond(request, 1)
        await gate.reach(2 * count)
        await replica.crash()
        replica = await mesh.replica(two_pauses(gate))
        await mesh.advance(17)
    gate.opened.set()
    reply = await boss.reply(task_id)
    assert isinstance(reply, Ok)
    assert reply.usage.total.input == 3 + 20
    assert reply.value == {"flags": {"0": True, "1": True, "2": True}, "text": "012"}
    assert len(reply.artifacts) == 4


@HOMES
async def test_a_failure_carries_what_was_used(mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool) -> None:
    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        return Paused([Call("a", "peer", 1)], b"")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Any:
        ctx.token_usage.record(Tokens(input=5), model="big")
        raise ValueError("after all that")

    await mesh.replica(Scripted("agent", start, resume), durable=durable)
    task_id = await boss.ask("agent", 1)
    await peer.respond(await peer.request_number(), Ok(1, usage=used(10)))
    reply = await boss.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.usage.total.input == 15


async def test_a_cancelled_task_tells_what_it_used(mesh: Mesh, boss: Puppet) -> None:
    gate = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        ctx.token_usage.record(Tokens(input=5), model="big")
        await gate()

    await mesh.replica(Scripted("agent", start))
    task_id = await boss.ask("agent", 1)
    await gate.reach()
    await boss.cancel("agent", task_id)
    reply = await boss.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.CANCELLED
    assert reply.usage.total.input == 5


@HOMES
async def test_artifacts_of_peers_reach_the_agent(mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool) -> None:
    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        return Paused([Call("a", "peer", 1)], b"")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Any:
        return Done([dict(artifact) for artifact in outcomes["a"].artifacts])

    await mesh.replica(Scripted("agent", start, resume), durable=durable)
    task_id = await boss.ask("agent", 1)
    await peer.respond(await peer.request_number(), Ok(1, artifacts=({"name": "map", "parts": [{"text": "…"}]},)))
    assert await boss.reply(task_id) == Ok([{"name": "map", "parts": [{"text": "…"}]}])


@HOMES
async def test_what_a_request_says_of_its_user_is_handed_down(
    mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool
) -> None:
    seen: list[Any] = []

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        return Paused([Call("a", "two", 1)], b"")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Any:
        return Done(outcomes["a"].value)

    async def two(ctx: TaskExecutionContext, request: Any) -> Any:
        a2a = ctx.a2a_context
        seen.append((a2a.user_id, a2a.session_id, dict(a2a.user_config), dict(a2a.metadata)))
        seen.append((dict(ctx.security_context), a2a.call_depth, a2a.requester, dict(ctx.trace_context)))
        return Done("seen")

    await mesh.replica(Scripted("one", start, resume), durable=durable)
    await mesh.replica(Scripted("two", two), durable=durable)
    metadata = {
        "userId": "ada",
        "sessionId": "s1",
        "userConfig": {"units": "metric"},
        "securityContext": {"token": "t"},
        "tenant": "north",
    }
    message = boss.request(1, metadata=metadata, traceparent="00-abc-def-01")
    await boss.send("one", message)
    assert await boss.reply(message.correlation_id) == Ok("seen")
    assert seen == [
        ("ada", "s1", {"units": "metric"}, {"tenant": "north"}),
        ({"token": "t"}, 1, "one", {"traceparent": "00-abc-def-01"}),
    ]
