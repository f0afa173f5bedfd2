"""One message, task or row that triggers a defect must not affect the replica or other tasks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from meshpoint.adapters.inprocess.exchange import InProcessDelivery
from meshpoint.errors import ConfigurationError
from meshpoint.model.calls import Call
from meshpoint.model.events import Step
from meshpoint.model.messages import Header
from meshpoint.model.outcomes import Failed, FailureKind, Ok

from .agents import asker, caller, doubler
from .mesh import Mesh, Running
from .puppet import Puppet

BAD = "no-such-id"  # real ids are hexadecimal, so no argument contains this by chance


@pytest.fixture(autouse=True)
def expected(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Every defect must be logged with its traceback."""
    yield
    assert any(record.exc_info for record in caplog.get_records("call"))


def breaks_on(running: Running, method: str) -> Callable[[], Awaitable[None]]:
    """Make a method of the database raise if its arguments contain `BAD`."""

    async def check() -> None:
        if BAD in repr(running.store.arguments[-1]):
            raise ValueError("a value that no driver takes")

    running.store.before[method] = check
    return check


def always_broken(running: Running, method: str) -> None:
    """Make a method of the database always raise."""

    async def check() -> None:
        raise ValueError("a defect")

    running.store.before[method] = check


async def test_a_request_that_breaks_the_lookup_is_refused_alone(mesh: Mesh, boss: Puppet) -> None:
    running = await mesh.replica(doubler, max_concurrency=2)
    breaks_on(running, "lookup")
    await boss.ask("doubler", 1, BAD)
    good = await boss.ask("doubler", 2)
    assert await boss.reply(good) == Ok(4)
    refused = await boss.reply(BAD)
    assert isinstance(refused, Failed)
    assert "internal error" in refused.message
    assert [letter.correlation_id for letter in mesh.dead_letters("doubler")] == [BAD]
    await mesh.settle()
    assert running.worker.site.slots.free == 2
    assert mesh.unacked("doubler") == 0


async def test_a_request_that_breaks_begin_is_refused_alone(mesh: Mesh, boss: Puppet) -> None:
    running = await mesh.replica(doubler, max_concurrency=2, begin_at_delivery=1)
    breaks_on(running, "begin")
    await boss.ask("doubler", 1, BAD)
    good = await boss.ask("doubler", 2)
    assert await boss.reply(good) == Ok(4)
    assert isinstance(await boss.reply(BAD), Failed)
    await mesh.settle()
    assert running.worker.site.slots.free == 2
    assert mesh.unacked("doubler") == 0


async def test_a_cancel_that_breaks_the_database_is_set_aside_alone(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    running = await mesh.replica(asker("asker", "peer"))
    breaks_on(running, "cancel")
    task_id = await boss.ask("asker", 1)
    await peer.request_number()
    await boss.cancel("asker", BAD)
    await boss.cancel("asker", task_id)
    assert await boss.reply(task_id) == Failed(FailureKind.CANCELLED, "cancelled on request")
    assert [letter.correlation_id for letter in mesh.dead_letters("asker")] == [BAD]


async def test_a_response_that_breaks_the_claim_is_set_aside_alone(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    running = await mesh.replica(asker("asker", "peer"))
    breaks_on(running, "claim")
    task_id = await boss.ask("asker", 1)
    asked = await peer.request_number()
    await peer.respond(asked, 1, headers={Header.PARENT_TASK.value: BAD})
    await peer.respond(asked, 2)
    assert await boss.reply(task_id) == Ok({"peer": 2})
    assert len(mesh.dead_letters("asker")) == 1


async def test_a_letter_that_no_dead_letters_take_keeps_no_other_waiting(
    mesh: Mesh, boss: Puppet, peer: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dead-letter queue is missing and the login may not declare it: an operator must act."""
    await mesh.replica(asker("asker", "peer"))
    task_id = await boss.ask("asker", 1)
    asked = await peer.request_number()
    bury = InProcessDelivery.dead_letter

    async def refused(*_: Any) -> bool:
        raise ConfigurationError("mesh.broker_url", "the login may not declare the queue", "grant it that")

    monkeypatch.setattr(InProcessDelivery, "dead_letter", refused)
    await boss.cancel("asker", "no id\0")
    await peer.respond(asked, 2)
    assert await boss.reply(task_id) == Ok({"peer": 2})
    monkeypatch.setattr(InProcessDelivery, "dead_letter", bury)
    await mesh.advance(5)
    assert len(mesh.dead_letters("asker")) == 1


@pytest.mark.parametrize("step", ["take", "expire", "take_over", "unsent", "keep_alives", "purge"])
async def test_a_step_of_the_sweeper_that_breaks_does_not_stop_the_others(
    mesh: Mesh, boss: Puppet, peer: Puppet, step: str
) -> None:
    running = await mesh.replica(asker("asker", "peer"))
    always_broken(running, step)
    always_broken(running, "due")  # makes each step of the sweeper query on its own
    task_id = await boss.ask("asker", 1)
    await peer.request_number()
    await mesh.advance(70)
    for other in {"take", "expire", "take_over", "unsent", "keep_alives", "purge"} - {step}:
        assert other in running.store.calls
    # one query a second, with no immediate repetition
    assert running.store.calls.count("due") < 100
    await peer.respond(peer.requests[0], 2)
    assert await boss.reply(task_id) == Ok({"peer": 2})


async def test_a_task_that_cannot_be_ended_does_not_end_its_replica(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    running = await mesh.replica(asker("asker", "peer"), max_concurrency=2)
    always_broken(running, "end")
    stuck = await boss.ask("asker", 1)
    await peer.respond(await peer.request_number(), 2)
    await mesh.settle()
    assert not running.task.done()
    assert running.worker.site.slots.free == 2
    del running.store.before["end"]
    await mesh.advance(40)  # the lease expires
    assert await boss.reply(stuck) == Ok({"peer": 2})


async def test_a_first_checkpoint_that_breaks_is_the_end_of_its_task_only(
    mesh: Mesh, boss: Puppet, peer: Puppet
) -> None:
    running = await mesh.replica(asker("asker", "peer"), max_concurrency=2)
    always_broken(running, "pause")
    task_id = await boss.ask("asker", 1)
    reply = await boss.reply(task_id)
    assert isinstance(reply, Failed)
    assert not running.task.done()


def breaks_publishing(running: Running, bad: Callable[[Any], bool]) -> None:
    """Make the replica's broker raise for every batch that contains a matching message."""
    publish = running.broker.publish

    async def check(messages: Any) -> Any:
        if any(bad(each) for each in messages):
            raise ValueError("Short string is longer than 255 bytes")
        return await publish(messages)

    running.broker.publish = check  # type: ignore[method-assign]


async def test_a_call_that_cannot_be_published_fails_alone(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    calls = [Call("bad", BAD, 1), Call("good", "peer", 2)]
    running = await mesh.replica(caller("caller", lambda _: calls))
    breaks_publishing(running, lambda letter: letter[0] == f"{BAD}.req")
    task_id = await boss.ask("caller", 0)
    await peer.respond(await peer.request_number(), 3)
    assert await boss.reply(task_id) == Ok({"bad": "undeliverable", "good": 3})


@pytest.mark.parametrize("pauses", [False, True])
async def test_a_reply_that_cannot_be_published_is_given_up(
    mesh: Mesh, boss: Puppet, peer: Puppet, pauses: bool
) -> None:
    running = await mesh.replica(asker("doubler", "peer") if pauses else doubler, max_concurrency=2)
    breaks_publishing(running, lambda letter: letter[1].correlation_id == BAD)
    await boss.ask("doubler", 1, BAD)
    if pauses:
        await peer.respond(await peer.request_number(), 2)
    await mesh.settle()
    await mesh.advance(50)
    assert mesh.events.of(Step.MESSAGE_REJECTED, task_id=BAD)
    assert not running.task.done()
    assert mesh.unacked("doubler") == 0


async def test_a_request_whose_context_cannot_be_built_gives_its_slot_back(
    mesh: Mesh, boss: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("no context")

    running = await mesh.replica(doubler, max_concurrency=1)
    with monkeypatch.context() as broken_context:
        broken_context.setattr("meshpoint.engine.receive.Request.context", refuse)
        broken = await boss.ask("doubler", 1)
        assert isinstance(await boss.reply(broken), Failed)
    good = await boss.ask("doubler", 2)
    assert await boss.reply(good) == Ok(4)
    await mesh.settle()
    assert running.worker.site.slots.free == 1
    assert mesh.unacked("doubler") == 0


async def test_a_batch_of_responses_that_breaks_after_its_commit_is_found_again_one_by_one(
    mesh: Mesh, boss: Puppet, peer: Puppet
) -> None:
    """Each repeated claim keeps its id, so no task waits for the lease of a run that never was."""
    running = await mesh.replica(asker("asker", "peer"))
    tasks = [await boss.ask("asker", number) for number in range(3)]
    requests = [await peer.request_number(number) for number in (1, 2, 3)]
    await mesh.settle()

    async def break_once() -> None:
        del running.store.after["claim"]
        raise ValueError("a defect behind the commit")

    running.store.after["claim"] = break_once
    for request in requests:
        await peer.respond(request, 2)
    for task_id in tasks:  # the clock stands still, so no lease expires
        assert await boss.reply(task_id) == Ok({"peer": 2})
    await mesh.settle()
    assert running.worker.site.slots.free == 10
    assert mesh.dead_letters("asker") == []
    assert mesh.events.of(Step.DUPLICATE) == []


async def test_a_response_whose_task_had_begun_before_the_defect_begins_nothing_twice(
    mesh: Mesh, boss: Puppet, peer: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await mesh.replica(asker("asker", "peer"))
    tasks = [await boss.ask("asker", number) for number in range(2)]
    requests = [await peer.request_number(number) for number in (1, 2)]
    await mesh.settle()
    segments = running.worker.segments
    arrived, count = segments.arrived, 0

    def break_at_the_second(*args: Any) -> None:
        nonlocal count
        count += 1
        if count == 2:
            raise ValueError("a defect between two arrivals")
        arrived(*args)

    monkeypatch.setattr(segments, "arrived", break_at_the_second)
    for request in requests:
        await peer.respond(request, 2)
    for task_id in tasks:
        assert await boss.reply(task_id) == Ok({"peer": 2})
    await mesh.settle()
    assert running.worker.site.slots.free == 10
