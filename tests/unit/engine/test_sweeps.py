"""The sweeper handles due work in batches until none is left, and reserves only needed slots."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.engine import dispatch
from meshpoint.model.calls import Call
from meshpoint.model.checkpoint import TaskState
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.messages import Address, Header, Message, MessageType
from meshpoint.model.outcomes import Ok
from meshpoint.ports.broker import Published

from .agents import asker, caller, doubler
from .mesh import Mesh, Running
from .puppet import Puppet


class Held:
    """Blocks methods of the database until `opened` is set."""

    def __init__(self, running: Running, *methods: str) -> None:
        self.reached, self.opened = asyncio.Event(), asyncio.Event()
        for method in methods:
            running.store.before[method] = self._hold

    async def _hold(self) -> None:
        self.reached.set()
        await self.opened.wait()


@pytest.mark.parametrize("look", [["take", "due"], ["expire", "due"], ["take_over", "due"]], ids=lambda each: each[0])
async def test_answers_that_coincide_with_a_look_run_here(
    mesh: Mesh, boss: Puppet, peer: Puppet, look: list[str]
) -> None:
    running = await mesh.replica(asker("asker", "peer"))
    await mesh.advance(20)  # past both grace periods
    tasks = [await boss.ask("asker", number) for number in range(5)]
    requests = [await peer.request_number(number) for number in range(1, 6)]
    await mesh.settle()
    held = Held(running, *look)
    mesh.clock.advance(timedelta(seconds=1))
    await held.reached.wait()
    for request in requests:
        await peer.respond(request, 2)
    for task_id in tasks:
        assert await boss.reply(task_id) == Ok({"peer": 2})
    assert mesh.events.of(Step.TAKE, Phase.AFTER) == [], "no task became ready"
    held.opened.set()
    await mesh.settle()
    assert running.worker.site.slots.free == 10


async def test_a_claim_takes_one_slot_for_all_responses_of_a_task(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    four = caller("agent", lambda _: [Call(name, "peer", name) for name in "abcd"])
    running = await mesh.replica(four, max_concurrency=2)
    await boss.ask("agent", 1)
    requests = [await peer.request_number(number) for number in (1, 2, 3, 4)]
    await mesh.settle()
    first = Held(running, "claim")
    await peer.respond(requests[0], 1)
    await first.reached.wait()
    for request in requests[1:]:  # these are claimed together
        await peer.respond(request, 1)
    second = Held(running, "claim")
    first.opened.set()
    await second.reached.wait()
    await boss.ask("agent", 2)  # gets the other slot even if the claim is delayed
    await peer.request_number(8)
    second.opened.set()


async def test_many_keep_alives_are_due_together(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    running = await mesh.replica(asker("asker", "peer"), sweep_batch=20)
    tasks = {await boss.ask("asker", number, idle_timeout=60) for number in range(150)}
    await peer.request_number(150)
    await mesh.settle()
    published = len(running.broker.published)
    calls = counted(running)
    await mesh.advance(20)
    told = {letter.correlation_id for letter in boss.letters if letter.type is MessageType.STATUS}
    assert told == tasks
    assert len(running.broker.published) - published == 150
    assert len(calls) <= 8 + 1, "each batch must be one publish"


def counted(running: Running) -> list[int]:
    """Sizes of all later publishes, updated as they happen."""
    calls: list[int] = []
    publish = running.broker.publish

    async def counting(messages: Sequence[tuple[Address, Message]]) -> list[Published]:
        calls.append(len(messages))
        return await publish(messages)

    running.broker.publish = counting  # type: ignore[method-assign]
    return calls


async def test_many_calls_that_are_due_together_expire_in_one_look(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    await mesh.replica(asker("asker", "peer", timeout=timedelta(seconds=60)), sweep_batch=10)
    tasks = [await boss.ask("asker", number) for number in range(200)]
    await peer.request_number(200)
    await mesh.advance(59)
    mesh.clock.advance(timedelta(seconds=2))
    for task_id in tasks:  # the clock stands still
        assert await boss.reply(task_id) == Ok({"peer": "timeout"})


async def test_much_that_is_due_to_be_sent_goes_in_one_look(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    running = await mesh.replica(asker("asker", "peer"), sweep_batch=10)
    running.broker.away = True
    tasks = [await boss.ask("asker", number) for number in range(95)]
    for task_id in tasks:
        await mesh.events.wait(Step.ACK, Phase.AFTER, task_id=task_id)
    await mesh.advance(10)
    running.broker.away = False
    mesh.clock.advance(timedelta(seconds=1))
    await peer.request_number(95)


async def test_a_silent_address_holds_up_no_keep_alive_and_no_other_reply(
    mesh: Mesh, boss: Puppet, peer: Puppet
) -> None:
    """The queue has lost its leader, so the broker confirms nothing for it."""
    running = await mesh.replica(asker("asker", "peer"))
    silent, asked, publish = await mesh.puppet("silent"), asyncio.Event(), running.broker.publish

    async def unconfirmed(messages: Sequence[tuple[Address, Message]]) -> list[Published]:
        if any(address == "silent.resp" for address, _ in messages):
            asked.set()
            await asyncio.Event().wait()
        return await publish(messages)

    for number in range(3):
        await silent.ask("asker", number)
    unheard = await silent.ask("asker", 4, idle_timeout=60)
    patient = await boss.ask("asker", 7, idle_timeout=60)
    quick = await boss.ask("asker", 8)
    requests = {request.correlation_id: request for request in [await peer.request_number(n) for n in range(1, 7)]}
    await mesh.settle()
    running.broker.publish = unconfirmed  # type: ignore[method-assign]
    parents = {request.headers[Header.PARENT_TASK.value]: request for request in requests.values()}
    for task_id, request in parents.items():
        if task_id not in {patient, unheard}:
            await peer.respond(request, 1)
    await asked.wait()
    assert await boss.reply(quick) == Ok({"peer": 1})
    await mesh.advance(30)
    assert {"alive": True} in boss.statuses()
    await peer.respond(parents[patient], 1)
    assert await boss.reply(patient) == Ok({"peer": 1})


async def test_rows_that_stay_due_do_not_keep_the_sweeper_busy(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    """Locked rows stay due without being acquired, so the next sweep waits for the interval."""
    running = await mesh.replica(asker("asker", "peer"), sweep_batch=5)
    due = running.store.due

    async def always(*args: Any) -> Any:
        counts = await due(*args)
        return type(counts)(5, 5, 5, 5, 5)

    running.store.due = always
    running.store.calls.clear()
    mesh.clock.advance(timedelta(seconds=2))
    for _ in range(5_000):
        await asyncio.sleep(0)
    assert running.store.calls.count("due") <= 201
    task_id = await boss.ask("asker", 1)
    await peer.respond(await peer.request_number(), 2)
    assert await boss.reply(task_id) == Ok({"peer": 2})


async def test_a_locked_private_queue_stops_no_durable_deadline(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    running = await mesh.launch(asker("asker", "peer", timeout=timedelta(seconds=30)))
    running.broker.locked.add("private")
    await mesh.events.wait(Step.STARTED)
    task_id = await boss.ask("asker", 1)
    await peer.request_number()
    await mesh.advance(40)
    assert await boss.reply(task_id) == Ok({"peer": "timeout"})
    assert not running.broker.consuming(running.worker.site.memory.reply_to)
    running.broker.locked.clear()
    await mesh.advance(6)
    assert running.broker.consuming(running.worker.site.memory.reply_to)


async def test_expiry_waits_for_the_shared_queue_and_rescues_do_not(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    first = await mesh.replica(asker("asker", "peer", timeout=timedelta(seconds=30)))
    waiting = await boss.ask("asker", 1)
    await peer.respond(await peer.request_number(), 2)
    await boss.reply(waiting)
    again = await boss.ask("asker", 2)
    await peer.request_number(2)
    await mesh.settle()
    first.broker.locked.add("asker.resp")
    await mesh.advance(60)
    assert boss.replies(again) == [], "a response may still wait in the unconsumed queue"
    first.broker.locked.clear()
    await mesh.advance(5)
    assert await boss.reply(again) == Ok({"peer": "timeout"})
    assert await mesh.state(again) is TaskState.COMPLETED


async def test_a_reply_that_stays_undelivered_is_tried_less_and_less_often(mesh: Mesh, boss: Puppet) -> None:
    running = await mesh.replica(doubler)
    running.broker.fail(*[Published.OVERLOADED] * 1000, type="response")
    await boss.ask("doubler", 1)
    await mesh.advance(600)
    assert len(mesh.events.of(Step.REPLY, Phase.AFTER)) < 12


@pytest.mark.parametrize("durable", [True, False])
async def test_a_silent_reply_queue_holds_up_others_only_for_a_moment(
    mesh: Mesh, boss: Puppet, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    monkeypatch.setattr(dispatch, "_PROMPT", 0.01)
    running = await mesh.replica(doubler, durable=durable, max_concurrency=2)
    publish, opened = running.broker.publish, asyncio.Event()

    async def unconfirmed(messages: Sequence[tuple[Address, Message]]) -> list[Published]:
        if any(address == "silent.resp" for address, _ in messages):
            await opened.wait()
        return await publish(messages)

    running.broker.publish = unconfirmed  # type: ignore[method-assign]
    silent = await mesh.puppet("silent")
    tasks = [await silent.ask("doubler", number) for number in range(10)]
    sane = await boss.ask("doubler", 21)
    assert await boss.reply(sane) == Ok(42)
    # without a database, only this process has the replies
    for task_id in tasks if durable else ():
        await mesh.events.wait(Step.ACK, Phase.AFTER, task_id=task_id)
    opened.set()
    await mesh.advance(60)
    for number, task_id in enumerate(tasks):
        assert set(map(str, silent.replies(task_id))) == {str(Ok(2 * number))}
    assert mesh.unacked("doubler") == 0


@agent("patient", version="1")
async def asks_if_large(ctx: TaskExecutionContext, number: int) -> int:
    return number if number < 10 else await ctx.call(Peer("peer", int, int)(number))


async def test_a_slow_broker_loses_no_reply_of_a_task_in_memory(
    mesh: Mesh, boss: Puppet, peer: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_PROMPT", 0)
    running = await mesh.replica(asks_if_large, durable=False, max_concurrency=4, max_in_memory=3)
    publish, quick = running.broker.publish, asyncio.Event()

    async def slow(messages: Sequence[tuple[Address, Message]]) -> list[Published]:
        if messages[0][1].type is MessageType.RESPONSE:
            await quick.wait()
        return await publish(messages)

    running.broker.publish = slow  # type: ignore[method-assign]
    paused = [await boss.ask("patient", number) for number in (10, 11)]
    requests = [await peer.request_number(count) for count in (1, 2)]
    tasks = [await boss.ask("patient", number) for number in range(8)]
    await mesh.settle()
    for number, request in enumerate(requests, 10):
        await peer.respond(request, number)
    await mesh.settle()
    quick.set()
    await mesh.advance(60)
    assert mesh.events.of(Step.REPLY_DROPPED) == []
    for number, task_id in [*enumerate(tasks), *enumerate(paused, 10)]:
        assert set(map(str, boss.replies(task_id))) == {str(Ok(number))}
    assert mesh.unacked("patient") == 0


async def test_a_cancelled_task_with_a_silent_requester_holds_up_no_letter(
    mesh: Mesh, boss: Puppet, peer: Puppet
) -> None:
    running = await mesh.replica(asker("asker", "peer"))
    publish = running.broker.publish

    async def unconfirmed(messages: Sequence[tuple[Address, Message]]) -> list[Published]:
        if any(address == "silent.resp" for address, _ in messages):
            await asyncio.Event().wait()
        return await publish(messages)

    silent = await mesh.puppet("silent")
    doomed = await silent.ask("asker", 1)
    task_id = await boss.ask("asker", 2)
    requests = [await peer.request_number(number) for number in (1, 2)]
    await mesh.settle()
    running.broker.publish = unconfirmed  # type: ignore[method-assign]
    await silent.cancel("asker", doomed)
    for request in requests:
        await peer.respond(request, 2)
    assert await boss.reply(task_id) == Ok({"peer": 2})
