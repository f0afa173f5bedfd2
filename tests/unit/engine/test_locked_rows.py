"""Another session locks a task's row: messages for that task wait, others are handled."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from meshpoint.engine.postponed import PostponedLetters
from meshpoint.errors import BrokerUnavailable, ConfigurationError, RowLocked
from meshpoint.model.calls import Done
from meshpoint.model.checkpoint import Locked, TaskState
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import AgentName, RunId
from meshpoint.model.messages import responses_of
from meshpoint.model.outcomes import Failed, FailureKind, Ok

from .agents import Gate, Scripted, asker
from .mesh import Mesh, Running
from .puppet import Puppet


def hold(running: Running, held: set[str], *, when_ending: set[str] | None = None) -> None:
    """Make the replica's database report these tasks as locked by another session."""
    store = running.store._inner

    class Held:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        async def claim(self, claims: Any, replica: Any, slots: int) -> Any:
            free = [claim for claim in claims if claim.task_id not in held]
            answers = iter(await store.claim(free, replica, slots))
            return [
                Locked(claim.task_id, claim.sub_task_id) if claim.task_id in held else next(answers)
                for claim in claims
            ]

        async def cancel(self, cancels: Any) -> Any:
            free = [cancel for cancel in cancels if cancel.task_id not in held]
            answers = iter(await store.cancel(free))
            return [Locked(cancel.task_id) if cancel.task_id in held else next(answers) for cancel in cancels]

        async def end(self, ends: Any) -> Any:
            if any(end.run.task_id in (when_ending or ()) for end in ends):
                raise RowLocked("another session holds a row")
            return await store.end(ends)

    running.store._inner = Held()


def unsettled(mesh: Mesh, agent: str) -> tuple[int, int]:
    """Responses to `agent`: queued, and unacked at replicas."""
    queue = mesh.exchange.queue(responses_of(AgentName(agent)))
    assert queue is not None
    return len(queue.ready), sum(len(consumer.unacked) for consumer in queue.consumers)


def claims(running: Running) -> list[int]:
    """Number of outcomes in each claim of the replica."""
    return [len(given[0]) for name, given in running.store.arguments if name == "claim"]


async def test_a_response_waits_for_its_own_task_only(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    locked, other = await boss.ask("asker", 1), await boss.ask("asker", 2)
    requests = [await peer.request_number(1), await peer.request_number(2)]
    held = {locked}
    hold(replica, held)
    for request in requests:
        await peer.respond(request, "answer")
    assert isinstance(await boss.reply(other), Ok)
    await mesh.advance(30)
    assert boss.replies(locked) == []
    assert mesh.events.of(Step.ROW_LOCKED, Phase.NOTED, locked)
    assert mesh.events.of(Step.STORE_AWAY) == []
    held.clear()
    await mesh.advance(2)
    assert isinstance(await boss.reply(locked), Ok)
    assert unsettled(mesh, "asker") == (0, 0)


async def test_more_responses_than_the_prefetch_may_wait(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    replica = await mesh.replica(asker("asker", "peer"), response_prefetch=2)
    tasks = [await boss.ask("asker", number) for number in range(5)]
    requests = [await peer.request_number(number) for number in range(1, 6)]
    held = set(tasks[:4])
    hold(replica, held)
    for request in requests:
        await peer.respond(request, "answer")
    await mesh.advance(5)
    assert isinstance(await boss.reply(tasks[4]), Ok)
    held.clear()
    await mesh.advance(5)
    for task in tasks:
        assert isinstance(await boss.reply(task), Ok)
    assert unsettled(mesh, "asker") == (0, 0)


async def test_a_cancel_waits_for_its_own_task_only(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    locked, other = await boss.ask("asker", 1), await boss.ask("asker", 2)
    await peer.request_number(2)
    await mesh.settle()
    held = {locked}
    hold(replica, held)
    for task in (locked, other):
        await boss.cancel("asker", task)
    assert (await boss.reply(other)).kind is FailureKind.CANCELLED  # type: ignore[union-attr]
    await mesh.advance(10)
    assert boss.replies(locked) == []
    held.clear()
    await mesh.advance(2)
    outcome = await boss.reply(locked)
    assert isinstance(outcome, Failed)
    assert outcome.kind is FailureKind.CANCELLED
    assert unsettled(mesh, "asker") == (0, 0)


async def test_an_end_is_repeated_and_is_no_outage(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    locked = await boss.ask("asker", 1)
    request = await peer.request_number(1)
    await mesh.settle()
    held = {locked}
    hold(replica, set(), when_ending=held)
    await peer.respond(request, "answer")
    await mesh.settle()
    await mesh.advance(5)
    assert mesh.events.of(Step.ROW_LOCKED, Phase.NOTED)
    assert boss.replies(locked) == []
    held.clear()
    await mesh.advance(5)
    assert isinstance(await boss.reply(locked), Ok)
    assert mesh.events.of(Step.STORE_AWAY) == []


async def test_a_draining_replica_gives_back_what_waits_for_a_lock(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    locked = await boss.ask("asker", 1)
    request = await peer.request_number(1)
    hold(replica, {locked})
    await peer.respond(request, "answer")
    await mesh.settle()
    assert unsettled(mesh, "asker") == (0, 1)
    replica.stop.set()
    await replica.task
    assert unsettled(mesh, "asker") == (1, 0)
    await mesh.replica(asker("asker", "peer"))
    assert await boss.reply(locked) == Ok({"peer": "answer"})
    assert unsettled(mesh, "asker") == (0, 0)


async def test_a_drain_waits_for_an_attempt_that_owns_the_task(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    replica = await mesh.replica(asker("asker", "peer"), drain_timeout=timedelta(hours=1))
    locked = await boss.ask("asker", 1)
    request = await peer.request_number(1)
    held, gate = {locked}, Gate()
    hold(replica, held)
    await peer.respond(request, "answer")
    await mesh.settle()
    held.clear()
    replica.store.after["claim"] = gate
    await mesh.advance(2)
    await gate.reach()
    replica.stop.set()
    await mesh.settle()
    assert not replica.task.done()
    gate.opened.set()
    await replica.task
    assert await boss.reply(locked) == Ok({"peer": "answer"})
    assert mesh.events.of(Step.RELEASE) == []


async def test_a_letter_waits_once_although_its_batch_met_a_defect(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    locked = await boss.ask("asker", 1)
    request = await peer.request_number(1)
    held = {locked}
    hold(replica, held)
    defects = iter([RuntimeError("a defect")])

    async def defect() -> None:
        for error in defects:
            raise error

    replica.store.before["progress"] = defect
    await asyncio.gather(peer.respond(request, "answer"), peer.status(request, "news"))
    await mesh.settle()
    assert claims(replica) == [1]  # not retried within the same attempt
    held.clear()
    replica.store.arguments.clear()
    await mesh.advance(2)
    assert await boss.reply(locked) == Ok({"peer": "answer"})
    assert claims(replica) == [1]
    assert unsettled(mesh, "asker") == (0, 0)


@pytest.mark.parametrize("letters", [1, 2])
async def test_letters_that_meet_a_defect_when_they_are_retried(
    mesh: Mesh, boss: Puppet, peer: Puppet, letters: int
) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    tasks = [await boss.ask("asker", number) for number in range(letters)]
    requests = [await peer.request_number(number + 1) for number in range(letters)]
    held = set(tasks)
    hold(replica, held)
    for request in requests:
        await peer.respond(request, "answer")
    await mesh.settle()
    defects = iter([RuntimeError("a defect")])

    async def defect() -> None:
        for error in defects:
            raise error

    replica.store.before["claim"] = defect
    held.clear()
    await mesh.advance(2)
    for task in tasks:
        assert await boss.reply(task) == Ok({"peer": "answer"})
    assert unsettled(mesh, "asker") == (0, 0)


async def test_letters_wait_while_a_setting_is_wrong(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    """For example, the login may not write to the exchange."""
    replica = await mesh.replica(asker("asker", "peer"))
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number(1)
    wrong = True

    async def refused() -> None:
        if wrong:
            raise ConfigurationError("mesh.broker_url", "the login may not write", "grant it that")

    replica.store.before["claim"] = refused
    await peer.respond(request, "answer")
    await mesh.advance(10)
    assert unsettled(mesh, "asker") == (0, 1)
    wrong = False
    await mesh.advance(2)
    assert await boss.reply(task_id) == Ok({"peer": "answer"})
    assert unsettled(mesh, "asker") == (0, 0)


async def test_letters_are_retried_after_any_defect(mesh: Mesh) -> None:
    errors = iter([RuntimeError("a defect"), BrokerUnavailable("away"), RuntimeError("another")])
    handled: list[object] = []

    async def handle(received: Any, home: Any, *, shared: bool) -> None:
        for error in errors:
            raise error
        handled.extend(received)

    def spawn(coroutine: Any) -> asyncio.Task[None]:
        return asyncio.create_task(coroutine)

    rooms = list[int]()
    letters = PostponedLetters(handle, mesh.clock, spawn, rooms.append)
    letter: Any = (None, RunId("claim"))
    home: Any = None
    await letters.keep(letter, home, shared=True)
    await mesh.advance(5)
    assert handled == [letter]
    assert rooms[-1] == 0  # no message waits or is being retried


async def test_a_drain_that_times_out_gives_waiting_responses_back(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    """Otherwise their tasks would start a segment here while slower code is still stopping."""
    stub, asks = Gate(), asker("asker", "peer")

    async def start(ctx: Any, request: Any) -> Any:
        while request == "stubborn":
            with suppress(asyncio.CancelledError):
                await stub()
                return Done("at last")
        return await asks.start(ctx, request)

    options = {"drain_timeout": timedelta(0), "release_timeout": timedelta(minutes=1)}
    replica = await mesh.replica(Scripted("asker", start, asks.resume), **options)
    locked = await boss.ask("asker", 1)
    request = await peer.request_number()
    await boss.ask("asker", "stubborn")
    await stub.reach()
    held = {locked}
    hold(replica, held)
    await peer.respond(request, "answer")
    await mesh.events.wait(Step.ROW_LOCKED)
    draining = asyncio.create_task(replica.drain())
    await mesh.settle()
    held.clear()
    await mesh.advance(2)
    assert unsettled(mesh, "asker") == (1, 0)
    assert await mesh.state(locked) is TaskState.WAITING
    stub.opened.set()
    await draining
    await mesh.replica(asks)
    assert await boss.reply(locked) == Ok({"peer": "answer"})
