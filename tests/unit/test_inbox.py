"""How long an inbox waits for more deliveries before the next batch."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from unittest.mock import create_autospec

import pytest

from meshpoint.adapters.inprocess.clock import FakeClock
from meshpoint.engine import inbox as module
from meshpoint.engine.inbox import Inbox
from meshpoint.model.messages import Header, Message, MessageType
from meshpoint.ports.broker import Delivery

CLOCK = FakeClock()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Timeouts the inbox asked for, in seconds; none is actually waited for."""
    seen: list[float] = []

    def timeout(seconds: float) -> asyncio.Timeout:
        seen.append(seconds)
        return at_once(0)

    at_once = asyncio.timeout
    monkeypatch.setattr(module.asyncio, "timeout", timeout)
    return seen


def put(inbox: Inbox, *parents: str) -> None:
    for parent in parents:
        delivery = create_autospec(Delivery, instance=True)
        headers: dict[str, str | int | float] = {Header.PARENT_TASK.value: parent}
        delivery.message = Message(MessageType.RESPONSE, b"{}", "m", "call", "peer", headers=headers)
        inbox.put(delivery)


async def batch(inbox: Inbox, *parents: str, seconds: float) -> None:
    """Take deliveries of these tasks and let the batch last `seconds`."""
    put(inbox, *parents)
    inbox.take(100)
    CLOCK.advance(timedelta(seconds=seconds))
    await inbox.let_more_come(enough=10)


async def test_one_task_alone_waits_for_nobody(waits: list[float]) -> None:
    inbox = Inbox(CLOCK)
    await batch(inbox, "a", "a", seconds=0.001)
    await batch(inbox, "a", seconds=0.001)
    assert waits == []


async def test_the_more_come_the_longer_more_are_let_come(waits: list[float]) -> None:
    inbox = Inbox(CLOCK)
    await batch(inbox, "a", "b", seconds=0.001)
    await batch(inbox, "a", "b", "c", "d", seconds=0.001)
    assert len(waits) == 2
    assert 0.001 <= waits[0] < waits[1]
    assert waits[1] >= 0.003


async def test_tasks_of_the_batch_before_count(waits: list[float]) -> None:
    inbox = Inbox(CLOCK)
    await batch(inbox, "a", seconds=0.001)
    await batch(inbox, "b", seconds=0.001)
    assert len(waits) == 1


async def test_no_wait_is_long(waits: list[float]) -> None:
    inbox = Inbox(CLOCK)
    await batch(inbox, *map(str, range(100)), seconds=60)
    assert waits == [module._LONGEST_WAIT]


async def test_those_without_a_parent_count_by_themselves(waits: list[float]) -> None:
    inbox = Inbox(CLOCK)
    for task in ("a", "b"):
        delivery = create_autospec(Delivery, instance=True)
        delivery.message = Message(MessageType.REQUEST, b"{}", task, task, "client")
        inbox.put(delivery)
    inbox.take(2)
    CLOCK.advance(timedelta(seconds=0.001))
    await inbox.let_more_come(enough=10)
    assert len(waits) == 1


async def test_enough_that_wait_already_wait_for_no_more(waits: list[float]) -> None:
    inbox = Inbox(CLOCK)
    put(inbox, "a", "b", "c", "d")
    inbox.take(2)
    CLOCK.advance(timedelta(seconds=0.001))
    await inbox.let_more_come(enough=2)
    assert waits == []
    await inbox.let_more_come(enough=3)
    assert len(waits) == 1


def put_large(inbox: Inbox, count: int, size: int) -> None:
    for number in range(count):
        delivery = create_autospec(Delivery, instance=True)
        delivery.message = Message(MessageType.RESPONSE, b"x" * size, f"m{number}", "call", "peer")
        inbox.put(delivery)


async def test_large_deliveries_are_taken_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH_BYTES", 100)
    inbox = Inbox(CLOCK)
    put_large(inbox, 5, size=60)
    assert [len(inbox.take(10)) for _ in range(3)] == [2, 2, 1]


async def test_one_that_is_too_large_for_a_batch_is_taken_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH_BYTES", 100)
    inbox = Inbox(CLOCK)
    put_large(inbox, 2, size=1000)
    assert len(inbox.take(10)) == 1


async def test_closing_gives_back_all_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH_BYTES", 100)
    inbox = Inbox(CLOCK)
    put_large(inbox, 5, size=60)
    assert len(inbox.close()) == 5
    assert not await inbox.some()


@pytest.mark.parametrize("end", ["enough", "closed"])
async def test_the_wait_ends_when_there_are_enough(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setattr(module, "_LONGEST_WAIT", 3600)
    inbox = Inbox(CLOCK)
    put(inbox, "a", "b")
    inbox.take(2)
    inbox._taken_at -= 3600
    waiting = asyncio.create_task(inbox.let_more_come(enough=2))
    await asyncio.sleep(0)
    put(inbox, "c")
    await asyncio.sleep(0)
    assert not waiting.done()
    put(inbox, "d") if end == "enough" else inbox.close()
    await waiting
