"""Signals, kept answers and values while the last release without them works on the same tables.

That release comes from the history of the repository: see `earlier_store`. To it, a wait is a call
to a peer. It has no mailbox.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from meshpoint.adapters.sql import SqlStore
from meshpoint.model.calls import FIRST
from meshpoint.model.mailbox import MailAccepted, Mailbox, MailRefused, SetValue
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.tasks import TaskState
from meshpoint.model.transitions import PauseCommitted
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    HERE,
    HOUR,
    LEASE,
    SECOND,
    THERE,
    a_claim,
    a_pause,
    begun,
    one,
    outcomes,
    paused,
    ready,
    state_of,
    write_pause,
)
from meshpoint.testing.conformance.store_mailbox import (
    a_question,
    a_receive,
    a_signal,
    an_answer,
    answer,
    kept,
    send,
)

EARLIER = "2893b32c580ffdc43b985bb4f5ca5d407b6d483b"
"""The last release without signals."""


async def test_a_wait_for_a_signal_continues_next_to_the_earlier_release(
    store: SqlStore, clock: FakeClock, earlier: Callable[..., Any]
) -> None:
    pause = await paused(store, a_receive(), a_receive("stop", 2 * HOUR))
    clock.advance(HOUR)
    swept = earlier("sweep")
    assert (swept["expired"], swept["acquired"], swept["sends"]) == ([], [], [])
    assert await send(store, a_signal(pause.run.task_id, 1)) == [MailAccepted()]
    clock.advance(HOUR)
    swept = earlier("sweep")  # it also times out the other wait
    assert (swept["expired"], swept["sends"]) == ([pause.run.task_id], [])
    clock.advance(LEASE + SECOND)
    task = one(await store.rescue(THERE, 10))
    chat, stop = outcomes(task).values()
    assert chat == Ok(1)
    assert isinstance(stop, Failed)
    assert stop.kind is FailureKind.TIMEOUT
    assert await send(store, a_signal(pause.run.task_id, 2, "stop")) == [MailAccepted()]
    again = a_pause(a_receive("stop"), run=task.run)
    assert await write_pause(store, again) == PauseCommitted(TaskState.READY, ())


async def test_the_earlier_release_takes_no_signal_of_a_race_that_it_decides(
    store: SqlStore, earlier: Callable[..., Any]
) -> None:
    pause = await paused(store, "a", a_receive(), join=FIRST)
    task_id = pause.run.task_id
    claimed = earlier("claim", task_id, pause.calls[0].sub_task_id, "won")
    assert claimed["result"] == "JoinCompleted"
    assert await send(store, a_signal(task_id)) == [MailAccepted()]
    assert len(await kept(store, task_id)) == 1


async def test_signals_stay_while_the_earlier_release_runs_the_task(
    store: SqlStore, clock: FakeClock, earlier: Callable[..., Any]
) -> None:
    pause = await ready(store)
    task_id = pause.run.task_id
    signal = a_signal(task_id, 1)
    assert await send(store, signal) == [MailAccepted()]
    assert list(earlier("acquire")) == ["a"]
    assert await send(store, signal, a_signal(task_id, 2)) == 2 * [MailAccepted()]
    clock.advance(LEASE + SECOND)
    run = one(await store.rescue(THERE, 10)).run
    for number in (1, 2):
        await write_pause(store, a_pause(a_receive(), run=run))
        task = one(await store.acquire(HERE, 10))
        assert outcomes(task) == {"chat": Ok(number)}
        run = task.run


@pytest.mark.parametrize("ending", ["end", "cancel"])
async def test_the_earlier_release_ends_a_task_with_signals(
    ending: str, store: SqlStore, clock: FakeClock, earlier: Callable[..., Any]
) -> None:
    """The sender learns of it when it repeats the signal."""
    pause = await ready(store)
    task_id = pause.run.task_id
    signal = a_signal(task_id)
    await send(store, signal)
    earlier("end") if ending == "end" else earlier("cancel", task_id)
    assert (await state_of(store, task_id)).is_final
    (again,) = await send(store, signal)
    assert again == MailRefused(f"task {task_id} ended before it received this signal")
    assert await kept(store, task_id) == [signal.id]
    clock.advance(HOUR)
    assert earlier("send") == [task_id]
    clock.advance(1000 * HOUR)
    assert earlier("purge") == 1
    assert await store.mailbox(task_id) == Mailbox()


async def test_an_answer_that_the_earlier_release_records_is_the_only_one(
    store: SqlStore, earlier: Callable[..., Any]
) -> None:
    pause = await paused(store, a_question())
    question = pause.calls[0].sub_task_id
    assert earlier("claim", pause.run.task_id, question, "yes")["result"] == "JoinCompleted"
    assert isinstance(await answer(store, an_answer(pause.run.task_id, "no")), MailRefused)


async def test_values_stay_while_the_earlier_release_runs_the_task(
    store: SqlStore, earlier: Callable[..., Any]
) -> None:
    run = await begun(store)
    await store.set_value(SetValue(run, "step", b"1"))
    pause = a_pause("a", run=run)
    await write_pause(store, pause)
    await store.claim([a_claim(pause)], HERE, 0)
    assert earlier("end") == "EndCommitted"
    assert (await store.mailbox(run.task_id)).values == (("step", b"1"),)
