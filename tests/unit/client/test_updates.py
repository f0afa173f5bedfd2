"""What `TaskHandle.updates` yields."""

from __future__ import annotations

import asyncio
import gc
import weakref
from datetime import UTC, datetime

import pytest
from pydantic import JsonValue, TypeAdapter

from idle_loop import idle
from meshpoint import (
    ArtifactUpdate,
    Ended,
    Failed,
    FailureKind,
    Ok,
    StatusUpdate,
    TaskHandle,
    TextDelta,
    Update,
)
from meshpoint.client.open_task import OpenTask
from meshpoint.model.bodies import (
    A2AMessage,
    A2ATaskState,
    Part,
    StatusBody,
    TaskStatus,
)
from meshpoint.model.bodies import StatusUpdate as StatusUpdateBody
from meshpoint.model.envelopes import KEEP_ALIVE, MAX_STATUS_BYTES
from meshpoint.model.messages import Message, MessageType

from .calling import ROME, Call, Plan, travel

ARTIFACT: dict[str, JsonValue] = {"artifactId": "a-1", "parts": [{"text": "map"}]}


async def collect(call: Call, count: int) -> tuple[list[Update], list[Update]]:
    """Two iterators of a task that reports `count` times: one from the start, one at the end."""
    task = await call.mesh.send(travel, ROME)
    request = await call.agent.wait_for_request()
    early = task.updates()
    first = asyncio.ensure_future(anext(early))
    await idle()
    for number in range(count):
        await call.agent.status(request, number)
    await idle()
    await call.agent.respond(request, Ok({"text": "by train"}, (ARTIFACT,)))
    await task.outcome()
    return [await first, *[each async for each in early]], [each async for each in task.updates()]


def messages(updates: list[Update]) -> list[JsonValue]:
    return [update.message for update in updates if isinstance(update, StatusUpdate)]


async def test_status_artifacts_and_the_end_arrive_in_order(call: Call) -> None:
    early, late = await collect(call, 3)
    for updates in (early, late):
        assert [update.kind for update in updates] == [*["status"] * 3, "artifact", "ended"]
        assert messages(updates) == [0, 1, 2]
        artifact, end = updates[-2:]
        assert isinstance(artifact, ArtifactUpdate)
        assert artifact.artifact == ARTIFACT
        assert isinstance(end, Ended)
        assert end.outcome == Ok(Plan(text="by train"), (ARTIFACT,))


async def test_a_late_iterator_begins_with_the_latest_updates(call: Call) -> None:
    early, late = await collect(call, 50)
    assert messages(early) == list(range(50))
    assert messages(late) == list(range(50)), "they are kept while an iterator exists"
    task = await call.mesh.send(travel, ROME)
    request = await call.agent.wait_for_request(2)
    for number in range(50):
        await call.agent.status(request, number)
    await idle()
    await call.agent.respond(request, {"text": "by train"})
    assert messages([each async for each in task.updates()]) == list(range(42, 50))


async def test_a_slow_reader_misses_the_oldest_but_never_the_end(call: Call) -> None:
    early, _ = await collect(call, 250)
    assert messages(early) == [0, *range(150, 250)]
    assert isinstance(early[-1], Ended)


async def test_a_failure_ends_the_updates(call: Call) -> None:
    task = await call.mesh.send(travel, ROME)
    failed = Failed(FailureKind.ERROR, "no train")
    await call.agent.respond(await call.agent.wait_for_request(), failed)
    (end,) = [each async for each in task.updates()]
    assert isinstance(end, Ended)
    assert end.outcome == failed


async def send_status(call: Call, request: Message, body: bytes) -> None:
    await call.agent.send_back(request, MessageType.STATUS, body=body)


def status_body(
    state: A2ATaskState, message: A2AMessage | None = None, timestamp: str | None = None
) -> bytes:
    status = TaskStatus(state=state, message=message, timestamp=timestamp)
    return StatusBody(status_update=StatusUpdateBody(task_id="t", status=status)).to_bytes()


async def test_text_times_and_states_of_other_agents_are_shown(call: Call) -> None:
    task = await call.mesh.send(travel, ROME)
    request = await call.agent.wait_for_request()
    text = A2AMessage(message_id="m", role="ROLE_AGENT", parts=[Part(text="looking")])
    sent_at = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
    await send_status(
        call, request, status_body(A2ATaskState.SUBMITTED, timestamp=sent_at.isoformat())
    )
    await send_status(call, request, status_body(A2ATaskState.WORKING, text, "yesterday"))
    await send_status(call, request, status_body(A2ATaskState.WORKING, text, "2026-01-02T03:04"))
    await idle()
    await call.agent.respond(request, {"text": "by train"})
    first, *rest = [each async for each in task.updates()][:-1]
    assert isinstance(first, StatusUpdate)
    assert (first.at, first.state, first.message) == (sent_at, "submitted", None)
    for update in rest:
        assert isinstance(update, StatusUpdate)
        assert (update.state, update.message) == ("working", "looking")
        assert update.at.tzinfo is not None


async def test_what_is_no_status_of_this_task_is_not_shown(call: Call) -> None:
    task = await call.mesh.send(travel, ROME)
    request = await call.agent.wait_for_request()
    await call.agent.status(request, KEEP_ALIVE)
    await call.agent.status(request, "forged", app_id="mallory")
    await call.agent.status(request, "other", correlation_id="other")
    await send_status(call, request, b"{}")
    await send_status(call, request, status_body(A2ATaskState.COMPLETED))
    await idle()
    await call.agent.respond(request, {"text": "by train"})
    await task.outcome()
    await call.agent.status(request, "late")
    await idle()
    assert [each.kind async for each in task.updates()] == ["ended"]


async def test_a_dropped_iterator_leaves_nothing(call: Call) -> None:
    task = await call.mesh.send(travel, ROME)
    request = await call.agent.wait_for_request()
    updates = task.updates()
    waiting = asyncio.ensure_future(anext(updates))
    await idle()
    waiting.cancel()
    await idle()
    kept = task.updates()
    gone = weakref.ref(updates)
    del updates, waiting
    gc.collect()
    assert gone() is None
    assert len(task._task._readers) == 1
    assert call.transport._awaited == set()
    await call.agent.respond(request, {"text": "by train"})
    assert isinstance(await anext(kept), Ended)


async def test_an_iterator_continues_after_a_cancelled_wait(call: Call) -> None:
    task = await call.mesh.send(travel, ROME)
    request = await call.agent.wait_for_request()
    updates = task.updates()
    waiting = asyncio.ensure_future(anext(updates))
    await idle()
    waiting.cancel()
    await call.agent.status(request, 1)
    await call.agent.respond(request, {"text": "by train"})
    assert [each.kind async for each in updates] == ["status", "ended"]
    with pytest.raises(StopAsyncIteration):
        await anext(updates)


def test_updates_are_pydantic_models_told_apart_by_kind() -> None:
    adapter: TypeAdapter[Update] = TypeAdapter(Update)
    now = datetime(2026, 1, 2, tzinfo=UTC)
    updates: list[Update] = [
        StatusUpdate(id="1", at=now, state="working", message={"percent": 40}),
        TextDelta(id="2", at=now, text="by ", path=("rails",), reset=True),
        ArtifactUpdate(id="3", at=now, artifact=ARTIFACT),
        Ended(id="end", at=now, outcome=Ok({"text": "by train"})),
        Ended(id="end", at=now, outcome=Failed(FailureKind.ERROR, "no train")),
    ]
    for update in updates:
        assert adapter.validate_json(update.model_dump_json()) == update
    typed = Ended(id="end", at=now, outcome=Ok(Plan(text="by train")))
    assert '"value":{"text":"by train"}' in typed.model_dump_json()


async def test_updates_that_are_too_large_are_dropped_and_logged_once(
    call: Call, caplog: pytest.LogCaptureFixture
) -> None:
    task = await call.mesh.send(travel, ROME)
    request = await call.agent.wait_for_request()
    reading = asyncio.ensure_future(anext(task.updates()))
    await idle()
    for _ in range(3):
        await call.agent.status(request, 70_000 * "x")
    await call.agent.status(request, "small")
    assert messages([await reading]) == ["small"]
    (record,) = caplog.records
    assert f"task {task.id} of travel: an update of 7" in record.getMessage()
    await call.agent.respond(request, Ok({"text": "by train"}))
    assert await task.result() == Plan(text="by train")


async def test_an_update_of_the_maximal_size_is_shown(call: Call) -> None:
    task = await call.mesh.send(travel, ROME)
    request = await call.agent.wait_for_request()
    body = status_body(A2ATaskState.WORKING)
    for size in (MAX_STATUS_BYTES, MAX_STATUS_BYTES + 1):
        await send_status(call, request, body.ljust(size))
    await idle()
    assert task._task.kept_bytes == MAX_STATUS_BYTES


async def test_the_kept_updates_of_a_task_are_bounded_in_size(call: Call) -> None:
    task = await call.mesh.send(travel, ROME)
    request = await call.agent.wait_for_request()
    updates = task.updates()
    for number in range(100):
        await call.agent.status(request, [number, 60_000 * "x"])
    await idle()
    assert 900_000 < task._task.kept_bytes < 1024 * 1024
    await call.agent.respond(request, Ok({"text": "by train"}))
    numbers = [update.message[0] async for update in updates if isinstance(update, StatusUpdate)]  # type: ignore[index]
    assert numbers == list(range(100))[-len(numbers) :]
    assert len(numbers) > 10


async def test_an_update_wakes_only_those_that_wait_for_updates(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = {True: 0, False: 0}
    wait_news = OpenTask.wait_news

    async def count(task: OpenTask, *, with_updates: bool = True) -> None:
        waits[with_updates] += 1
        await wait_news(task, with_updates=with_updates)

    monkeypatch.setattr(OpenTask, "wait_news", count)
    task = await call.mesh.send(travel, ROME)
    request = await call.agent.wait_for_request()
    results = [asyncio.ensure_future(task.result()) for _ in range(10)]
    reading = asyncio.ensure_future(_collect(task))
    for number in range(5):
        await idle()
        await call.agent.status(request, number)
    await idle()
    assert waits == {True: 6, False: 10}
    await call.agent.respond(request, {"text": "by train"})
    assert await asyncio.gather(*results) == 10 * [Plan(text="by train")]
    assert messages(await reading) == list(range(5))


async def _collect(task: TaskHandle[Plan]) -> list[Update]:
    return [each async for each in task.updates()]
