"""Good messages are handled while the broker has yet to confirm dead letters of bad ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import pytest

from fake_peer import FakePeer
from meshpoint.adapters.inprocess.broker import InProcessDelivery
from meshpoint.errors import ConfigurationError
from meshpoint.model.envelopes import cancel_message
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import AgentName, TaskId, new_id
from meshpoint.model.messages import Address, Message, MessageType, response_queue
from meshpoint.model.outcomes import Failed, Ok
from meshpoint.ports.broker import PublishResult

from .agents import asker, doubler
from .mesh import Mesh, RunningReplica

BURST_SIZE = 5


class PendingConfirms:
    """Broker confirms withheld until the test releases them.

    `max_outstanding` is the largest number outstanding at a time.
    """

    def __init__(self) -> None:
        self.outstanding = self.max_outstanding = 0
        self._released = asyncio.Event()

    async def wait_one(self) -> None:
        self.outstanding += 1
        self.max_outstanding = max(self.max_outstanding, self.outstanding)
        try:
            await self._released.wait()
        finally:
            self.outstanding -= 1

    def release(self) -> None:
        self._released.set()


@pytest.fixture
def dead_letter_confirms(monkeypatch: pytest.MonkeyPatch) -> PendingConfirms:
    """Withheld confirms of dead letters."""
    confirms, dead_letter = PendingConfirms(), InProcessDelivery.dead_letter

    async def hold_confirm(delivery: InProcessDelivery, reason: str) -> bool:
        await confirms.wait_one()
        return await dead_letter(delivery, reason)

    monkeypatch.setattr(InProcessDelivery, "dead_letter", hold_confirm)
    return confirms


@pytest.fixture
async def bad_sender(mesh: Mesh) -> FakePeer:
    """A fake peer that sends bad messages."""
    return await mesh.fake_peer("bad_sender")


def create_message(type_: MessageType, body: bytes = b"}{", app_id: str = "bad_sender") -> Message:
    message_id = new_id()
    return Message(
        type=type_, body=body, message_id=message_id, correlation_id=message_id, app_id=app_id
    )


async def send_burst(sender: FakePeer, agent: str, count: int = BURST_SIZE) -> None:
    for _ in range(count):
        await sender.send_control(agent, create_message(MessageType.REQUEST))


def count_unhandled_messages(mesh: Mesh, agent: str) -> tuple[int, int]:
    """Messages in the response queue of `agent`: queued, and unacked."""
    queue = mesh.exchange.queues.get(response_queue(AgentName(agent)))
    assert queue is not None
    return len(queue.ready), sum(len(consumer.unacked) for consumer in queue.consumers)


@pytest.mark.parametrize(
    "type_", [MessageType.REQUEST, MessageType.RESPONSE, MessageType.STATUS, MessageType.CANCEL]
)
async def test_messages_do_not_wait_for_dead_lettering(
    mesh: Mesh,
    client: FakePeer,
    peer: FakePeer,
    bad_sender: FakePeer,
    dead_letter_confirms: PendingConfirms,
    type_: MessageType,
) -> None:
    await mesh.replica(asker("asker", "peer"))
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    for _ in range(BURST_SIZE):
        if type_ is MessageType.CANCEL:  # the sender is not the requester of this task
            await bad_sender.cancel("asker", task_id)
        else:
            await bad_sender.send_control("asker", create_message(type_))
    await mesh.idle()
    assert dead_letter_confirms.outstanding == BURST_SIZE
    await peer.respond(request, "well")
    assert await client.reply(task_id) == Ok({"peer": "well"})
    assert mesh.dead_letters("asker") == []
    await mesh.idle()
    assert count_unhandled_messages(mesh, "asker") == (0, BURST_SIZE)
    dead_letter_confirms.release()
    await mesh.idle()
    assert len(mesh.dead_letters("asker")) == BURST_SIZE
    assert count_unhandled_messages(mesh, "asker") == (0, 0)


async def test_valid_messages_of_a_batch_are_handled_first(
    mesh: Mesh,
    client: FakePeer,
    peer: FakePeer,
    bad_sender: FakePeer,
    dead_letter_confirms: PendingConfirms,
) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    started: list[int] = []

    async def count() -> None:
        started.append(dead_letter_confirms.outstanding)

    replica.store.before["claim"] = count
    await asyncio.gather(send_burst(bad_sender, "asker"), peer.respond(request, "well"))
    assert await client.reply(task_id) == Ok({"peer": "well"})
    assert started == [0]
    await mesh.idle()
    assert dead_letter_confirms.outstanding == BURST_SIZE


async def test_dead_letters_are_copied_a_few_at_a_time(
    mesh: Mesh,
    bad_sender: FakePeer,
    dead_letter_confirms: PendingConfirms,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("meshpoint.engine.refusals._MAX_CONCURRENT_COPIES", 2)
    await mesh.replica(doubler)
    await send_burst(bad_sender, "doubler")
    await mesh.idle()
    assert dead_letter_confirms.outstanding == 2
    dead_letter_confirms.release()
    await mesh.idle()
    assert dead_letter_confirms.max_outstanding == 2
    assert len(mesh.dead_letters("doubler")) == BURST_SIZE


async def test_requests_do_not_wait_for_refusals(
    mesh: Mesh,
    client: FakePeer,
    bad_sender: FakePeer,
    dead_letter_confirms: PendingConfirms,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica, replies = await mesh.replica(doubler), PendingConfirms()
    publish = replica.broker.publish

    async def hold_confirm(messages: Sequence[tuple[Address, Message]]) -> list[PublishResult]:
        if messages[0][0] == response_queue(AgentName("bad_sender")):
            await replies.wait_one()
        return await publish(messages)

    monkeypatch.setattr(replica.broker, "publish", hold_confirm)
    invalid = [
        replace(
            create_message(MessageType.REQUEST), reply_to=response_queue(AgentName("bad_sender"))
        )
        for _ in range(BURST_SIZE)
    ]
    for message in invalid:
        await bad_sender.send("doubler", message)
    await mesh.idle()
    assert (replies.outstanding, dead_letter_confirms.outstanding) == (BURST_SIZE, 0)
    assert await client.reply(await client.ask("doubler", 1)) == Ok(2)
    replies.release()
    for message in invalid:
        assert isinstance(await bad_sender.reply(message.correlation_id), Failed)
    await mesh.idle()
    assert dead_letter_confirms.outstanding == BURST_SIZE
    assert await client.reply(await client.ask("doubler", 2)) == Ok(4)
    assert mesh.unacked("doubler") == BURST_SIZE
    dead_letter_confirms.release()
    await mesh.idle()
    assert len(mesh.dead_letters("doubler")) == BURST_SIZE
    assert mesh.unacked("doubler") == 0


@pytest.mark.parametrize("durable", [True, False])
async def test_the_cancels_of_a_batch_are_broadcast_together(
    mesh: Mesh, bad_sender: FakePeer, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    replica, confirms = await mesh.replica(doubler, durable=durable), PendingConfirms()
    broadcast = replica.broker.broadcast

    async def hold_confirm(agent: AgentName, message: Message) -> None:
        await confirms.wait_one()
        await broadcast(agent, message)

    monkeypatch.setattr(replica.broker, "broadcast", hold_confirm)
    cancels = [
        cancel_message(AgentName("bad_sender"), TaskId(new_id())) for _ in range(BURST_SIZE)
    ]
    await asyncio.gather(*(bad_sender.send_control("doubler", item) for item in cancels))
    await mesh.idle()
    assert confirms.outstanding == BURST_SIZE
    assert count_unhandled_messages(mesh, "doubler") == (0, BURST_SIZE)
    confirms.release()
    await mesh.idle()
    assert count_unhandled_messages(mesh, "doubler") == (0, 0)


async def test_a_drain_waits_for_dead_letter_confirms(
    mesh: Mesh, bad_sender: FakePeer, dead_letter_confirms: PendingConfirms
) -> None:
    replica = await mesh.replica(doubler)
    await send_burst(bad_sender, "doubler")
    await bad_sender.send("doubler", create_message(MessageType.REQUEST))
    await mesh.idle()
    replica.stop.set()
    await mesh.idle()
    assert not replica.task.done()
    assert dead_letter_confirms.outstanding == BURST_SIZE + 1
    dead_letter_confirms.release()
    await replica.task
    assert len(mesh.dead_letters("doubler")) == BURST_SIZE + 1
    assert count_unhandled_messages(mesh, "doubler") == (0, 0)
    assert mesh.waiting("doubler") == 0


@pytest.mark.parametrize("end", ["crash", "drain"])
async def test_an_unconfirmed_dead_letter_is_redelivered(
    mesh: Mesh, bad_sender: FakePeer, dead_letter_confirms: PendingConfirms, end: str
) -> None:
    replica = await mesh.replica(doubler, drain_timeout=timedelta(0))
    await send_burst(bad_sender, "doubler")
    await bad_sender.send("doubler", create_message(MessageType.REQUEST))
    await mesh.idle()
    assert dead_letter_confirms.outstanding == BURST_SIZE + 1
    await (replica.crash() if end == "crash" else replica.drain())
    assert mesh.dead_letters("doubler") == []
    assert count_unhandled_messages(mesh, "doubler")[0] == BURST_SIZE
    assert mesh.waiting("doubler") == 1
    dead_letter_confirms.release()
    await mesh.replica(doubler)
    await mesh.idle()
    assert len(mesh.dead_letters("doubler")) == BURST_SIZE + 1


async def test_a_retried_batch_dead_letters_each_message_once(
    mesh: Mesh,
    client: FakePeer,
    peer: FakePeer,
    bad_sender: FakePeer,
    dead_letter_confirms: PendingConfirms,
) -> None:
    """A message already being dead-lettered is not handled again when its batch is retried."""
    replica = await mesh.replica(asker("asker", "peer"))
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    fail_claims(replica, ValueError("a defect"), ConfigurationError("a", "b", "c"))
    await asyncio.gather(send_burst(bad_sender, "asker", 1), peer.respond(request, "well"))
    await mesh.idle()
    assert dead_letter_confirms.outstanding == 1
    await mesh.advance(2)
    assert await client.reply(task_id) == Ok({"peer": "well"})
    assert dead_letter_confirms.max_outstanding == 1
    dead_letter_confirms.release()
    await mesh.idle()
    assert len(mesh.dead_letters("asker")) == 1
    assert len(mesh.events.matching(Step.DEAD_LETTER, Phase.INFO)) == 1


def fail_claims(replica: RunningReplica, *errors: Exception) -> None:
    remaining_errors = list(errors)

    async def fail() -> None:
        if remaining_errors:
            raise remaining_errors.pop(0)

    replica.store.before["claim"] = fail
