"""Peers that send false data, and values at the limits of what can be read."""

from __future__ import annotations

from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.envelopes import MAX_STATUS_BYTES
from meshpoint.model.events import Step
from meshpoint.model.messages import Header, Message
from meshpoint.model.outcomes import Failed, FailureKind, Ok

from .agents import ScriptedAgent, asker
from .mesh import Mesh

BACKENDS = pytest.mark.parametrize("durable", [True, False])


def a2a_status(to: Message, data: str, metadata: str = "{}") -> bytes:
    message = f'{{"role": "ROLE_AGENT", "parts": [{{"data": {data}}}]}}'
    status = f'{{"state": "TASK_STATE_COMPLETED", "message": {message}}}'
    task = f'{{"id": "{to.correlation_id}", "status": {status}, "metadata": {metadata}}}'
    return f'{{"task": {task}}}'.encode()


@BACKENDS
@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), 7, True, 1.5, "x" * 100_000, "", "\0", "00-ä"]
)
async def test_only_a_trace_context_is_forwarded(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool, value: Any
) -> None:
    await mesh.replica(asker("asker", "peer"), durable=durable)
    task_id = await client.ask("asker", 1, traceparent=value)
    request = await peer.wait_for_request()
    await peer.respond(request, "well")
    assert await client.reply(task_id) == Ok({"peer": "well"})
    assert Header.TRACEPARENT.value not in request.headers


@BACKENDS
@pytest.mark.parametrize(
    "data", ["1e400", '[{"a": -1e999}]', '{"a": "Infinity", "b": 1e400}', "1" * 400 + ".0"]
)
async def test_a_result_beyond_float_range_is_an_invalid_outcome(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool, data: str
) -> None:
    await mesh.replica(asker("asker", "peer"), durable=durable)
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await peer.respond(request, None, body=a2a_status(request, data))
    assert await client.reply(task_id) == Ok({"peer": "invalid"})


@pytest.mark.parametrize(
    "data", ["1e308", '["Infinity", "NaN", "1e400", 4e5]', '{"Infinity": 1.5}']
)
async def test_a_result_that_looks_out_of_range_but_is_valid_is_accepted(
    mesh: Mesh, client: FakePeer, peer: FakePeer, data: str
) -> None:
    await mesh.replica(asker("asker", "peer"))
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await peer.respond(request, None, body=a2a_status(request, data))
    reply = await client.reply(task_id)
    assert isinstance(reply, Ok)
    assert reply != Ok({"peer": "invalid"})


@agent("repeater", version="1")
async def repeating_agent(ctx: TaskExecutionContext, count: int) -> list[str]:
    results = [await ctx.outcome(Peer("peer", int, int)(number)) for number in range(count)]
    return [result.kind.value if isinstance(result, Failed) else "ok" for result in results]


@BACKENDS
@pytest.mark.parametrize("count", ["9" * 4300, str(2**53 + 1), "-1"])
async def test_excessive_token_counts_are_rejected(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool, count: str
) -> None:
    await mesh.replica(repeating_agent, durable=durable)
    task_id = await client.ask("repeater", 2)
    for number in (1, 2):
        request = await peer.wait_for_request(number)
        usage = f'{{"usage": {{"total": {{"input": {count}}}}}}}'
        await peer.respond(request, None, body=a2a_status(request, "1", usage))
    assert await client.reply(task_id) == Ok(["invalid", "invalid"])


@BACKENDS
@pytest.mark.parametrize("place", ["output", "artifact", "flag", "status"])
async def test_integers_too_long_to_parse_fail_their_task(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool, place: str
) -> None:
    large = 10**5000

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        match place:
            case "output":
                return Done(large)
            case "artifact":
                ctx.produced_artifacts.append({"a": large})
            case "flag":
                ctx.flags["a"] = large
            case "status":
                await ctx.update_status({"a": large})
        return Done(1)

    await mesh.replica(ScriptedAgent("digits", start), durable=durable)
    reply = await client.reply(await client.ask("digits", 1))
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.ERROR
    assert "internal error" not in reply.message


@BACKENDS
async def test_a_status_too_large_to_send_is_dropped_and_reported(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        await ctx.update_status("small")
        await ctx.update_status("x" * MAX_STATUS_BYTES)
        return Done("done")

    await mesh.replica(ScriptedAgent("talker", start), durable=durable)
    task_id = await client.ask("talker", 1)
    assert await client.reply(task_id) == Ok("done")
    assert client.statuses() == ["small"]
    (dropped,) = mesh.events.matching(Step.STATUS_DROPPED, task_id=task_id)
    assert str(MAX_STATUS_BYTES) in str(dropped.detail)


@BACKENDS
async def test_a_state_too_large_for_a_row_fails_its_task(
    mesh: Mesh, client: FakePeer, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    monkeypatch.setattr("meshpoint.adapters.inprocess.transitions.MAX_ROW_BYTES", 100_000)

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        return Paused([Call("peer", "peer", 1)], b"x" * 100_000)

    await mesh.fake_peer("peer")
    await mesh.replica(ScriptedAgent("keeper", start), durable=durable)
    reply = await client.reply(await client.ask("keeper", 1))
    assert isinstance(reply, Failed)
    assert "a checkpoint keeps 100000 at most" in reply.message


async def test_a_sender_name_that_no_database_can_store_is_refused(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(asker("asker", "peer"))
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await peer.respond(request, "forged", app_id="pe\0er")
    await peer.respond(request, "unreadable", app_id="pe\0er", body=b"}{")
    await peer.respond(request, "honest")
    assert await client.reply(task_id) == Ok({"peer": "honest"})
    reasons = [event.detail["reason"] for event in mesh.events.matching(Step.DEAD_LETTER)]
    assert len(reasons) == 2
