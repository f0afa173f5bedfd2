"""Each task that ends without a result is reported once, with its kind, reason and traceback."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from pydantic import JsonValue

from fake_peer import FakePeer
from meshpoint.agents.function import FunctionAgent, agent
from meshpoint.agents.peer import Peer
from meshpoint.errors import AgentFailed, InvalidInput, InvalidOutput, PeerFailed, ReplayMismatch
from meshpoint.model.calls import Done
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Step
from meshpoint.model.outcomes import Failed, FailureKind, Ok

from .agents import Gate, ScriptedAgent, asker
from .mesh import Mesh

BACKENDS = pytest.mark.parametrize("durable", [True, False])

peer_agent = Peer("peer", int, int, timeout=timedelta(seconds=10))
missing = Peer("missing", int, int)


def raising(error: BaseException) -> Callable[[TaskExecutionContext, Any], Awaitable[Any]]:
    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        raise error

    return start


def calling(peer: Peer[int, int]) -> FunctionAgent[int, int]:
    @agent("caller")
    async def caller(ctx: TaskExecutionContext, number: int) -> int:
        return await peer(number)

    return caller


def reported(mesh: Mesh, task_id: str) -> dict[str, JsonValue]:
    """The only report of the failed task."""
    (event,) = mesh.events.matching(Step.TASK_FAILED, task_id=task_id)
    return dict(event.detail)


@BACKENDS
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("odd"), "error"),
        (AgentFailed("odd"), "error"),
        (InvalidOutput("odd"), "error"),
        (ReplayMismatch("odd"), "error"),
        (InvalidInput("odd"), "invalid"),
        (SystemExit("odd"), "error"),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_an_exception_is_reported_with_its_traceback(
    mesh: Mesh, client: FakePeer, durable: bool, error: BaseException, kind: str
) -> None:
    await mesh.replica(ScriptedAgent("broken", raising(error)), durable=durable)
    task_id = await client.ask("broken", 1)
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    await mesh.idle()
    detail = reported(mesh, task_id)
    assert (detail["kind"], detail["reason"]) == (kind, reply.message)
    assert str(detail["traceback"]).startswith("Traceback")
    assert f"{type(error).__name__}: odd" in str(detail["traceback"])


async def test_a_completed_task_is_not_reported(mesh: Mesh, client: FakePeer) -> None:
    async def start(ctx: TaskExecutionContext, request: Any) -> Done[int]:
        return Done(1)

    await mesh.replica(ScriptedAgent("agent", start))
    assert await client.reply(await client.ask("agent", 1)) == Ok(1)
    assert mesh.events.matching(Step.TASK_FAILED) == []


async def test_reasons_and_tracebacks_are_masked_and_bounded(mesh: Mesh, client: FakePeer) -> None:
    error = RuntimeError("password=hunter2 badge: 0123 " + "x" * 100_000)
    await mesh.replica(ScriptedAgent("broken", raising(error)), secret_keys=("badge",))
    task_id = await client.ask("broken", 1)
    await client.reply(task_id)
    await mesh.idle()
    detail = reported(mesh, task_id)
    for text in (str(detail["reason"]), str(detail["traceback"])):
        assert len(text) <= 8_001
        assert "hunter2" not in text
        assert "0123" not in text


@BACKENDS
async def test_a_timeout_that_is_passed_on_stays_a_timeout(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    await mesh.replica(calling(peer_agent), durable=durable)
    task_id = await client.ask("caller", 1)
    await peer.wait_for_request()
    await mesh.advance(12)
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    assert (reply.kind, reply.message.partition(":")[0]) == (FailureKind.TIMEOUT, "peer 'peer'")
    detail = reported(mesh, task_id)
    assert (detail["kind"], detail["reason"]) == ("timeout", reply.message)
    assert "PeerFailed" in str(detail["traceback"])


@BACKENDS
async def test_an_undeliverable_call_that_is_passed_on_stays_undeliverable(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    await mesh.replica(calling(missing), durable=durable)
    task_id = await client.ask("caller", 1)
    await mesh.advance(40)
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.UNDELIVERABLE


@pytest.mark.parametrize("kind", [FailureKind.CANCELLED, FailureKind.INVALID, FailureKind.ERROR])
async def test_other_kinds_of_a_peer_become_errors(
    mesh: Mesh, client: FakePeer, peer: FakePeer, kind: FailureKind
) -> None:
    """A task whose peer was cancelled was not cancelled itself."""
    await mesh.replica(calling(peer_agent))
    task_id = await client.ask("caller", 1)
    await peer.respond(await peer.wait_for_request(), Failed(kind, "sorry"))
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    assert (reply.kind, reply.message) == (
        FailureKind.ERROR,
        f"peer 'peer': {kind.value}: sorry",
    )


async def test_an_outcome_that_agent_code_made_up_is_an_error(
    mesh: Mesh, client: FakePeer
) -> None:
    class Odd:
        kind, message = ["timeout"], "odd"

    error = PeerFailed("peer", Odd())  # type: ignore[arg-type]
    await mesh.replica(ScriptedAgent("broken", raising(error)))
    reply = await client.reply(await client.ask("broken", 1))
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.ERROR


@BACKENDS
async def test_a_cancelled_waiting_task_is_reported(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    await mesh.replica(asker("asker", "peer"), durable=durable)
    task_id = await client.ask("asker", 1)
    await peer.wait_for_request()
    await mesh.idle()
    await client.cancel("asker", task_id)
    await client.reply(task_id)
    assert reported(mesh, task_id) == {"kind": "cancelled", "reason": "cancelled on request"}


@BACKENDS
async def test_a_cancelled_running_task_is_reported_with_the_place_of_its_code(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    gate = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        await gate()

    await mesh.replica(ScriptedAgent("agent", start), durable=durable)
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    await client.cancel("agent", task_id)
    await client.reply(task_id)
    await mesh.idle()
    detail = reported(mesh, task_id)
    assert (detail["kind"], detail["reason"]) == ("cancelled", "cancelled on request")
    assert "await gate()" in str(detail["traceback"])


async def test_a_request_past_its_deadline_is_reported(mesh: Mesh, client: FakePeer) -> None:
    await mesh.replica(asker("asker", "peer"))
    task_id = await client.ask("asker", 1, deadline=mesh.deadline_in(-1))
    await client.reply(task_id)
    detail = reported(mesh, task_id)
    assert (detail["kind"], detail["refused"]) == ("timeout", True)


async def test_a_result_too_large_to_send_is_reported(mesh: Mesh, client: FakePeer) -> None:
    async def start(ctx: TaskExecutionContext, request: Any) -> Done[str]:
        return Done("x" * 10_000)

    await mesh.replica(ScriptedAgent("agent", start), max_message_bytes=5_000)
    task_id = await client.ask("agent", 1)
    await client.reply(task_id)
    await mesh.idle()
    assert "max_message_bytes is 5000" in str(reported(mesh, task_id)["reason"])


async def test_a_drained_task_is_not_reported(mesh: Mesh, client: FakePeer) -> None:
    gate = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        await gate()

    replica = await mesh.replica(
        ScriptedAgent("agent", start), drain_timeout=timedelta(), release_timeout=timedelta()
    )
    await client.ask("agent", 1)
    await gate.wait_reached()
    await asyncio.wait_for(replica.drain(), 60)
    assert mesh.events.matching(Step.TASK_FAILED) == []
