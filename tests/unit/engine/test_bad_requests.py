"""Requests that cannot be read, and requests that must not run."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from meshpoint.model.calls import Call
from meshpoint.model.events import Phase, Step
from meshpoint.model.messages import Header, Message, MessageType
from meshpoint.model.outcomes import Failed, FailureKind, Ok

from .agents import asker, caller, doubler
from .mesh import Mesh
from .puppet import Puppet

GOOD = {"message": {"messageId": "m", "role": "ROLE_USER", "parts": [{"data": 1}]}}


def without(field: str) -> bytes:
    return json.dumps({"message": {key: value for key, value in GOOD["message"].items() if key != field}}).encode()


def with_message(**fields: Any) -> bytes:
    return json.dumps({"message": GOOD["message"] | fields}).encode()


def with_metadata(text: str) -> bytes:
    return b'{"message": %s, "metadata": %s}' % (json.dumps(GOOD["message"]).encode(), text.encode())


UNREADABLE = {
    "not JSON": b"}{",
    "empty": b"",
    "not UTF-8": b'{"message": "\xff"}',
    "not an object": b"[]",
    "no message": b"{}",
    "no role": without("role"),
    "no parts": without("parts"),
    "empty parts": with_message(parts=[]),
    "wrong type": with_message(parts="one"),
    "other task id": with_message(taskId="another"),
    "deep": b"[" * 100_000,
    "user id is a number": with_metadata('{"userId": 7}'),
    "user config is a list": with_metadata('{"userConfig": []}'),
    "security context is a text": with_metadata('{"securityContext": "root"}'),
    "metadata is not JSON": with_metadata('{"weight": NaN}'),
    "user config is not JSON": with_metadata('{"userConfig": {"weight": Infinity}}'),
    "security context is not JSON": with_metadata('{"securityContext": {"weight": NaN}}'),
    "context id that leaves a reply no room": with_message(contextId="x" * 3500),
    "context id of several lines": with_message(contextId="a\nb"),
    "too large": with_message(parts=[{"text": "x" * 5000}]),
}


@pytest.mark.parametrize("body", UNREADABLE.values(), ids=UNREADABLE)
@pytest.mark.parametrize("durable", [True, False])
async def test_unreadable_body(mesh: Mesh, boss: Puppet, body: bytes, durable: bool) -> None:
    await mesh.replica(doubler, durable=durable, max_message_bytes=4000)
    message = replace(boss.request(1), body=body)
    await boss.send("doubler", message)
    reply = await boss.reply(message.correlation_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.INVALID
    (reason,) = mesh.dead_reasons("doubler")
    assert reason == reply.message
    assert mesh.unacked("doubler") == 0
    assert mesh.events.of(Step.SEGMENT) == []
    assert await mesh.ask("doubler", 4) == Ok(8)  # the replica still serves and its slot is free


HEADERS = {
    Header.DEADLINE: ["soon", "nan", "inf", 1e300, -1e300, 0, -1, 3e11, True],
    Header.IDLE_TIMEOUT: ["often", "nan", "inf", 1e300, 0, -1, 1e9, 1e-300, True],
    Header.CALL_DEPTH: ["deep", "nan", "inf", -1, -1000, -1e308, 1e308, 1.5, "-3", True, 10**400],
    Header.ATTEMPT: ["first", "nan", "inf", 0, -1, 1.5, 1e308, True],
}


@pytest.mark.parametrize(("header", "value"), [(header, value) for header in HEADERS for value in HEADERS[header]])
async def test_unreadable_header(mesh: Mesh, boss: Puppet, header: Header, value: Any) -> None:
    await mesh.replica(doubler)
    message = replace(boss.request(1), headers={header.value: value})
    await boss.send("doubler", message)
    reply = await boss.reply(message.correlation_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.INVALID
    assert header.value in reply.message
    assert len(mesh.dead_letters("doubler")) == 1
    assert await mesh.ask("doubler", 4) == Ok(8)


async def test_fifty_megabytes(mesh: Mesh, boss: Puppet) -> None:
    await mesh.replica(doubler)
    message = replace(boss.request(1), body=with_message(parts=[{"text": "x" * 50_000_000}]))
    await boss.send("doubler", message)
    reply = await boss.reply(message.correlation_id)
    assert isinstance(reply, Failed)
    assert "max_message_bytes" in reply.message
    assert len(mesh.dead_letters("doubler")) == 1


async def test_a_response_on_the_request_queue(mesh: Mesh, boss: Puppet) -> None:
    await mesh.replica(doubler)
    await boss.send("doubler", replace(boss.request(1), type=MessageType.RESPONSE))
    await mesh.events.wait(Step.DEAD_LETTER)
    await mesh.settle()
    assert boss.letters == []
    assert len(mesh.dead_letters("doubler")) == 1


async def test_an_unreadable_request_without_a_reply_address(mesh: Mesh, boss: Puppet) -> None:
    await mesh.replica(doubler)
    await boss.send("doubler", replace(boss.request(1), body=b"?", reply_to=None))
    await mesh.events.wait(Step.DEAD_LETTER)
    await mesh.settle()
    assert len(mesh.dead_letters("doubler")) == 1
    assert mesh.unacked("doubler") == 0


async def test_the_dead_letter_waits_for_the_broker(mesh: Mesh, boss: Puppet) -> None:
    replica = await mesh.replica(doubler)
    replica.broker.fail("not committed", "not committed")
    message = replace(boss.request(1), body=b"?")
    await boss.send("doubler", message)
    await mesh.advance(5)
    assert isinstance(await boss.reply(message.correlation_id), Failed)
    assert len(mesh.dead_letters("doubler")) == 1
    assert mesh.unacked("doubler") == 0


async def test_input_of_the_wrong_type(mesh: Mesh, boss: Puppet) -> None:
    await mesh.replica(doubler)
    reply = await boss.reply(await boss.ask("doubler", "many"))
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.INVALID
    assert mesh.dead_letters("doubler") == []
    assert mesh.unacked("doubler") == 0


async def test_an_unknown_agent(mesh: Mesh, boss: Puppet) -> None:
    await mesh.replica(asker("asker", "nobody"))
    assert await boss.reply(await boss.ask("asker", 1)) == Ok({"nobody": "undeliverable"})


@pytest.mark.parametrize("durable", [True, False])
async def test_a_request_that_came_too_deep(mesh: Mesh, boss: Puppet, durable: bool) -> None:
    await mesh.replica(doubler, durable=durable, max_call_depth=3)
    reply = await boss.reply(await boss.ask("doubler", 1, call_depth=4))
    assert isinstance(reply, Failed)
    assert "max_call_depth 3" in reply.message
    assert mesh.events.of(Step.SEGMENT) == []
    assert await boss.reply(await boss.ask("doubler", 1, call_depth=3)) == Ok(2)


@pytest.mark.parametrize("durable", [True, False])
async def test_a_call_that_would_go_too_deep_is_not_sent(
    mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool
) -> None:
    await mesh.replica(asker("asker", "peer"), durable=durable, max_call_depth=3)
    assert await boss.reply(await boss.ask("asker", 1, call_depth=3)) == Ok({"peer": "error"})
    assert peer.requests == []


async def test_a_call_that_is_too_large_is_not_sent(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    await mesh.replica(caller("asker", lambda _: [Call("large", "peer", "x" * 4000)]), max_message_bytes=4000)
    assert await boss.reply(await boss.ask("asker", 1)) == Ok({"large": "undeliverable"})
    assert peer.requests == []


@pytest.mark.parametrize("durable", [True, False])
async def test_a_request_past_its_deadline_is_not_run(mesh: Mesh, boss: Puppet, durable: bool) -> None:
    await mesh.replica(doubler, durable=durable)
    reply = await boss.reply(await boss.ask("doubler", 1, deadline=mesh.in_seconds(-1)))
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.TIMEOUT
    assert mesh.events.of(Step.SEGMENT) == []
    assert mesh.unacked("doubler") == 0


async def test_a_kept_request_past_its_deadline_is_not_run_by_who_takes_it_over(mesh: Mesh, boss: Puppet) -> None:
    first = await mesh.replica(doubler, ack_policy="on_receipt")
    crashed = False

    def crash_at_segment(event: Any) -> None:
        nonlocal crashed
        if event.step is Step.SEGMENT and not crashed:
            crashed = True
            first.task.cancel()

    mesh.events.hooks.append(crash_at_segment)
    task_id = await boss.ask("doubler", 1, deadline=mesh.in_seconds(5))
    await mesh.events.wait(Step.SEGMENT, Phase.FAILED)
    await first.crash()
    await mesh.replica(doubler)
    await mesh.advance(40)
    reply = await boss.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.TIMEOUT
    assert len(mesh.events.of(Step.SEGMENT, Phase.BEFORE)) == 1


async def test_a_kept_request_that_cannot_be_read_any_more_fails(mesh: Mesh, boss: Puppet) -> None:
    """The replica that rescues the task may have a smaller limit for messages."""
    first = await mesh.replica(doubler, ack_policy="on_receipt")
    mesh.events.hooks.append(lambda event: first.task.cancel() if event.step is Step.SEGMENT else None)
    task_id = await boss.ask("doubler", 1)
    await mesh.events.wait(Step.SEGMENT, Phase.FAILED)
    await first.crash()
    mesh.events.hooks.clear()
    await mesh.replica(doubler, max_message_bytes=100)
    await mesh.advance(40)
    assert isinstance(await boss.reply(task_id), Failed)


async def test_a_message_whose_task_is_named_in_the_body_only(mesh: Mesh, boss: Puppet) -> None:
    await mesh.replica(doubler)
    message: Message = replace(boss.request(3, "in-the-body"), correlation_id="")
    await boss.send("doubler", message)
    assert await boss.reply("in-the-body") == Ok(6)
