"""Malformed and forged responses, status updates and cancels: each call gets one outcome."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshpoint.model.bodies import response_body
from meshpoint.model.events import Step
from meshpoint.model.messages import Header, MessageType, responses_of
from meshpoint.model.outcomes import Failed, Ok

from .agents import asker, summer
from .mesh import Mesh
from .puppet import Puppet

HOMES = pytest.mark.parametrize("durable", [True, False])


def response(**task: Any) -> bytes:
    body = json.loads(response_body("t", None, Ok(1)).to_bytes())
    body["task"] |= task
    return json.dumps(body).encode()


ENDED = b'{"statusUpdate": {"taskId": "t", "status": {"state": "TASK_STATE_COMPLETED"}}}'
UNREADABLE = {
    "not JSON": b"}{",
    "no task": b"{}",
    "wrong type": b'{"task": 7}',
    "does not end a task": response(status={"state": "TASK_STATE_WORKING"}),
    "unknown state": response(status={"state": "DONE"}),
    "usage is a text": response(metadata={"usage": "much"}),
    "usage has unknown counts": response(metadata={"usage": {"total": {"thoughts": 1}}}),
    "artifacts are numbers": response(artifacts=[1]),
    "not a number": response(artifacts=[{"weight": float("nan")}]),
    "too large": response(artifacts=[{"text": "x" * 5000}]),
}


@HOMES
@pytest.mark.parametrize("body", UNREADABLE.values(), ids=UNREADABLE)
async def test_an_unreadable_response_is_an_outcome_and_a_dead_letter(
    mesh: Mesh, boss: Puppet, peer: Puppet, body: bytes, durable: bool
) -> None:
    await mesh.replica(asker("asker", "peer"), max_message_bytes=4000, durable=durable)
    task_id = await boss.ask("asker", 1)
    await peer.respond(await peer.request_number(), 1, body=body)
    assert await boss.reply(task_id) == Ok({"peer": "invalid"})
    await mesh.settle()
    assert len(mesh.dead_letters("asker")) == 1


async def test_a_failure_of_no_known_kind_is_an_error(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    await mesh.replica(asker("asker", "peer"))
    for failure in ("melted", 7, ["timeout"], {"kind": "timeout"}, None):
        task_id = await boss.ask("asker", 1)
        body = response(status={"state": "TASK_STATE_FAILED"}, metadata={"failure": failure})
        await peer.respond(await peer.request_number(len(peer.requests) + 1), 1, body=body)
        assert await boss.reply(task_id) == Ok({"peer": "error"})


async def test_an_output_that_does_not_fit_the_declared_type(mesh: Mesh, boss: Puppet) -> None:
    doubler = await mesh.puppet("doubler")
    await mesh.replica(summer)
    task_id = await boss.ask("summer", [1])
    await doubler.respond(await doubler.request_number(), "two")
    reply = await boss.reply(task_id)
    assert isinstance(reply, Failed)
    assert "invalid" in reply.message
    assert "doubler" in reply.message


@HOMES
async def test_a_duplicate_changes_nothing(mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool) -> None:
    other = await mesh.puppet("other")
    await mesh.replica(asker("asker", "peer", "other"), durable=durable)
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    await peer.respond(request, "first")
    await peer.respond(request, "second")
    await mesh.events.wait(Step.DUPLICATE, task_id=task_id)
    await other.respond(await other.request_number(), "other")
    assert await boss.reply(task_id) == Ok({"peer": "first", "other": "other"})
    assert mesh.dead_letters("asker") == []


@HOMES
async def test_a_late_response_changes_nothing(mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool) -> None:
    await mesh.replica(asker("asker", "peer"), durable=durable)
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    await peer.respond(request, "first")
    await boss.reply(task_id)
    await peer.respond(request, "late")
    await mesh.events.wait(Step.LATE, task_id=task_id)
    await mesh.settle()
    assert boss.replies() == [Ok({"peer": "first"})]
    assert mesh.dead_letters("asker") == []


async def test_a_response_for_an_unknown_call(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    await mesh.replica(asker("asker", "peer"))
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    await peer.respond(request, "stray", correlation_id="nothing")
    await peer.respond(request, "stray", headers={Header.PARENT_TASK.value: "nobody"})
    await mesh.events.wait(Step.LATE, count=2)
    await peer.respond(request, "right")
    assert await boss.reply(task_id) == Ok({"peer": "right"})
    assert mesh.dead_letters("asker") == []


@HOMES
async def test_the_wrong_sender_is_not_believed(mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool) -> None:
    await mesh.replica(asker("asker", "peer"), durable=durable)
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    await peer.respond(request, "forged", app_id="mallory")
    await peer.respond(request, "", app_id="mallory", body=b"forged and unreadable")
    await mesh.events.wait(Step.DEAD_LETTER, count=2)
    await peer.respond(request, "right")
    assert await boss.reply(task_id) == Ok({"peer": "right"})
    assert all("'mallory'" in reason and "'peer'" in reason for reason in mesh.dead_reasons("asker"))
    assert len(mesh.dead_letters("asker")) == 2


async def test_another_login_than_the_peers_is_not_believed(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    await mesh.replica(asker("asker", "peer"), peer_logins={"peer": "peer-login"})
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    await peer.respond(request, "forged", user_id="mallory")
    await peer.respond(request, "", user_id="mallory", body=b"forged and unreadable")
    await peer.respond(request, "forged too")
    await mesh.events.wait(Step.DEAD_LETTER, count=3)
    await peer.respond(request, "right", user_id="peer-login")
    assert await boss.reply(task_id) == Ok({"peer": "right"})
    assert len(mesh.dead_letters("asker")) == 3


@pytest.mark.parametrize("fields", [{"app_id": ""}, {"headers": {}}], ids=["no sender", "no parent task"])
async def test_a_response_that_names_no_sender_or_no_task(
    mesh: Mesh, boss: Puppet, peer: Puppet, fields: dict[str, Any]
) -> None:
    await mesh.replica(asker("asker", "peer"))
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    await peer.respond(request, "?", **fields)
    await mesh.events.wait(Step.DEAD_LETTER)
    await peer.respond(request, "right")
    assert await boss.reply(task_id) == Ok({"peer": "right"})
    assert len(mesh.dead_letters("asker")) == 1


async def test_good_and_bad_ones_that_arrive_together(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    """One transaction records them all, and each is settled separately."""
    asking = await mesh.replica(asker("asker", "peer"))
    tasks = [await boss.ask("asker", number) for number in range(4)]
    requests = [await peer.request_number(count) for count in (1, 2, 3, 4)]
    of = {request.headers[Header.PARENT_TASK.value]: request for request in requests}
    asking.store.calls.clear()
    await peer.respond(of[tasks[0]], "right")
    await peer.respond(of[tasks[1]], "", body=b"unreadable")
    await peer.respond(of[tasks[2]], "forged", app_id="mallory")
    await peer.respond(of[tasks[3]], "right")
    await peer.respond(of[tasks[3]], "again")
    assert await boss.reply(tasks[0]) == Ok({"peer": "right"})
    assert await boss.reply(tasks[1]) == Ok({"peer": "invalid"})
    assert await boss.reply(tasks[3]) == Ok({"peer": "right"})
    assert boss.replies(tasks[2]) == []
    await mesh.settle()
    assert len(mesh.dead_letters("asker")) == 2


@HOMES
async def test_news_that_nobody_can_read(mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool) -> None:
    await mesh.replica(asker("asker", "peer"), durable=durable)
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    await peer.status(request, 1, body=b"?")
    await peer.status(request, 1, headers={})
    await peer.status(
        request, 1, body=b'{"statusUpdate": {"taskId": "t", "status": {"state": "TASK_STATE_COMPLETED"}}}'
    )
    await peer.say(request, MessageType.CANCEL, body=b"{}", address=responses_of("asker"))  # type: ignore[arg-type]
    await peer.say(request, MessageType.REQUEST, body=b"{}")
    await mesh.events.wait(Step.DEAD_LETTER, count=5)
    await peer.respond(request, "right")
    assert await boss.reply(task_id) == Ok({"peer": "right"})
    await mesh.settle()
    assert len(mesh.dead_letters("asker")) == 5


async def test_a_response_while_the_database_is_away_is_neither_lost_nor_given_back(
    mesh: Mesh, boss: Puppet, peer: Puppet
) -> None:
    asking = await mesh.replica(asker("asker", "peer"))
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    await mesh.settle()
    asking.store.away = True
    await peer.respond(request, "right")
    await mesh.events.wait(Step.STORE_AWAY)
    await mesh.advance(30)
    assert boss.replies() == []
    asking.store.away = False
    await mesh.advance(3)
    assert await boss.reply(task_id) == Ok({"peer": "right"})
    assert mesh.events.story(task_id, Step.CLAIM, Step.ACK)[2:] == [
        "claim before",
        "claim after",
        "ack before",
        "ack after",
    ]
    assert len(mesh.events.of(Step.STORE_AWAY)) == 1
