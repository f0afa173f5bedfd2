"""A cancel from an earlier attempt of the requester that arrives late."""

from __future__ import annotations

import pytest

from meshpoint.engine import receive
from meshpoint.model.checkpoint import CancelNotice
from meshpoint.model.envelopes import cancel_letter
from meshpoint.model.ids import AgentName, TaskId, resumed_id
from meshpoint.model.options import Options
from meshpoint.model.outcomes import Failed, Ok

from .agents import Gate, gated
from .mesh import Mesh
from .puppet import Puppet


@pytest.mark.parametrize("retry", [None, 2])
def test_a_cancel_says_for_which_attempt_it_speaks(retry: int | None) -> None:
    child, parent = TaskId("child"), TaskId("parent")
    kept = child if retry is None else resumed_id(child, retry)
    _, message = cancel_letter(CancelNotice(AgentName("boss"), parent, kept, AgentName("peer")))
    spoken_for = parent if retry is None else resumed_id(parent, retry)
    assert receive.cancelled_task(message, Options()) == (child, spoken_for)


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize(("parent", "heeded"), [("boss-task", True), (None, True), ("boss-task~resume-1", False)])
async def test_only_the_attempt_that_asked_may_cancel(
    mesh: Mesh, boss: Puppet, durable: bool, parent: str | None, heeded: bool
) -> None:
    gate = Gate()
    await mesh.replica(gated("agent", gate), durable=durable)
    task_id = await boss.ask("agent", 1, parent_task="boss-task")
    await gate.reach()
    await boss.cancel("agent", task_id, parent=parent)
    await mesh.settle()
    gate.opened.set()
    reply = await boss.reply(task_id)
    assert isinstance(reply, Failed) if heeded else reply == Ok("done")
