"""A connection keeps little: nothing after a failed open, and few request queues and replies."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from meshpoint.adapters.inprocess.broker import InProcessBroker, InProcessExchange
from meshpoint.client.reply_slot import ReplySlot
from meshpoint.client.transport import ShardCounts, Transport
from meshpoint.errors import BrokerUnavailable, MeshClosed
from meshpoint.model.ids import AgentName
from meshpoint.model.messages import MAX_SHARDS, Address

from .calling import ROME, Call, travel


class Broker(InProcessBroker):
    """A broker whose `consume` fails; records that it was closed."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(InProcessExchange())
        self.error, self.closed = error, False

    async def consume(self, *_: Any) -> Any:
        raise self.error

    async def close(self) -> None:
        self.closed = True
        await super().close()


@pytest.mark.parametrize(
    "error", [BrokerUnavailable("gone"), asyncio.CancelledError()], ids=["failed", "cancelled"]
)
async def test_a_connection_that_fails_to_open_closes_its_broker(error: BaseException) -> None:
    broker = Broker(error)
    with pytest.raises(type(error)):
        await Transport(broker).open()
    assert broker.closed


class CountedQueues(InProcessBroker):
    """Counts the look-ups of queues."""

    def __init__(self) -> None:
        super().__init__(InProcessExchange())
        self.lookup_count = 0

    async def depth(self, address: Address) -> int | None:
        self.lookup_count += 1
        return None


async def test_the_request_queues_of_few_agents_are_remembered() -> None:
    broker = CountedQueues()
    counts = ShardCounts(broker)
    for number in range(1_500):
        assert await counts.count(AgentName(f"agent-{number}")) == 1
    assert (len(counts._counts), broker.lookup_count) == (1_000, 1_500)
    await counts.count(AgentName("agent-500"))
    assert broker.lookup_count == 1_500
    await counts.count(AgentName("agent-499"))
    assert broker.lookup_count == 1_501


class ShardedBroker(CountedQueues):
    """Every agent has the maximal number of request queues."""

    async def depth(self, address: Address) -> int | None:
        await super().depth(address)
        await asyncio.sleep(0)
        return 0


async def test_concurrent_requests_look_the_queues_up_once() -> None:
    broker = ShardedBroker()
    counts = ShardCounts(broker)
    found = await asyncio.gather(*[counts.count(AgentName("travel")) for _ in range(3)])
    assert (found, broker.lookup_count) == ([MAX_SHARDS] * 3, MAX_SHARDS - 1)


async def test_a_request_to_a_queue_that_is_gone_goes_to_the_first_one(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookups = list[Address]()

    async def depth(address: Address) -> int | None:
        lookups.append(address)
        return 0 if len(lookups) < MAX_SHARDS else None

    monkeypatch.setattr(call.broker, "depth", depth)
    for count in (1, 2):
        await call.mesh.send(travel, ROME)
        await call.agent.wait_for_request(count)
    assert len(lookups) == MAX_SHARDS, "the number was not looked up again"


async def test_a_reply_that_decides_is_not_lost_in_a_flood() -> None:
    slot = ReplySlot[int](lambda reply: reply > 0)
    for reply in (-1, -2, 1, -3, 2):
        slot.add(reply)
    slot.close(MeshClosed("closed"))
    assert await slot.take() == 1
    with pytest.raises(MeshClosed):
        await slot.take()


async def test_the_latest_reply_that_decides_nothing_is_kept() -> None:
    slot = ReplySlot[int](lambda reply: reply > 0)
    taken = asyncio.ensure_future(slot.take())
    await asyncio.sleep(0)
    for reply in (-1, -2):
        slot.add(reply)
    assert await taken == -2
    slot.add(-3)
    assert await slot.take() == -3
