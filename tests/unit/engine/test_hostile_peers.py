"""Peers that send false data, and values at the limits of what can be read."""

from __future__ import annotations

from typing import Any

import pytest

from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.envelopes import LONGEST_STATUS
from meshpoint.model.events import Step
from meshpoint.model.messages import Header, Message
from meshpoint.model.outcomes import Failed, FailureKind, Ok

from .agents import Scripted, asker
from .mesh import Mesh
from .puppet import Puppet

HOMES = pytest.mark.parametrize("durable", [True, False])


def answer(to: Message, data: str, metadata: str = "{}") -> bytes:
    message = f'{{"role": "ROLE_AGENT", "parts": [{{"data": {data}}}]}}'
    status = f'{{"state": "TASK_STATE_COMPLETED", "message": {message}}}'
    return f'{{"task": {{"id": "{to.correlation_id}", "status": {status}, "metadata": {metadata}}}}}'.encode()


@HOMES
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 7, True, 1.5, "x" * 100_000, "", "\0", "00-ä"])
async def test_only_a_trace_context_is_handed_on(
    mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool, value: Any
) -> None:
    await mesh.replica(asker("asker", "peer"), durable=durable)
    task_id = await boss.ask("asker", 1, traceparent=value)
    request = await peer.request_number()
    await peer.respond(request, "well")
    assert await boss.reply(task_id) == Ok({"peer": "well"})
    assert Header.TRACEPARENT.value not in request.headers


@HOMES
@pytest.mark.parametrize("data", ["1e400", '[{"a": -1e999}]', '{"a": "Infinity", "b": 1e400}', "1" * 400 + ".0"])
async def test_a_result_beyond_any_float(mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool, data: str) -> None:
    await mesh.replica(asker("asker", "peer"), durable=durable)
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    await peer.respond(request, None, body=answer(request, data))
    assert await boss.reply(task_id) == Ok({"peer": "invalid"})


@pytest.mark.parametrize("data", ["1e308", '["Infinity", "NaN", "1e400", 4e5]', '{"Infinity": 1.5}'])
async def test_a_result_that_only_looks_like_it(mesh: Mesh, boss: Puppet, peer: Puppet, data: str) -> None:
    await mesh.replica(asker("asker", "peer"))
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    await peer.respond(request, None, body=answer(request, data))
    reply = await boss.reply(task_id)
    assert isinstance(reply, Ok)
    assert reply != Ok({"peer": "invalid"})


@agent("repeater", version="1")
async def repeater(ctx: TaskExecutionContext, count: int) -> list[str]:
    results = [await ctx.call(Peer("peer", int, int)(number), return_errors=True) for number in range(count)]
    return [result.kind.value if isinstance(result, Failed) else "ok" for result in results]


@HOMES
@pytest.mark.parametrize("count", ["9" * 4300, str(2**53 + 1), "-1"])
async def test_token_counts_that_nobody_can_add_up(
    mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool, count: str
) -> None:
    await mesh.replica(repeater, durable=durable)
    task_id = await boss.ask("repeater", 2)
    for number in (1, 2):
        request = await peer.request_number(number)
        usage = f'{{"usage": {{"total": {{"input": {count}}}}}}}'
        await peer.respond(request, None, body=answer(request, "1", usage))
    assert await boss.reply(task_id) == Ok(["invalid", "invalid"])


@HOMES
@pytest.mark.parametrize("where", ["output", "artifact", "flag", "status"])
async def test_integers_that_no_parser_reads_fail_their_task(
    mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool, where: str
) -> None:
    large = 10**5000

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        match where:
            case "output":
                return Done(large)
            case "artifact":
                ctx.produced_artifacts.append({"a": large})
            case "flag":
                ctx.flags["a"] = large
            case "status":
                await ctx.status({"a": large})
        return Done(1)

    await mesh.replica(Scripted("digits", start), durable=durable)
    reply = await boss.reply(await boss.ask("digits", 1))
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.ERROR
    assert "internal error" not in reply.message


@HOMES
async def test_a_status_too_large_to_send_is_dropped_and_told(mesh: Mesh, boss: Puppet, durable: bool) -> None:
    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        await ctx.status("small")
        await ctx.status("x" * LONGEST_STATUS)
        return Done("done")

    await mesh.replica(Scripted("talker", start), durable=durable)
    task_id = await boss.ask("talker", 1)
    assert await boss.reply(task_id) == Ok("done")
    assert boss.statuses() == ["small"]
    (dropped,) = mesh.events.of(Step.STATUS_DROPPED, task_id=task_id)
    assert str(LONGEST_STATUS) in str(dropped.detail)


@HOMES
async def test_a_state_that_no_row_can_keep_fails_its_task(
    mesh: Mesh, boss: Puppet, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    monkeypatch.setattr("meshpoint.adapters.inprocess.transitions.MOST_OF_A_ROW", 100_000)

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        return Paused([Call("peer", "peer", 1)], b"x" * 100_000)

    await mesh.puppet("peer")
    await mesh.replica(Scripted("keeper", start), durable=durable)
    reply = await boss.reply(await boss.ask("keeper", 1))
    assert isinstance(reply, Failed)
    assert "a checkpoint keeps 100000 at most" in reply.message


async def test_a_sender_that_no_database_can_keep(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    await mesh.replica(asker("asker", "peer"))
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    await peer.respond(request, "forged", app_id="pe\0er")
    await peer.respond(request, "unreadable", app_id="pe\0er", body=b"}{")
    await peer.respond(request, "honest")
    assert await boss.reply(task_id) == Ok({"peer": "honest"})
    reasons = [event.detail["reason"] for event in mesh.events.of(Step.DEAD_LETTER)]
    assert len(reasons) == 2
