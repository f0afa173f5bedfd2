"""Broker tests of the marker of agents whose replicas store tasks in a database."""

from __future__ import annotations

import asyncio

from meshpoint.model.messages import Address
from meshpoint.ports.broker import Broker, PublishResult
from meshpoint.testing.conformance.broker_messages import AGENT, STRANGER, BrokerCase, a_message


class MarkerSuite(BrokerCase):
    """Database markers. `BrokerSuite` includes these tests."""

    async def test_a_database_marker_is_seen(self, broker: Broker, other: Broker) -> None:
        assert not await other.has_database_marker(AGENT)
        assert await broker.mark_database(AGENT)
        assert await other.has_database_marker(AGENT)
        assert not await other.has_database_marker(STRANGER)
        assert not await other.mark_database(AGENT)

    async def test_a_database_marker_outlives_its_broker(
        self, broker: Broker, other: Broker
    ) -> None:
        await broker.mark_database(AGENT)
        await broker.close()
        assert await other.has_database_marker(AGENT)

    async def test_a_database_marker_can_be_removed(self, broker: Broker, other: Broker) -> None:
        await broker.mark_database(AGENT)
        for _ in range(2):  # the second time without effect
            await other.remove_database_marker(AGENT)
            assert not await broker.has_database_marker(AGENT)
        assert await broker.mark_database(AGENT)

    async def test_a_database_marker_receives_nothing(self, broker: Broker, other: Broker) -> None:
        await broker.mark_database(AGENT)
        assert await other.publish([(Address(f"{AGENT}.database"), a_message())]) == [
            PublishResult.UNROUTABLE
        ]

    async def test_marking_at_the_same_time(self, broker: Broker, other: Broker) -> None:
        await asyncio.gather(*(each.mark_database(AGENT) for each in (broker, other) * 3))
        assert await other.has_database_marker(AGENT)
