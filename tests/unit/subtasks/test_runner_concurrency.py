"""Concurrent subtasks, progress within them, and runs that are stopped during a save."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from runs import AttemptHarness, was_cancelled

from idle_loop import idle
from meshpoint.errors import AgentMisbehaved, NotJson
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Step
from meshpoint.ports.agent import Plan
from run_log import RunLog


def return_number(number: int) -> int:
    return number


async def test_concurrent_subtasks_are_all_saved() -> None:
    harness, barrier = AttemptHarness(), asyncio.Barrier(3)

    async def step(number: int) -> int:
        await barrier.wait()
        return 10 * number

    ctx = harness.ctx
    assert await asyncio.gather(*[ctx.subtask(f"step {n}", step, n) for n in range(3)]) == [
        0,
        10,
        20,
    ]
    assert len(harness.subtask_log.operations) == 1
    assert [checkpoint.seq for checkpoint in harness.subtask_log.saved] == [1, 2, 3]
    assert [
        list(harness.statuses(each).values()).count("completed")
        for each in harness.subtask_log.saved
    ] == [
        1,
        2,
        3,
    ]
    ctx = harness.rerun()
    assert await asyncio.gather(*[ctx.subtask(f"step {n}", step, n) for n in range(3)]) == [
        0,
        10,
        20,
    ]


async def test_saves_do_not_overtake_each_other() -> None:
    harness, written, in_progress = AttemptHarness(), list[str](), 0

    async def slowly(name: str) -> None:
        nonlocal in_progress
        in_progress += 1
        assert in_progress == 1
        await asyncio.sleep(0)
        written.append(name)
        in_progress -= 1

    harness.subtask_log.before_save = slowly
    ctx = harness.ctx
    await asyncio.gather(*[ctx.subtask(f"step {n}", return_number, n) for n in range(3)])
    assert len(written) == 3
    assert [checkpoint.seq for checkpoint in harness.subtask_log.saved] == [1, 2, 3]


async def test_a_failing_subtask_does_not_stop_a_concurrent_one() -> None:
    harness, visits, failed = AttemptHarness(), RunLog(), asyncio.Event()

    async def failing() -> None:
        visits("failing")
        if not failed.is_set():
            failed.set()
            raise ValueError("no")

    async def run_long() -> str:
        visits("lasting")
        await failed.wait()
        return "done"

    def both(ctx: TaskExecutionContext) -> Any:
        return asyncio.gather(
            ctx.subtask("failing", failing),
            ctx.subtask("lasting", run_long),
            return_exceptions=True,
        )

    error, done = await both(harness.ctx)
    assert isinstance(error, ValueError)
    assert done == "done"
    assert harness.statuses() == {"failing": "failed", "lasting": "completed"}
    assert await both(harness.resume()) == [None, "done"]
    assert visits.names == ["failing", "lasting", "failing"]


async def test_the_current_subtask_is_the_one_begun_last() -> None:
    harness, may_end = AttemptHarness(Plan(version="1", subtasks=("a", "b", "c"))), asyncio.Event()

    async def step() -> None:
        await may_end.wait()

    ctx = harness.ctx
    running = asyncio.gather(ctx.subtask("b", step), ctx.subtask("a", step))
    await idle()
    assert ctx.progress.current == "a"
    may_end.set()
    await running
    assert ctx.progress.completed == ("b", "a")
    assert ctx.progress.current == "c"


async def test_progress_counts_completed_subtasks() -> None:
    harness = AttemptHarness(Plan(version="1", subtasks=("a", "b", "c", "d")))
    seen: list[tuple[Any, ...]] = []

    def read_progress() -> None:
        progress = harness.ctx.progress
        seen.append((progress.k, progress.n, progress.percent, progress.current, progress.pending))

    read_progress()
    await harness.ctx.subtask("a", read_progress)
    read_progress()
    await harness.ctx.subtask("extra", read_progress)
    read_progress()
    for name in "bcd":
        await harness.ctx.subtask(name, return_number, 1)
    read_progress()
    assert seen == [
        (0, 4, 0.0, "a", ("a", "b", "c", "d")),
        (0, 4, 0.0, "a", ("a", "b", "c", "d")),
        (1, 4, 25.0, "b", ("b", "c", "d")),
        (1, 5, 20.0, "extra", ("b", "c", "d", "extra")),
        (2, 5, 40.0, "b", ("b", "c", "d")),
        (5, 5, 100.0, None, ()),
    ]
    assert harness.subtask_log.saved[-1].progress == harness.ctx.progress


async def test_progress_without_a_plan_counts_begun_subtasks() -> None:
    harness = AttemptHarness()
    assert (
        harness.ctx.progress.n,
        harness.ctx.progress.percent,
        harness.ctx.progress.current,
    ) == (0, 0.0, None)
    await harness.ctx.subtask("a", return_number, 1)
    assert (harness.ctx.progress.k, harness.ctx.progress.n, harness.ctx.progress.percent) == (
        1,
        1,
        100.0,
    )


class Trainer:
    """A subtask that saves after each epoch and fails after `crash_after` of them."""

    def __init__(self, harness: AttemptHarness) -> None:
        self.harness, self.first_epochs = harness, list[Any]()
        self.crash_after: int | None = None

    async def train(self, rate: float) -> int:
        ctx = self.harness.ctx
        self.first_epochs.append(ctx.saved_progress)
        for epoch in range((ctx.saved_progress or {"epoch": 0})["epoch"], 4):
            if epoch == self.crash_after:
                raise ConnectionError("died")
            await ctx.save_progress({"epoch": epoch + 1})
        return 4

    async def train_differently(self, rate: float) -> int:
        self.first_epochs.append(self.harness.ctx.saved_progress)
        return 4


async def interrupt_training(saves: int = 2) -> tuple[AttemptHarness, Trainer]:
    harness = AttemptHarness()
    trainer = Trainer(harness)
    trainer.crash_after = saves
    with pytest.raises(ConnectionError):
        await harness.ctx.subtask("train", trainer.train, 0.1)
    trainer.crash_after = None
    return harness, trainer


@pytest.mark.parametrize("interruption", ["crashed", "resumed"])
async def test_a_saved_state_is_restored(interruption: str) -> None:
    harness, trainer = await interrupt_training()
    assert harness.statuses() == {"train": "started"}
    assert harness.subtask_log.saved[-1].current_subtask == "train"
    ctx = harness.resume() if interruption == "resumed" else harness.rerun()
    assert await ctx.subtask("train", trainer.train, 0.1) == 4
    assert trainer.first_epochs == [None, {"epoch": 2}]


async def test_a_saved_state_is_dropped_when_the_subtask_completes() -> None:
    harness, trainer = await interrupt_training()
    await harness.rerun().subtask("train", trainer.train, 0.1)
    assert harness.subtask_log.saved[-1].saved_progress == {}
    assert harness.subtask_log.saved[-2].saved_progress == {"train": '{"epoch": 4}'}


async def test_a_saved_state_is_dropped_when_the_function_changes() -> None:
    harness, trainer = await interrupt_training()
    await harness.resume().subtask("train", trainer.train_differently, 0.1)
    assert trainer.first_epochs == [None, None]


async def test_a_saved_state_is_dropped_when_the_inputs_differ() -> None:
    harness, trainer = await interrupt_training()
    await harness.resume().subtask("train", trainer.train, 0.2)
    assert trainer.first_epochs == [None, None]


async def test_a_saved_state_is_dropped_when_an_earlier_subtask_reruns() -> None:
    harness = AttemptHarness()
    trainer = Trainer(harness)
    await harness.ctx.subtask("data", return_number, 1)
    trainer.crash_after = 2
    with pytest.raises(ConnectionError):
        await harness.ctx.subtask("train", trainer.train, 0.1)
    trainer.crash_after = None
    ctx = harness.resume()
    await ctx.subtask("data", return_number, 2)
    await ctx.subtask("train", trainer.train, 0.1)
    assert trainer.first_epochs == [None, None]


async def test_each_subtask_has_its_own_saved_state() -> None:
    harness = AttemptHarness()
    barrier = asyncio.Barrier(2)

    async def step(name: str) -> Any:
        await harness.ctx.save_progress(name)
        await barrier.wait()
        return harness.ctx.saved_progress

    ctx = harness.ctx
    results = await asyncio.gather(ctx.subtask("a", step, "of a"), ctx.subtask("b", step, "of b"))
    assert list(results) == ["of a", "of b"]


async def test_a_saved_state_is_not_a_result() -> None:
    """Later changes to the saved value must not affect the stored one."""
    harness = AttemptHarness()

    async def step() -> None:
        state = {"done": [1]}
        await harness.ctx.save_progress(state)
        state["done"].append(2)
        harness.ctx.saved_progress["done"].append(3)
        assert harness.ctx.saved_progress == {"done": [1]}

    await harness.ctx.subtask("step", step)


async def test_saving_state_outside_a_subtask_is_refused() -> None:
    harness = AttemptHarness()
    await harness.ctx.subtask("a", return_number, 1)
    assert harness.ctx.saved_progress is None
    with pytest.raises(AgentMisbehaved, match="works only inside the function"):
        await harness.ctx.save_progress({"a": 1})


async def test_saving_state_after_the_end_of_the_subtask_is_refused() -> None:
    harness, ended = AttemptHarness(), asyncio.Event()
    leftover_tasks: list[asyncio.Task[None]] = []

    async def straggler() -> None:
        await ended.wait()
        await harness.ctx.save_progress({"late": True})

    async def step() -> None:
        leftover_tasks.append(asyncio.create_task(straggler()))

    await harness.ctx.subtask("step", step)
    ended.set()
    with pytest.raises(AgentMisbehaved, match="subtask 'step' has ended"):
        await leftover_tasks[0]


@pytest.mark.parametrize(
    "state", [object(), float("inf"), {1: 2}], ids=["an object", "infinity", "a number as key"]
)
async def test_a_state_that_is_not_json_is_refused_with_its_path(state: Any) -> None:
    harness = AttemptHarness()

    async def step() -> None:
        await harness.ctx.save_progress({"state": state})

    with pytest.raises(NotJson, match=r"saved_progress of subtask 'step'"):
        await harness.ctx.subtask("step", step)
    assert harness.subtask_log.saved == []


async def test_an_abandoned_save_is_not_mistaken_for_the_next_one() -> None:
    """A timeout around `ctx.subtask` cancels it during its save, whose result stays unknown."""
    harness, reached = AttemptHarness(), asyncio.Event()

    async def hanging(name: str) -> None:
        if name == "slow":
            reached.set()
            await asyncio.Event().wait()

    harness.subtask_log.before_save = hanging
    abandoned = asyncio.create_task(harness.ctx.subtask("slow", return_number, 1))
    await reached.wait()
    abandoned.cancel()
    assert await was_cancelled(abandoned)
    await harness.ctx.subtask("next", return_number, 2)
    (saved,) = harness.subtask_log.saved
    assert saved.seq == 2
    assert harness.statuses() == {"slow": "completed", "next": "completed"}


async def test_abandoned_code_is_not_a_pause() -> None:
    """After a timeout ended a subtask's code, later peer calls must not count as its own."""
    harness, reached = AttemptHarness(), asyncio.Event()

    async def slow() -> None:
        reached.set()
        await asyncio.Event().wait()

    abandoned = asyncio.create_task(harness.ctx.subtask("slow", slow))
    await reached.wait()
    abandoned.cancel()
    assert await was_cancelled(abandoned)
    assert harness.runner.paused_subtask is None
    await harness.ctx.subtask("next", return_number, 2)
    assert harness.statuses() == {"slow": "started", "next": "completed"}


@pytest.mark.parametrize("in_a_child", [False, True])
async def test_a_subtask_log_can_stop_the_run(in_a_child: bool) -> None:
    harness, after = AttemptHarness(), list[str]()
    await harness.ctx.subtask("first", return_number, 1)
    harness.subtask_log.stop = asyncio.CancelledError("lost")

    async def code() -> None:
        subtask = harness.ctx.subtask("second", return_number, 2)
        await (asyncio.create_task(subtask) if in_a_child else subtask)
        after.append("went on")

    assert await was_cancelled(asyncio.create_task(code()))
    assert after == []
    assert len(harness.subtask_log.saved) == 1


async def test_a_subtask_log_can_stop_the_run_before_its_first_subtask() -> None:
    harness, visits = AttemptHarness(), RunLog()
    harness.subtask_log.stop = asyncio.CancelledError("cancelled")

    def step() -> None:
        visits("step")

    assert await was_cancelled(asyncio.create_task(harness.ctx.subtask("step", step)))
    assert visits.names == []
    assert not harness.runner.is_operation


async def test_a_stopped_subtask_is_not_failed() -> None:
    harness = AttemptHarness()

    async def step() -> None:
        raise asyncio.CancelledError

    assert await was_cancelled(asyncio.create_task(harness.ctx.subtask("step", step)))
    assert harness.statuses(harness.runner.final_checkpoint("why", None)) == {"step": "started"}
    assert not [
        event for event in harness.events if event.step is Step.SUBTASK and event.phase == "failed"
    ]
