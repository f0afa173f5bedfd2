"""An agent played by the test: it records every message it receives and can send any message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

from pydantic import JsonValue

from meshpoint.model.bodies import (
    A2AMessage,
    A2ATaskState,
    Part,
    RequestBody,
    ResponseBody,
    StatusBody,
    StatusUpdate,
    TaskStatus,
    parse_body,
)
from meshpoint.model.envelopes import cancel_message, encode_reply
from meshpoint.model.ids import AgentName, TaskId, new_id
from meshpoint.model.messages import (
    Address,
    Header,
    Message,
    MessageType,
    nested_queue,
    request_queue,
    response_queue,
)
from meshpoint.model.outcomes import Failed, Ok, Outcome
from meshpoint.ports.broker import Broker, Delivery, PublishResult


class FakePeer:
    """Receives and acks all messages to agent `name`. Tests read `requests` and `messages`."""

    def __init__(self, broker: Broker, name: str) -> None:
        self.name, self._broker = name, broker
        self.requests: list[Message] = []
        self.messages: list[Message] = []
        self._changed = asyncio.Event()
        self._acks: set[asyncio.Task[bool]] = set()

    async def open(self) -> Self:
        """Declare the queues on the open broker, and consume them."""
        name = AgentName(self.name)
        await self._broker.declare(name)
        for address, inbox in (
            (request_queue(name), self.requests),
            (nested_queue(name), self.requests),
            (response_queue(name), self.messages),
        ):
            await self._broker.consume(address, 1000, self._receiver(inbox))
        return self

    async def close(self) -> None:
        await asyncio.gather(*self._acks)
        await self._broker.close()

    def _receiver(self, inbox: list[Message]) -> Callable[[Delivery], None]:
        def receive(delivery: Delivery) -> None:
            inbox.append(delivery.message)
            self._changed.set()
            ack = asyncio.ensure_future(delivery.ack())
            self._acks.add(ack)
            ack.add_done_callback(self._acks.discard)

        return receive

    async def send(
        self, agent: str, message: Message, address: Address | None = None
    ) -> PublishResult:
        (result,) = await self._broker.publish(
            [(address or request_queue(AgentName(agent)), message)]
        )
        return result

    async def ask(
        self,
        agent: str,
        input_: JsonValue,
        task_id: str | None = None,
        reply_to: str | None = None,
        **headers: Any,
    ) -> TaskId:
        """Send a request and return its task id."""
        message = self.request(input_, task_id, **headers)
        if reply_to is not None:
            message = replace(message, reply_to=Address(reply_to))
        assert await self.send(agent, message) is PublishResult.ACCEPTED
        return TaskId(message.correlation_id)

    def request(
        self, input_: JsonValue, task_id: str | None = None, metadata: Any = None, **headers: Any
    ) -> Message:
        """A request; each keyword sets a header, for example `deadline` sets `x-deadline`."""
        task_id = task_id or new_id()
        content = A2AMessage(
            message_id=new_id(), role="ROLE_USER", parts=[Part(data=input_)], task_id=task_id
        )
        return Message(
            type=MessageType.REQUEST,
            body=RequestBody(message=content, metadata=metadata or {}).to_bytes(),
            message_id=task_id,
            correlation_id=task_id,
            app_id=self.name,
            reply_to=response_queue(AgentName(self.name)),
            headers={Header[key.upper()].value: value for key, value in headers.items()},
        )

    async def cancel(
        self, agent: str, task_id: str, parent: str | None = None, reason: str = ""
    ) -> None:
        message = cancel_message(
            AgentName(self.name), TaskId(task_id), parent=parent, reason=reason
        )
        await self.send_control(agent, message)

    def replies(self, task_id: str | None = None) -> list[Outcome]:
        return [
            parse_body(ResponseBody, message.body).outcome()
            for message in self.messages
            if message.type is MessageType.RESPONSE and task_id in {None, message.correlation_id}
        ]

    async def reply(self, task_id: str) -> Outcome:
        """Wait for the reply to `task_id` and assert that it is the only one."""
        await self.first_reply(task_id)
        (reply,) = self.replies(task_id)
        return reply

    async def first_reply(self, task_id: str) -> Outcome:
        """Wait for a reply to `task_id`. Others may follow."""
        await self.wait_until(lambda: bool(self.replies(task_id)))
        return self.replies(task_id)[0]

    def statuses(self) -> list[JsonValue]:
        bodies = [
            parse_body(StatusBody, received.body)
            for received in self.messages
            if received.type is MessageType.STATUS
        ]
        contents = [body.status_update.status.message for body in bodies]
        return [content.parts[0].data for content in contents if content]

    async def wait_for_request(self, count: int = 1) -> Message:
        """Wait for the `count`-th request."""
        await self.wait_until(lambda: len(self.requests) >= count)
        return self.requests[count - 1]

    async def respond(
        self, request_message: Message, outcome: Outcome | JsonValue, **fields: Any
    ) -> None:
        outcome = outcome if isinstance(outcome, (Ok, Failed)) else Ok(outcome)
        body = encode_reply(TaskId(request_message.correlation_id), None, outcome)
        await self.send_back(request_message, MessageType.RESPONSE, **{"body": body, **fields})

    async def status(self, request_message: Message, data: JsonValue, **fields: Any) -> None:
        content = A2AMessage(message_id=new_id(), role="ROLE_AGENT", parts=[Part(data=data)])
        status = TaskStatus(state=A2ATaskState.WORKING, message=content)
        update = StatusUpdate(
            task_id=request_message.correlation_id,
            status=status,
            metadata=fields.pop("metadata", {}),
        )
        body = StatusBody(status_update=update).to_bytes()
        await self.send_back(request_message, MessageType.STATUS, **{"body": body, **fields})

    async def send_back(self, request_message: Message, type_: MessageType, **fields: Any) -> None:
        address: Address | None = fields.pop("address", None) or request_message.reply_to
        assert address is not None
        parent = request_message.headers.get(Header.PARENT_TASK.value)
        message = Message(
            **{
                "type": type_,
                "message_id": new_id(),
                "correlation_id": request_message.correlation_id,
                "app_id": self.name,
                "headers": {} if parent is None else {Header.PARENT_TASK.value: parent},
                **fields,
            }
        )
        assert await self._broker.publish([(address, message)]) == [PublishResult.ACCEPTED]

    async def send_control(self, agent: str, message: Message) -> None:
        assert await self._broker.publish([(response_queue(AgentName(agent)), message)]) == [
            PublishResult.ACCEPTED
        ]

    async def send_to_address(self, address: str, message: Message) -> None:
        assert await self._broker.publish([(Address(address), message)]) == [
            PublishResult.ACCEPTED
        ]

    def cancels(self) -> list[str]:
        """Ids of the tasks for which a cancel arrived."""
        return [
            message.correlation_id
            for message in self.messages
            if message.type is MessageType.CANCEL
        ]

    async def wait_for_cancels(self, count: int = 1) -> list[str]:
        await self.wait_until(lambda: len(self.cancels()) >= count)
        return self.cancels()

    async def depth(self, address: Address) -> int | None:
        """Number of messages waiting at an address."""
        return await self._broker.depth(address)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a message makes `condition` true."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()
