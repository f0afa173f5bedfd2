"""Sleeps and questions while an earlier release, which knows neither, works on the same tables.

It comes from the history of the repository: see `earlier_store`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from meshpoint.adapters.sql import SqlStore
from meshpoint.model.calls import ALL, FIRST, Join
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.questions import Question
from meshpoint.model.tasks import TaskState, waits_format
from meshpoint.model.transitions import JoinCompleted
from meshpoint.model.waits import received_outcome
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    FORMAT,
    HOUR,
    SECOND,
    a_call,
    a_claim,
    a_pause,
    a_replica,
    one,
    row,
    write_pause,
)
from meshpoint.testing.conformance.store_sleeps import a_sleep

EARLIER = "2893b32c580ffdc43b985bb4f5ca5d407b6d483b"
"""The last release without sleeps."""
STORED = waits_format(FORMAT)
NEW = a_replica("new", formats=[FORMAT, STORED])
APPROVAL = AgentName(Question("approval", bool).peer)


async def asleep(store: SqlStore, *calls: Any, join: Join = ALL) -> Any:
    """A task that waits for `calls`."""
    pause = a_pause(*calls, join=join)
    pause = replace(pause, state_format=STORED)
    await write_pause(store, pause)
    return pause


async def test_a_sleep_ends_at_its_time_whichever_release_finds_it(
    store: SqlStore, clock: FakeClock, earlier: Callable[..., Any]
) -> None:
    pause = await asleep(store, a_sleep("nap", HOUR))
    clock.advance(HOUR - SECOND)
    early = earlier("sweep")
    assert (early["expired"], early["acquired"], early["sends"]) == ([], [], [])
    clock.advance(SECOND)
    ended = earlier("sweep")
    assert (ended["expired"], ended["results"]) == ([pause.run.task_id], ["TaskReady"])
    assert ended["acquired"] == [], "it does not read the format of a task that has slept"
    assert (await row(store, pause.run.task_id))[0].state is TaskState.READY
    task = one(await store.acquire(NEW, 10))
    (_, peer, outcome) = one(task.outcomes)
    assert received_outcome(peer, outcome) == Ok(None)


async def test_this_release_ends_a_sleep_next_to_the_earlier_one(
    store: SqlStore, clock: FakeClock, earlier: Callable[..., Any]
) -> None:
    pause = await asleep(store, a_sleep("nap", HOUR), a_sleep("rest", 2 * HOUR), join=FIRST)
    clock.advance(HOUR)
    expired = one(await store.expire(NEW, 10, 1))
    assert isinstance(expired.join_result, JoinCompleted)
    assert expired.cancels == ()
    assert expired.join_result.task.outcomes[0][2] == Ok(None)
    after = earlier("sweep")
    assert (after["expired"], after["acquired"], after["sends"]) == ([], [], [])
    assert (await row(store, pause.run.task_id))[0].state is TaskState.RUNNING


async def test_a_race_that_a_sleep_should_have_won_keeps_waiting(
    store: SqlStore, clock: FakeClock, earlier: Callable[..., Any]
) -> None:
    """The known difference: the earlier release does not count the sleep as a success."""
    pause = await asleep(store, a_sleep("nap", HOUR), a_call("a", timeout=3 * HOUR), join=FIRST)
    clock.advance(HOUR)
    assert earlier("sweep")["results"] == ["StillWaiting"]
    assert await store.expire(NEW, 10, 1) == []
    arrival = one(await store.claim([a_claim(pause, "a")], NEW, 1))
    assert isinstance(arrival, JoinCompleted)
    (_, peer, outcome), _ = arrival.task.outcomes
    assert received_outcome(peer, outcome) == Ok(None)


async def test_a_question_keeps_waiting_and_is_answered_once(
    store: SqlStore, clock: FakeClock, earlier: Callable[..., Any]
) -> None:
    asked = replace(
        a_call("approval", timeout=None, peer=APPROVAL),
        sub_task_id=TaskId("~?approval.1"),
        headers={},
    )
    pause = await asleep(store, asked)
    clock.advance(100 * 24 * HOUR)
    swept = earlier("sweep")
    assert (swept["expired"], swept["acquired"], swept["sends"]) == ([], [], [])
    claim = replace(a_claim(pause, "approval", Ok(True)), sender=APPROVAL)
    arrival = one(await store.claim([claim], NEW, 1))
    assert isinstance(arrival, JoinCompleted)
    assert arrival.task.outcomes == (("approval", APPROVAL, Ok(True)),)


async def test_the_time_of_a_question_passes_in_the_earlier_release_too(
    store: SqlStore, clock: FakeClock, earlier: Callable[..., Any]
) -> None:
    asked = replace(
        a_call("approval", timeout=timedelta(hours=1), peer=APPROVAL),
        sub_task_id=TaskId("~?approval.1"),
        headers={},
    )
    pause = await asleep(store, asked)
    clock.advance(HOUR)
    assert earlier("sweep")["expired"] == [pause.run.task_id]
    task = one(await store.acquire(NEW, 10))
    (_, peer, outcome) = one(task.outcomes)
    unanswered = received_outcome(peer, outcome)
    assert isinstance(unanswered, Failed)
    assert unanswered.kind is FailureKind.TIMEOUT
