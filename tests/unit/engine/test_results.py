"""A result carries token usage and artifacts; a context keeps its fields across pauses."""

from __future__ import annotations

from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint import Peer, Replies, StatefulAgent, agent
from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.usage import Tokens, TokenUsage

from .agents import Gate, ScriptedAgent
from .mesh import Mesh

BACKENDS = pytest.mark.parametrize("durable", [True, False])


def usage_of(tokens: int, model: str = "small") -> TokenUsage:
    usage = TokenUsage()
    usage.record(Tokens(input=tokens), model=model)
    return usage


def pausing_twice(gate: Gate | None = None) -> ScriptedAgent:
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

    return ScriptedAgent("agent", start, resume)


@BACKENDS
async def test_token_usage_is_counted_per_peer_and_reported_to_the_requester(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    other = await mesh.fake_peer("other")
    await mesh.replica(pausing_twice(), durable=durable)
    task_id = await client.ask("agent", 1)
    for count in (1, 2):
        await peer.respond(await peer.wait_for_request(count), Ok(1, usage=usage_of(10)))
        await other.respond(
            await other.wait_for_request(count),
            Failed(FailureKind.ERROR, "no", usage=usage_of(100, "other")),
        )
    reply = await client.reply(task_id)
    assert isinstance(reply, Ok)
    usage = reply.usage
    assert usage.total.input == 3 + 20 + 200
    assert {name: tokens.input for name, tokens in usage.by_source.items()} == {
        "agent": 3,
        "peer": 20,
        "other": 200,
    }
    assert {name: tokens.input for name, tokens in usage.by_model.items()} == {
        "big": 3,
        "small": 20,
        "other": 200,
    }
    assert reply.value == {"flags": {"0": True, "1": True, "2": True}, "text": "012"}
    assert list(reply.artifacts) == [{"from": f"segment {number}"} for number in range(3)] + [
        {"last": True}
    ]


async def test_a_rerun_segment_counts_its_usage_once(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    other, gate = await mesh.fake_peer("other"), Gate()
    replica = await mesh.replica(pausing_twice(gate))
    task_id = await client.ask("agent", 1)
    for count in (1, 2):
        await gate.wait_reached(2 * count - 1)
        gate.opened.set()
        await peer.respond(await peer.wait_for_request(count), Ok(1, usage=usage_of(10)))
        request = await other.wait_for_request(count)
        await mesh.idle()
        gate.opened.clear()
        await other.respond(request, 1)
        await gate.wait_reached(2 * count)
        await replica.crash()
        replica = await mesh.replica(pausing_twice(gate))
        await mesh.advance(17)
    gate.opened.set()
    reply = await client.reply(task_id)
    assert isinstance(reply, Ok)
    assert reply.usage.total.input == 3 + 20
    assert reply.value == {"flags": {"0": True, "1": True, "2": True}, "text": "012"}
    assert len(reply.artifacts) == 4


@BACKENDS
async def test_a_failure_reports_the_usage(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        return Paused([Call("a", "peer", 1)], b"")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Any:
        ctx.token_usage.record(Tokens(input=5), model="big")
        raise ValueError("after all that")

    await mesh.replica(ScriptedAgent("agent", start, resume), durable=durable)
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(), Ok(1, usage=usage_of(10)))
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.usage.total.input == 15


async def test_a_cancelled_task_reports_its_usage(mesh: Mesh, client: FakePeer) -> None:
    gate = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        ctx.token_usage.record(Tokens(input=5), model="big")
        await gate()

    await mesh.replica(ScriptedAgent("agent", start))
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    await client.cancel("agent", task_id)
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.CANCELLED
    assert reply.usage.total.input == 5


@BACKENDS
async def test_artifacts_of_peers_reach_the_agent(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        return Paused([Call("a", "peer", 1)], b"")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Any:
        return Done([dict(artifact) for artifact in outcomes["a"].artifacts])

    await mesh.replica(ScriptedAgent("agent", start, resume), durable=durable)
    task_id = await client.ask("agent", 1)
    await peer.respond(
        await peer.wait_for_request(),
        Ok(1, artifacts=({"name": "map", "parts": [{"text": "…"}]},)),
    )
    map_: dict[str, Any] = {"name": "map", "parts": [{"text": "…"}]}
    assert await client.reply(task_id) == Ok([map_], artifacts=(map_,))


@BACKENDS
async def test_user_metadata_of_a_request_is_passed_to_peers(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    seen: list[Any] = []

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        return Paused([Call("a", "two", 1)], b"")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Any:
        return Done(outcomes["a"].value)

    async def two(ctx: TaskExecutionContext, request: Any) -> Any:
        a2a = ctx.a2a_context
        seen.append((a2a.user_id, a2a.session_id, dict(a2a.user_config), dict(a2a.metadata)))
        seen.append(
            (dict(ctx.security_context), a2a.call_depth, a2a.requester, dict(ctx.trace_context))
        )
        return Done("seen")

    await mesh.replica(ScriptedAgent("one", start, resume), durable=durable)
    await mesh.replica(ScriptedAgent("two", two), durable=durable)
    metadata = {
        "userId": "ada",
        "sessionId": "s1",
        "userConfig": {"units": "metric"},
        "securityContext": {"token": "t"},
        "tenant": "north",
    }
    message = client.request(1, metadata=metadata, traceparent="00-abc-def-01")
    await client.send("one", message)
    assert await client.reply(message.correlation_id) == Ok("seen")
    assert seen == [
        ("ada", "s1", {"units": "metric"}, {"tenant": "north"}),
        ({"token": "t"}, 1, "one", {"traceparent": "00-abc-def-01"}),
    ]


def merging_agents(*, merges: bool) -> list[Any]:
    """Agents that ask `peer` twice, one after the other, and produce an artifact of their own."""
    ask = Peer("peer", int, int)

    @agent("function", merge_artifacts=merges)
    async def function(ctx: TaskExecutionContext, number: int) -> int:
        ctx.produced_artifacts.append({"own": 1})
        answer = await ask(number).with_artifacts()
        ctx.produced_artifacts.extend([{"own": 2}, *answer.artifacts])
        return await ask(answer.value)

    class Stateful(StatefulAgent[int, int, int]):
        name = "stateful"
        merge_artifacts = merges

        async def on_request(self, ctx: TaskExecutionContext, request: int) -> Any:
            ctx.produced_artifacts.append({"own": 1})
            return self.ask(0, {"a": ask(request)}, then=self.on_first)

        async def on_first(self, ctx: TaskExecutionContext, state: int, replies: Replies) -> Any:
            return self.ask(0, {"a": ask(1)}, then=self.on_second)

        async def on_second(self, ctx: TaskExecutionContext, state: int, replies: Replies) -> Any:
            ctx.produced_artifacts.append({"own": 2})
            return self.done(replies.value("a", ask))

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        ctx.produced_artifacts.append({"own": 1})
        return Paused([Call("a", "peer", request)], b"1")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Any:
        if state == b"1":
            return Paused([Call("a", "peer", 1)], b"2")
        ctx.produced_artifacts.append({"own": 2})
        return Done(0)

    raw = ScriptedAgent("raw", start, resume)
    if not merges:
        raw.merge_artifacts = False  # type: ignore[attr-defined]
    return [function, Stateful(), raw]


@BACKENDS
@pytest.mark.parametrize(
    ("name", "merges", "expected"),
    [
        ("function", True, [{"own": 1}, {"own": 2}, {"peer": 1}, {"peer": 2}]),
        ("function", False, [{"own": 1}, {"own": 2}, {"peer": 1}]),
        ("stateful", True, [{"own": 1}, {"peer": 1}, {"peer": 2}, {"own": 2}]),
        ("stateful", False, [{"own": 1}, {"own": 2}]),
        ("raw", True, [{"own": 1}, {"peer": 1}, {"peer": 2}, {"own": 2}]),
        ("raw", False, [{"own": 1}, {"own": 2}]),
    ],
)
async def test_artifacts_of_peers_are_merged_unless_the_agent_says_otherwise(
    mesh: Mesh,
    client: FakePeer,
    peer: FakePeer,
    durable: bool,
    name: str,
    merges: bool,
    expected: list[Any],
) -> None:
    await mesh.replica(*merging_agents(merges=merges), durable=durable)
    task_id = await client.ask(name, 1)
    for number in (1, 2):
        request = await peer.wait_for_request(number)
        await peer.respond(request, Ok(number, artifacts=({"peer": number},)))
    reply = await client.reply(task_id)
    assert isinstance(reply, Ok)
    assert list(reply.artifacts) == expected
