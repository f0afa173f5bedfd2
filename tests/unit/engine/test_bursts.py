"""Good messages are handled while the broker has yet to confirm dead letters of bad ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import pytest

from meshpoint.adapters.inprocess.exchange import InProcessDelivery
from meshpoint.errors import ConfigurationError
from meshpoint.model.envelopes import cancel_message
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import AgentName, TaskId, new_id
from meshpoint.model.messages import Address, Message, MessageType, responses_of
from meshpoint.model.outcomes import Failed, Ok
from meshpoint.ports.broker import Published

from .agents import asker, doubler
from .mesh import Mesh, Running
from .puppet import Puppet

BURST = 5


class Confirms:
    """Broker confirms withheld until the test releases them.

    `most` is the largest number outstanding at a time.
    """

    def __init__(self) -> None:
        self.outstanding = self.most = 0
        self._released = asyncio.Event()

    async def one(self) -> None:
        self.outstanding += 1
        self.most = max(self.most, self.outstanding)
        try:
            await self._released.wait()
        finally:
            self.outstanding -= 1

    def release(self) -> None:
        self._released.set()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Confirms:
    """Withheld confirms of dead letters."""
    confirms, dead_letter = Confirms(), InProcessDelivery.dead_letter

    async def held(delivery: InProcessDelivery, reason: str) -> bool:
        await confirms.one()
        return await dead_letter(delivery, reason)

    monkeypatch.setattr(InProcessDelivery, "dead_letter", held)
    return confirms


@pytest.fixture
async def evil(mesh: Mesh) -> Puppet:
    """A puppet that sends bad messages."""
    return await mesh.puppet("evil")


def letter(type_: MessageType, body: bytes = b"}{", app_id: str = "evil") -> Message:
    id_ = new_id()
    return Message(type=type_, body=body, message_id=id_, correlation_id=id_, app_id=app_id)


async def burst(evil: Puppet, agent: str, count: int = BURST) -> None:
    for _ in range(count):
        await evil.letter(agent, letter(MessageType.REQUEST))


def waiting_letters(mesh: Mesh, agent: str) -> tuple[int, int]:
    """Messages in the response queue of `agent`: queued, and unacked."""
    queue = mesh.exchange.queue(responses_of(AgentName(agent)))
    assert queue is not None
    return len(queue.ready), sum(len(consumer.unacked) for consumer in queue.consumers)


@pytest.mark.parametrize("type_", [MessageType.REQUEST, MessageType.RESPONSE, MessageType.STATUS, MessageType.CANCEL])
async def test_letters_do_not_wait_for_dead_letters(
    mesh: Mesh, boss: Puppet, peer: Puppet, evil: Puppet, copies: Confirms, type_: MessageType
) -> None:
    await mesh.replica(asker("asker", "peer"))
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    for _ in range(BURST):
        if type_ is MessageType.CANCEL:  # the sender is not the requester of this task
            await evil.cancel("asker", task_id)
        else:
            await evil.letter("asker", letter(type_))
    await mesh.settle()
    assert copies.outstanding == BURST
    await peer.respond(request, "well")
    assert await boss.reply(task_id) == Ok({"peer": "well"})
    assert mesh.dead_letters("asker") == []
    await mesh.settle()
    assert waiting_letters(mesh, "asker") == (0, BURST)
    copies.release()
    await mesh.settle()
    assert len(mesh.dead_letters("asker")) == BURST
    assert waiting_letters(mesh, "asker") == (0, 0)


async def test_the_honest_letters_of_a_batch_come_first(
    mesh: Mesh, boss: Puppet, peer: Puppet, evil: Puppet, copies: Confirms
) -> None:
    running = await mesh.replica(asker("asker", "peer"))
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    started: list[int] = []

    async def count() -> None:
        started.append(copies.outstanding)

    running.store.before["claim"] = count
    await asyncio.gather(burst(evil, "asker"), peer.respond(request, "well"))
    assert await boss.reply(task_id) == Ok({"peer": "well"})
    assert started == [0]
    await mesh.settle()
    assert copies.outstanding == BURST


async def test_a_limited_number_is_copied_at_a_time(
    mesh: Mesh, evil: Puppet, copies: Confirms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshpoint.engine.refusals._AT_ONCE", 2)
    await mesh.replica(doubler)
    await burst(evil, "doubler")
    await mesh.settle()
    assert copies.outstanding == 2
    copies.release()
    await mesh.settle()
    assert copies.most == 2
    assert len(mesh.dead_letters("doubler")) == BURST


async def test_requests_do_not_wait_for_refusals(
    mesh: Mesh, boss: Puppet, evil: Puppet, copies: Confirms, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, replies = await mesh.replica(doubler), Confirms()
    publish = running.broker.publish

    async def held(messages: Sequence[tuple[Address, Message]]) -> list[Published]:
        if messages[0][0] == responses_of(AgentName("evil")):
            await replies.one()
        return await publish(messages)

    monkeypatch.setattr(running.broker, "publish", held)
    bad = [replace(letter(MessageType.REQUEST), reply_to=responses_of(AgentName("evil"))) for _ in range(BURST)]
    for message in bad:
        await evil.send("doubler", message)
    await mesh.settle()
    assert (replies.outstanding, copies.outstanding) == (BURST, 0)
    assert await boss.reply(await boss.ask("doubler", 1)) == Ok(2)
    replies.release()
    for message in bad:
        assert isinstance(await evil.reply(message.correlation_id), Failed)
    await mesh.settle()
    assert copies.outstanding == BURST
    assert await boss.reply(await boss.ask("doubler", 2)) == Ok(4)
    assert mesh.unacked("doubler") == BURST
    copies.release()
    await mesh.settle()
    assert len(mesh.dead_letters("doubler")) == BURST
    assert mesh.unacked("doubler") == 0


@pytest.mark.parametrize("durable", [True, False])
async def test_the_cancels_of_a_batch_are_broadcast_together(
    mesh: Mesh, evil: Puppet, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    running, confirms = await mesh.replica(doubler, durable=durable), Confirms()
    broadcast = running.broker.broadcast

    async def held(agent: AgentName, message: Message) -> None:
        await confirms.one()
        await broadcast(agent, message)

    monkeypatch.setattr(running.broker, "broadcast", held)
    cancels = [cancel_message(AgentName("evil"), TaskId(new_id())) for _ in range(BURST)]
    await asyncio.gather(*(evil.letter("doubler", each) for each in cancels))
    await mesh.settle()
    assert confirms.outstanding == BURST
    assert waiting_letters(mesh, "doubler") == (0, BURST)
    confirms.release()
    await mesh.settle()
    assert waiting_letters(mesh, "doubler") == (0, 0)


async def test_a_drain_waits_for_the_confirms(mesh: Mesh, evil: Puppet, copies: Confirms) -> None:
    running = await mesh.replica(doubler)
    await burst(evil, "doubler")
    await evil.send("doubler", letter(MessageType.REQUEST))
    await mesh.settle()
    running.stop.set()
    await mesh.settle()
    assert not running.task.done()
    assert copies.outstanding == BURST + 1
    copies.release()
    await running.task
    assert len(mesh.dead_letters("doubler")) == BURST + 1
    assert waiting_letters(mesh, "doubler") == (0, 0)
    assert mesh.waiting("doubler") == 0


@pytest.mark.parametrize("end", ["crash", "drain"])
async def test_what_is_not_confirmed_comes_again(mesh: Mesh, evil: Puppet, copies: Confirms, end: str) -> None:
    running = await mesh.replica(doubler, drain_timeout=timedelta(0))
    await burst(evil, "doubler")
    await evil.send("doubler", letter(MessageType.REQUEST))
    await mesh.settle()
    assert copies.outstanding == BURST + 1
    await (running.crash() if end == "crash" else running.drain())
    assert mesh.dead_letters("doubler") == []
    assert waiting_letters(mesh, "doubler")[0] == BURST
    assert mesh.waiting("doubler") == 1
    copies.release()
    await mesh.replica(doubler)
    await mesh.settle()
    assert len(mesh.dead_letters("doubler")) == BURST + 1


async def test_a_batch_that_is_retried_has_one_dead_letter_for_each(
    mesh: Mesh, boss: Puppet, peer: Puppet, evil: Puppet, copies: Confirms
) -> None:
    """A message already being dead-lettered is not handled again when its batch is retried."""
    running = await mesh.replica(asker("asker", "peer"))
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    fail_claims(running, ValueError("a defect"), ConfigurationError("a", "b", "c"))
    await asyncio.gather(burst(evil, "asker", 1), peer.respond(request, "well"))
    await mesh.settle()
    assert copies.outstanding == 1
    await mesh.advance(2)
    assert await boss.reply(task_id) == Ok({"peer": "well"})
    assert copies.most == 1
    copies.release()
    await mesh.settle()
    assert len(mesh.dead_letters("asker")) == 1
    assert len(mesh.events.of(Step.DEAD_LETTER, Phase.NOTED)) == 1


def fail_claims(running: Running, *errors: Exception) -> None:
    left = list(errors)

    async def fail() -> None:
        if left:
            raise left.pop(0)

    running.store.before["claim"] = fail
