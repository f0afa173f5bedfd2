"""Concurrent subtasks, progress within them, and runs that are stopped during a save."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from runs import Life, Visits, cancelled

from meshpoint.errors import AgentMisbehaved, NotJson
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Step
from meshpoint.ports.agent import Plan


def one(number: int) -> int:
    return number


async def test_each_is_saved_and_none_is_lost() -> None:
    life, met = Life(), asyncio.Barrier(3)

    async def step(number: int) -> int:
        await met.wait()
        return 10 * number

    ctx = life.ctx
    assert await asyncio.gather(*[ctx.subtask(f"step {n}", step, n) for n in range(3)]) == [0, 10, 20]
    assert len(life.book.operations) == 1
    assert [each.seq for each in life.book.saved] == [1, 2, 3]
    assert [list(life.statuses(each).values()).count("completed") for each in life.book.saved] == [1, 2, 3]
    ctx = life.again()
    assert await asyncio.gather(*[ctx.subtask(f"step {n}", step, n) for n in range(3)]) == [0, 10, 20]


async def test_saves_do_not_overtake_each_other() -> None:
    life, written, at_once = Life(), list[str](), 0

    async def slowly(name: str) -> None:
        nonlocal at_once
        at_once += 1
        assert at_once == 1
        await asyncio.sleep(0)
        written.append(name)
        at_once -= 1

    life.book.before_save = slowly
    ctx = life.ctx
    await asyncio.gather(*[ctx.subtask(f"step {n}", one, n) for n in range(3)])
    assert len(written) == 3
    assert [each.seq for each in life.book.saved] == [1, 2, 3]


async def test_one_fails_while_the_other_completes() -> None:
    life, visits, failed = Life(), Visits(), asyncio.Event()

    async def failing() -> None:
        visits("failing")
        if not failed.is_set():
            failed.set()
            raise ValueError("no")

    async def lasting() -> str:
        visits("lasting")
        await failed.wait()
        return "done"

    def both(ctx: TaskExecutionContext) -> Any:
        return asyncio.gather(
            ctx.subtask("failing", failing), ctx.subtask("lasting", lasting), return_exceptions=True
        )

    error, done = await both(life.ctx)
    assert isinstance(error, ValueError)
    assert done == "done"
    assert life.statuses() == {"failing": "failed", "lasting": "completed"}
    assert await both(life.resume()) == [None, "done"]
    assert visits.names == ["failing", "lasting", "failing"]


async def test_the_current_one_is_the_one_that_was_begun_last() -> None:
    life, may_end = Life(Plan(version="1", subtasks=("a", "b", "c"))), asyncio.Event()

    async def step() -> None:
        await may_end.wait()

    ctx = life.ctx
    running = asyncio.gather(ctx.subtask("b", step), ctx.subtask("a", step))
    for _ in range(5):
        await asyncio.sleep(0)
    assert ctx.progress.current == "a"
    may_end.set()
    await running
    assert ctx.progress.completed == ("b", "a")
    assert ctx.progress.current == "c"


async def test_progress() -> None:
    life = Life(Plan(version="1", subtasks=("a", "b", "c", "d")))
    seen: list[tuple[Any, ...]] = []

    def look() -> None:
        told = life.ctx.progress
        seen.append((told.k, told.n, told.percent, told.current, told.pending))

    look()
    await life.ctx.subtask("a", look)
    look()
    await life.ctx.subtask("extra", look)
    look()
    for name in "bcd":
        await life.ctx.subtask(name, one, 1)
    look()
    assert seen == [
        (0, 4, 0.0, "a", ("a", "b", "c", "d")),
        (0, 4, 0.0, "a", ("a", "b", "c", "d")),
        (1, 4, 25.0, "b", ("b", "c", "d")),
        (1, 5, 20.0, "extra", ("b", "c", "d", "extra")),
        (2, 5, 40.0, "b", ("b", "c", "d")),
        (5, 5, 100.0, None, ()),
    ]
    assert life.book.saved[-1].progress == life.ctx.progress


async def test_progress_without_a_plan() -> None:
    life = Life()
    assert (life.ctx.progress.n, life.ctx.progress.percent, life.ctx.progress.current) == (0, 0.0, None)
    await life.ctx.subtask("a", one, 1)
    assert (life.ctx.progress.k, life.ctx.progress.n, life.ctx.progress.percent) == (1, 1, 100.0)


class Epochs:
    """A subtask that saves after each epoch and fails after `dies_after` of them."""

    def __init__(self, life: Life) -> None:
        self.life, self.began = life, list[Any]()
        self.dies_after: int | None = None

    async def train(self, rate: float) -> int:
        ctx = self.life.ctx
        self.began.append(ctx.saved_progress)
        for epoch in range((ctx.saved_progress or {"epoch": 0})["epoch"], 4):
            if epoch == self.dies_after:
                raise ConnectionError("died")
            await ctx.save_progress({"epoch": epoch + 1})
        return 4

    async def other(self, rate: float) -> int:
        self.began.append(self.life.ctx.saved_progress)
        return 4


async def interrupted(saves: int = 2) -> tuple[Life, Epochs]:
    life = Life()
    epochs = Epochs(life)
    epochs.dies_after = saves
    with pytest.raises(ConnectionError):
        await life.ctx.subtask("train", epochs.train, 0.1)
    epochs.dies_after = None
    return life, epochs


@pytest.mark.parametrize("how", ["crashed", "resumed"])
async def test_a_saved_state_is_given_back(how: str) -> None:
    life, epochs = await interrupted()
    assert life.statuses() == {"train": "started"}
    assert life.book.saved[-1].current_subtask == "train"
    ctx = life.resume() if how == "resumed" else life.again()
    assert await ctx.subtask("train", epochs.train, 0.1) == 4
    assert epochs.began == [None, {"epoch": 2}]


async def test_it_is_forgotten_when_the_subtask_is_completed() -> None:
    life, epochs = await interrupted()
    await life.again().subtask("train", epochs.train, 0.1)
    assert life.book.saved[-1].saved_progress == {}
    assert life.book.saved[-2].saved_progress == {"train": '{"epoch": 4}'}


async def test_it_is_forgotten_when_the_function_is_another() -> None:
    life, epochs = await interrupted()
    await life.resume().subtask("train", epochs.other, 0.1)
    assert epochs.began == [None, None]


async def test_it_is_forgotten_when_the_inputs_differ() -> None:
    life, epochs = await interrupted()
    await life.resume().subtask("train", epochs.train, 0.2)
    assert epochs.began == [None, None]


async def test_it_is_forgotten_when_an_earlier_subtask_runs_again() -> None:
    life = Life()
    epochs = Epochs(life)
    await life.ctx.subtask("data", one, 1)
    epochs.dies_after = 2
    with pytest.raises(ConnectionError):
        await life.ctx.subtask("train", epochs.train, 0.1)
    epochs.dies_after = None
    ctx = life.resume()
    await ctx.subtask("data", one, 2)
    await ctx.subtask("train", epochs.train, 0.1)
    assert epochs.began == [None, None]


async def test_it_is_the_subtasks_own() -> None:
    life = Life()
    met = asyncio.Barrier(2)

    async def step(name: str) -> Any:
        await life.ctx.save_progress(name)
        await met.wait()
        return life.ctx.saved_progress

    ctx = life.ctx
    assert await asyncio.gather(ctx.subtask("a", step, "of a"), ctx.subtask("b", step, "of b")) == ["of a", "of b"]


async def test_it_is_no_result() -> None:
    """Later changes to the saved value must not affect the stored one."""
    life = Life()

    async def step() -> None:
        state = {"done": [1]}
        await life.ctx.save_progress(state)
        state["done"].append(2)
        life.ctx.saved_progress["done"].append(3)
        assert life.ctx.saved_progress == {"done": [1]}

    await life.ctx.subtask("step", step)


async def test_outside_of_a_subtask_it_is_refused() -> None:
    life = Life()
    await life.ctx.subtask("a", one, 1)
    assert life.ctx.saved_progress is None
    with pytest.raises(AgentMisbehaved, match="works only inside the function"):
        await life.ctx.save_progress({"a": 1})


async def test_after_the_end_of_the_subtask_it_is_refused() -> None:
    life, ended = Life(), asyncio.Event()
    left: list[asyncio.Task[None]] = []

    async def straggler() -> None:
        await ended.wait()
        await life.ctx.save_progress({"late": True})

    async def step() -> None:
        left.append(asyncio.create_task(straggler()))

    await life.ctx.subtask("step", step)
    ended.set()
    with pytest.raises(AgentMisbehaved, match="subtask 'step' has ended"):
        await left[0]


@pytest.mark.parametrize("state", [object(), float("inf"), {1: 2}], ids=["an object", "infinity", "a number as key"])
async def test_a_state_that_is_not_json_is_refused_with_its_place(state: Any) -> None:
    life = Life()

    async def step() -> None:
        await life.ctx.save_progress({"state": state})

    with pytest.raises(NotJson, match=r"saved_progress of subtask 'step'"):
        await life.ctx.subtask("step", step)
    assert life.book.saved == []


async def test_a_save_that_is_given_up_is_not_taken_for_the_next_one() -> None:
    """A timeout around `ctx.subtask` cancels it during its save, whose result stays unknown."""
    life, reached = Life(), asyncio.Event()

    async def hanging(name: str) -> None:
        if name == "slow":
            reached.set()
            await asyncio.Event().wait()

    life.book.before_save = hanging
    given_up = asyncio.create_task(life.ctx.subtask("slow", one, 1))
    await reached.wait()
    given_up.cancel()
    assert await cancelled(given_up)
    await life.ctx.subtask("next", one, 2)
    (saved,) = life.book.saved
    assert saved.seq == 2
    assert life.statuses() == {"slow": "completed", "next": "completed"}


async def test_code_that_is_given_up_is_no_pause() -> None:
    """After a timeout ended a subtask's code, later peer calls must not count as its own."""
    life, reached = Life(), asyncio.Event()

    async def slow() -> None:
        reached.set()
        await asyncio.Event().wait()

    given_up = asyncio.create_task(life.ctx.subtask("slow", slow))
    await reached.wait()
    given_up.cancel()
    assert await cancelled(given_up)
    assert life.runner.paused_subtask is None
    await life.ctx.subtask("next", one, 2)
    assert life.statuses() == {"slow": "started", "next": "completed"}


@pytest.mark.parametrize("in_a_child", [False, True])
async def test_a_ledger_that_stops_the_run(in_a_child: bool) -> None:
    life, after = Life(), list[str]()
    await life.ctx.subtask("first", one, 1)
    life.book.stop = asyncio.CancelledError("lost")

    async def code() -> None:
        subtask = life.ctx.subtask("second", one, 2)
        await (asyncio.create_task(subtask) if in_a_child else subtask)
        after.append("went on")

    assert await cancelled(asyncio.create_task(code()))
    assert after == []
    assert len(life.book.saved) == 1


async def test_a_ledger_that_stops_the_run_before_its_first_subtask() -> None:
    life, visits = Life(), Visits()
    life.book.stop = asyncio.CancelledError("cancelled")

    def step() -> None:
        visits("step")

    assert await cancelled(asyncio.create_task(life.ctx.subtask("step", step)))
    assert visits.names == []
    assert not life.runner.is_operation


async def test_a_subtask_that_is_stopped_has_not_failed() -> None:
    life = Life()

    async def step() -> None:
        raise asyncio.CancelledError

    assert await cancelled(asyncio.create_task(life.ctx.subtask("step", step)))
    assert life.statuses(life.runner.final_checkpoint("why", None)) == {"step": "started"}
    assert not [event for event in life.events if event.step is Step.SUBTASK and event.phase == "failed"]
