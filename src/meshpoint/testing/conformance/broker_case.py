"""What the broker suites share: brokers under test, an inbox, messages."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from meshpoint.model.ids import AgentName, new_id
from meshpoint.model.messages import (
    Address,
    Message,
    MessageType,
    requests_of,
)
from meshpoint.ports.broker import Broker, Delivery, Published

PATIENCE = 30.0
"""Seconds to wait for what must come. Only a failing test waits that long."""

AGENT = AgentName("travel")
STRANGER = AgentName("flights")
REQUESTS = requests_of(AGENT)


def a_message(body: bytes = b"{}", **changes: object) -> Message:
    """A request that differs from every other by its `message_id`."""
    message = Message(MessageType.REQUEST, body, message_id=new_id(), correlation_id=new_id(), app_id="planner")
    return replace(message, **changes)  # type: ignore[arg-type]


class Inbox:
    """Collects deliveries in order; itself the `on_delivery` callback."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Delivery] = asyncio.Queue()
        self._thread = threading.get_ident()

    def __call__(self, delivery: Delivery) -> None:
        if threading.get_ident() != self._thread or not asyncio.get_running_loop().is_running():
            raise AssertionError("on_delivery must be called on the event loop")
        self._queue.put_nowait(delivery)

    async def next(self) -> Delivery:
        """The next delivery."""
        async with asyncio.timeout(PATIENCE):
            return await self._queue.get()

    async def take(self, count: int) -> list[Delivery]:
        """The next `count` deliveries."""
        return [await self.next() for _ in range(count)]

    def empty(self) -> bool:
        """Whether nothing waits here."""
        return self._queue.empty()


async def send(broker: Broker, address: Address, *messages: Message) -> None:
    """Publish `messages`, all of which must be accepted."""
    results = await broker.publish([(address, message) for message in messages])
    assert results == [Published.ACCEPTED] * len(messages)


async def until_depth(broker: Broker, address: Address, depth: int | None) -> None:
    """Return when `depth` messages lie in the queue: a broker may count with some delay."""
    async with asyncio.timeout(PATIENCE):
        while await broker.depth(address) != depth:  # noqa: ASYNC110  a broker has no event for it
            await asyncio.sleep(0)


class BrokerCase(ABC):
    """The fixtures and hooks that an adapter's test class provides; see `meshpoint.testing.conformance.broker`."""

    verified_user: str | None = None
    """The `user_id` that the broker itself puts on messages from `broker`; None: it carries the sender's."""

    @pytest.fixture
    @abstractmethod
    def broker(self) -> AsyncIterator[Broker]:
        """An open broker on empty data."""

    @pytest.fixture
    @abstractmethod
    def other(self, broker: Broker) -> AsyncIterator[Broker]:
        """A second open broker on the data of `broker`."""

    @abstractmethod
    async def break_connection(self, broker: Broker) -> None:
        """Make `broker` lose its connection; it must come back by itself."""

    @pytest.fixture(autouse=True)
    async def _declared(self, broker: Broker) -> None:
        await broker.declare(AGENT)

    def received(self, message: Message) -> Message:
        """What a consumer sees of `message`."""
        return replace(message, user_id=self.verified_user or message.user_id)

    async def nothing_is_left(self, broker: Broker, inbox: Inbox) -> None:
        """Nothing lies in the request queue and nothing came twice: what comes next is what is sent next."""
        await until_depth(broker, REQUESTS, 0)
        last = a_message()
        await send(broker, REQUESTS, last)
        delivery = await inbox.next()
        assert delivery.message.message_id == last.message_id
        assert delivery.count == 1
        assert await delivery.ack()
