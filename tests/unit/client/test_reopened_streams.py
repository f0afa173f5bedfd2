"""A stream of updates ends early, and another one for the same task continues."""

from __future__ import annotations

import asyncio
import gc
import math

import pytest

from idle_loop import advance_loop, idle
from meshpoint import (
    Ended,
    OutcomeUnknown,
    StatusUpdate,
    TaskFailed,
    TooManyFollowers,
    Update,
)
from meshpoint.client import attachment, followed_tasks, open_task
from meshpoint.client.followed_tasks import FollowedTasks
from meshpoint.client.open_task import OpenTask
from meshpoint.errors import PoisonMessage
from meshpoint.model.bodies import StatusBody
from meshpoint.model.envelopes import status_envelope
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.messages import Address, AttachStatus, Message
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.questions import QuestionKey
from meshpoint.model.status_metadata import StatusMetadata, StatusNumber, UpdateKind
from meshpoint.model.tasks import Requester

from .calling import ROME, Call, Plan, travel
from .test_attachment import attaches, send_status, wait_for_attaches


async def read(call: Call, task_id: str, count: int, after: str | None = None) -> list[Update]:
    """Read some updates of a task, then leave its stream and drop its handle."""
    updates = call.mesh.task(travel, task_id).updates(after=after)
    return [await anext(updates) for _ in range(count)]


async def left_after_one_update(call: Call) -> Message:
    """Send `order-17`, read one update of it, and drop its stream. Returns the request."""
    await call.mesh.send(travel, ROME, task_id="order-17")
    request = await call.agent.wait_for_request()
    first = asyncio.ensure_future(read(call, "order-17", 1))
    await idle()
    await call.agent.status(request, 0)
    await first
    return request


def messages(updates: list[Update]) -> list[object]:
    return [update.message for update in updates if isinstance(update, StatusUpdate)]


async def test_a_reopened_stream_loses_no_update_and_no_result(call: Call) -> None:
    task_id = (await call.mesh.send(travel, ROME, task_id="order-17")).id
    request = await call.agent.wait_for_request()
    first = asyncio.ensure_future(read(call, task_id, 1))
    await idle()
    await call.agent.status(request, 0)
    seen = await first
    gc.collect()
    for number in range(1, 50):
        await call.agent.status(request, number)
    await idle()
    seen += await read(call, task_id, 10, after=seen[-1].id)
    gc.collect()
    await call.agent.respond(request, {"text": "by train"})
    await idle()
    seen += await read(call, task_id, 40, after=seen[-1].id)
    assert messages(seen) == list(range(50))
    assert not any(update.reset for update in seen)
    end = seen[-1]
    assert isinstance(end, Ended)
    assert end.outcome == Ok(Plan(text="by train"))


async def test_the_result_is_kept_for_a_reader_that_left(call: Call) -> None:
    request = await left_after_one_update(call)
    gc.collect()
    await call.agent.respond(request, {"text": "by train"})
    await idle()
    assert await call.mesh.task(travel, "order-17").result() == Plan(text="by train")


async def test_a_failed_task_is_asked_for_again_because_it_may_have_been_resumed(
    call: Call,
) -> None:
    request = await left_after_one_update(call)
    await call.agent.respond(request, Failed(FailureKind.ERROR, "sold out"))
    await idle()
    resumed = asyncio.ensure_future(call.mesh.task(travel, "order-17").result())
    await idle()
    await call.agent.respond(request, {"text": "by train"})
    assert await resumed == Plan(text="by train")


async def test_the_failure_counts_if_no_replica_knows_the_task(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attachment, "_UNKNOWN_DELAYS", (0.0,))
    request = await left_after_one_update(call)
    await call.agent.respond(request, Failed(FailureKind.ERROR, "sold out"))
    await idle()
    count = len(attaches(call))
    call.mesh.task(travel, "order-17")  # and dropped
    result = asyncio.ensure_future(call.mesh.task(travel, "order-17").result())
    for number in range(1, 6):
        attach = await wait_for_attaches(call, count + number)
        await send_status(call, attach, AttachStatus.UNKNOWN, certain=True)
    with pytest.raises(TaskFailed, match="sold out"):
        await result


async def test_a_repeated_id_is_another_task_for_its_readers(call: Call) -> None:
    request = await left_after_one_update(call)
    await call.agent.respond(request, {"text": "by train"})
    await idle()
    again = await call.mesh.send(travel, ROME, task_id="order-17")
    await call.agent.respond(await call.agent.wait_for_request(2), {"text": "by plane"})
    assert await again.result() == Plan(text="by plane")
    del again
    gc.collect()
    waiting = asyncio.ensure_future(call.mesh.task(travel, "order-17").result())
    await idle()
    assert not waiting.done(), "the first outcome is outdated"
    waiting.cancel()


def test_followed_tasks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    followed = FollowedTasks()
    tasks = [OpenTask("travel", TaskId(str(number)), set()) for number in range(1_002)]
    for task in tasks:
        followed.keep(task)
    followed.keep(tasks[2])
    assert followed.find("travel", "1") is None
    assert followed.find("travel", "2") is tasks[2]
    assert followed.find("travel", "3") is tasks[3]
    monkeypatch.setattr(followed_tasks, "_MAX_BYTES", 100)
    tasks[-1].kept_bytes = tasks[2].kept_bytes = 60
    followed.measure(tasks[2])
    followed.measure(tasks[-1])
    assert (followed.find("travel", "1001"), followed.find("travel", "5")) == (None, None)
    assert followed.find("travel", "2") is tasks[2]
    followed.discard("travel", "2")
    assert followed._bytes == 0


def test_another_task_with_the_id_of_a_followed_one_does_not_replace_it() -> None:
    followed = FollowedTasks()
    task, other = (OpenTask("travel", TaskId("order-17"), set()) for _ in range(2))
    followed.keep(task)
    other.kept_bytes = 60
    followed.measure(other)
    followed.forget(other)
    assert followed.find("travel", "order-17") is task
    assert followed._bytes == 0


async def test_the_outcome_of_a_followed_task_counts(call: Call) -> None:
    request = await left_after_one_update(call)
    before = call.transport._followed._bytes
    await call.agent.respond(request, {"text": 9_000 * "x"})
    await idle()
    assert 9_000 < call.transport._followed._bytes - before < 10_000


async def test_a_displaced_stream_takes_its_place_back_after_a_minute(call: Call) -> None:
    task = await call.mesh.send(travel, ROME, task_id="order-17")
    request = await call.agent.wait_for_request()
    reading = asyncio.ensure_future(anext(task.updates()))
    await idle()
    await send_status(call, request, AttachStatus.DETACHED)
    with pytest.raises(TooManyFollowers):
        await reading
    with pytest.raises(TooManyFollowers):
        await anext(task.updates())
    assert attaches(call) == []
    advance_loop(61.0)
    again = asyncio.ensure_future(anext(task.updates()))
    await idle()
    assert len(attaches(call)) == 1
    again.cancel()


async def test_a_displaced_connection_shows_the_end_of_a_task_at_once(call: Call) -> None:
    task = await call.mesh.send(travel, ROME, task_id="order-17")
    request = await call.agent.wait_for_request()
    await send_status(call, request, AttachStatus.DETACHED)
    await call.agent.respond(request, {"text": "by train"})
    await idle()
    assert isinstance(await anext(task.updates()), Ended)


async def test_a_requested_task_that_exists_nowhere_was_sent() -> None:
    asking = attachment.Attachment("travel", "order-17")
    asking.expect_reply(0.0)
    asking.displace(0.0)
    for now in range(5):
        asking.raise_error()
        await asking.ask(now)
        asking.record_status(AttachStatus.UNKNOWN, now, certain=True)
    assert asking.due_at == math.inf
    with pytest.raises(OutcomeUnknown, match="'order-17' of 'travel'"):
        asking.raise_error()


async def test_a_flood_of_updates_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    task, read = OpenTask("travel", TaskId("order-17"), set()), 0

    def count(*_: object) -> StatusBody:
        nonlocal read
        read += 1
        raise PoisonMessage("not read further")

    monkeypatch.setattr(open_task, "parse_body", count)
    envelope = status_envelope(
        AgentName("travel"), task.id, Requester(Address("client.private.1")), {"percent": 40}
    )
    assert envelope is not None
    for burst in (2_000, 100):
        for _ in range(burst + 500):
            task.add_status(envelope[1])
        assert burst <= read <= burst + 200, "a second of updates may pass meanwhile"
        read = 0
        advance_loop(1)


class Reader:
    """A reader of updates."""


async def test_the_status_is_asked_for_after_a_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flood may have hidden an honest update, such as a question."""
    monkeypatch.setattr(open_task, "_MAX_BURST", 0)
    task, reader = OpenTask("travel", TaskId("order-17"), set()), Reader()
    task.add_request("", None)
    envelope = status_envelope(
        AgentName("travel"), task.id, Requester(Address("client.private.1")), {"percent": 40}
    )
    assert envelope is not None
    now = asyncio.get_running_loop().time()
    task.add_status(envelope[1])
    assert task.attachment.due_at > now + 60, "nobody follows it"
    task.add_reader(reader)
    for _ in range(3):
        task.add_status(envelope[1])
        assert now + 10 <= task.attachment.due_at < now + 60


async def test_a_question_that_is_asked_again_is_shown_after_a_snapshot_of_it() -> None:
    task = OpenTask("travel", TaskId("order-17"), set())
    question = QuestionKey(AgentName("travel"), task.id, TaskId("~?approval.1")).to_id()
    for fence in (1, None, 2, None, 3):
        number = None if fence is None else StatusNumber(0, fence, f"run-{fence}", 1)
        envelope = status_envelope(
            AgentName("travel"),
            task.id,
            Requester(Address("client.private.1")),
            {"name": "approval", "questionId": question, "prompt": None, "answerSchema": {}},
            StatusMetadata(UpdateKind.QUESTION, number),
        )
        assert envelope is not None
        task.add_status(envelope[1])
    shown = [update.id for update, _ in task._updates]
    assert shown == ["0.1.run-1.1", "0.2.run-2.1", "0.3.run-3.1"]


async def test_the_last_hundred_questions_are_remembered() -> None:
    task = OpenTask("travel", TaskId("order-17"), set())
    for number in range(120):
        name = TaskId(f"~?approval.{number}")
        question = QuestionKey(AgentName("travel"), task.id, name).to_id()
        envelope = status_envelope(
            AgentName("travel"),
            task.id,
            Requester(Address("client.private.1")),
            {"name": "approval", "questionId": question, "prompt": None, "answerSchema": {}},
            StatusMetadata(UpdateKind.QUESTION),
        )
        assert envelope is not None
        task.add_status(envelope[1])
    assert len(task._questions) == 100
    assert question in task._questions


async def test_the_ids_of_questions_are_bounded() -> None:
    task = OpenTask("travel", TaskId("order-17"), set())
    question = QuestionKey(AgentName("travel"), task.id, TaskId("~?approval.1")).to_id()
    padded = question + 5_000 * "!"  # base64 ignores it
    assert QuestionKey.from_id(padded).task_id == task.id
    envelope = status_envelope(
        AgentName("travel"),
        task.id,
        Requester(Address("client.private.1")),
        {"name": "approval", "questionId": padded, "prompt": None, "answerSchema": {}},
        StatusMetadata(UpdateKind.QUESTION),
    )
    assert envelope is not None
    task.add_status(envelope[1])
    assert [update.kind for update, _ in task._updates] == ["status"]
    assert task._questions == {}


async def test_another_stream_of_an_ended_task_keeps_the_later_task(call: Call) -> None:
    earlier = await call.mesh.send(travel, ROME, task_id="order-17")
    request = await call.agent.wait_for_request()
    await call.agent.respond(request, Failed(FailureKind.ERROR, "sold out"))
    await idle()
    first = asyncio.ensure_future(read(call, "order-17", 1))  # it has been resumed
    await idle()
    await call.agent.status(request, 0)
    await first
    earlier.updates()
    gc.collect()
    await call.agent.respond(request, {"text": "by train"})
    await idle()
    assert call.mesh.task(travel, "order-17")._task.outcome is not None


async def test_the_end_of_an_earlier_stream_keeps_the_task_of_a_later_one(call: Call) -> None:
    earlier = await call.mesh.send(travel, ROME, task_id="order-17")
    request = await call.agent.wait_for_request()
    stream = earlier.updates()
    await call.agent.respond(request, Failed(FailureKind.ERROR, "sold out"))
    await idle()
    first = asyncio.ensure_future(read(call, "order-17", 1))  # it has been resumed
    await idle()
    await call.agent.status(request, 0)
    await first
    assert isinstance(await anext(stream), Ended)
    gc.collect()
    await call.agent.respond(request, {"text": "by train"})
    await idle()
    later = call.mesh.task(travel, "order-17")._task
    assert later.outcome is not None


async def test_the_bound_counts_the_kept_failure_of_an_earlier_attempt(call: Call) -> None:
    await call.mesh.send(travel, ROME, task_id="order-17")
    request = await call.agent.wait_for_request()
    for _ in range(3):
        reading = asyncio.ensure_future(read(call, "order-17", 1))
        await idle()
        await call.agent.status(request, 0)
        await reading
        gc.collect()
        await call.agent.respond(request, Failed(FailureKind.ERROR, 9_000 * "x"))
        await idle()
    call.mesh.task(travel, "order-17").updates()
    kept = call.transport._followed.find("travel", "order-17")
    assert kept is not None
    assert kept.outcome is None
    assert 9_000 < kept.kept_bytes < 15_000
    assert call.transport._followed._bytes == kept.kept_bytes


async def test_a_wait_for_news_counts_from_its_call() -> None:
    """An update that arrives before the coroutine runs is news."""
    task = OpenTask("travel", TaskId("1"), set())
    news = task.wait_news()
    envelope = status_envelope(
        AgentName("travel"), task.id, Requester(Address("ledger.private.1")), {"percent": 1}
    )
    assert envelope is not None
    task.add_status(envelope[1])
    waiting = asyncio.ensure_future(news)
    await idle()
    assert waiting.done()
