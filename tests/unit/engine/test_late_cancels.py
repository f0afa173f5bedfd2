"""A cancel from an earlier attempt of the requester that arrives late."""

from __future__ import annotations

import pytest

from fake_peer import FakePeer
from meshpoint.engine import parsing
from meshpoint.model.envelopes import cancel_envelope
from meshpoint.model.ids import AgentName, TaskId, resumed_id
from meshpoint.model.options import Options
from meshpoint.model.outcomes import Failed, Ok
from meshpoint.model.tasks import CancelNotice

from .agents import Gate, asker, gated
from .mesh import Mesh


@pytest.mark.parametrize("retry", [None, 2])
def test_a_cancel_names_the_attempt_it_belongs_to(retry: int | None) -> None:
    child, parent = TaskId("child"), TaskId("parent")
    child_id = child if retry is None else resumed_id(child, retry)
    _, message = cancel_envelope(
        CancelNotice(AgentName("client"), parent, child_id, AgentName("peer"))
    )
    parent_id = parent if retry is None else resumed_id(parent, retry)
    assert parsing.parse_cancel(message, Options()) == (child, parent_id, "")


ATTEMPTS = pytest.mark.parametrize(
    ("parent", "heeded"), [("client-task", True), (None, True), ("client-task~resume-1", False)]
)


@pytest.mark.parametrize("durable", [True, False])
@ATTEMPTS
async def test_only_the_requesting_attempt_can_cancel(
    mesh: Mesh, client: FakePeer, durable: bool, parent: str | None, heeded: bool
) -> None:
    gate = Gate()
    await mesh.replica(gated("agent", gate), durable=durable)
    task_id = await client.ask("agent", 1, parent_task="client-task")
    await gate.wait_reached()
    await client.cancel("agent", task_id, parent=parent)
    await mesh.idle()
    gate.opened.set()
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed) if heeded else reply == Ok("done")


@pytest.mark.parametrize("durable", [True, False])
@ATTEMPTS
async def test_only_the_requesting_attempt_can_cancel_a_waiting_task(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool, parent: str | None, heeded: bool
) -> None:
    await mesh.replica(asker("agent", "peer"), durable=durable)
    task_id = await client.ask("agent", 1, parent_task="client-task")
    request = await peer.wait_for_request()
    await mesh.idle()
    await client.cancel("agent", task_id, parent=parent)
    await mesh.idle()
    await peer.respond(request, "done")
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed) if heeded else reply == Ok({"peer": "done"})
