"""Fixtures, helpers and sample values shared by the broker suites."""

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
"""Seconds to wait for an expected event. Only a failing test waits this long."""

AGENT = AgentName("travel")
STRANGER = AgentName("flights")
REQUESTS = requests_of(AGENT)


def a_message(body: bytes = b"{}", **changes: object) -> Message:
    """A request with a new `message_id` and `correlation_id`."""
    message = Message(MessageType.REQUEST, body, message_id=new_id(), correlation_id=new_id(), app_id="planner")
    return replace(message, **changes)  # type: ignore[arg-type]


class Inbox:
    """Collects deliveries in order. Pass it as the `on_delivery` callback."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Delivery] = asyncio.Queue()
        self._thread = threading.get_ident()

    def __call__(self, delivery: Delivery) -> None:
        if threading.get_ident() != self._thread or not asyncio.get_running_loop().is_running():
            raise AssertionError("on_delivery must be called on the event loop")
        self._queue.put_nowait(delivery)

    async def next(self) -> Delivery:
        """Wait for the next delivery and return it."""
        async with asyncio.timeout(PATIENCE):
            return await self._queue.get()

    async def take(self, count: int) -> list[Delivery]:
        """Wait for the next `count` deliveries and return them."""
        return [await self.next() for _ in range(count)]

    def empty(self) -> bool:
        """Whether no delivery is waiting in the inbox."""
        return self._queue.empty()


async def send(broker: Broker, address: Address, *messages: Message) -> None:
    """Publish `messages` and assert that the broker accepts all of them."""
    results = await broker.publish([(address, message) for message in messages])
    assert results == [Published.ACCEPTED] * len(messages)


async def until_depth(broker: Broker, address: Address, depth: int | None) -> None:
    """Wait until `address` holds `depth` messages, since a broker may count with a delay."""
    async with asyncio.timeout(PATIENCE):
        while await broker.depth(address) != depth:  # noqa: ASYNC110  a broker has no event for it
            await asyncio.sleep(0)


class BrokerCase(ABC):
    """Fixtures and hooks of an adapter's test class; see the module `broker`."""

    verified_user: str | None = None
    """The `user_id` that the broker itself puts on messages; `None` if it keeps the sender's."""

    @pytest.fixture
    @abstractmethod
    def broker(self) -> AsyncIterator[Broker]:
        """An open broker without queues or messages."""

    @pytest.fixture
    @abstractmethod
    def other(self, broker: Broker) -> AsyncIterator[Broker]:
        """A second open broker on the same data as `broker`."""

    @abstractmethod
    async def break_connection(self, broker: Broker) -> None:
        """Break the connection of `broker`, which must reconnect by itself."""

    @pytest.fixture(autouse=True)
    async def _declared(self, broker: Broker) -> None:
        await broker.declare(AGENT)

    def received(self, message: Message) -> Message:
        """The message that a consumer receives when `message` is sent."""
        return replace(message, user_id=self.verified_user or message.user_id)

    async def nothing_is_left(self, broker: Broker, inbox: Inbox) -> None:
        """Assert that the request queue is empty and that no delivery was duplicated.

        The next delivery in `inbox` must be a message that is sent here.
        """
        await until_depth(broker, REQUESTS, 0)
        last = a_message()
        await send(broker, REQUESTS, last)
        delivery = await inbox.next()
        assert delivery.message.message_id == last.message_id
        assert delivery.count == 1
        assert await delivery.ack()
