"""Requests that arrive while others of their task are being acked."""

from __future__ import annotations

import asyncio

from meshpoint.engine.segment import Segment
from meshpoint.model.ids import AgentName, RunId, TaskId, new_id
from meshpoint.model.messages import Address, Message, MessageType, request_queue
from meshpoint.model.tasks import Requester, Run

from .agents import doubler
from .mesh import Mesh

AGENT = AgentName("double")


class SlowDelivery:
    """A delivery whose ack waits for `may_ack`."""

    delivery_count = 1
    lost = False

    def __init__(self, task_id: TaskId, may_ack: asyncio.Event) -> None:
        self.message = Message(
            type=MessageType.REQUEST,
            body=b"",
            message_id=new_id(),
            correlation_id=task_id,
            app_id="client",
        )
        self.address: Address = request_queue(AGENT)
        self.may_ack = may_ack
        self.ack_begun = asyncio.Event()
        self.acked = False

    async def ack(self) -> bool:
        self.ack_begun.set()
        await self.may_ack.wait()
        self.acked = True
        return True

    async def requeue(self) -> bool:
        raise AssertionError

    async def dead_letter(self, reason: str) -> bool:
        raise AssertionError


async def test_a_copy_that_arrives_while_another_is_acked_is_kept(mesh: Mesh) -> None:
    replica = await mesh.replica(doubler, durable=False)
    tasks, settlement = replica.worker.tasks, replica.worker.runner.settlement
    task_id, may_ack = TaskId(new_id()), asyncio.Event()
    earlier = [SlowDelivery(task_id, may_ack) for _ in range(8)]
    assert tasks.unacked.add(task_id, earlier) == []
    first, late = SlowDelivery(task_id, may_ack), SlowDelivery(task_id, may_ack)
    segment = Segment(Run(task_id, AGENT, RunId(new_id())), Requester(), deliveries=[first])
    tasks.segments[segment.run.task_id] = segment
    keeping = asyncio.create_task(settlement.keep_unacked(segment))
    await earlier[0].ack_begun.wait()  # one copy more than are kept
    await settlement.add_redelivery(task_id, late)
    may_ack.set()
    await keeping
    tasks.remove(segment)
    assert [delivery.acked for delivery in earlier] == [True] * 2 + [False] * 6
    assert tasks.unacked.remove(task_id) == [*earlier[2:], first, late]
