"""Dead letters are listed, replayed and dropped in the same way on every broker."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiormq
import asyncpg
import pytest

from meshpoint.adapters.postgres_queue import PostgresBroker
from meshpoint.adapters.rabbitmq import RabbitMqBroker
from meshpoint.adapters.rabbitmq import dead_letters as module
from meshpoint.adapters.sqlite_queue import SqliteBroker
from meshpoint.model.dead_letters import DeadLetter, LetterFilter, LetterResult
from meshpoint.model.ids import AgentName, ReplicaId
from meshpoint.model.messages import (
    Address,
    Header,
    Message,
    MessageType,
    dead_letter_queue,
    nested_queue,
    private_queue,
    response_queue,
)
from meshpoint.ports.broker import Broker, Delivery, PublishResult
from meshpoint.ports.dead_letters import DeadLetters
from meshpoint.settings import MeshSettings
from meshpoint.testing.conformance.broker import AGENT, REQUESTS, Inbox, a_message, send
from meshpoint.wiring import make_dead_letters
from unusual_content import properties, publish_raw

REPLICA = ReplicaId("r1")
PRIVATE, RESPONSES = private_queue(AGENT, REPLICA), response_queue(AGENT)
DEAD = dead_letter_queue(AGENT)
ALL = LetterFilter()
SENT_AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
CAUSES = [f"cause {number}" for number in range(5)]


class Rig(ABC):
    """One kind of broker: an open one as replicas have it, and access to its dead letters."""

    broker: Broker
    keeps_login = True
    max_repeated = 0
    """Letters that a killed command may have sent although they remain."""

    def __init__(self, url: str, namespace: str) -> None:
        self.url, self.namespace = url, namespace
        self.warnings: list[str] = []
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        self.broker = self.make_broker()
        await self.broker.open()
        self._stack.push_async_callback(self.broker.close)
        await self.broker.declare(AGENT, REPLICA)

    async def stop(self) -> None:
        await self._stack.aclose()

    async def open_letters(self) -> DeadLetters:
        """Access to the dead letters, as one command has it."""
        mesh = MeshSettings(broker_url=self.url, namespace=self.namespace)
        letters = make_dead_letters(mesh, [AGENT], self.warnings.append)
        assert letters is not None
        await letters.open()
        self._stack.push_async_callback(letters.close)
        return letters

    @abstractmethod
    def make_broker(self) -> Broker: ...

    @abstractmethod
    async def delete_queue(self, address: Address) -> None:
        """Delete a queue, as its expiry does."""

    @abstractmethod
    async def forget_queues(self) -> None:
        """Make all dead letters look as if an earlier release had written them."""

    @abstractmethod
    async def add_unreadable(self, body: bytes) -> None:
        """Add a message to the requests that no consumer can decode."""

    @abstractmethod
    async def set_causes(self, causes: Sequence[str]) -> None:
        """Give the dead letters whose bodies are numbers these reasons in turn."""


class SqliteRig(Rig):
    def make_broker(self) -> Broker:
        return SqliteBroker(
            self.url.removeprefix("sqlite:///"), namespace=self.namespace, delivery_limit=2
        )

    def _execute(self, statement: str, *values: Any) -> None:
        with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"), timeout=60)) as db:
            db.execute(statement, values)
            db.commit()

    async def delete_queue(self, address: Address) -> None:
        self._execute("DELETE FROM meshpoint_queue WHERE name = ?", f"{self.namespace}.{address}")

    async def forget_queues(self) -> None:
        self._execute("UPDATE meshpoint_queue_message SET dead_from = NULL")

    async def add_unreadable(self, body: bytes) -> None:
        await send(self.broker, REQUESTS, a_message(body))
        self._execute("UPDATE meshpoint_queue_content SET headers = 'none' WHERE body = ?", body)

    async def set_causes(self, causes: Sequence[str]) -> None:
        for number, cause in enumerate(causes):
            self._execute(
                "UPDATE meshpoint_queue_message SET dead_reason = ?, dead_from = ?"
                f" WHERE id % {len(causes)} = ?",
                *(cause, f"{self.namespace}.{REQUESTS}", number),
            )


class PostgresRig(Rig):
    def make_broker(self) -> Broker:
        return PostgresBroker(self.url, namespace=self.namespace, delivery_limit=2)

    async def _execute(self, statement: str, *values: Any) -> None:
        connection = await asyncpg.connect(self.url)
        try:
            await connection.execute(statement, *values)
        finally:
            await connection.close()

    async def delete_queue(self, address: Address) -> None:
        name = f"{self.namespace}.{address}"
        await self._execute("DELETE FROM meshpoint_queue WHERE name = $1", name)

    async def forget_queues(self) -> None:
        await self._execute("UPDATE meshpoint_queue_message SET dead_from = NULL")

    async def add_unreadable(self, body: bytes) -> None:
        await send(self.broker, REQUESTS, a_message(body))
        statement = "UPDATE meshpoint_queue_message SET properties = 'none' WHERE body = $1"
        await self._execute(statement, body)

    async def set_causes(self, causes: Sequence[str]) -> None:
        await self._execute(
            "UPDATE meshpoint_queue_message SET dead_reason = ($1::text[])[id % $2 + 1],"
            " dead_from = $3",
            *(list(causes), len(causes), f"{self.namespace}.{REQUESTS}"),
        )


class RabbitRig(Rig):
    keeps_login = False
    max_repeated = 100

    def make_broker(self) -> Broker:
        return RabbitMqBroker(
            self.url,
            namespace=self.namespace,
            delivery_limit=2,
            publish_timeout=timedelta(minutes=1),
        )

    async def delete_queue(self, address: Address) -> None:
        connection = await aiormq.connect(self.url)
        channel = await connection.channel()
        await channel.queue_delete(f"{self.namespace}.{address}")
        await connection.close()

    async def forget_queues(self) -> None:
        """Copy the letters without the header."""
        inbox, depth = Inbox(), await self.broker.depth(DEAD)
        subscription = await self.broker.consume(DEAD, 100, inbox)
        deliveries = await inbox.take(depth or 0)
        await subscription.cancel()
        for delivery in deliveries:
            headers = {**delivery.message.headers}
            del headers[Header.DEAD_FROM]
            await send(self.broker, DEAD, replace(delivery.message, headers=headers))
            await delivery.ack()

    async def add_unreadable(self, body: bytes) -> None:
        encoded = properties(correlation_id=b"\xff\xfe")
        await publish_raw(self.url, f"{self.namespace}.mesh", REQUESTS, encoded, body)

    async def set_causes(self, causes: Sequence[str]) -> None:
        """Nothing to do: `bury_many` has written the headers."""


@pytest.fixture(autouse=True)
def _wait_for_a_busy_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RETURN_SECONDS", 20.0)


@pytest.fixture(
    params=[
        "sqlite",
        pytest.param("postgres", marks=pytest.mark.servers),
        pytest.param("rabbit", marks=pytest.mark.servers),
    ]
)
def closed_rig(request: pytest.FixtureRequest, tmp_path: Path, namespace: str) -> Rig:
    match request.param:
        case "sqlite":
            return SqliteRig(f"sqlite:///{tmp_path}/mesh.db", namespace)
        case "postgres":
            return PostgresRig(request.getfixturevalue("empty_postgres_url"), namespace)
    return RabbitRig(request.getfixturevalue("amqp_url"), namespace)


@pytest.fixture
async def rig(closed_rig: Rig) -> AsyncIterator[Rig]:
    await closed_rig.start()
    yield closed_rig
    await closed_rig.stop()


async def dead_letter(rig: Rig, address: Address, reason: str, *messages: Message) -> None:
    """Send messages, and dead-letter each when it is delivered."""
    inbox = Inbox()
    subscription = await rig.broker.consume(address, len(messages), inbox)
    await send(rig.broker, address, *messages)
    for delivery in await inbox.take(len(messages)):
        assert await delivery.dead_letter(reason)
    await subscription.cancel()


async def read(letters: DeadLetters, where: LetterFilter = ALL) -> list[DeadLetter]:
    async with aclosing(letters.read(where)) as pages:
        return [letter async for page in pages for letter in page]


async def replay(letters: DeadLetters, where: LetterFilter = ALL) -> Counter[LetterResult]:
    """Replay what `where` selects, as the command does."""
    results = Counter[LetterResult]()
    async with aclosing(letters.read(where)) as pages:
        async for page in pages:
            results.update(await letters.replay(page))
    return results


async def drop(letters: DeadLetters, where: LetterFilter = ALL) -> Counter[LetterResult]:
    results = Counter[LetterResult]()
    async with aclosing(letters.read(where)) as pages:
        async for page in pages:
            results.update(await letters.drop(page))
    return results


async def receive(rig: Rig, address: Address, count: int) -> list[Delivery]:
    """Take `count` messages from a queue that has no more, and ack them."""
    inbox = Inbox()
    subscription = await rig.broker.consume(address, count + 1, inbox)
    deliveries = await inbox.take(count)
    last = a_message(b"last")
    await send(rig.broker, address, last)
    assert (await inbox.next()).message.message_id == last.message_id
    for delivery in deliveries:
        assert await delivery.ack()
    await subscription.cancel()
    return deliveries


ADDRESSES = [REQUESTS, nested_queue(AGENT), RESPONSES, PRIVATE]


@pytest.mark.parametrize("address", ADDRESSES)
async def test_a_letter_returns_to_its_queue_as_it_was_sent(rig: Rig, address: Address) -> None:
    message = a_message(
        b'{"a": 1}', headers={"x-attempt": 2, "traceparent": "00-1-2-01"}, timestamp=SENT_AT
    )
    await dead_letter(rig, address, "it was unwanted", message)
    letters = await rig.open_letters()
    (letter,) = await read(letters)
    assert (letter.agent, letter.queue, letter.reason) == (AGENT, address, "it was unwanted")
    assert (letter.sender, letter.defect, letter.body_size) == (message.app_id, None, 8)
    assert letter.message is not None
    assert letter.message.timestamp == SENT_AT
    assert letter.id.startswith(f"{AGENT}:")
    assert await replay(letters) == {LetterResult.DONE: 1}
    (delivery,) = await receive(rig, address, 1)
    expected = message if rig.keeps_login else replace(message, user_id="guest")
    assert (delivery.message, delivery.delivery_count) == (expected, 1)
    assert await read(letters) == []


async def test_a_message_at_the_delivery_limit_returns_with_a_count_of_one(rig: Rig) -> None:
    inbox, message = Inbox(), a_message()
    subscription = await rig.broker.consume(REQUESTS, 1, inbox)
    await send(rig.broker, REQUESTS, message)
    while not await rig.broker.depth(DEAD):
        if not inbox.empty():
            await (await inbox.next()).requeue()
    await subscription.cancel()
    letters = await rig.open_letters()
    (letter,) = await read(letters)
    assert letter.queue == REQUESTS
    assert letter.reason.replace("_", " ").endswith("delivery limit")
    assert await replay(letters) == {LetterResult.DONE: 1}
    (delivery,) = await receive(rig, REQUESTS, 1)
    assert (delivery.message.message_id, delivery.delivery_count) == (message.message_id, 1)
    assert not [name for name in delivery.message.headers if name.startswith("x-dead-")]


async def test_the_queue_of_a_letter_of_an_earlier_release_follows_from_its_type(rig: Rig) -> None:
    nested = {"x-call-depth": 1}
    sent = {
        nested_queue(AGENT): a_message(headers=nested),
        REQUESTS: a_message(),
        RESPONSES: a_message(type=MessageType.RESPONSE),
        PRIVATE: a_message(type=MessageType.WAKE),
    }
    for address, message in sent.items():
        await dead_letter(rig, address, "unwanted", message)
    await rig.forget_queues()
    found = {
        each.message.message_id: each
        for each in await read(await rig.open_letters())
        if each.message
    }
    for address in (nested_queue(AGENT), REQUESTS, RESPONSES):
        assert found[sent[address].message_id].queue == address
    lost = found[sent[PRIVATE].message_id]
    assert (lost.queue, lost.defect) == (None, "the queue from which it came is not recorded")


async def test_filters_select_by_agent_reason_sender_and_id(rig: Rig) -> None:
    await dead_letter(
        rig, REQUESTS, "not JSON", a_message(app_id="billing"), a_message(app_id="shop")
    )
    await dead_letter(rig, REQUESTS, "no slot", a_message(app_id="shop"))
    letters = await rig.open_letters()
    everything = await read(letters)
    assert len(everything) == 3
    assert len(await read(letters, LetterFilter(agent=AgentName("nobody")))) == 0
    assert len(await read(letters, LetterFilter(agent=AGENT))) == 3
    assert len(await read(letters, LetterFilter(reason="JSON"))) == 2
    assert len(await read(letters, LetterFilter(sender="shop"))) == 2
    assert len(await read(letters, LetterFilter(sender="shop", reason="JSON"))) == 1
    chosen = everything[1]
    (found,) = await read(letters, LetterFilter(frozenset({chosen.id})))
    assert (found.id, found.reason, found.sender) == (chosen.id, chosen.reason, chosen.sender)


async def test_an_unreadable_letter_is_shown_and_dropped_but_never_replayed(rig: Rig) -> None:
    body = b"\xff\x00 raw " + bytes(range(256))
    inbox = Inbox()
    await rig.add_unreadable(body)
    await send(rig.broker, REQUESTS, a_message(b"good"))
    subscription = await rig.broker.consume(REQUESTS, 1, inbox)
    assert (await inbox.next()).message.body == b"good"
    await subscription.cancel()
    while not await rig.broker.depth(DEAD):
        pass
    letters = await rig.open_letters()
    async with aclosing(letters.read(ALL)) as pages:
        async for page in pages:
            (letter,) = page
            assert letter.message is None
            assert letter.sender is None
            assert letter.defect
            assert letter.properties
            assert await letters.body(letter) == body
            assert await letters.replay(page) == [LetterResult.DEFECTIVE]
    assert await drop(letters) == {LetterResult.DONE: 1}
    assert await read(letters) == []


async def test_a_letter_whose_queue_is_gone_stays(rig: Rig) -> None:
    await dead_letter(rig, PRIVATE, "unwanted", a_message())
    await rig.delete_queue(PRIVATE)
    letters = await rig.open_letters()
    assert await replay(letters) == {LetterResult.NO_QUEUE: 1}
    assert len(await read(letters)) == 1


async def test_a_replay_can_replace_the_body(rig: Rig) -> None:
    await dead_letter(rig, REQUESTS, "unwanted", a_message(b"wrong"))
    letters = await rig.open_letters()
    async with aclosing(letters.read(ALL)) as pages:
        async for page in pages:
            assert await letters.replay(page, b"right") == [LetterResult.DONE]
    (delivery,) = await receive(rig, REQUESTS, 1)
    assert delivery.message.body == b"right"


async def test_a_large_body_is_listed_exported_and_replayed(rig: Rig) -> None:
    body = b"x" * 9_000_000
    await dead_letter(rig, REQUESTS, "unwanted", a_message(body))
    letters = await rig.open_letters()
    async with aclosing(letters.read(ALL)) as pages:
        async for page in pages:
            assert page[0].body_size == len(body)
            assert await letters.body(page[0]) == body
            assert await letters.replay(page) == [LetterResult.DONE]
    (delivery,) = await receive(rig, REQUESTS, 1)
    assert delivery.message.body == body


async def test_a_settled_letter_is_gone_for_the_same_command(rig: Rig) -> None:
    await dead_letter(rig, REQUESTS, "unwanted", a_message())
    letters = await rig.open_letters()
    async with aclosing(letters.read(ALL)) as pages:
        async for page in pages:
            assert await letters.drop(page) == [LetterResult.DONE]
            assert await letters.body(page[0]) is None
            assert await letters.replay(page) == [LetterResult.GONE]
            assert await letters.drop(page) == [LetterResult.GONE]
    assert await rig.broker.depth(REQUESTS) == 0


async def test_two_commands_at_once_replay_each_letter_once(rig: Rig) -> None:
    sent = [a_message(str(number).encode()) for number in range(60)]
    await dead_letter(rig, REQUESTS, "unwanted", *sent)
    one, two = await rig.open_letters(), await rig.open_letters()
    results = [*await asyncio.gather(replay(one), replay(two))]
    results.append(await replay(one))  # what one command held while the other looked
    assert sum(each[LetterResult.DONE] for each in results) == len(sent)
    received = await receive(rig, REQUESTS, len(sent))
    assert sorted(each.message.message_id for each in received) == sorted(
        each.message_id for each in sent
    )


async def test_a_message_that_dies_again_is_not_replayed_by_the_same_command(rig: Rig) -> None:
    sent = [a_message(), a_message()]
    await dead_letter(rig, REQUESTS, "unwanted", *sent)
    inbox, letters = Inbox(), await rig.open_letters()
    await rig.broker.consume(REQUESTS, 2, inbox)
    results = Counter[LetterResult]()
    async with aclosing(letters.read(ALL)) as pages:
        async for page in pages:
            results.update(await letters.replay(page))
            for delivery in await inbox.take(2):
                assert await delivery.dead_letter("unwanted again")
    assert results == {LetterResult.DONE: 2}
    assert [each.reason for each in await read(letters)] == ["unwanted again"] * 2


async def bury_many(rig: Rig, count: int) -> dict[str, str]:
    """Store letters of five causes. Returns the cause of each message id."""
    messages = [a_message(str(number).encode()) for number in range(count)]
    dead = [
        replace(
            message,
            headers={
                Header.DEAD_REASON.value: CAUSES[number % 5],
                Header.DEAD_FROM.value: REQUESTS,
            },
        )
        for number, message in enumerate(messages)
    ]
    for start in range(0, count, 1000):
        results = await rig.broker.publish([(DEAD, each) for each in dead[start : start + 1000]])
        assert set(results) == {PublishResult.ACCEPTED}
    await rig.set_causes(CAUSES)
    return {
        each.message.message_id: each.reason
        for each in await read(await rig.open_letters())
        if each.message
    }


async def test_a_killed_command_loses_nothing(rig: Rig) -> None:
    """On RabbitMQ, letters whose acks did not arrive are sent again under the same ids."""
    sent = set(await bury_many(rig, 2000))
    options = ["--broker", rig.url, "--namespace", rig.namespace, "--agent", AGENT, "--yes"]
    received, begun, letters = Counter[str](), asyncio.Event(), await rig.open_letters()

    def handle(delivery: Delivery) -> None:
        received[delivery.message.message_id] += 1
        begun.set()
        acks.create_task(delivery.ack())

    async with asyncio.TaskGroup() as acks:
        await rig.broker.consume(REQUESTS, 100, handle)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "meshpoint.cli", "dead", "replay", *options)
        )
        await begun.wait()
        process.kill()
        await process.wait()
        while await replay(letters) or set(received) != sent:
            pass
    assert received.total() - len(sent) <= rig.max_repeated


async def test_one_cause_of_ten_thousand_letters_is_replayed_while_replicas_run(rig: Rig) -> None:
    causes = await bury_many(rig, 10_000)
    assert Counter(causes.values()) == dict.fromkeys(CAUSES, 2000)
    received, complete = Counter[str](), asyncio.Event()

    def handle(delivery: Delivery) -> None:
        received[delivery.message.message_id] += 1
        acks.create_task(delivery.ack())
        if received.total() == 2000:
            complete.set()

    letters = await rig.open_letters()
    async with asyncio.TaskGroup() as acks:
        await rig.broker.consume(REQUESTS, 100, handle)
        await rig.broker.consume(REQUESTS, 100, handle)
        assert await replay(letters, LetterFilter(reason=CAUSES[3])) == {LetterResult.DONE: 2000}
        await complete.wait()
    assert set(received.values()) == {1}
    assert {causes[message_id] for message_id in received} == {CAUSES[3]}
    assert Counter(each.reason for each in await read(letters)) == {
        cause: 2000 for cause in CAUSES if cause != CAUSES[3]
    }
