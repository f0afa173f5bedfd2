"""Impersonated senders, and reply addresses of other senders."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshpoint.model.envelopes import cancel_message, wake_message
from meshpoint.model.events import Step
from meshpoint.model.ids import AgentName, new_id
from meshpoint.model.messages import Address, Header, responses_of
from meshpoint.model.outcomes import Ok

from .agents import Gate, asker, doubler
from .mesh import Mesh
from .puppet import Puppet

HOMES = pytest.mark.parametrize("durable", [True, False], ids=["database", "memory"])


@pytest.fixture
async def mallory(mesh: Mesh) -> Puppet:
    """A sender without any rights."""
    return await mesh.puppet("mallory")


@pytest.mark.parametrize("logins", ["boss-login", ("boss-login", "boss-2")], ids=["one", "several"])
async def test_a_request_under_another_login_than_its_senders_is_not_run(
    mesh: Mesh, boss: Puppet, logins: str | tuple[str, ...]
) -> None:
    await mesh.replica(doubler, peer_logins={"boss": logins})
    for user_id in ("mallory", None):
        await boss.send("doubler", replace(boss.request(1), user_id=user_id))
    await mesh.events.wait(Step.DEAD_LETTER, count=2)
    known = replace(boss.request(2), user_id="boss-login" if isinstance(logins, str) else "boss-2")
    await boss.send("doubler", known)
    assert await boss.reply(known.correlation_id) == Ok(4)
    assert boss.replies() == [Ok(4)]
    assert len(mesh.events.of(Step.SEGMENT)) == 2
    assert mesh.dead_reasons("doubler") == [
        f"user_id: 'boss' sent this under {login}, which peer_logins does not list for it"
        for login in ("the login 'mallory'", "no login")
    ]


@pytest.mark.parametrize("body", [None, b"unreadable"], ids=["readable", "unreadable"])
@pytest.mark.parametrize("reply_to", ["asker.resp", "asker.private.1", "mallory", "mallory2.resp", ".resp"])
async def test_no_reply_goes_to_another_senders_address(
    mesh: Mesh, mallory: Puppet, reply_to: str, body: bytes | None
) -> None:
    replica = await mesh.replica(doubler)
    request = replace(mallory.request(1), reply_to=Address(reply_to))
    await mallory.send("doubler", request if body is None else replace(request, body=body))
    await mesh.events.wait(Step.DEAD_LETTER)
    await mesh.settle()
    assert [message.type for _, message in replica.broker.published] == []
    assert mesh.events.of(Step.SEGMENT) == []
    assert mesh.unacked("doubler") == 0


@pytest.mark.parametrize("name", ["doubler.private", "doubler."])
async def test_a_name_with_a_dot_reaches_nobody_elses_queue(mesh: Mesh, mallory: Puppet, name: str) -> None:
    replica = await mesh.replica(doubler)
    request = replace(mallory.request(1), app_id=name, reply_to=Address(f"{name}.{replica.id}"))
    await mallory.send("doubler", request)
    await mesh.events.wait(Step.DEAD_LETTER)
    await mesh.settle()
    assert replica.broker.published == []


async def test_an_outsiders_malformed_request_ends_nobodys_call(mesh: Mesh, boss: Puppet, mallory: Puppet) -> None:
    """The request has the ids of a call of `asker`, and its reply address."""
    gate = Gate()
    await mesh.replica(asker("asker", "doubler"))
    await mesh.replica(doubler_behind(gate))
    task_id = await boss.ask("asker", 1)
    await gate.reach()
    _, (call,) = await mesh.task(task_id)
    bad = replace(
        mallory.request(1, call.sub_task_id),
        body=b"?",
        reply_to=responses_of(AgentName("asker")),
        headers={Header.PARENT_TASK.value: task_id},
    )
    await mallory.send("doubler", bad)
    await mesh.events.wait(Step.DEAD_LETTER)
    await mesh.settle()
    gate.opened.set()
    assert await boss.reply(task_id) == Ok({"doubler": 2})


@HOMES
async def test_an_impostors_status_is_not_forwarded(mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool) -> None:
    await mesh.replica(asker("asker", "peer"), durable=durable, peer_logins={"peer": "peer-login"})
    task_id = await boss.ask("asker", 1)
    call = await peer.request_number()
    await peer.status(call, "forged", user_id="mallory")
    await mesh.events.wait(Step.DEAD_LETTER)
    await peer.status(call, "true", user_id="peer-login")
    await peer.respond(call, "right", user_id="peer-login")
    assert await boss.reply(task_id) == Ok({"peer": "right"})
    assert boss.statuses() == ["true"]


@HOMES
@pytest.mark.parametrize("name", ["boss", "doubler"])
async def test_an_impostors_cancel_cancels_nothing(mesh: Mesh, boss: Puppet, durable: bool, name: str) -> None:
    gate = Gate()
    logins = {"boss": "boss-login", "doubler": "doubler-login"}
    await mesh.replica(doubler_behind(gate), durable=durable, peer_logins=logins)
    request = replace(boss.request(1), user_id="boss-login")
    await boss.send("doubler", request)
    await gate.reach()
    cancel = replace(cancel_message(AgentName(name), request.correlation_id), user_id="mallory")  # type: ignore[arg-type]
    await boss.letter("doubler", cancel)
    await mesh.events.wait(Step.DEAD_LETTER)
    gate.opened.set()
    assert await boss.reply(request.correlation_id) == Ok(2)


@pytest.mark.parametrize("fields", [{"app_id": "mallory"}, {"user_id": "mallory"}], ids=["other", "impostor"])
async def test_a_strangers_wake_up_call_is_a_dead_letter(mesh: Mesh, mallory: Puppet, fields: dict[str, Any]) -> None:
    await mesh.replica(doubler, peer_logins={"doubler": "doubler-login"})
    await mallory.letter("doubler", replace(wake_message(AgentName("doubler")), **fields))
    await mesh.events.wait(Step.DEAD_LETTER)
    assert len(mesh.dead_letters("doubler")) == 1


async def test_a_request_on_a_response_queue_is_not_answered_elsewhere(mesh: Mesh, mallory: Puppet) -> None:
    replica = await mesh.replica(doubler)
    await mallory.letter("doubler", replace(mallory.request(1, new_id()), reply_to=responses_of(AgentName("boss"))))
    await mesh.events.wait(Step.DEAD_LETTER)
    await mesh.settle()
    assert replica.broker.published == []


def doubler_behind(gate: Gate) -> Any:
    """An agent that doubles its input once the gate opens."""
    from meshpoint.agents.function import agent
    from meshpoint.model.context import TaskExecutionContext

    @agent("doubler")
    async def double(ctx: TaskExecutionContext, number: int) -> int:
        await gate()
        return 2 * number

    return double
