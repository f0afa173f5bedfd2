"""A caller and an agent that the test plays, on one in-process exchange."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel

from fake_peer import FakePeer
from meshpoint import Mesh, Peer
from meshpoint.adapters.inprocess.broker import InProcessBroker, InProcessExchange
from meshpoint.client import transport
from meshpoint.client.reply_slot import ReplySlot
from meshpoint.client.transport import Transport
from meshpoint.errors import BrokerUnavailable
from meshpoint.model.ids import TaskId
from meshpoint.model.messages import Address, Message
from meshpoint.ports.broker import PublishResult


class Trip(BaseModel):
    city: str
    days: int = 1


class Plan(BaseModel):
    text: str


ROME, OSLO = Trip(city="Rome"), Trip(city="Oslo")
travel = Peer("travel", Trip, Plan)


def give_up_after_reply(patch: pytest.MonkeyPatch) -> None:
    """Make callers give up after the first reply to an answer or a signal."""

    async def first_reply(replies: ReplySlot[Any]) -> AsyncIterator[Any]:
        yield await replies.take()
        raise TimeoutError

    patch.setattr(transport, "COMPLETION_SECONDS", 600.0)
    patch.setattr(transport, "_until_silent", first_reply)


class FailingBroker(InProcessBroker):
    """Fails the next publishes: with a result, before the message is stored, or after it."""

    def __init__(self, exchange: InProcessExchange) -> None:
        super().__init__(exchange)
        self.failures: deque[PublishResult | str] = deque()

    async def publish(self, messages: Sequence[tuple[Address, Message]]) -> list[PublishResult]:
        failure = self.failures.popleft() if self.failures else None
        if isinstance(failure, PublishResult):
            return [failure for _ in messages]
        if failure == "not stored":
            raise BrokerUnavailable("the broker is unavailable")
        results = await super().publish(messages)
        if failure is not None:
            raise BrokerUnavailable("the confirm was lost")
        return results


@dataclass
class Call:
    """A mesh, its broker and transport, and the agent `travel`."""

    mesh: Mesh
    transport: Transport
    broker: FailingBroker
    agent: FakePeer

    @property
    def open_tasks(self) -> list[TaskId]:
        """Ids of the tasks that the transport knows."""
        return [task.id for task in self.transport._open.values()]


@asynccontextmanager
async def open_call() -> AsyncIterator[Call]:
    exchange = InProcessExchange()
    broker, agents_broker = FailingBroker(exchange), InProcessBroker(exchange)
    await agents_broker.open()
    agent = await FakePeer(agents_broker, "travel").open()
    transport = Transport(broker, "api")
    try:
        async with transport:
            yield Call(Mesh(transport), transport, broker, agent)
    finally:
        await agent.close()
