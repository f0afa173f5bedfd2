"""Impersonated senders, and reply addresses of other senders."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.model.envelopes import cancel_message, wake_message
from meshpoint.model.events import Step
from meshpoint.model.ids import AgentName, TaskId, new_id
from meshpoint.model.messages import Address, Header, response_queue
from meshpoint.model.outcomes import Ok

from .agents import Gate, asker, doubler
from .mesh import Mesh

BACKENDS = pytest.mark.parametrize("durable", [True, False], ids=["database", "memory"])


@pytest.fixture
async def mallory(mesh: Mesh) -> FakePeer:
    """A sender without any rights."""
    return await mesh.fake_peer("mallory")


@pytest.mark.parametrize(
    "logins", ["client-login", ("client-login", "client-2")], ids=["one", "several"]
)
async def test_a_request_from_a_login_other_than_its_senders_is_not_run(
    mesh: Mesh, client: FakePeer, logins: str | tuple[str, ...]
) -> None:
    await mesh.replica(doubler, peer_logins={"client": logins})
    for user_id in ("mallory", None):
        await client.send("doubler", replace(client.request(1), user_id=user_id))
    await mesh.events.wait(Step.DEAD_LETTER, count=2)
    valid_request = replace(
        client.request(2), user_id="client-login" if isinstance(logins, str) else "client-2"
    )
    await client.send("doubler", valid_request)
    assert await client.reply(valid_request.correlation_id) == Ok(4)
    assert client.replies() == [Ok(4)]
    assert len(mesh.events.matching(Step.SEGMENT)) == 2
    assert mesh.dead_reasons("doubler") == [
        f"user_id: 'client' sent this under {login}, which peer_logins does not list for it"
        for login in ("the login 'mallory'", "no login")
    ]


@pytest.mark.parametrize("body", [None, b"unreadable"], ids=["readable", "unreadable"])
@pytest.mark.parametrize(
    "reply_to", ["asker.resp", "asker.private.1", "mallory", "mallory2.resp", ".resp"]
)
async def test_no_reply_goes_to_another_senders_address(
    mesh: Mesh, mallory: FakePeer, reply_to: str, body: bytes | None
) -> None:
    replica = await mesh.replica(doubler)
    request = replace(mallory.request(1), reply_to=Address(reply_to))
    await mallory.send("doubler", request if body is None else replace(request, body=body))
    await mesh.events.wait(Step.DEAD_LETTER)
    await mesh.idle()
    assert [message.type for _, message in replica.broker.published] == []
    assert mesh.events.matching(Step.SEGMENT) == []
    assert mesh.unacked("doubler") == 0


@pytest.mark.parametrize("name", ["doubler.private", "doubler."])
async def test_a_name_with_a_dot_reaches_nobody_elses_queue(
    mesh: Mesh, mallory: FakePeer, name: str
) -> None:
    replica = await mesh.replica(doubler)
    request = replace(mallory.request(1), app_id=name, reply_to=Address(f"{name}.{replica.id}"))
    await mallory.send("doubler", request)
    await mesh.events.wait(Step.DEAD_LETTER)
    await mesh.idle()
    assert replica.broker.published == []


async def test_an_outsiders_malformed_request_ends_no_call(
    mesh: Mesh, client: FakePeer, mallory: FakePeer
) -> None:
    """The request has the ids of a call of `asker`, and its reply address."""
    gate = Gate()
    await mesh.replica(asker("asker", "doubler"))
    await mesh.replica(gated_doubler(gate))
    task_id = await client.ask("asker", 1)
    await gate.wait_reached()
    _, (call,) = await mesh.task(task_id)
    bad = replace(
        mallory.request(1, call.sub_task_id),
        body=b"?",
        reply_to=response_queue(AgentName("asker")),
        headers={Header.PARENT_TASK.value: task_id},
    )
    await mallory.send("doubler", bad)
    await mesh.events.wait(Step.DEAD_LETTER)
    await mesh.idle()
    gate.opened.set()
    assert await client.reply(task_id) == Ok({"doubler": 2})


@BACKENDS
async def test_an_impostors_status_is_not_forwarded(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    await mesh.replica(asker("asker", "peer"), durable=durable, peer_logins={"peer": "peer-login"})
    task_id = await client.ask("asker", 1)
    call = await peer.wait_for_request()
    await peer.status(call, "forged", user_id="mallory")
    await mesh.events.wait(Step.DEAD_LETTER)
    await peer.status(call, "true", user_id="peer-login")
    await peer.respond(call, "right", user_id="peer-login")
    assert await client.reply(task_id) == Ok({"peer": "right"})
    assert client.statuses() == ["true"]


@BACKENDS
@pytest.mark.parametrize("name", ["client", "doubler"])
async def test_an_impostors_cancel_cancels_nothing(
    mesh: Mesh, client: FakePeer, durable: bool, name: str
) -> None:
    gate = Gate()
    logins = {"client": "client-login", "doubler": "doubler-login"}
    await mesh.replica(gated_doubler(gate), durable=durable, peer_logins=logins)
    request = replace(client.request(1), user_id="client-login")
    await client.send("doubler", request)
    await gate.wait_reached()
    cancel = replace(
        cancel_message(AgentName(name), TaskId(request.correlation_id)), user_id="mallory"
    )
    await client.send_control("doubler", cancel)
    await mesh.events.wait(Step.DEAD_LETTER)
    gate.opened.set()
    assert await client.reply(request.correlation_id) == Ok(2)


@pytest.mark.parametrize(
    "fields", [{"app_id": "mallory"}, {"user_id": "mallory"}], ids=["other", "impostor"]
)
async def test_a_strangers_wake_up_message_is_dead_lettered(
    mesh: Mesh, mallory: FakePeer, fields: dict[str, Any]
) -> None:
    await mesh.replica(doubler, peer_logins={"doubler": "doubler-login"})
    await mallory.send_control("doubler", replace(wake_message(AgentName("doubler")), **fields))
    await mesh.events.wait(Step.DEAD_LETTER)
    assert len(mesh.dead_letters("doubler")) == 1


async def test_a_request_on_a_response_queue_is_not_answered_elsewhere(
    mesh: Mesh, mallory: FakePeer
) -> None:
    replica = await mesh.replica(doubler)
    await mallory.send_control(
        "doubler",
        replace(mallory.request(1, new_id()), reply_to=response_queue(AgentName("client"))),
    )
    await mesh.events.wait(Step.DEAD_LETTER)
    await mesh.idle()
    assert replica.broker.published == []


def gated_doubler(gate: Gate) -> Any:
    """An agent that doubles its input once the gate opens."""
    from meshpoint.agents.function import agent
    from meshpoint.model.context import TaskExecutionContext

    @agent("doubler")
    async def double(ctx: TaskExecutionContext, number: int) -> int:
        await gate()
        return 2 * number

    return double
