"""Retried calls while the last release without retries works on the same tables.

That release comes from the history of the repository: see `earlier_store`. It never records a
second outcome for a call, but gives a call fewer attempts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from meshpoint.adapters.sql import SqlStore
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.tasks import TaskState
from meshpoint.model.transitions import (
    CallRetried,
    DuplicateOutcome,
    JoinCompleted,
    TaskReady,
    UnknownCall,
)
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    AGENT,
    HERE,
    HOUR,
    LEASE,
    SECOND,
    THERE,
    TIMEOUT,
    ok,
    one,
    outcomes,
    row,
    state_of,
)
from meshpoint.testing.conformance.store_retries import (
    WAIT,
    a_retried_call,
    answer,
    attempts,
    open_retry,
    send_retry,
)

EARLIER = "2893b32c580ffdc43b985bb4f5ca5d407b6d483b"
"""The last release without retries."""


async def test_an_attempt_waits_and_is_sent_in_either_release(
    store: SqlStore, clock: FakeClock, earlier: Callable[..., Any]
) -> None:
    pause = await open_retry(store, a_retried_call(timeout=HOUR))
    second = (await attempts(store, pause))[-1].sub_task_id
    clock.advance(WAIT - SECOND)
    swept = earlier("sweep")
    assert (swept["expired"], swept["acquired"], swept["sends"]) == ([], [], [])
    clock.advance(SECOND)
    assert earlier("send") == [second]
    clock.advance(TIMEOUT)
    assert earlier("send") in ([], [second]), "its fast path does not record that it has sent it"
    result = one(await store.claim([answer(pause, second, ok("late"))], HERE, 1))
    assert isinstance(result, JoinCompleted)
    assert outcomes(result.task) == {"a": Ok("late")}
    clock.advance(HOUR)
    assert earlier("send") == []


async def test_a_failure_that_the_earlier_release_records_is_final(
    store: SqlStore, clock: FakeClock, earlier: Callable[..., Any]
) -> None:
    pause = await open_retry(store)
    second = (await send_retry(store, clock)).sub_task_id
    claimed = earlier("claim", pause.run.task_id, second, None)
    assert claimed["result"] == "JoinCompleted"
    assert json.loads(claimed["outcomes"]["a"])["kind"] == "error"
    first = (await attempts(store, pause))[0].sub_task_id
    for sub_task_id in (first, second):
        late = one(await store.claim([answer(pause, sub_task_id, ok())], HERE, 1))
        assert isinstance(late, DuplicateOutcome)
    clock.advance(LEASE + SECOND)
    task = one(await store.rescue(THERE, 10))
    (failed,) = outcomes(task).values()
    assert isinstance(failed, Failed)
    assert failed.kind is FailureKind.ERROR


async def test_a_timeout_that_the_earlier_release_finds_is_final(
    store: SqlStore, clock: FakeClock, earlier: Callable[..., Any]
) -> None:
    pause = await open_retry(store)
    await send_retry(store, clock)
    clock.advance(TIMEOUT)
    swept = earlier("sweep")
    assert (swept["expired"], swept["results"]) == ([pause.run.task_id], ["JoinCompleted"])
    clock.advance(LEASE + SECOND)
    (failed,) = outcomes(one(await store.rescue(THERE, 10))).values()
    assert isinstance(failed, Failed)
    assert failed.kind is FailureKind.TIMEOUT


async def test_a_result_of_an_earlier_attempt_is_a_duplicate_in_the_earlier_release(
    store: SqlStore, clock: FakeClock, earlier: Callable[..., Any]
) -> None:
    pause = await open_retry(store)
    first, second = [each.sub_task_id for each in await attempts(store, pause)]
    assert earlier("claim", pause.run.task_id, first, "early")["result"] == "DuplicateOutcome"
    assert await state_of(store, pause.run.task_id) is TaskState.WAITING
    clock.advance(WAIT)
    assert earlier("send") == [second]
    claimed = earlier("claim", pause.run.task_id, second, "right")
    assert claimed["result"] == "JoinCompleted"
    assert json.loads(claimed["outcomes"]["a"])["value"] == "right"


async def test_both_releases_retry_and_answer_the_calls_of_one_pause(
    store: SqlStore, clock: FakeClock, earlier: Callable[..., Any]
) -> None:
    """The earlier release counts an outcome, and this one continues the other call."""
    pause = await open_retry(store, a_retried_call(), a_retried_call("b"))
    other = (await attempts(store, pause, "b"))[0].sub_task_id
    assert earlier("claim", pause.run.task_id, other, "b")["result"] == "StillWaiting"
    second = (await send_retry(store, clock)).sub_task_id
    failed = answer(pause, second, Failed(FailureKind.ERROR, "broken"))
    assert isinstance(one(await store.claim([failed], HERE, 1)), CallRetried)
    summary, _ = await row(store, pause.run.task_id)
    assert (summary.completed, summary.expected) == (1, 2)
    third = (await send_retry(store, clock, 2 * WAIT)).sub_task_id
    assert isinstance(one(await store.claim([answer(pause, third, ok("a"))], HERE, 0)), TaskReady)
    received = {key: json.loads(each)["value"] for key, each in earlier("acquire").items()}
    assert received == {"a": "a", "b": "b"}


@pytest.mark.parametrize("ending", ["end", "cancel"])
async def test_the_earlier_release_ends_a_task_with_attempts(
    ending: str, store: SqlStore, clock: FakeClock, earlier: Callable[..., Any]
) -> None:
    pause = await open_retry(store)
    task_id = pause.run.task_id
    if ending == "cancel":
        assert earlier("cancel", task_id) == "CancelCommitted"
    else:
        second = (await send_retry(store, clock)).sub_task_id
        await store.claim([answer(pause, second, ok())], HERE, 0)
        assert earlier("end") == "EndCommitted"
    clock.advance(HOUR)
    earlier("send")
    clock.advance(HOUR)
    assert await store.unsent(AGENT, 10) == []
    assert (await row(store, task_id))[1] == []
    late = replace(answer(pause, pause.calls[0].sub_task_id, ok()), sender=None)
    assert isinstance(one(await store.claim([late], HERE, 1)), UnknownCall)
    clock.advance(1000 * HOUR)
    assert earlier("purge") == 1
