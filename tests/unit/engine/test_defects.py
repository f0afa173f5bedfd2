"""One message, task or row that triggers a defect must not affect the replica or other tasks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.adapters.inprocess.broker import InProcessDelivery
from meshpoint.errors import ConfigurationError
from meshpoint.model.calls import Call
from meshpoint.model.events import Step
from meshpoint.model.messages import Header
from meshpoint.model.outcomes import Failed, FailureKind, Ok

from .agents import asker, caller, doubler
from .mesh import Mesh, RunningReplica

BAD_ID = "no-such-id"  # real ids are hexadecimal, so no argument contains this by chance


@pytest.fixture(autouse=True)
def expected(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Every defect must be logged with its traceback."""
    yield
    assert any(record.exc_info for record in caplog.get_records("call"))


def fail_for_bad_task(replica: RunningReplica, method: str) -> Callable[[], Awaitable[None]]:
    """Make a method of the database raise if its arguments contain `BAD_ID`."""

    async def raise_if_bad() -> None:
        if BAD_ID in repr(replica.store.arguments[-1]):
            raise ValueError("a value that no driver takes")

    replica.store.before[method] = raise_if_bad
    return raise_if_bad


def fail_always(replica: RunningReplica, method: str) -> None:
    """Make a method of the database always raise."""

    async def raise_defect() -> None:
        raise ValueError("a defect")

    replica.store.before[method] = raise_defect


async def test_a_request_that_breaks_the_lookup_is_refused_alone(
    mesh: Mesh, client: FakePeer
) -> None:
    replica = await mesh.replica(doubler, max_concurrency=2)
    fail_for_bad_task(replica, "lookup")
    await client.ask("doubler", 1, BAD_ID)
    good = await client.ask("doubler", 2)
    assert await client.reply(good) == Ok(4)
    refusal = await client.reply(BAD_ID)
    assert isinstance(refusal, Failed)
    assert "internal error" in refusal.message
    assert [message.correlation_id for message in mesh.dead_letters("doubler")] == [BAD_ID]
    await mesh.idle()
    assert replica.worker.runtime.slots.free == 2
    assert mesh.unacked("doubler") == 0


async def test_a_request_that_breaks_begin_is_refused_alone(mesh: Mesh, client: FakePeer) -> None:
    replica = await mesh.replica(doubler, max_concurrency=2, begin_at_delivery=1)
    fail_for_bad_task(replica, "begin")
    await client.ask("doubler", 1, BAD_ID)
    good = await client.ask("doubler", 2)
    assert await client.reply(good) == Ok(4)
    assert isinstance(await client.reply(BAD_ID), Failed)
    await mesh.idle()
    assert replica.worker.runtime.slots.free == 2
    assert mesh.unacked("doubler") == 0


async def test_a_cancel_that_breaks_the_database_is_dead_lettered_alone(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    fail_for_bad_task(replica, "cancel")
    task_id = await client.ask("asker", 1)
    await peer.wait_for_request()
    await client.cancel("asker", BAD_ID)
    await client.cancel("asker", task_id)
    assert await client.reply(task_id) == Failed(FailureKind.CANCELLED, "cancelled on request")
    assert [message.correlation_id for message in mesh.dead_letters("asker")] == [BAD_ID]


async def test_a_response_that_breaks_the_claim_is_dead_lettered_alone(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    fail_for_bad_task(replica, "claim")
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await peer.respond(request, 1, headers={Header.PARENT_TASK.value: BAD_ID})
    await peer.respond(request, 2)
    assert await client.reply(task_id) == Ok({"peer": 2})
    assert len(mesh.dead_letters("asker")) == 1


async def test_a_message_that_cannot_be_dead_lettered_delays_no_other(
    mesh: Mesh, client: FakePeer, peer: FakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dead-letter queue is missing and the login may not declare it: an operator must act."""
    await mesh.replica(asker("asker", "peer"))
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    original_dead_letter = InProcessDelivery.dead_letter

    async def refused(*_: Any) -> bool:
        raise ConfigurationError(
            "mesh.broker_url", "the login may not declare the queue", "grant it that"
        )

    monkeypatch.setattr(InProcessDelivery, "dead_letter", refused)
    await client.cancel("asker", "no id\0")
    await peer.respond(request, 2)
    assert await client.reply(task_id) == Ok({"peer": 2})
    monkeypatch.setattr(InProcessDelivery, "dead_letter", original_dead_letter)
    await mesh.advance(5)
    assert len(mesh.dead_letters("asker")) == 1


@pytest.mark.parametrize("step", ["acquire", "expire", "rescue", "unsent", "keep_alives", "purge"])
async def test_a_step_of_the_sweeper_that_breaks_does_not_stop_the_others(
    mesh: Mesh, client: FakePeer, peer: FakePeer, step: str
) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    fail_always(replica, step)
    fail_always(replica, "due")  # makes each step of the sweeper query on its own
    task_id = await client.ask("asker", 1)
    await peer.wait_for_request()
    await mesh.advance(70)
    for other in {"acquire", "expire", "rescue", "unsent", "keep_alives", "purge"} - {step}:
        assert other in replica.store.calls
    # one query a second, with no immediate repetition
    assert replica.store.calls.count("due") < 100
    await peer.respond(peer.requests[0], 2)
    assert await client.reply(task_id) == Ok({"peer": 2})


async def test_a_task_that_cannot_be_ended_does_not_end_its_replica(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await mesh.replica(asker("asker", "peer"), max_concurrency=2)
    fail_always(replica, "end")
    blocked_id = await client.ask("asker", 1)
    await peer.respond(await peer.wait_for_request(), 2)
    await mesh.idle()
    assert not replica.task.done()
    assert replica.worker.runtime.slots.free == 2
    del replica.store.before["end"]
    await mesh.advance(40)  # the lease expires
    assert await client.reply(blocked_id) == Ok({"peer": 2})


async def test_a_defect_in_the_first_checkpoint_fails_only_its_task(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await mesh.replica(asker("asker", "peer"), max_concurrency=2)
    fail_always(replica, "pause")
    task_id = await client.ask("asker", 1)
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    assert not replica.task.done()


def fail_publishing(replica: RunningReplica, is_bad: Callable[[Any], bool]) -> None:
    """Make the replica's broker raise for every batch that contains a matching message."""
    publish = replica.broker.publish

    async def check_and_publish(messages: Any) -> Any:
        if any(is_bad(message) for message in messages):
            raise ValueError("Short string is longer than 255 bytes")
        return await publish(messages)

    replica.broker.publish = check_and_publish  # type: ignore[method-assign]  # a fake


async def test_a_call_that_cannot_be_published_fails_alone(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    calls = [Call("bad", BAD_ID, 1), Call("good", "peer", 2)]
    replica = await mesh.replica(caller("caller", lambda _: calls))
    fail_publishing(replica, lambda message: message[0] == f"{BAD_ID}.req")
    task_id = await client.ask("caller", 0)
    await peer.respond(await peer.wait_for_request(), 3)
    assert await client.reply(task_id) == Ok({"bad": "undeliverable", "good": 3})


@pytest.mark.parametrize("pauses", [False, True])
async def test_a_reply_that_cannot_be_published_is_abandoned(
    mesh: Mesh, client: FakePeer, peer: FakePeer, pauses: bool
) -> None:
    replica = await mesh.replica(
        asker("doubler", "peer") if pauses else doubler, max_concurrency=2
    )
    fail_publishing(replica, lambda message: message[1].correlation_id == BAD_ID)
    await client.ask("doubler", 1, BAD_ID)
    if pauses:
        await peer.respond(await peer.wait_for_request(), 2)
    await mesh.idle()
    await mesh.advance(50)
    assert mesh.events.matching(Step.MESSAGE_REJECTED, task_id=BAD_ID)
    assert not replica.task.done()
    assert mesh.unacked("doubler") == 0


async def test_a_request_whose_context_cannot_be_built_releases_its_slot(
    mesh: Mesh, client: FakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("no context")

    replica = await mesh.replica(doubler, max_concurrency=1)
    with monkeypatch.context() as broken_context:
        broken_context.setattr("meshpoint.engine.parsing.Request.create_context", refuse)
        broken = await client.ask("doubler", 1)
        assert isinstance(await client.reply(broken), Failed)
    good = await client.ask("doubler", 2)
    assert await client.reply(good) == Ok(4)
    await mesh.idle()
    assert replica.worker.runtime.slots.free == 1
    assert mesh.unacked("doubler") == 0


async def test_a_batch_that_breaks_after_its_commit_is_retried_one_by_one(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """Each repeated claim keeps its id, so no task waits for the lease of a run that never was."""
    replica = await mesh.replica(asker("asker", "peer"))
    tasks = [await client.ask("asker", number) for number in range(3)]
    requests = [await peer.wait_for_request(number) for number in (1, 2, 3)]
    await mesh.idle()

    async def fail_once() -> None:
        del replica.store.after["claim"]
        raise ValueError("a defect behind the commit")

    replica.store.after["claim"] = fail_once
    for request in requests:
        await peer.respond(request, 2)
    for task_id in tasks:  # the clock stands still, so no lease expires
        assert await client.reply(task_id) == Ok({"peer": 2})
    await mesh.idle()
    assert replica.worker.runtime.slots.free == 10
    assert mesh.dead_letters("asker") == []
    assert mesh.events.matching(Step.DUPLICATE) == []


async def test_a_response_retried_after_a_defect_resumes_its_task_once(
    mesh: Mesh, client: FakePeer, peer: FakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    tasks = [await client.ask("asker", number) for number in range(2)]
    requests = [await peer.wait_for_request(number) for number in (1, 2)]
    await mesh.idle()
    segments = replica.worker.runner
    handle_arrival, count = segments.handle_arrival, 0

    def fail_on_second(*args: Any) -> None:
        nonlocal count
        count += 1
        if count == 2:
            raise ValueError("a defect between two arrivals")
        handle_arrival(*args)

    monkeypatch.setattr(segments, "handle_arrival", fail_on_second)
    for request in requests:
        await peer.respond(request, 2)
    for task_id in tasks:
        assert await client.reply(task_id) == Ok({"peer": 2})
    await mesh.idle()
    assert replica.worker.runtime.slots.free == 10
