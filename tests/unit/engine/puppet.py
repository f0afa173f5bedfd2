"""An agent played by the test: it records every message it receives and can send any message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Self

from pydantic import JsonValue

from meshpoint.adapters.inprocess.broker import InProcessBroker
from meshpoint.adapters.inprocess.exchange import InProcessExchange
from meshpoint.model.bodies import (
    A2AMessage,
    Part,
    RequestBody,
    ResponseBody,
    StatusBody,
    StatusUpdate,
    TaskState,
    TaskStatus,
    parse,
    response_body,
)
from meshpoint.model.envelopes import cancel_message
from meshpoint.model.ids import AgentName, TaskId, new_id
from meshpoint.model.messages import Address, Header, Message, MessageType, nested_of, requests_of, responses_of
from meshpoint.model.outcomes import Failed, Ok, Outcome
from meshpoint.ports.broker import Delivery, Published


class Puppet:
    """Receives and acks all messages to agent `name`. Tests read `requests` and `letters`."""

    def __init__(self, exchange: InProcessExchange, name: str) -> None:
        self.name = name
        self._broker = InProcessBroker(exchange)
        self.requests: list[Message] = []
        self.letters: list[Message] = []
        self._changed = asyncio.Event()
        self._acks: set[asyncio.Task[bool]] = set()

    async def open(self) -> Self:
        await self._broker.open()
        await self._broker.declare(AgentName(self.name))
        await self._broker.consume(requests_of(AgentName(self.name)), 1000, self._taker(self.requests))
        await self._broker.consume(nested_of(AgentName(self.name)), 1000, self._taker(self.requests))
        await self._broker.consume(responses_of(AgentName(self.name)), 1000, self._taker(self.letters))
        return self

    async def close(self) -> None:
        await asyncio.gather(*self._acks)
        await self._broker.close()

    def _taker(self, into: list[Message]) -> Callable[[Delivery], None]:
        def take(delivery: Delivery) -> None:
            into.append(delivery.message)
            self._changed.set()
            ack = asyncio.ensure_future(delivery.ack())
            self._acks.add(ack)
            ack.add_done_callback(self._acks.discard)

        return take

    async def send(self, agent: str, message: Message, address: Address | None = None) -> Published:
        (word,) = await self._broker.publish([(address or requests_of(AgentName(agent)), message)])
        return word

    async def ask(self, agent: str, input_: JsonValue, task_id: str | None = None, **headers: Any) -> TaskId:
        message = self.request(input_, task_id, **headers)
        assert await self.send(agent, message) is Published.ACCEPTED
        return TaskId(message.correlation_id)

    def request(self, input_: JsonValue, task_id: str | None = None, metadata: Any = None, **headers: Any) -> Message:
        """A request; each keyword sets a header, for example `deadline` sets `x-deadline`."""
        task_id = task_id or new_id()
        said = A2AMessage(message_id=new_id(), role="ROLE_USER", parts=[Part(data=input_)], task_id=task_id)
        return Message(
            type=MessageType.REQUEST,
            body=RequestBody(message=said, metadata=metadata or {}).to_bytes(),
            message_id=task_id,
            correlation_id=task_id,
            app_id=self.name,
            reply_to=responses_of(AgentName(self.name)),
            headers={Header[key.upper()].value: value for key, value in headers.items()},
        )

    async def cancel(self, agent: str, task_id: str, parent: str | None = None) -> None:
        await self.letter(agent, cancel_message(AgentName(self.name), TaskId(task_id), parent=parent))

    def replies(self, task_id: str | None = None) -> list[Outcome]:
        return [
            parse(ResponseBody, letter.body).outcome()
            for letter in self.letters
            if letter.type is MessageType.RESPONSE and task_id in {None, letter.correlation_id}
        ]

    async def reply(self, task_id: str) -> Outcome:
        """Wait for the reply to `task_id` and assert that it is the only one."""
        await self._until(lambda: bool(self.replies(task_id)))
        (reply,) = self.replies(task_id)
        return reply

    def statuses(self) -> list[JsonValue]:
        bodies = [parse(StatusBody, each.body) for each in self.letters if each.type is MessageType.STATUS]
        said = [body.status_update.status.message for body in bodies]
        return [message.parts[0].data for message in said if message]

    async def request_number(self, count: int = 1) -> Message:
        """Wait for the `count`-th request."""
        await self._until(lambda: len(self.requests) >= count)
        return self.requests[count - 1]

    async def respond(self, to: Message, outcome: Outcome | JsonValue, **fields: Any) -> None:
        outcome = outcome if isinstance(outcome, (Ok, Failed)) else Ok(outcome)
        body = response_body(to.correlation_id, None, outcome).to_bytes()
        await self.say(to, MessageType.RESPONSE, **{"body": body, **fields})

    async def status(self, to: Message, data: JsonValue, **fields: Any) -> None:
        said = A2AMessage(message_id=new_id(), role="ROLE_AGENT", parts=[Part(data=data)])
        status = TaskStatus(state=TaskState.WORKING, message=said)
        body = StatusBody(status_update=StatusUpdate(task_id=to.correlation_id, status=status)).to_bytes()
        await self.say(to, MessageType.STATUS, **{"body": body, **fields})

    async def say(self, to: Message, type_: MessageType, **fields: Any) -> None:
        address: Address = fields.pop("address", None) or to.reply_to
        parent = to.headers.get(Header.PARENT_TASK.value)
        message = Message(
            **{
                "type": type_,
                "message_id": new_id(),
                "correlation_id": to.correlation_id,
                "app_id": self.name,
                "headers": {} if parent is None else {Header.PARENT_TASK.value: parent},
                **fields,
            }
        )
        assert await self._broker.publish([(address, message)]) == [Published.ACCEPTED]

    async def letter(self, agent: str, message: Message) -> None:
        assert await self._broker.publish([(responses_of(AgentName(agent)), message)]) == [Published.ACCEPTED]

    async def say_to(self, address: str, message: Message) -> None:
        assert await self._broker.publish([(Address(address), message)]) == [Published.ACCEPTED]

    def cancels(self) -> list[str]:
        """Ids of the tasks for which a cancel arrived."""
        return [letter.correlation_id for letter in self.letters if letter.type is MessageType.CANCEL]

    async def cancelled(self, count: int = 1) -> list[str]:
        await self._until(lambda: len(self.cancels()) >= count)
        return self.cancels()

    async def _until(self, happened: Callable[[], bool]) -> None:
        while not happened():
            self._changed.clear()
            await self._changed.wait()
