"""How long an inbox waits for more deliveries before the next batch."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from unittest.mock import create_autospec

import pytest

from idle_loop import idle
from meshpoint.engine import inbox as module
from meshpoint.engine.inbox import Inbox
from meshpoint.model.messages import Header, Message, MessageType
from meshpoint.ports.broker import Delivery
from meshpoint.testing.clock import FakeClock

CLOCK = FakeClock()


@pytest.fixture
def timeouts(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Timeouts the inbox asked for, in seconds; none is actually waited for."""
    seen: list[float] = []

    def timeout(seconds: float) -> asyncio.Timeout:
        seen.append(seconds)
        return at_once(0)

    at_once = asyncio.timeout
    monkeypatch.setattr(asyncio, "timeout", timeout)
    return seen


def put_responses(inbox: Inbox, *parents: str) -> None:
    for parent in parents:
        delivery = create_autospec(Delivery, instance=True)
        headers: dict[str, str | int | float] = {Header.PARENT_TASK.value: parent}
        delivery.message = Message(
            MessageType.RESPONSE, b"{}", "m", "call", "peer", headers=headers
        )
        inbox.put(delivery)


async def wait_for_batch(inbox: Inbox, target_count: int) -> None:
    """Wait for more deliveries, but not for the first."""
    waiting = asyncio.create_task(inbox.wait_for_batch(target_count))
    await idle()
    waiting.cancel()


async def take_batch(inbox: Inbox, *parents: str, seconds: float) -> None:
    """Take deliveries of these tasks and let the batch last `seconds`."""
    put_responses(inbox, *parents)
    inbox.take_batch(100)
    CLOCK.advance(timedelta(seconds=seconds))
    await wait_for_batch(inbox, target_count=10)


async def test_a_single_task_is_not_delayed(timeouts: list[float]) -> None:
    inbox = Inbox(CLOCK)
    await take_batch(inbox, "a", "a", seconds=0.001)
    await take_batch(inbox, "a", seconds=0.001)
    assert timeouts == []


async def test_more_arrivals_lengthen_the_wait(timeouts: list[float]) -> None:
    inbox = Inbox(CLOCK)
    await take_batch(inbox, "a", "b", seconds=0.0005)
    await take_batch(inbox, "a", "b", "c", "d", seconds=0.0005)
    assert len(timeouts) == 2
    assert 0.0005 <= timeouts[0] < timeouts[1]
    assert timeouts[1] >= 0.0015


async def test_tasks_of_the_previous_batch_count(timeouts: list[float]) -> None:
    inbox = Inbox(CLOCK)
    await take_batch(inbox, "a", seconds=0.001)
    await take_batch(inbox, "b", seconds=0.001)
    assert len(timeouts) == 1


async def test_the_wait_is_bounded(timeouts: list[float]) -> None:
    inbox = Inbox(CLOCK)
    await take_batch(inbox, *map(str, range(100)), seconds=60)
    assert timeouts == [module._MAX_WAIT_SECONDS]


async def test_deliveries_without_a_parent_count_separately(timeouts: list[float]) -> None:
    inbox = Inbox(CLOCK)
    for task in ("a", "b"):
        delivery = create_autospec(Delivery, instance=True)
        delivery.message = Message(MessageType.REQUEST, b"{}", task, task, "client")
        inbox.put(delivery)
    inbox.take_batch(2)
    CLOCK.advance(timedelta(seconds=0.001))
    await wait_for_batch(inbox, target_count=10)
    assert len(timeouts) == 1


async def test_a_large_enough_batch_is_taken_at_once(timeouts: list[float]) -> None:
    inbox = Inbox(CLOCK)
    put_responses(inbox, "a", "b", "c", "d")
    inbox.take_batch(2)
    CLOCK.advance(timedelta(seconds=0.001))
    assert await inbox.wait_for_batch(target_count=2)
    assert timeouts == []
    assert await inbox.wait_for_batch(target_count=3)
    assert len(timeouts) == 1


def put_large_responses(inbox: Inbox, count: int, size: int) -> None:
    for number in range(count):
        delivery = create_autospec(Delivery, instance=True)
        delivery.message = Message(MessageType.RESPONSE, b"x" * size, f"m{number}", "call", "peer")
        inbox.put(delivery)


async def test_large_deliveries_are_taken_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_BATCH_BYTES", 100)
    inbox = Inbox(CLOCK)
    put_large_responses(inbox, 5, size=60)
    assert [len(inbox.take_batch(10)) for _ in range(3)] == [2, 2, 1]


async def test_a_delivery_too_large_for_a_batch_is_taken_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_MAX_BATCH_BYTES", 100)
    inbox = Inbox(CLOCK)
    put_large_responses(inbox, 2, size=1000)
    assert len(inbox.take_batch(10)) == 1


async def test_closing_requeues_all_remaining_deliveries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_BATCH_BYTES", 100)
    inbox = Inbox(CLOCK)
    put_large_responses(inbox, 5, size=60)
    assert len(inbox.close()) == 5
    assert not await inbox.wait_for_batch(target_count=1)


@pytest.mark.parametrize("end", ["enough", "closed"])
async def test_the_wait_ends_when_the_batch_is_full(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(module, "_MAX_WAIT_SECONDS", 3600)
    inbox = Inbox(CLOCK)
    put_responses(inbox, "a", "b")
    inbox.take_batch(2)
    inbox._taken_at -= 3600
    waiting = asyncio.create_task(inbox.wait_for_batch(target_count=2))
    await idle()
    put_responses(inbox, "c")
    await idle()
    assert not waiting.done()
    put_responses(inbox, "d") if end == "enough" else inbox.close()
    await waiting
