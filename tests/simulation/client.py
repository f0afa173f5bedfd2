"""The client: sends requests until the broker has them, cancels some, and receives replies."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from pydantic import JsonValue

from meshpoint.errors import BrokerUnavailable
from meshpoint.model.bodies import A2AMessage, Part, RequestBody
from meshpoint.model.envelopes import cancel_message, complete_message
from meshpoint.model.ids import AgentName, TaskId, new_id
from meshpoint.model.messages import (
    Address,
    Header,
    HeaderValue,
    Message,
    MessageType,
    request_queue,
    response_queue,
)
from meshpoint.model.questions import QuestionKey
from meshpoint.ports.broker import Delivery, PublishResult

from .broker import SimulatedBroker

CLIENT = AgentName("client")
OPERATOR = "operator"
"""Login for cancels, some of which concern tasks of other requesters."""


@dataclass(slots=True)
class ClientRequest:
    """One request, and the outcomes it may have."""

    task_id: TaskId
    number: int
    has_tight_timeouts: bool = False  # its calls have little time
    has_deadline: bool = False  # the task itself has little time
    is_cancelled: bool = False  # the client has cancelled it


class SimulatedClient:
    """Requester of every root task."""

    def __init__(self, broker: SimulatedBroker) -> None:
        self._broker = broker
        self.requests: list[ClientRequest] = []
        self.answered_ids: set[str] = set()
        self._acks: set[asyncio.Task[bool]] = set()

    async def open(self) -> None:
        """Start to receive replies."""
        await self._broker.open()
        await self._broker.declare(CLIENT)
        await self._broker.consume(response_queue(CLIENT), 1000, self._on_reply)

    async def send_request(self, number: int, *, tight: bool, deadline: float | None) -> None:
        """Send a request to `root`; `deadline` is in seconds since the epoch."""
        request = ClientRequest(TaskId(new_id()), number, tight, deadline is not None)
        self.requests.append(request)
        headers: dict[str, HeaderValue] = (
            {} if deadline is None else {Header.DEADLINE.value: deadline}
        )
        input_: JsonValue = {"number": number, "tight": tight}
        content = A2AMessage(
            message_id=new_id(),
            role="ROLE_USER",
            parts=[Part(data=input_)],
            task_id=request.task_id,
        )
        message = Message(
            type=MessageType.REQUEST,
            body=RequestBody(message=content).to_bytes(),
            message_id=request.task_id,
            correlation_id=request.task_id,
            app_id=CLIENT,
            reply_to=response_queue(CLIENT),
            headers=headers,
        )
        await self._send(request_queue(AgentName("root")), message)

    async def cancel(self, agent: AgentName, task_id: TaskId) -> None:
        """Cancel a task of `agent`, regardless of its requester."""
        await self._send(
            response_queue(agent), replace(cancel_message(CLIENT, task_id), user_id=OPERATOR)
        )

    async def complete(self, key: QuestionKey, value: JsonValue) -> None:
        """Answer a question."""
        message = complete_message(CLIENT, key.to_id(), key.task_id, value, response_queue(CLIENT))
        await self._send(response_queue(key.agent), replace(message, user_id=OPERATOR))

    async def _send(self, address: Address, message: Message) -> None:
        while True:
            try:
                if await self._broker.publish([(address, message)]) == [PublishResult.ACCEPTED]:
                    return
            except BrokerUnavailable:
                pass  # it may have arrived: send the same id again
            await asyncio.sleep(0.5)

    def _on_reply(self, delivery: Delivery) -> None:
        self.answered_ids.add(delivery.message.correlation_id)
        ack = asyncio.ensure_future(delivery.ack())
        self._acks.add(ack)
        ack.add_done_callback(self._acks.discard)
