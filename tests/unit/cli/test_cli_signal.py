"""`tasks signal`, and signals, values and kept answers in `tasks show`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path

import pytest

from command_result import Command
from meshpoint.adapters.sql import SqlStore
from meshpoint.model.ids import TaskId
from meshpoint.model.mailbox import MAX_SIGNAL_BYTES, SetValue
from meshpoint.model.outcomes import Ok
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import HERE, a_pause, an_end, begun, one, paused
from meshpoint.testing.conformance.store_mailbox import (
    a_receive,
    an_answer,
    unanswered,
)

UseStore = Callable[[Callable[[SqlStore], Awaitable[object]]], object]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def use_store(tmp_path: Path, clock: FakeClock) -> UseStore:
    """Run something with the store."""

    def use(body: Callable[[SqlStore], Awaitable[object]]) -> object:
        async def run() -> object:
            store = SqlStore(f"sqlite:///{tmp_path}/tasks.db", namespace="test", clock=clock)
            await store.open()
            try:
                return await body(store)
            finally:
                await store.close()

        return asyncio.run(run())

    return use


def test_a_signal_resumes_a_task(
    run_command: Command, use_store: UseStore, clock: FakeClock
) -> None:
    async def write(store: SqlStore) -> TaskId:
        return (await paused(store, a_receive())).run.task_id

    task_id = str(use_store(write))
    assert "signal chat" in (shown := run_command("show", task_id).out)
    assert "~" not in shown
    done = run_command("signal", task_id, "chat", '{"text": "hi"}')
    assert (done.code, done.out) == (0, f"sent signal chat to {task_id}\n")

    async def read(store: SqlStore) -> object:
        clock.advance(timedelta(days=10_000))  # the command uses the real time
        return one(await store.acquire(HERE, 1)).outcomes[0][2]

    assert use_store(read) == Ok({"text": "hi"})


def test_kept_values_answers_and_signals_are_shown(
    run_command: Command, use_store: UseStore, clock: FakeClock
) -> None:
    async def write(store: SqlStore) -> TaskId:
        run = await unanswered(store, clock)
        await store.answer([an_answer(run.task_id)])
        await store.set_value(SetValue(run, "progress", b'{"done":3}'))
        await store.set_value(SetValue(run, "password", b'"hunter2"'))
        return run.task_id

    task_id = str(use_store(write))
    for id_ in ("1", "1", "2"):
        result = run_command("signal", task_id, "chat", "hi", "--id", id_, "--json")
        assert json.loads(result.out)["signal_id"] == id_
    shown = run_command("show", task_id).out
    assert "signal chat" in shown
    assert "2 unreceived, the oldest for" in shown
    assert "answer approval" in shown
    assert "value progress" in shown
    assert '{"done": 3}' in shown
    assert "hunter2" not in shown
    facts = json.loads(run_command("show", task_id, "--json").out)
    assert [(each["id"], each["name"]) for each in facts["signals"]] == [
        ("1", "chat"),
        ("2", "chat"),
    ]
    assert facts["values"]["progress"] == {"done": 3}
    assert len(facts["kept_answers"]) == 1
    assert "hunter2" not in json.dumps(facts)


def test_a_question_open_between_two_waits_is_answered(
    run_command: Command, use_store: UseStore, clock: FakeClock
) -> None:
    async def write(store: SqlStore) -> TaskId:
        run = await unanswered(store, clock)
        await store.pause([a_pause("a", run=run)])  # it waits for something else now
        return run.task_id

    task_id = str(use_store(write))
    assert run_command("complete", task_id, "colour", "true").code == 1
    assert run_command("complete", task_id, "approval", "true").code == 0
    again = run_command("complete", task_id, "approval", "true")
    assert again.code == 1


def test_signals_that_are_refused(run_command: Command, use_store: UseStore) -> None:
    async def write(store: SqlStore) -> TaskId:
        run = await begun(store)
        await store.end([an_end(run)])
        return run.task_id

    task_id = str(use_store(write))
    ended = run_command("signal", task_id, "chat", "1")
    assert ended.code == 1
    assert f"task {task_id} has already ended (completed)" in ended.err
    large = run_command("signal", task_id, "chat", "x" * MAX_SIGNAL_BYTES)
    assert "is the maximum" in large.err
    assert run_command("signal", "unknown", "chat", "1").code == 1
    assert run_command("signal", task_id, "a b", "1").code == 2
    assert run_command("signal", task_id, "chat", "1", "--id", "x" * 300).code == 2
