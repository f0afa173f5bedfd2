"""A new attempt repeats only the first subtask that differs and those started after it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from runs import Life, Visits

from meshpoint.errors import SubtaskRefused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Step
from meshpoint.model.subtasks import SubtaskStatus
from meshpoint.subtasks.versions import subtask

Function = Callable[[Any], Any]


class Flow:
    """A sequence of subtasks, each with an input and a function version; `visits` records runs."""

    def __init__(self, **options: Any) -> None:
        self.life, self.visits = Life(**options), Visits()

    def function(self, name: str, version: str = "1") -> Function:
        @subtask(version=version)
        def step(given: Any) -> str:
            self.visits(name)
            return f"{name}({given})"

        return step

    async def run(self, *names: str, ctx: TaskExecutionContext | None = None, **changed: Any) -> list[str]:
        """Run subtasks `names` and return the names of the executed subtasks.

        `a=2` changes the input of "a", and `a="v2"` its function.
        """
        ctx = ctx or self.life.ctx
        for name in names:
            change = changed.get(name, 1)
            version, given = ("2", 1) if change == "v2" else ("1", change)
            await ctx.subtask(name, self.function(name, version), given)
        return self.visits.since()


async def test_nothing_runs_again_if_nothing_changed() -> None:
    flow = Flow()
    assert await flow.run("a", "b", "c") == ["a", "b", "c"]
    flow.life.resume()
    assert await flow.run("a", "b", "c") == []
    assert flow.life.told(Step.SUBTASK_AGAIN) == {}


@pytest.mark.parametrize(
    ("change", "why"),
    [({"b": "v2"}, "its function has changed"), ({"b": 2}, "input 'given' differs")],
    ids=["function", "input"],
)
async def test_what_changed_runs_again_and_all_that_was_begun_after_it(change: dict[str, Any], why: str) -> None:
    flow = Flow()
    await flow.run("a", "b", "c", "d")
    flow.life.resume()
    assert await flow.run("a", "b", "c", "d", **change) == ["b", "c", "d"]
    after = "after 'b', which runs again"
    assert flow.life.told(Step.SUBTASK_AGAIN) == {"b": why, "c": after, "d": after}
    flow.life.resume()
    assert await flow.run("a", "b", "c", "d", **change) == [], "the change is recorded"


async def test_a_new_subtask_makes_what_comes_after_it_run_again() -> None:
    flow = Flow()
    await flow.run("a", "b", "c")
    flow.life.resume()
    assert await flow.run("a", "new", "b", "c") == ["new", "b", "c"]
    after = "after 'new', which is new"
    assert flow.life.told(Step.SUBTASK_AGAIN) == {"b": after, "c": after}


async def test_a_new_subtask_at_the_end_changes_nothing() -> None:
    flow = Flow()
    await flow.run("a", "b")
    flow.life.resume()
    assert await flow.run("a", "b", "new") == ["new"]


async def test_a_subtask_that_is_gone_changes_nothing() -> None:
    flow = Flow()
    await flow.run("a", "b", "c")
    flow.life.resume()
    assert await flow.run("a", "c") == []


async def test_subtasks_in_another_order_are_still_those() -> None:
    flow = Flow()
    await flow.run("a", "b", "c")
    flow.life.resume()
    assert await flow.run("c", "a", "b") == []


async def test_what_is_outdated_runs_again_even_if_the_run_that_found_it_out_ended() -> None:
    """The replica crashed after it repeated `b` and before `c`."""
    flow = Flow()
    await flow.run("a", "b", "c")
    flow.life.resume()
    assert await flow.run("a", "b", b=2) == ["b"]
    flow.life.again()
    assert await flow.run("a", "b", "c", b=2) == ["c"]
    assert flow.life.told(Step.SUBTASK_AGAIN) == {"c": "after 'b', which runs again"}


async def test_what_is_outdated_stays_so_if_the_attempt_that_found_it_out_failed() -> None:
    flow = Flow()
    await flow.run("a", "b", "c")
    flow.life.resume()
    assert await flow.run("a", "b", b=2) == ["b"]
    assert flow.life.runner.outdated == {"b", "c"}
    flow.life.resume()
    assert flow.life.runner.outdated == {"c"}, "the calls of its last run are outdated too"
    assert await flow.run("a", "b", "c", b=2) == ["c"]
    assert flow.life.told(Step.SUBTASK_AGAIN) == {"c": "after 'b', which runs again"}


async def test_one_that_had_failed_and_is_mended_makes_nothing_run_again() -> None:
    """It was started before another subtask that completed alongside it."""
    flow = Flow()

    def failing(given: int) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await flow.life.ctx.subtask("a", failing, 1)
    assert await flow.run("b") == ["b"]
    flow.life.resume()
    assert await flow.run("a", "b") == ["a"]
    assert flow.life.told(Step.SUBTASK_AGAIN) == {}


async def test_a_changed_function_within_an_attempt_runs_again() -> None:
    """A replica of a new release rescued the task."""
    flow = Flow()
    await flow.run("a", "b")
    flow.life.again()
    assert await flow.run("a", "b", a="v2") == ["a", "b"]


async def test_what_ran_in_this_attempt_is_not_outdated_by_what_comes_after_it() -> None:
    """`b` was started before `a`, which now comes first; both have changed."""
    flow = Flow()
    await flow.run("b", "a")
    flow.life.resume()
    assert await flow.run("a", "b", a=2, b=2) == ["a", "b"]
    assert flow.life.statuses() == {"b": "completed", "a": "completed"}
    flow.life.again()
    assert await flow.run("a", "b", a=2, b=2) == []


async def test_what_was_reused_in_this_run_stays() -> None:
    """One branch has reused its second subtask when the other finds its first one changed."""
    flow = Flow()
    await flow.run("left", "right", "left too")
    ctx = flow.life.resume()
    await asyncio.gather(flow.run("left", "left too", ctx=ctx), flow.run("right", ctx=ctx, right=2))
    assert flow.life.statuses() == {"left": "completed", "right": "completed", "left too": "completed"}
    flow.life.again()
    assert await flow.run("left", "left too", "right", right=2) == []


async def test_handlers_that_come_after_a_changed_one_run_again() -> None:
    flow = Flow(handlers=True)
    await flow.run("a")
    flow.life.again(paused=True)
    await flow.run("b")
    flow.life.resume()
    assert await flow.run("a", a=2) == ["a"]
    flow.life.again(paused=True)
    assert await flow.run("b") == ["b"]


async def test_a_new_subtask_of_a_later_handler_leaves_those_of_earlier_ones() -> None:
    flow = Flow(handlers=True)
    await flow.run("a")
    flow.life.again(paused=True)
    await flow.run("b")
    flow.life.resume()
    assert await flow.run("a") == []
    flow.life.again(paused=True)
    assert await flow.run("new", "b") == ["new"]
    flow.life.resume()
    assert await flow.run("a") == []


async def test_reused_records_say_when_they_ran() -> None:
    flow = Flow()
    await flow.run("a", "b")
    flow.life.resume()
    await flow.run("a", "b", b=2)
    assert [flow.life.record(name).retry for name in "ab"] == [0, 1]
    flow.life.resume()
    await flow.run("a", "b", "c", b=2)
    assert [flow.life.record(name).retry for name in "abc"] == [0, 1, 2]


async def test_a_migration_vouches_for_a_result() -> None:
    flow = Flow()
    await flow.run("a", "b")
    last = flow.life.runner.final_checkpoint("why", None)
    vouched = [each.model_copy(update={"function": None, "inputs": {}}) for each in last.subtasks]
    flow.life.retry += 1
    flow.life.begin(last.model_copy(update={"subtasks": tuple(vouched)}))
    assert await flow.run("a", "b", a=2, b="v2") == []


async def test_an_input_that_differs_within_a_new_attempt_is_refused_as_in_the_first() -> None:
    flow = Flow()
    await flow.run("a")
    flow.life.resume()
    assert await flow.run("a", a=2) == ["a"]
    flow.life.again()
    with pytest.raises(SubtaskRefused, match="depends on time, chance"):
        await flow.run("a", a=3)


async def test_what_is_outdated_is_kept_without_its_result() -> None:
    flow = Flow()
    await flow.run("a", "b")
    flow.life.resume()
    await flow.run("a", a=2)
    outdated = flow.life.record("b")
    assert (outdated.status, outdated.result, outdated.context) == (SubtaskStatus.OUTDATED, None, None)
    assert outdated.again == "after 'a', which runs again"
    assert flow.life.runner.progress.completed == ("a",)
    assert flow.life.runner.progress.pending == ("b",)


async def test_an_input_may_differ_as_long_as_nothing_is_recorded() -> None:
    """The process died during the subtask: progress saved for one input must not serve another."""
    life, seen = Life(), list[Any]()

    async def step(at: int) -> None:
        seen.append(life.ctx.saved_progress)
        await life.ctx.save_progress({"at": at})
        if at == 1:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await life.ctx.subtask("step", step, 1)
    assert life.statuses() == {"step": "started"}
    life.again()
    await life.ctx.subtask("step", step, 2)
    assert seen == [None, None]
