"""Dead letters on RabbitMQ: reading loses none, and what a replay that was cut off repeats."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from datetime import timedelta
from typing import Any

import aiormq
import pytest
from live import SLOW_BROKER_TIMEOUT, open_broker, serve_agent

from fake_peer import FakePeer
from meshpoint import TaskExecutionContext, agent
from meshpoint.adapters.rabbitmq import RabbitMqBroker
from meshpoint.adapters.rabbitmq import dead_letters as module
from meshpoint.adapters.rabbitmq.dead_letters import RabbitDeadLetters
from meshpoint.adapters.rabbitmq.topology import Topology
from meshpoint.agents.peer import Peer
from meshpoint.errors import BrokerUnavailable, ConfigurationError
from meshpoint.model.dead_letters import DeadLetter, LetterFilter, LetterResult
from meshpoint.model.envelopes import encode_reply
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import AgentName, TaskId, new_id
from meshpoint.model.messages import (
    Header,
    Message,
    MessageType,
    dead_letter_queue,
    request_queue,
    response_queue,
)
from meshpoint.model.outcomes import Ok
from meshpoint.testing.conformance.broker import AGENT, REQUESTS, Inbox, a_message, send
from servers import Proxy
from unusual_content import UNDECODABLE, publish_raw

pytestmark = pytest.mark.servers

ALL = LetterFilter()
DEAD = dead_letter_queue(AGENT)
Open = Callable[..., Awaitable[RabbitDeadLetters]]


@pytest.fixture(autouse=True)
def _wait_for_a_busy_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RETURN_SECONDS", 20.0)


@pytest.fixture
async def opened(amqp_url: str, namespace: str) -> AsyncIterator[Open]:
    """Opens access to the dead letters, as a command has it."""
    async with AsyncExitStack() as stack:

        async def open_letters(
            url: str = amqp_url, agents: tuple[str, ...] = (AGENT,)
        ) -> RabbitDeadLetters:
            topology = Topology(namespace, timedelta(minutes=1), 20)
            names = [AgentName(name) for name in agents]
            letters = RabbitDeadLetters(url, topology, names, SLOW_BROKER_TIMEOUT, warnings.append)
            await letters.open()
            stack.push_async_callback(letters.close)
            return letters

        warnings: list[str] = []
        open_letters.warnings = warnings  # type: ignore[attr-defined]
        yield open_letters


@pytest.fixture
async def broker(amqp_url: str, namespace: str) -> AsyncIterator[RabbitMqBroker]:
    async with open_broker(amqp_url, namespace) as broker:
        await broker.declare(AGENT)
        yield broker


def a_letter(reason: str = "unwanted", **changes: Any) -> Message:
    headers = {Header.DEAD_REASON.value: reason, Header.DEAD_FROM.value: REQUESTS}
    return a_message(headers={**headers, **changes.pop("headers", {})}, **changes)


async def read(letters: RabbitDeadLetters, where: LetterFilter = ALL) -> list[DeadLetter]:
    async with aclosing(letters.read(where)) as pages:
        return [letter async for page in pages for letter in page]


async def replay(letters: RabbitDeadLetters) -> Counter[LetterResult]:
    results = Counter[LetterResult]()
    async with aclosing(letters.read(ALL)) as pages:
        async for page in pages:
            results.update(await letters.replay(page))
    return results


async def replay_cut_off(letters: RabbitDeadLetters, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay all letters as a command does that dies between the confirm and the ack."""

    async def die(*_: object) -> None:
        raise BrokerUnavailable("died")

    with monkeypatch.context() as patch:
        patch.setattr(module._LetterQueue, "settle", die)
        with pytest.raises(BrokerUnavailable, match="died"):
            await replay(letters)


@pytest.fixture
async def limited(amqp_url: str, namespace: str) -> None:
    """Limits the deliveries of dead letters to 20, as RabbitMQ 4 does by default."""
    connection = await aiormq.connect(amqp_url)
    channel = await connection.channel()
    arguments: Any = {"x-queue-type": "quorum", "x-delivery-limit": 20}
    await channel.queue_declare(f"{namespace}.{DEAD}", durable=True, arguments=arguments)
    await connection.close()


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("shown", [False, True])
async def test_no_number_of_reads_loses_a_letter(
    broker: RabbitMqBroker, opened: Open, amqp_url: str, namespace: str, shown: bool
) -> None:
    """Also if each command ends as soon as it has found its letter."""
    exchange = f"{namespace}.mesh"
    sent = [a_letter(f"reason {number}") for number in range(5)]
    await send(broker, DEAD, *sent)
    await publish_raw(amqp_url, exchange, DEAD, UNDECODABLE["id without UTF-8"], b"unreadable")
    letters = await opened()
    before = {letter.id: (letter.reason, letter.queue) for letter in await read(letters)}
    assert len(before) == 6
    for _ in range(50):
        async with aclosing(letters.read(ALL)) as pages:
            async for page in pages:
                assert len(page) == 6
                if shown:
                    break
    after = {letter.id: (letter.reason, letter.queue) for letter in await read(letters)}
    assert after == before
    assert await replay(letters) == {LetterResult.DONE: 5, LetterResult.DEFECTIVE: 1}
    inbox = Inbox()
    await broker.consume(REQUESTS, 6, inbox)
    received = {delivery.message.message_id for delivery in await inbox.take(5)}
    assert received == {message.message_id for message in sent}


@pytest.mark.usefixtures("limited")
async def test_a_copy_that_the_same_command_receives_stays(
    broker: RabbitMqBroker, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes after all letters that were there, unless some of those have disappeared."""
    monkeypatch.setattr(module, "_MAX_RETURNS", 1)
    await send(broker, DEAD, a_letter(), a_letter())
    letters = await opened()
    before = [letter.id for letter in await read(letters)]
    count = 0
    async with aclosing(letters.read(ALL)) as pages:
        async for page in pages:
            count += len(page)
            assert letters._queue is not None
            letters._queue.remaining += 2
    assert count == 2
    assert sorted(letter.id for letter in await read(letters)) == sorted(before)


async def test_identical_letters_are_one(broker: RabbitMqBroker, opened: Open) -> None:
    """A crash between a copy and the ack of the original leaves two."""
    letter = a_letter()
    await send(broker, DEAD, letter, letter, a_letter())
    letters = await opened()
    assert len(await read(letters)) == 2
    assert await replay(letters) == {LetterResult.DONE: 2}
    assert await broker.depth(DEAD) == 0
    assert await broker.depth(REQUESTS) == 2


async def test_an_identical_letter_on_a_later_page_stays(
    broker: RabbitMqBroker, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a message that was replayed and died again."""
    monkeypatch.setattr(module, "_PER_PAGE", 2)
    letter = a_letter()
    await send(broker, DEAD, letter, a_letter(), a_letter(), a_letter(), letter)
    letters = await opened()  # the first read: returned letters may change their order
    assert await replay(letters) == {LetterResult.DONE: 4}
    assert len(await read(letters)) == 1


async def test_letters_return_when_the_connection_of_a_command_is_lost(
    broker: RabbitMqBroker, opened: Open, amqp_url: str
) -> None:
    await send(broker, DEAD, a_letter(), a_letter())
    async with Proxy(amqp_url) as proxy:
        letters = await opened(proxy.url)
        async with aclosing(letters.read(ALL)) as pages:
            page = await anext(pages)
            assert letters._queue is not None
            consumer = letters._queue._consumer
            proxy.cut()
            await asyncio.wait({consumer.channel.closing})
            with pytest.raises(BrokerUnavailable):
                await letters.replay(page)
    assert len(await read(await opened())) == 2
    assert await broker.depth(REQUESTS) == 0


async def test_an_incomplete_copy_is_not_replayed(broker: RabbitMqBroker, opened: Open) -> None:
    await send(broker, DEAD, a_letter(headers={"x-dead-headers-dropped": 3}))
    letters = await opened()
    (letter,) = await read(letters)
    assert letter.defect == "its largest headers were dropped"
    assert await replay(letters) == {LetterResult.DEFECTIVE: 1}


@pytest.mark.parametrize("forged", ["other.req", f"{AGENT}.broadcast", f"{AGENT}.dlq", "*.card"])
async def test_a_header_of_a_sender_names_no_other_queue(
    broker: RabbitMqBroker, opened: Open, forged: str
) -> None:
    await send(broker, DEAD, a_letter(headers={Header.DEAD_FROM.value: forged}))
    (letter,) = await read(await opened())
    assert letter.queue == REQUESTS


@pytest.mark.parametrize("name", UNDECODABLE)
async def test_an_undecodable_letter_is_readable_as_far_as_possible(
    broker: RabbitMqBroker, opened: Open, amqp_url: str, namespace: str, name: str
) -> None:
    """The broker dead-letters such a message unchanged at the delivery limit."""
    await publish_raw(amqp_url, f"{namespace}.mesh", DEAD, UNDECODABLE[name], b"body")
    letters = await opened()
    async with aclosing(letters.read(ALL)) as pages:
        async for page in pages:
            assert page[0].message is None
            assert page[0].defect
            assert await letters.body(page[0]) == b"body"
            assert await letters.drop(page) == [LetterResult.DONE]
    assert await broker.depth(DEAD) == 0


async def test_other_programs_that_hold_letters_are_mentioned(
    broker: RabbitMqBroker, opened: Open, amqp_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_IDLE_SECONDS", 0.01)
    await send(broker, DEAD, a_letter(), a_letter())
    inbox = Inbox()
    await broker.consume(DEAD, 1, inbox)
    await inbox.next()
    assert len(await read(await opened())) == 1
    (warning,) = opened.warnings  # type: ignore[attr-defined]
    assert warning.startswith("another program reads ")


async def test_without_agents_there_is_one_clear_error(opened: Open) -> None:
    letters = await opened(agents=())
    with pytest.raises(ConfigurationError, match=r"^--agent: .*use --agent NAME"):
        await read(letters)
    assert await read(letters, LetterFilter(agent=AgentName("unknown"))) == []


async def test_a_replay_cut_off_before_the_ack_repeats_under_the_same_id(
    broker: RabbitMqBroker, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    letter = a_letter()
    await send(broker, DEAD, letter)
    letters = await opened()
    await replay_cut_off(letters, monkeypatch)
    assert await replay(letters) == {LetterResult.DONE: 1}
    assert await replay(letters) == {}
    inbox = Inbox()
    await broker.consume(REQUESTS, 3, inbox)
    received = [delivery.message for delivery in await inbox.take(2)]
    assert [each.message_id for each in received] == [letter.message_id] * 2
    assert received[0] == received[1]


flights = Peer("flights", str, str)
runs = Counter[str]()


@agent("pauses")
async def pauses(ctx: TaskExecutionContext, text: str) -> str:
    runs[text] += 1
    return await flights(text)


@agent("answers")
async def answers(ctx: TaskExecutionContext, text: str) -> str:
    runs[text] += 1
    return text


async def dead_letter(broker: RabbitMqBroker, name: str, address: str, message: Message) -> None:
    """Make `message` a dead letter of an agent that died at `address`."""
    headers = {
        **message.headers,
        Header.DEAD_REASON.value: "unwanted",
        Header.DEAD_FROM.value: address,
    }
    await send(broker, dead_letter_queue(AgentName(name)), replace(message, headers=headers))


async def test_a_request_replayed_twice_runs_once_if_its_task_has_a_row(
    amqp_url: str,
    namespace: str,
    postgres_url: str,
    opened: Open,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = new_id()
    async with (
        open_broker(amqp_url, namespace) as broker,
        open_broker(amqp_url, namespace) as other,
        serve_agent(pauses, amqp_url, namespace, postgres_url) as worker,
    ):
        client = await FakePeer(broker, "client").open()
        peer = await FakePeer(other, "flights").open()
        request = client.request(text)
        await dead_letter(broker, "pauses", request_queue(AgentName("pauses")), request)
        letters = await opened(agents=("pauses",))
        await replay_cut_off(letters, monkeypatch)
        called = await peer.wait_for_request()
        assert await replay(letters) == {LetterResult.DONE: 1}
        await worker.events.wait(Step.ACK, Phase.AFTER, 2, task_id=request.correlation_id)
        await peer.respond(called, "found")
        assert await client.reply(request.correlation_id) == Ok("found")
    # A function agent runs again from its first line after a pause.
    assert runs[text] == 2
    assert len(peer.requests) == 1


async def test_a_response_replayed_twice_counts_once(
    amqp_url: str,
    namespace: str,
    postgres_url: str,
    opened: Open,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        open_broker(amqp_url, namespace) as broker,
        open_broker(amqp_url, namespace) as other,
        serve_agent(pauses, amqp_url, namespace, postgres_url) as worker,
    ):
        client = await FakePeer(broker, "client").open()
        peer = await FakePeer(other, "flights").open()
        task_id = await client.ask("pauses", new_id())
        called = await peer.wait_for_request()
        response = Message(
            MessageType.RESPONSE,
            encode_reply(TaskId(called.correlation_id), None, Ok("found")),
            message_id=new_id(),
            correlation_id=called.correlation_id,
            app_id="flights",
            headers={Header.PARENT_TASK.value: task_id},
        )
        await dead_letter(broker, "pauses", response_queue(AgentName("pauses")), response)
        letters = await opened(agents=("pauses",))
        await replay_cut_off(letters, monkeypatch)
        assert await client.reply(task_id) == Ok("found")
        assert await replay(letters) == {LetterResult.DONE: 1}
        await worker.events.wait_until(
            lambda: bool({Step.DUPLICATE, Step.LATE} & set(worker.events.steps))
        )
        assert client.replies(task_id) == [Ok("found")]


async def test_a_request_replayed_twice_runs_twice_if_its_task_never_paused(
    amqp_url: str,
    namespace: str,
    postgres_url: str,
    opened: Open,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As any request that is sent again."""
    text = new_id()
    async with (
        open_broker(amqp_url, namespace) as broker,
        serve_agent(answers, amqp_url, namespace, postgres_url),
    ):
        client = await FakePeer(broker, "client").open()
        request = client.request(text)
        await dead_letter(broker, "answers", request_queue(AgentName("answers")), request)
        letters = await opened(agents=("answers",))
        await replay_cut_off(letters, monkeypatch)
        await client.first_reply(request.correlation_id)
        assert await replay(letters) == {LetterResult.DONE: 1}
        await client.wait_until(lambda: len(client.replies(request.correlation_id)) == 2)
    assert runs[text] == 2
