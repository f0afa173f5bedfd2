"""The client: sends requests until the broker has them, cancels some, and receives replies."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from pydantic import JsonValue

from meshpoint.errors import BrokerUnavailable
from meshpoint.model.bodies import A2AMessage, Part, RequestBody
from meshpoint.model.envelopes import cancel_message
from meshpoint.model.ids import AgentName, TaskId, new_id
from meshpoint.model.messages import Address, Header, HeaderValue, Message, MessageType, requests_of, responses_of
from meshpoint.ports.broker import Delivery, Published

from .broker import SimulatedBroker

BOSS = AgentName("boss")
OPERATOR = "operator"
"""Login for cancels, some of which concern tasks of other requesters."""


@dataclass(slots=True)
class Asked:
    """One request, and the outcomes it may have."""

    task_id: TaskId
    number: int
    tight: bool = False  # its calls have little time
    deadline: bool = False  # the task itself has little time
    cancelled: bool = False  # the client has cancelled it


class Boss:
    """Requester of every root task."""

    def __init__(self, broker: SimulatedBroker) -> None:
        self._broker = broker
        self.asked: list[Asked] = []
        self.answered: set[str] = set()
        self._acks: set[asyncio.Task[bool]] = set()

    async def open(self) -> None:
        """Start to receive replies."""
        await self._broker.open()
        await self._broker.declare(BOSS)
        await self._broker.consume(responses_of(BOSS), 1000, self._take)

    async def ask(self, number: int, *, tight: bool, deadline: float | None) -> None:
        """Send a request to `root`; `deadline` is in seconds since the epoch."""
        asked = Asked(TaskId(new_id()), number, tight, deadline is not None)
        self.asked.append(asked)
        headers: dict[str, HeaderValue] = {} if deadline is None else {Header.DEADLINE.value: deadline}
        input_: JsonValue = {"number": number, "tight": tight}
        said = A2AMessage(message_id=new_id(), role="ROLE_USER", parts=[Part(data=input_)], task_id=asked.task_id)
        message = Message(
            type=MessageType.REQUEST,
            body=RequestBody(message=said).to_bytes(),
            message_id=asked.task_id,
            correlation_id=asked.task_id,
            app_id=BOSS,
            reply_to=responses_of(BOSS),
            headers=headers,
        )
        await self._send(requests_of(AgentName("root")), message)

    async def cancel(self, agent: AgentName, task_id: TaskId) -> None:
        """Cancel a task of `agent`, regardless of its requester."""
        await self._send(responses_of(agent), replace(cancel_message(BOSS, task_id), user_id=OPERATOR))

    async def _send(self, address: Address, message: Message) -> None:
        while True:
            try:
                if await self._broker.publish([(address, message)]) == [Published.ACCEPTED]:
                    return
            except BrokerUnavailable:
                pass  # it may have arrived: send the same id again
            await asyncio.sleep(0.5)

    def _take(self, delivery: Delivery) -> None:
        self.answered.add(delivery.message.correlation_id)
        ack = asyncio.ensure_future(delivery.ack())
        self._acks.add(ack)
        ack.add_done_callback(self._acks.discard)
