"""Malformed and forged responses, status updates and cancels: each call gets one outcome."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.model.envelopes import encode_reply
from meshpoint.model.events import Step
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.messages import Header, MessageType, response_queue
from meshpoint.model.outcomes import Failed, Ok

from .agents import asker, summer
from .mesh import Mesh

BACKENDS = pytest.mark.parametrize("durable", [True, False])


def response_bytes(**task_id: Any) -> bytes:
    body = json.loads(encode_reply(TaskId("t"), None, Ok(1)))
    body["task"] |= task_id
    return json.dumps(body).encode()


ENDED = b'{"statusUpdate": {"taskId": "t", "status": {"state": "TASK_STATE_COMPLETED"}}}'
UNREADABLE_BODIES = {
    "not JSON": b"}{",
    "no task": b"{}",
    "wrong type": b'{"task": 7}',
    "does not end a task": response_bytes(status={"state": "TASK_STATE_WORKING"}),
    "unknown state": response_bytes(status={"state": "DONE"}),
    "usage is a text": response_bytes(metadata={"usage": "much"}),
    "usage has unknown counts": response_bytes(metadata={"usage": {"total": {"thoughts": 1}}}),
    "artifacts are numbers": response_bytes(artifacts=[1]),
    "not a number": response_bytes(artifacts=[{"weight": float("nan")}]),
    "too large": response_bytes(artifacts=[{"text": "x" * 5000}]),
}


@BACKENDS
@pytest.mark.parametrize("body", UNREADABLE_BODIES.values(), ids=UNREADABLE_BODIES)
async def test_an_unreadable_response_is_an_outcome_and_a_dead_letter(
    mesh: Mesh, client: FakePeer, peer: FakePeer, body: bytes, durable: bool
) -> None:
    await mesh.replica(asker("asker", "peer"), max_message_bytes=4000, durable=durable)
    task_id = await client.ask("asker", 1)
    await peer.respond(await peer.wait_for_request(), 1, body=body)
    assert await client.reply(task_id) == Ok({"peer": "invalid"})
    await mesh.idle()
    assert len(mesh.dead_letters("asker")) == 1


async def test_a_failure_of_an_unknown_kind_is_an_error(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(asker("asker", "peer"))
    for failure in ("melted", 7, ["timeout"], {"kind": "timeout"}, None):
        task_id = await client.ask("asker", 1)
        body = response_bytes(status={"state": "TASK_STATE_FAILED"}, metadata={"failure": failure})
        await peer.respond(await peer.wait_for_request(len(peer.requests) + 1), 1, body=body)
        assert await client.reply(task_id) == Ok({"peer": "error"})


async def test_an_output_of_the_wrong_type_fails_the_call(mesh: Mesh, client: FakePeer) -> None:
    doubler = await mesh.fake_peer("doubler")
    await mesh.replica(summer)
    task_id = await client.ask("summer", [1])
    await doubler.respond(await doubler.wait_for_request(), "two")
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    assert "invalid" in reply.message
    assert "doubler" in reply.message


@BACKENDS
async def test_a_duplicate_response_changes_nothing(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    other = await mesh.fake_peer("other")
    await mesh.replica(asker("asker", "peer", "other"), durable=durable)
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await peer.respond(request, "first")
    await peer.respond(request, "second")
    await mesh.events.wait(Step.DUPLICATE, task_id=task_id)
    await other.respond(await other.wait_for_request(), "other")
    assert await client.reply(task_id) == Ok({"peer": "first", "other": "other"})
    assert mesh.dead_letters("asker") == []


@BACKENDS
async def test_a_late_response_changes_nothing(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    await mesh.replica(asker("asker", "peer"), durable=durable)
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await peer.respond(request, "first")
    await client.reply(task_id)
    await peer.respond(request, "late")
    await mesh.events.wait(Step.LATE, task_id=task_id)
    await mesh.idle()
    assert client.replies() == [Ok({"peer": "first"})]
    assert mesh.dead_letters("asker") == []


async def test_a_response_for_an_unknown_call_is_ignored(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(asker("asker", "peer"))
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await peer.respond(request, "stray", correlation_id="nothing")
    await peer.respond(request, "stray", headers={Header.PARENT_TASK.value: "nobody"})
    await mesh.events.wait(Step.LATE, count=2)
    await peer.respond(request, "right")
    assert await client.reply(task_id) == Ok({"peer": "right"})
    assert mesh.dead_letters("asker") == []


@BACKENDS
async def test_a_response_from_the_wrong_sender_is_rejected(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    await mesh.replica(asker("asker", "peer"), durable=durable)
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await peer.respond(request, "forged", app_id="mallory")
    await peer.respond(request, "", app_id="mallory", body=b"forged and unreadable")
    await mesh.events.wait(Step.DEAD_LETTER, count=2)
    await peer.respond(request, "right")
    assert await client.reply(task_id) == Ok({"peer": "right"})
    assert all(
        "'mallory'" in reason and "'peer'" in reason for reason in mesh.dead_reasons("asker")
    )
    assert len(mesh.dead_letters("asker")) == 2


async def test_a_response_from_another_login_than_the_peers_is_rejected(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(asker("asker", "peer"), peer_logins={"peer": "peer-login"})
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await peer.respond(request, "forged", user_id="mallory")
    await peer.respond(request, "", user_id="mallory", body=b"forged and unreadable")
    await peer.respond(request, "forged too")
    await mesh.events.wait(Step.DEAD_LETTER, count=3)
    await peer.respond(request, "right", user_id="peer-login")
    assert await client.reply(task_id) == Ok({"peer": "right"})
    assert len(mesh.dead_letters("asker")) == 3


@pytest.mark.parametrize(
    "fields", [{"app_id": ""}, {"headers": {}}], ids=["no sender", "no parent task"]
)
async def test_a_response_without_a_sender_or_a_task_is_rejected(
    mesh: Mesh, client: FakePeer, peer: FakePeer, fields: dict[str, Any]
) -> None:
    await mesh.replica(asker("asker", "peer"))
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await peer.respond(request, "?", **fields)
    await mesh.events.wait(Step.DEAD_LETTER)
    await peer.respond(request, "right")
    assert await client.reply(task_id) == Ok({"peer": "right"})
    assert len(mesh.dead_letters("asker")) == 1


async def test_valid_responses_in_a_batch_with_invalid_ones_are_handled(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """One transaction records them all, and each is settled separately."""
    asking = await mesh.replica(asker("asker", "peer"))
    tasks = [await client.ask("asker", number) for number in range(4)]
    requests = [await peer.wait_for_request(count) for count in (1, 2, 3, 4)]
    request_by_parent = {
        request.headers[Header.PARENT_TASK.value]: request for request in requests
    }
    asking.store.calls.clear()
    await peer.respond(request_by_parent[tasks[0]], "right")
    await peer.respond(request_by_parent[tasks[1]], "", body=b"unreadable")
    await peer.respond(request_by_parent[tasks[2]], "forged", app_id="mallory")
    await peer.respond(request_by_parent[tasks[3]], "right")
    await peer.respond(request_by_parent[tasks[3]], "again")
    assert await client.reply(tasks[0]) == Ok({"peer": "right"})
    assert await client.reply(tasks[1]) == Ok({"peer": "invalid"})
    assert await client.reply(tasks[3]) == Ok({"peer": "right"})
    assert client.replies(tasks[2]) == []
    await mesh.idle()
    assert len(mesh.dead_letters("asker")) == 2


@BACKENDS
async def test_an_unreadable_status_is_dead_lettered(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    await mesh.replica(asker("asker", "peer"), durable=durable)
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await peer.status(request, 1, body=b"?")
    await peer.status(request, 1, headers={})
    await peer.status(
        request,
        1,
        body=b'{"statusUpdate": {"taskId": "t", "status": {"state": "TASK_STATE_COMPLETED"}}}',
    )
    await peer.send_back(
        request, MessageType.CANCEL, body=b"{}", address=response_queue(AgentName("asker"))
    )
    await peer.send_back(request, MessageType.REQUEST, body=b"{}")
    await mesh.events.wait(Step.DEAD_LETTER, count=5)
    await peer.respond(request, "right")
    assert await client.reply(task_id) == Ok({"peer": "right"})
    await mesh.idle()
    assert len(mesh.dead_letters("asker")) == 5


async def test_a_response_during_a_database_outage_is_neither_lost_nor_requeued(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    asking = await mesh.replica(asker("asker", "peer"))
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    asking.store.unavailable = True
    await peer.respond(request, "right")
    await mesh.events.wait(Step.STORE_UNAVAILABLE)
    await mesh.advance(30)
    assert client.replies() == []
    asking.store.unavailable = False
    await mesh.advance(3)
    assert await client.reply(task_id) == Ok({"peer": "right"})
    assert mesh.events.timeline(task_id, Step.CLAIM, Step.ACK)[2:] == [
        "claim before",
        "claim after",
        "ack before",
        "ack after",
    ]
    assert len(mesh.events.matching(Step.STORE_UNAVAILABLE)) == 1
