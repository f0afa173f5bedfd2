"""A new attempt repeats only the first subtask that differs and those started after it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from runs import AttemptHarness

from meshpoint.errors import ReplayMismatch, SubtaskRefused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Step
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.subtasks import Child, SubtaskStatus
from meshpoint.subtasks.versions import subtask
from run_log import RunLog

Function = Callable[[Any], Any]


class AttemptFlow:
    """Subtasks, each with an input and a function version; `run_log` records runs."""

    def __init__(self, **options: Any) -> None:
        self.harness, self.run_log = AttemptHarness(**options), RunLog()

    def function(self, name: str, version: str = "1") -> Function:
        @subtask(version=version)
        def step(given: Any) -> str:
            self.run_log(name)
            return f"{name}({given})"

        return step

    async def run(
        self, *names: str, ctx: TaskExecutionContext | None = None, **changed: Any
    ) -> list[str]:
        """Run subtasks `names` and return the names of the executed subtasks.

        `a=2` changes the input of "a", and `a="v2"` its function.
        """
        ctx = ctx or self.harness.ctx
        for name in names:
            change = changed.get(name, 1)
            version, input_value = ("2", 1) if change == "v2" else ("1", change)
            await ctx.subtask(name, self.function(name, version), input_value)
        return self.run_log.take_new()


async def test_nothing_runs_again_if_nothing_changed() -> None:
    flow = AttemptFlow()
    assert await flow.run("a", "b", "c") == ["a", "b", "c"]
    flow.harness.resume()
    assert await flow.run("a", "b", "c") == []
    assert flow.harness.reasons(Step.SUBTASK_RERUN) == {}


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"b": "v2"}, "its function has changed"), ({"b": 2}, "input 'given' differs")],
    ids=["function", "input"],
)
async def test_a_changed_subtask_and_all_later_ones_run_again(
    change: dict[str, Any], reason: str
) -> None:
    flow = AttemptFlow()
    await flow.run("a", "b", "c", "d")
    flow.harness.resume()
    assert await flow.run("a", "b", "c", "d", **change) == ["b", "c", "d"]
    after = "after 'b', which runs again"
    assert flow.harness.reasons(Step.SUBTASK_RERUN) == {"b": reason, "c": after, "d": after}
    flow.harness.resume()
    assert await flow.run("a", "b", "c", "d", **change) == [], "the change is recorded"


async def test_a_new_subtask_reruns_later_ones() -> None:
    flow = AttemptFlow()
    await flow.run("a", "b", "c")
    flow.harness.resume()
    assert await flow.run("a", "new", "b", "c") == ["new", "b", "c"]
    after = "after 'new', which is new"
    assert flow.harness.reasons(Step.SUBTASK_RERUN) == {"b": after, "c": after}


async def test_a_new_subtask_at_the_end_changes_nothing() -> None:
    flow = AttemptFlow()
    await flow.run("a", "b")
    flow.harness.resume()
    assert await flow.run("a", "b", "new") == ["new"]


async def test_a_removed_subtask_changes_nothing() -> None:
    flow = AttemptFlow()
    await flow.run("a", "b", "c")
    flow.harness.resume()
    assert await flow.run("a", "c") == []


async def test_reordered_subtasks_are_reused() -> None:
    flow = AttemptFlow()
    await flow.run("a", "b", "c")
    flow.harness.resume()
    assert await flow.run("c", "a", "b") == []


async def test_an_outdated_subtask_reruns_even_after_the_run_that_detected_it() -> None:
    """The replica crashed after it repeated `b` and before `c`."""
    flow = AttemptFlow()
    await flow.run("a", "b", "c")
    flow.harness.resume()
    assert await flow.run("a", "b", b=2) == ["b"]
    flow.harness.rerun()
    assert await flow.run("a", "b", "c", b=2) == ["c"]
    assert flow.harness.reasons(Step.SUBTASK_RERUN) == {"c": "after 'b', which runs again"}


async def test_an_outdated_subtask_stays_outdated_if_the_attempt_fails() -> None:
    flow = AttemptFlow()
    await flow.run("a", "b", "c")
    flow.harness.resume()
    assert await flow.run("a", "b", b=2) == ["b"]
    children = [
        Child(id=TaskId(name), peer=AgentName("peer"), digest="", subtask=name) for name in "abcd"
    ]
    assert flow.harness.runner.reusable_children(children) == children[3:]
    flow.harness.resume()
    assert flow.harness.runner.reusable_children(children) == children[3:]
    assert await flow.run("a", "b", "c", b=2) == ["c"]
    assert flow.harness.reasons(Step.SUBTASK_RERUN) == {"c": "after 'b', which runs again"}


async def test_a_fixed_failed_subtask_reruns_no_other() -> None:
    """It was started before another subtask that completed alongside it."""
    flow = AttemptFlow()

    def failing(given: int) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await flow.harness.ctx.subtask("a", failing, 1)
    assert await flow.run("b") == ["b"]
    flow.harness.resume()
    assert await flow.run("a", "b") == ["a"]
    assert flow.harness.reasons(Step.SUBTASK_RERUN) == {}


@pytest.mark.parametrize("paused", [False, True])
async def test_a_changed_function_within_an_attempt_does_not_run_again(paused: bool) -> None:
    """A replica of a new release rescued or resumed the task."""
    flow = AttemptFlow()
    await flow.run("a", "b")
    flow.harness.rerun(paused=paused)
    assert await flow.run("a", "b", a="v2") == []
    assert flow.harness.reasons(Step.SUBTASK_DIFFERS) == {}


async def test_what_a_new_attempt_has_reused_holds_until_its_end() -> None:
    flow = AttemptFlow()
    await flow.run("a", "b")
    flow.harness.resume()
    assert await flow.run("a", "b") == []
    assert flow.harness.runner.has_unsaved, "a pause must record the reuse"
    checkpoint = flow.harness.runner.next_checkpoint()
    flow.harness.generation += 1
    flow.harness.begin(checkpoint)
    assert await flow.run("a", "new", "b", a="v2", b=2) == ["new"]
    assert flow.harness.reasons(Step.SUBTASK_DIFFERS) == {"b": "input 'given' differs"}
    flow.harness.resume()
    assert await flow.run("a", a="v2") == ["a"]


async def test_a_later_change_does_not_outdate_what_ran_in_this_attempt() -> None:
    """`b` was started before `a`, which now comes first; both have changed."""
    flow = AttemptFlow()
    await flow.run("b", "a")
    flow.harness.resume()
    assert await flow.run("a", "b", a=2, b=2) == ["a", "b"]
    assert flow.harness.statuses() == {"b": "completed", "a": "completed"}
    flow.harness.rerun()
    assert await flow.run("a", "b", a=2, b=2) == []


async def test_a_subtask_reused_in_this_run_stays_valid() -> None:
    """One branch has reused its second subtask when the other finds its first one changed."""
    flow = AttemptFlow()
    await flow.run("left", "right", "left too")
    ctx = flow.harness.resume()
    await asyncio.gather(
        flow.run("left", "left too", ctx=ctx), flow.run("right", ctx=ctx, right=2)
    )
    assert flow.harness.statuses() == {
        "left": "completed",
        "right": "completed",
        "left too": "completed",
    }
    flow.harness.rerun()
    assert await flow.run("left", "left too", "right", right=2) == []


async def test_handlers_after_a_changed_one_run_again() -> None:
    flow = AttemptFlow(handlers=True)
    await flow.run("a")
    flow.harness.rerun(paused=True)
    await flow.run("b")
    flow.harness.resume()
    assert await flow.run("a", a=2) == ["a"]
    flow.harness.rerun(paused=True)
    assert await flow.run("b") == ["b"]


async def test_a_new_subtask_of_a_later_handler_keeps_earlier_handlers_valid() -> None:
    flow = AttemptFlow(handlers=True)
    await flow.run("a")
    flow.harness.rerun(paused=True)
    await flow.run("b")
    flow.harness.resume()
    assert await flow.run("a") == []
    flow.harness.rerun(paused=True)
    assert await flow.run("new", "b") == ["new"]
    flow.harness.resume()
    assert await flow.run("a") == []


async def test_reused_records_keep_their_original_times() -> None:
    flow = AttemptFlow()
    await flow.run("a", "b")
    flow.harness.resume()
    await flow.run("a", "b", b=2)
    assert [flow.harness.record(name).retry for name in "ab"] == [0, 1]
    flow.harness.resume()
    await flow.run("a", "b", "c", b=2)
    assert [flow.harness.record(name).retry for name in "abc"] == [0, 1, 2]


async def test_a_migrated_result_is_reused() -> None:
    flow = AttemptFlow()
    await flow.run("a", "b")
    last = flow.harness.runner.final_checkpoint("why", None)
    accepted = [
        record.model_copy(update={"function": None, "inputs": {}}) for record in last.subtasks
    ]
    flow.harness.retry += 1
    flow.harness.begin(last.model_copy(update={"subtasks": tuple(accepted)}))
    assert await flow.run("a", "b", a=2, b="v2") == []


async def test_an_input_that_differs_within_a_new_attempt_is_a_warning_as_in_the_first() -> None:
    flow = AttemptFlow()
    await flow.run("a")
    flow.harness.resume()
    assert await flow.run("a", a=2) == ["a"]
    flow.harness.rerun()
    assert await flow.run("a", a=3) == []
    assert flow.harness.reasons(Step.SUBTASK_DIFFERS) == {"a": "input 'given' differs"}


async def test_an_argument_that_is_no_data_any_more_is_a_warning_within_an_attempt() -> None:
    flow = AttemptFlow()
    await flow.run("a")
    flow.harness.rerun()
    assert await flow.run("a", a=object()) == []
    assert flow.harness.reasons(Step.SUBTASK_DIFFERS) == {"a": "input 'given' is gone"}
    flow.harness.resume()
    with pytest.raises(SubtaskRefused, match="has no canonical form"):
        await flow.run("a", a=object())


async def test_nothing_is_saved_while_recorded_calls_are_left() -> None:
    """The code may not fit the recorded calls; an earlier version then finds its own records."""
    flow = AttemptFlow()
    await flow.run("a")
    flow.harness.rerun(paused=True)
    flow.harness.recorder.replaying, flow.harness.recorder.is_own_task = True, False
    saved = len(flow.harness.subtask_log.saved)
    assert await flow.run("new", "a") == ["new"]
    assert len(flow.harness.subtask_log.saved) == saved
    assert flow.harness.runner.has_unsaved
    flow.harness.recorder.replaying = False
    await flow.run("b")
    assert flow.harness.statuses() == {"a": "completed", "new": "completed", "b": "completed"}


async def test_a_task_does_not_become_an_operation_while_recorded_calls_are_left() -> None:
    flow = AttemptFlow()
    harness = flow.harness
    harness.recorder.replaying, harness.recorder.is_own_task = True, False
    await flow.run("a")
    assert (harness.runner.is_operation, harness.runner.has_unsaved) == (True, True)
    assert (harness.subtask_log.operations, harness.subtask_log.saved) == ([], [])
    unopened = harness.runner.unopened
    harness.recorder.replaying = False
    await flow.run("b")
    assert harness.subtask_log.operations == [unopened]
    assert harness.runner.unopened is None
    assert harness.statuses() == {"a": "completed", "b": "completed"}


@pytest.mark.parametrize("is_opened", [True, False])
async def test_a_pause_makes_the_task_an_operation_if_the_store_accepts_it(
    is_opened: bool,
) -> None:
    flow = AttemptFlow()
    runner, recorder = flow.harness.runner, flow.harness.recorder
    recorder.replaying, recorder.is_own_task = True, False
    await flow.run("a")
    runner.on_opened(is_opened=is_opened)
    assert runner.is_operation is is_opened
    assert runner.unopened is None


async def test_a_new_subtask_before_a_recorded_call_is_another_path() -> None:
    flow = AttemptFlow()
    await flow.run("a")
    flow.harness.rerun(paused=True)
    flow.harness.recorder.replaying, flow.harness.recorder.passed = True, 2
    with pytest.raises(ReplayMismatch, match="subtask 'new' before call 3 is not recorded"):
        await flow.run("a", "new")
    assert flow.run_log.take_new() == []
    assert isinstance(flow.harness.runner.mismatch, ReplayMismatch)
    with pytest.raises(ReplayMismatch):
        await flow.run("later")  # the code may have caught the error


async def test_a_subtask_that_began_before_a_recorded_call_runs_again() -> None:
    flow = AttemptFlow()
    await flow.run("a")

    async def stop() -> None:
        raise asyncio.CancelledError  # such as a time limit

    with pytest.raises(asyncio.CancelledError):
        await flow.harness.ctx.subtask("stopped", stop)
    assert flow.harness.runner.has_unsaved, "a replay must find that it began"
    flow.harness.subtask_log.saved.append(flow.harness.runner.next_checkpoint())
    flow.harness.rerun(paused=True)
    flow.harness.recorder.replaying = True
    assert await flow.run("a", "stopped") == ["stopped"]


async def test_an_outdated_record_is_kept_without_its_result() -> None:
    flow = AttemptFlow()
    await flow.run("a", "b")
    flow.harness.resume()
    await flow.run("a", a=2)
    outdated = flow.harness.record("b")
    assert (outdated.status, outdated.result, outdated.context) == (
        SubtaskStatus.OUTDATED,
        None,
        None,
    )
    assert outdated.again == "after 'a', which runs again"
    assert flow.harness.runner.progress.completed == ("a",)
    assert flow.harness.runner.progress.pending == ("b",)


async def test_an_input_can_differ_while_nothing_is_recorded() -> None:
    """The process died during the subtask: progress saved for one input must not serve another."""
    harness, seen = AttemptHarness(), list[Any]()

    async def step(at: int) -> None:
        seen.append(harness.ctx.saved_progress)
        await harness.ctx.save_progress({"at": at})
        if at == 1:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await harness.ctx.subtask("step", step, 1)
    assert harness.statuses() == {"step": "started"}
    harness.rerun()
    await harness.ctx.subtask("step", step, 2)
    assert seen == [None, None]
