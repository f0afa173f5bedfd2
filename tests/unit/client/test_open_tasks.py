"""A caller keeps only what is open: tasks with a handle or a wait."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter, deque

from idle_loop import idle
from meshpoint import Ended, StatusUpdate, TaskHandle
from meshpoint.client.open_task import ANSWER_GRACE, OpenTask
from meshpoint.client.transport import UsedIds
from meshpoint.errors import TaskNotFound
from meshpoint.model.ids import TaskId
from meshpoint.model.outcomes import Failed, FailureKind, Ok

from .calling import ROME, Call, Plan, travel

CALLS = 3_000
KEPT_TYPES = (OpenTask, TaskHandle, StatusUpdate, Ended, Plan, Ok, asyncio.Event, asyncio.Timeout)


def count_objects() -> Counter[str]:
    gc.collect()
    return Counter(type(each).__name__ for each in gc.get_objects() if type(each) in KEPT_TYPES)


def client_sizes() -> Counter[str]:
    """Count the client's objects by type, and the elements of the containers that they hold."""
    gc.collect()
    sizes = Counter[str]()
    for each in gc.get_objects():
        if str(type(each).__module__).startswith("meshpoint.client."):
            sizes[type(each).__name__] += 1
            for referent in gc.get_referents(each, getattr(each, "__dict__", None)):
                if isinstance(referent, dict | list | set | deque):
                    sizes[f"{type(each).__name__} {type(referent).__name__}"] += len(referent)
    return sizes


async def answer_all(call: Call) -> None:
    """Answer every request after a status update."""
    number = 0
    while True:
        number += 1
        request = await call.agent.wait_for_request(number)
        await call.agent.status(request, {"number": number})
        await call.agent.respond(request, {"text": "by train"})


async def test_calls_leave_nothing_behind(call: Call) -> None:
    answering = asyncio.create_task(answer_all(call))
    await call.mesh.call(travel, ROME, timeout=3600)
    await idle()
    before, sizes = count_objects(), client_sizes()
    assert sizes["Mesh"] == sizes["Transport"] == 1
    for _ in range(CALLS // 100):
        await asyncio.gather(*[call.mesh.call(travel, ROME, timeout=3600) for _ in range(100)])
    await idle()
    assert count_objects() == before
    assert client_sizes() == sizes
    assert (call.open_tasks, call.transport._awaited) == ([], set())
    assert not call.transport._used_ids._digests
    answering.cancel()


async def test_followed_tasks_leave_nothing_behind(call: Call) -> None:
    answering = asyncio.create_task(answer_all(call))

    async def follow() -> int:
        task = await call.mesh.send(travel, ROME)
        return len([update async for update in task.updates()])

    await follow()
    await idle()
    before = count_objects()
    for _ in range(10):
        assert await asyncio.gather(*[follow() for _ in range(100)]) == [2] * 100
    await idle()
    assert count_objects() == before
    answering.cancel()


async def test_a_task_without_a_handle_leaves_nothing(call: Call) -> None:
    before = count_objects()
    for _ in range(100):
        await call.mesh.send(travel, ROME, timeout=3600)
    assert count_objects() == before
    assert call.open_tasks == []
    for request in call.agent.requests:
        await call.agent.respond(request, {"text": "unheard"})
    await idle()
    assert count_objects() == before


async def test_a_wait_needs_no_handle(call: Call) -> None:
    results: list[Plan] = []

    async def wait(task: TaskHandle[Plan]) -> None:
        results.append(await task.result())

    task = await call.mesh.send(travel, ROME)
    # The event loop refers to it weakly, and so does the test.
    asyncio.ensure_future(wait(task))  # noqa: RUF006
    request = await call.agent.wait_for_request()
    del task
    await idle()
    gc.collect()
    await call.agent.respond(request, {"text": "by train"})
    await idle()
    assert results == [Plan(text="by train")]


async def test_an_open_task_keeps_few_updates_that_nobody_reads(call: Call) -> None:
    task = await call.mesh.send(travel, ROME)
    request = await call.agent.wait_for_request()
    before = count_objects()["StatusUpdate"]
    for number in range(500):
        await call.agent.status(request, number)
    await idle()
    assert count_objects()["StatusUpdate"] - before <= 8
    assert task.id == request.correlation_id


async def test_few_used_ids_are_kept_for_a_while() -> None:
    used = UsedIds(lambda: 0.0)
    for number in range(1_500):
        used.add(("travel", str(number)), "digest")
    assert len(used._digests) == 1_000
    assert used.has_other(("travel", "1499"), "other")
    assert not used.has_other(("travel", "1499"), "digest")
    assert not used.has_other(("travel", "0"), "other"), "forgotten"


async def test_an_id_is_used_until_some_minutes_after_its_reply() -> None:
    now = 0.0
    used, key = UsedIds(lambda: now), ("travel", "1")
    used.add(key, "digest")
    now = 100_000.0
    assert used.has_other(key, "other"), "its task may still run"
    used.record_reply(key)
    now += 599
    assert used.has_other(key, "other"), "the reply may come again"
    now += 2
    assert not used.has_other(key, "other"), "expired"


async def test_a_refused_request_leaves_what_was_known_of_its_id() -> None:
    used, key = UsedIds(lambda: 0.0), ("travel", "1")
    used.add(key, "digest")
    used.withdraw(key)
    assert not used.has_other(key, "other")
    for _ in range(3):
        used.add(key, "digest")
    before = used._digests[key].before
    assert before is not None
    assert before.before is None, "each repeated request would keep more"
    used.withdraw(key)
    assert used.has_other(key, "other")


async def test_a_repeated_request_with_a_later_deadline_prolongs_all_waits() -> None:
    task = OpenTask("travel", TaskId("1"), set())
    task.add_request("first", timeout=0.0)
    waiting = asyncio.create_task(task.wait_outcome())
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    task.add_request("second", timeout=3600.0)
    loop_time = loop.time
    loop.time = lambda: loop_time() + 6.0  # type: ignore[method-assign]
    try:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    finally:
        loop.time = loop_time  # type: ignore[method-assign]
    assert not waiting.done()
    task.end(Ok("by train"))
    assert await waiting == Ok("by train")


async def test_a_repeated_request_with_an_earlier_deadline_ends_no_wait() -> None:
    task = OpenTask("travel", TaskId("1"), set())
    task.add_request("first", timeout=3600.0)
    task.add_request("second", timeout=-ANSWER_GRACE)
    waiting = asyncio.create_task(task.wait_outcome())
    await idle()
    task.end(Ok("by train"))
    assert await waiting == Ok("by train")


async def test_only_refusals_of_its_own_requests_refuse_a_task() -> None:
    task = OpenTask("travel", TaskId("1"), set())
    assert task.is_refused_by("any"), "it is only attached to"
    task.add_request("first", timeout=None)
    assert [task.is_refused_by(each) for each in ("first", "other")] == [True, False]


async def test_the_first_outcome_of_a_task_counts() -> None:
    task = OpenTask("travel", TaskId("1"), set())
    task.end(Ok("by train"))
    task.end(Ok("by plane"), answered=False)
    assert (task.outcome, task.is_answered) == (Ok("by train"), True)


async def test_the_failure_of_an_earlier_attempt_counts_until_the_task_ends() -> None:
    earlier, task = OpenTask("travel", TaskId("1"), set()), OpenTask("travel", TaskId("1"), set())
    earlier.end(Failed(FailureKind.ERROR, "sold out"), size=9_000)
    for _ in range(2):
        task.expect_at_least(earlier)
        assert task.kept_bytes == 9_000
    task.end(Ok("by train"), size=10)
    assert task.kept_bytes == 10


async def test_a_task_that_ends_with_an_earlier_failure_counts_its_size() -> None:
    earlier, task = OpenTask("travel", TaskId("1"), set()), OpenTask("travel", TaskId("1"), set())
    earlier.end(failed := Failed(FailureKind.ERROR, "sold out"), size=9_000)
    task.expect_at_least(earlier)
    task.attachment.fail(lambda: TaskNotFound("travel", "1"))
    await task.wait_news()
    assert (task.outcome, task.kept_bytes) == (failed, 9_000)


async def test_a_task_remembers_its_last_sixteen_requests() -> None:
    task = OpenTask("travel", TaskId("1"), set())
    for number in range(20):
        task.add_request(str(number), timeout=None)
    refused = [number for number in range(20) if task.is_refused_by(str(number))]
    assert refused == list(range(4, 20))
