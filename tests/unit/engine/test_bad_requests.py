"""Requests that cannot be read, and requests that must not run."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.model.calls import Call
from meshpoint.model.events import Phase, Step
from meshpoint.model.messages import Header, Message, MessageType
from meshpoint.model.outcomes import Failed, FailureKind, Ok

from .agents import asker, caller, doubler
from .mesh import Mesh

VALID_REQUEST = {"message": {"messageId": "m", "role": "ROLE_USER", "parts": [{"data": 1}]}}


def body_without(field: str) -> bytes:
    return json.dumps(
        {
            "message": {
                key: value for key, value in VALID_REQUEST["message"].items() if key != field
            }
        }
    ).encode()


def body_with_message(**fields: Any) -> bytes:
    return json.dumps({"message": VALID_REQUEST["message"] | fields}).encode()


def body_with_metadata(text: str) -> bytes:
    return b'{"message": %s, "metadata": %s}' % (
        json.dumps(VALID_REQUEST["message"]).encode(),
        text.encode(),
    )


UNREADABLE_BODIES = {
    "not JSON": b"}{",
    "empty": b"",
    "not UTF-8": b'{"message": "\xff"}',
    "not an object": b"[]",
    "no message": b"{}",
    "no role": body_without("role"),
    "no parts": body_without("parts"),
    "empty parts": body_with_message(parts=[]),
    "wrong type": body_with_message(parts="one"),
    "other task id": body_with_message(taskId="another"),
    "deep": b"[" * 100_000,
    "user id is a number": body_with_metadata('{"userId": 7}'),
    "user config is a list": body_with_metadata('{"userConfig": []}'),
    "security context is a text": body_with_metadata('{"securityContext": "root"}'),
    "metadata is not JSON": body_with_metadata('{"weight": NaN}'),
    "user config is not JSON": body_with_metadata('{"userConfig": {"weight": Infinity}}'),
    "security context is not JSON": body_with_metadata('{"securityContext": {"weight": NaN}}'),
    "context id that leaves a reply no room": body_with_message(contextId="x" * 3500),
    "context id of several lines": body_with_message(contextId="a\nb"),
    "too large": body_with_message(parts=[{"text": "x" * 5000}]),
}


@pytest.mark.parametrize("body", UNREADABLE_BODIES.values(), ids=UNREADABLE_BODIES)
@pytest.mark.parametrize("durable", [True, False])
async def test_an_unreadable_body_is_refused_and_dead_lettered(
    mesh: Mesh, client: FakePeer, body: bytes, durable: bool
) -> None:
    await mesh.replica(doubler, durable=durable, max_message_bytes=4000)
    message = replace(client.request(1), body=body)
    await client.send("doubler", message)
    reply = await client.reply(message.correlation_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.INVALID
    (reason,) = mesh.dead_reasons("doubler")
    assert reason == reply.message
    assert mesh.unacked("doubler") == 0
    assert mesh.events.matching(Step.SEGMENT) == []
    assert await mesh.ask("doubler", 4) == Ok(8)  # the replica still serves and its slot is free


HEADERS = {
    Header.DEADLINE: ["soon", "nan", "inf", 1e300, -1e300, 0, -1, 3e11, True],
    Header.IDLE_TIMEOUT: ["often", "nan", "inf", 1e300, 0, -1, 1e9, 1e-300, True],
    Header.CALL_DEPTH: ["deep", "nan", "inf", -1, -1000, -1e308, 1e308, 1.5, "-3", True, 10**400],
    Header.ATTEMPT: ["first", "nan", "inf", 0, -1, 1.5, 1e308, True],
}


@pytest.mark.parametrize(
    ("header", "value"), [(header, value) for header in HEADERS for value in HEADERS[header]]
)
async def test_an_unreadable_header_is_refused(
    mesh: Mesh, client: FakePeer, header: Header, value: Any
) -> None:
    await mesh.replica(doubler)
    message = replace(client.request(1), headers={header.value: value})
    await client.send("doubler", message)
    reply = await client.reply(message.correlation_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.INVALID
    assert header.value in reply.message
    assert len(mesh.dead_letters("doubler")) == 1
    assert await mesh.ask("doubler", 4) == Ok(8)


async def test_a_fifty_megabyte_request_is_refused(mesh: Mesh, client: FakePeer) -> None:
    await mesh.replica(doubler)
    message = replace(
        client.request(1), body=body_with_message(parts=[{"text": "x" * 50_000_000}])
    )
    await client.send("doubler", message)
    reply = await client.reply(message.correlation_id)
    assert isinstance(reply, Failed)
    assert "max_message_bytes" in reply.message
    assert len(mesh.dead_letters("doubler")) == 1


async def test_a_response_on_the_request_queue_is_dead_lettered(
    mesh: Mesh, client: FakePeer
) -> None:
    await mesh.replica(doubler)
    await client.send("doubler", replace(client.request(1), type=MessageType.RESPONSE))
    await mesh.events.wait(Step.DEAD_LETTER)
    await mesh.idle()
    assert client.messages == []
    assert len(mesh.dead_letters("doubler")) == 1


async def test_an_unreadable_request_without_a_reply_address_is_dead_lettered(
    mesh: Mesh, client: FakePeer
) -> None:
    await mesh.replica(doubler)
    await client.send("doubler", replace(client.request(1), body=b"?", reply_to=None))
    await mesh.events.wait(Step.DEAD_LETTER)
    await mesh.idle()
    assert len(mesh.dead_letters("doubler")) == 1
    assert mesh.unacked("doubler") == 0


async def test_the_dead_letter_waits_for_the_broker(mesh: Mesh, client: FakePeer) -> None:
    replica = await mesh.replica(doubler)
    replica.broker.fail("not committed", "not committed")
    message = replace(client.request(1), body=b"?")
    await client.send("doubler", message)
    await mesh.advance(5)
    assert isinstance(await client.reply(message.correlation_id), Failed)
    assert len(mesh.dead_letters("doubler")) == 1
    assert mesh.unacked("doubler") == 0


async def test_an_input_of_the_wrong_type_fails_the_task(mesh: Mesh, client: FakePeer) -> None:
    await mesh.replica(doubler)
    reply = await client.reply(await client.ask("doubler", "many"))
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.INVALID
    assert mesh.dead_letters("doubler") == []
    assert mesh.unacked("doubler") == 0


async def test_a_call_to_an_unknown_agent_fails(mesh: Mesh, client: FakePeer) -> None:
    await mesh.replica(asker("asker", "nobody"), undeliverable_after=timedelta())
    assert await client.reply(await client.ask("asker", 1)) == Ok({"nobody": "undeliverable"})


@pytest.mark.parametrize("durable", [True, False])
async def test_a_request_above_the_depth_limit_is_refused(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    await mesh.replica(doubler, durable=durable, max_call_depth=3)
    reply = await client.reply(await client.ask("doubler", 1, call_depth=4))
    assert isinstance(reply, Failed)
    assert "max_call_depth 3" in reply.message
    assert mesh.events.matching(Step.SEGMENT) == []
    assert await client.reply(await client.ask("doubler", 1, call_depth=3)) == Ok(2)


@pytest.mark.parametrize("durable", [True, False])
async def test_a_call_above_the_depth_limit_is_not_sent(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    await mesh.replica(asker("asker", "peer"), durable=durable, max_call_depth=3)
    assert await client.reply(await client.ask("asker", 1, call_depth=3)) == Ok({"peer": "error"})
    assert peer.requests == []
    task_id = await client.ask("asker", 1, call_depth=2)
    await peer.respond(await peer.wait_for_request(), 1)
    assert await client.reply(task_id) == Ok({"peer": 1})


async def test_a_call_that_is_too_large_is_not_sent(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(
        caller("asker", lambda _: [Call("large", "peer", "x" * 4000)]), max_message_bytes=4000
    )
    assert await client.reply(await client.ask("asker", 1)) == Ok({"large": "undeliverable"})
    assert peer.requests == []


@pytest.mark.parametrize("durable", [True, False])
async def test_a_request_past_its_deadline_is_not_run(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    await mesh.replica(doubler, durable=durable)
    reply = await client.reply(await client.ask("doubler", 1, deadline=mesh.deadline_in(-1)))
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.TIMEOUT
    assert mesh.events.matching(Step.SEGMENT) == []
    assert mesh.unacked("doubler") == 0


async def test_a_stored_request_past_its_deadline_is_not_run_by_the_rescuer(
    mesh: Mesh, client: FakePeer
) -> None:
    first = await mesh.replica(doubler, ack_policy="on_receipt")
    crashed = False

    def crash_at_segment(event: Any) -> None:
        nonlocal crashed
        if event.step is Step.SEGMENT and not crashed:
            crashed = True
            first.task.cancel()

    mesh.events.hooks.append(crash_at_segment)
    task_id = await client.ask("doubler", 1, deadline=mesh.deadline_in(5))
    await mesh.events.wait(Step.SEGMENT, Phase.FAILED)
    await first.crash()
    await mesh.replica(doubler)
    await mesh.advance(40)
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.TIMEOUT
    assert len(mesh.events.matching(Step.SEGMENT, Phase.BEFORE)) == 1


async def test_a_stored_request_that_became_unreadable_fails(mesh: Mesh, client: FakePeer) -> None:
    """The replica that rescues the task may have a smaller limit for messages."""
    first = await mesh.replica(doubler, ack_policy="on_receipt")
    mesh.events.hooks.append(
        lambda event: first.task.cancel() if event.step is Step.SEGMENT else None
    )
    task_id = await client.ask("doubler", 1)
    await mesh.events.wait(Step.SEGMENT, Phase.FAILED)
    await first.crash()
    mesh.events.hooks.clear()
    await mesh.replica(doubler, max_message_bytes=100)
    await mesh.advance(40)
    assert isinstance(await client.reply(task_id), Failed)


async def test_a_message_that_names_its_task_only_in_the_body_is_accepted(
    mesh: Mesh, client: FakePeer
) -> None:
    await mesh.replica(doubler)
    message: Message = replace(client.request(3, "in-the-body"), correlation_id="")
    await client.send("doubler", message)
    assert await client.reply("in-the-body") == Ok(6)
