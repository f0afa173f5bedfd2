"""`ctx.subtask`: recorded before its value is returned, reused in later runs, or refused."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from pydantic import BaseModel
from runs import Life, Visits

from meshpoint.errors import SubtaskFailed, SubtaskRefused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import TaskId
from meshpoint.model.subtasks import SubtaskStatus
from meshpoint.model.usage import Tokens
from meshpoint.ports.agent import Plan
from meshpoint.subtasks.versions import subtask


class Ratios(BaseModel):
    margin: float
    at: datetime


def ratios(margin: float) -> Ratios:
    return Ratios(margin=margin, at=datetime(2026, 1, 1, tzinfo=UTC))


async def doubled(number: int) -> int:
    return 2 * number


async def test_a_deliverable_is_recorded_before_it_is_returned() -> None:
    life, seen = Life(), list[str]()

    async def saving(name: str) -> None:
        seen.append("saved")

    life.book.before_save = saving
    assert await life.ctx.subtask("double", doubled, 4) == 8
    seen.append("returned")
    assert seen == ["saved", "returned"]
    record = life.record("double")
    assert (record.status, record.result, record.retry, record.generation) == (SubtaskStatus.COMPLETED, "8", 0, 0)


@pytest.mark.parametrize("how", ["crashed", "paused", "resumed"])
async def test_what_is_recorded_does_not_run_again(how: str) -> None:
    life, visits = Life(), Visits()

    async def step(number: int) -> int:
        visits("step")
        return number + len(visits.names)

    first = await life.ctx.subtask("step", step, 4)
    ctx = life.resume() if how == "resumed" else life.again(paused=how == "paused")
    assert await ctx.subtask("step", step, 4) == first == 5
    assert visits.names == ["step"]
    assert life.recorder.skipped == ["step"]
    assert len(life.book.saved) == 1
    (reused,) = [event for event in life.events if event.step is Step.SUBTASK_REUSED]
    assert reused.detail["subtask"] == "step"


async def test_the_task_becomes_an_operation_once() -> None:
    plan = Plan(version="1", type="analysis", exclusive=True, preserve=True)
    life = Life(plan)
    assert not life.runner.is_operation
    life.ctx.subject = "ACME"
    await life.ctx.subtask("a", doubled, 1)
    await life.ctx.subtask("b", doubled, 1)
    ctx = life.again()
    await ctx.subtask("c", doubled, 1)
    (operation,) = life.book.operations
    assert (operation.type, operation.subject, operation.parameters) == ("analysis", "ACME", {"input": 1})
    assert operation.exclusive
    assert operation.preserve


async def test_the_checkpoint_says_what_the_agent_is() -> None:
    plan = Plan(version="7", subtasks=("a", "b"), type="analysis")
    life = Life(plan)
    life.ctx.subject = "ACME"
    await life.ctx.subtask("a", doubled, 1)
    (saved,) = life.book.saved
    assert (saved.operation_id, saved.agent, saved.seq) == ("task", "analyst", 1)
    assert (saved.subject, saved.agent_version, saved.planned) == ("ACME", "7", ("a", "b"))
    assert saved.current_subtask == "b"
    assert saved.agent_config == {"type": "analysis", "exclusive": False, "preserve": False}


async def test_each_checkpoint_has_a_number_of_its_own() -> None:
    life = Life()
    await life.ctx.subtask("a", doubled, 1)
    await life.ctx.subtask("b", doubled, 1)
    ctx = life.again()
    await ctx.subtask("c", doubled, 1)
    assert [each.seq for each in life.book.saved] == [1, 2, 3]
    assert life.runner.final_checkpoint("why", {"type": "ValueError"}).seq == 4


async def test_the_last_checkpoint_has_the_reason() -> None:
    life = Life()
    await life.ctx.subtask("a", doubled, 1)
    last = life.runner.final_checkpoint("out of paper", {"type": "ValueError"})
    assert (last.failure_reason, last.error_details) == ("out of paper", {"type": "ValueError"})
    assert life.statuses(last) == {"a": "completed"}
    assert life.book.saved[-1].failure_reason is None


async def test_nobody_records_in_a_context_of_ones_own() -> None:
    ctx = TaskExecutionContext(TaskId("mine"))
    assert await ctx.subtask("a", doubled, 4) == 8
    assert await ctx.subtask("a", ratios, 0.5) == ratios(0.5)
    assert (ctx.progress.k, ctx.progress.n, ctx.saved_progress) == (0, 0, None)


async def test_a_model_comes_back_as_one() -> None:
    life = Life()
    first = await life.ctx.subtask("ratios", ratios, 0.5)
    second = await life.again().subtask("ratios", ratios, 0.5)
    assert first == second == ratios(0.5)
    assert type(second) is Ratios


async def test_without_an_annotation_plain_json_comes_back_the_first_time_as_well() -> None:
    def bare(number):  # type: ignore[no-untyped-def]
        return ratios(number), {1, 2}

    life = Life()
    first: Any = await life.ctx.subtask("bare", bare, 0.5)
    assert first == [{"margin": 0.5, "at": "2026-01-01T00:00:00Z"}, [1, 2]]
    assert await life.again().subtask("bare", bare, 0.5) == first


async def test_what_is_returned_is_nobody_elses() -> None:
    """A caller that changes the returned value does not change the record."""
    made: dict[str, int] = {"a": 1}

    def make() -> dict[str, int]:
        return made

    life = Life()
    got = await life.ctx.subtask("make", make)
    got["b"] = 2
    assert made == {"a": 1}
    await life.ctx.subtask("next", doubled, 1)
    assert life.record("make").result == '{"a":1}'


class Calculator:
    """Not data, so the attributes of `self` do not count."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def times(self, number: int) -> int:
        return self.factor * number

    async def __call__(self, number: int) -> int:
        return self.factor * number


@dataclass
class Halved:
    """Calling this class is a subtask too."""

    number: int


CALLABLES: dict[str, tuple[Callable[..., Any], Any]] = {
    "a coroutine function": (doubled, 8),
    "a function": (lambda number: 2 * number, 8),
    "a lambda that returns an awaitable": (lambda number: doubled(number + 0), 8),
    "a partial": (functools.partial(doubled), 8),
    "a partial of a method": (functools.partial(Calculator(2).times), 8),
    "a bound method": (Calculator(3).times, 12),
    "a callable object": (Calculator(3), 12),
    "a class": (Halved, Halved(4)),
    "a builtin": (str, "4"),
}


@pytest.mark.parametrize(("function", "result"), CALLABLES.values(), ids=CALLABLES)
async def test_any_callable_will_do(function: Callable[..., Any], result: Any) -> None:
    life = Life()
    assert await life.ctx.subtask("step", function, 4) == result
    assert await life.again().subtask("step", function, 4) == result
    assert await life.resume().subtask("step", function, 4) == result
    assert len(life.book.saved) == 1


async def test_a_deliverable_that_no_longer_fits_runs_again_and_so_does_what_came_after() -> None:
    """Its version is unchanged, so the function counts as the same, but its annotation is new."""

    @subtask(version="1")
    def old() -> int:
        return 1

    @subtask(version="1")
    def new() -> Ratios:
        return ratios(0.5)

    life = Life()
    await life.ctx.subtask("step", old)
    await life.ctx.subtask("next", doubled, 1)
    ctx = life.resume()
    assert await ctx.subtask("step", new) == ratios(0.5)
    await ctx.subtask("next", doubled, 1)
    told = life.told(Step.SUBTASK_AGAIN)
    assert told["step"].startswith("its deliverable no longer fits: Ratios: ")
    assert told["next"] == "after 'step', which runs again"


async def everything(ctx: TaskExecutionContext) -> str:
    ctx.flags["parsed"] = {"pages": 3}
    ctx.produced_artifacts.append({"name": "report"})
    ctx.artifact_signals_to_return.append({"artifact": "report"})
    ctx.response_buffer += "parsed. "
    ctx.token_usage.record(Tokens(input=100, output=10), model="small")
    return "done"


def state_of(ctx: TaskExecutionContext) -> list[Any]:
    return [
        ctx.flags.to_plain(),
        ctx.produced_artifacts.to_plain(),
        ctx.artifact_signals_to_return.to_plain(),
        ctx.response_buffer,
        ctx.token_usage.model_dump(),
    ]


@pytest.mark.parametrize("how", ["crashed", "resumed"])
async def test_what_a_subtask_set_on_the_context_is_put_back_once(how: str) -> None:
    life = Life()
    life.ctx.flags["before"] = True
    await life.ctx.subtask("parse", everything, life.ctx)
    life.ctx.response_buffer += "after. "
    expected = state_of(life.ctx)
    ctx = life.resume() if how == "resumed" else life.again()
    ctx.flags["before"] = True
    assert await ctx.subtask("parse", everything, ctx) == "done"
    ctx.response_buffer += "after. "
    assert state_of(ctx) == expected
    assert ctx.token_usage.total.input == 100


async def test_two_subtasks_count_their_tokens_once_each() -> None:
    def used(ctx: TaskExecutionContext, tokens: int) -> None:
        ctx.token_usage.record(Tokens(input=tokens), model="small")

    life = Life()
    for begin in (lambda: life.ctx, life.again, life.again, life.resume):
        ctx = begin()
        await ctx.subtask("a", used, ctx, 10)
        await ctx.subtask("b", used, ctx, 5)
        assert ctx.token_usage.total.input == 15


async def test_a_subtask_that_sets_nothing_keeps_nothing_of_the_context() -> None:
    life = Life()
    life.ctx.flags["secret plan"] = "no"
    await life.ctx.subtask("a", doubled, 1)
    assert life.record("a").context is None


async def test_what_side_by_side_set_on_the_context_is_all_put_back() -> None:
    """The subtask that started last ends first; restoring the context must keep both changes."""
    first_may_end = asyncio.Event()

    async def first(ctx: TaskExecutionContext) -> None:
        await first_may_end.wait()
        ctx.flags["first"] = 1
        ctx.token_usage.record(Tokens(input=10), model="small")

    async def second(ctx: TaskExecutionContext) -> None:
        ctx.flags["second"] = 2
        ctx.token_usage.record(Tokens(input=5), model="small")
        first_may_end.set()

    life = Life()
    ctx = life.ctx
    await asyncio.gather(ctx.subtask("first", first, ctx), ctx.subtask("second", second, ctx))
    expected = state_of(ctx)
    assert expected[0] == {"first": 1, "second": 2}
    ctx = life.resume()
    await asyncio.gather(ctx.subtask("first", first, ctx), ctx.subtask("second", second, ctx))
    assert state_of(ctx) == expected


@pytest.mark.parametrize("name", ["", " a", "a ", "a\n", "a\0b", "x" * 101, 7, None])
async def test_a_name_that_cannot_be_one_is_refused(name: Any) -> None:
    life = Life()
    with pytest.raises(SubtaskRefused, match="is not a valid subtask name"):
        await life.ctx.subtask(name, doubled, 1)
    assert not life.runner.is_operation


@pytest.mark.parametrize("name", ["a", "10k parsing", "ß/…", "x" * 100])
async def test_any_other_name_will_do(name: str) -> None:
    life = Life()
    assert await life.ctx.subtask(name, doubled, 1) == 2
    assert list(life.statuses()) == [name]


@pytest.mark.parametrize("reused", [False, True])
async def test_two_of_one_name_are_refused(reused: bool) -> None:
    life = Life()
    await life.ctx.subtask("a", doubled, 1)
    if reused:
        await life.again().subtask("a", doubled, 1)
    with pytest.raises(SubtaskRefused, match=r"two subtasks of this run are called 'a'.*'a-2'"):
        await life.ctx.subtask("a", doubled, 2)
    assert await life.ctx.subtask("a-2", doubled, 2) == 4


async def test_one_inside_another_is_refused() -> None:
    life = Life()

    async def outer() -> int:
        return await life.ctx.subtask("inner", doubled, 1)

    with pytest.raises(SubtaskRefused, match="subtask 'inner' begins inside subtask 'outer'"):
        await life.ctx.subtask("outer", outer)


async def test_one_in_a_child_task_of_another_is_refused() -> None:
    life = Life()

    async def outer() -> int:
        return await asyncio.create_task(life.ctx.subtask("inner", doubled, 1))

    with pytest.raises(SubtaskRefused, match="begins inside subtask 'outer'"):
        await life.ctx.subtask("outer", outer)


async def test_an_argument_without_a_form_is_refused_before_anything_runs() -> None:
    life, visits = Life(), Visits()

    def step(given: Any) -> None:
        visits("step")

    with pytest.raises(SubtaskRefused, match=r"subtask 'step': argument \"given\['client'\]\" is a object"):
        await life.ctx.subtask("step", step, {"client": object()})
    assert visits.names == []
    assert not life.runner.is_operation


@pytest.mark.parametrize("value", [object(), float("nan"), iter([1])], ids=["an object", "nan", "an iterator"])
async def test_a_deliverable_that_cannot_be_kept_is_refused_and_not_marked_as_done(value: Any) -> None:
    life = Life()

    def step():  # type: ignore[no-untyped-def]
        return value

    with pytest.raises(SubtaskRefused, match=r"subtask 'step' returned a .* that cannot be recorded"):
        await life.ctx.subtask("step", step)
    assert life.book.saved == []
    last = life.runner.final_checkpoint("why", None)
    assert life.statuses(last) == {"step": "failed"}
    assert life.record("step", last).result is None
    assert life.runner.progress.completed == ()


async def test_a_deliverable_of_another_type_than_declared_is_refused() -> None:
    def step() -> int:
        return "seven"  # type: ignore[return-value]

    life = Life()
    with pytest.raises(SubtaskRefused, match="subtask 'step' returned a str that cannot be recorded: int"):
        await life.ctx.subtask("step", step)


async def test_an_exception_passes_as_it_is_and_the_subtask_is_failed() -> None:
    def step() -> None:
        raise KeyError("price")

    life = Life()
    with pytest.raises(KeyError, match="price"):
        await life.ctx.subtask("step", step)
    assert life.statuses(life.runner.final_checkpoint("why", None)) == {"step": "failed"}
    assert life.runner.paused_subtask is None
    (told,) = [event for event in life.events if (event.step, event.phase) == (Step.SUBTASK, Phase.FAILED)]
    assert told.detail["error"] == "KeyError: 'price'"


async def test_one_that_failed_runs_again_in_the_next_run() -> None:
    life, visits = Life(), Visits()

    def step() -> int:
        visits("step")
        if len(visits.names) == 1:
            raise ConnectionError("a glitch")
        return 7

    with pytest.raises(ConnectionError):
        await life.ctx.subtask("step", step)
    assert await life.resume().subtask("step", step) == 7
    assert life.told(Step.SUBTASK_AGAIN) == {}, "an incomplete subtask is not reported as repeated"


CHANCE: dict[str, Callable[[], Any]] = {"now": lambda: datetime.now(UTC), "chance": uuid4}


@pytest.mark.parametrize("chance", CHANCE.values(), ids=CHANCE)
async def test_an_input_that_depends_on_time_or_chance_is_refused_by_its_name(chance: Callable[[], Any]) -> None:
    life = Life()

    def step(asked: int, at: Any) -> int:
        return asked

    await life.ctx.subtask("step", step, 1, at=chance())
    with pytest.raises(SubtaskRefused, match=r"subtask 'step': input 'at' differs .* depends on time, chance"):
        await life.again().subtask("step", step, 1, at=chance())
    assert life.statuses(life.runner.final_checkpoint("why", None)) == {"step": "completed"}


async def test_chance_in_a_subtask_of_its_own_is_fine() -> None:
    life = Life()

    def chance() -> str:
        return str(uuid4())

    def step(key: str) -> str:
        return key

    keys = []
    for begin in (lambda: life.ctx, life.again, life.again, life.resume):
        ctx = begin()
        keys.append(await ctx.subtask("step", step, await ctx.subtask("key", chance)))
    assert len(set(keys)) == 1


async def test_a_name_of_an_earlier_handler_is_refused() -> None:
    life = Life(handlers=True)
    await life.ctx.subtask("fetch", doubled, 1)
    with pytest.raises(SubtaskRefused, match="two subtasks of this run are called 'fetch'"):
        await life.again(paused=True).subtask("fetch", doubled, 1)


async def test_a_handler_that_runs_again_reuses_its_own() -> None:
    life, visits = Life(handlers=True), Visits()

    def step() -> None:
        visits("step")

    await life.again(paused=True).subtask("step", step)
    await life.again().subtask("step", step)
    assert visits.names == ["step"]


async def test_in_a_new_attempt_each_handler_reuses_its_own() -> None:
    life, visits = Life(handlers=True), Visits()

    def step(name: str) -> None:
        visits(name)

    await life.ctx.subtask("first", step, "first")
    await life.again(paused=True).subtask("second", step, "second")
    await life.resume().subtask("first", step, "first")
    life.generation = 1
    life.begin(life.book.saved[-1])
    await life.ctx.subtask("second", step, "second")
    assert visits.names == ["first", "second"]


async def crawl(ctx: TaskExecutionContext, epochs: int) -> int:
    for epoch in range(epochs):
        await ctx.save_progress({"epoch": epoch})
    raise ConnectionError("gone")


async def test_the_state_that_an_earlier_run_had_saved_is_no_progress() -> None:
    """A run that saves the same state again and crashes must not count as progress."""
    life = Life()
    with pytest.raises(ConnectionError):
        await life.ctx.subtask("crawl", crawl, life.ctx, 1)
    assert life.book.progressed == [True]
    for epochs, further in ((1, [False]), (2, [False, True])):
        life.book.progressed.clear()
        with pytest.raises(ConnectionError):
            await life.again().subtask("crawl", crawl, life.ctx, epochs)
        assert life.book.progressed == further
    life.book.progressed.clear()
    await life.again().subtask("doubled", doubled, 1)
    assert life.book.progressed == [True]


async def test_an_error_that_was_caught_comes_again_when_a_function_runs_again_after_a_pause() -> None:
    life, visits = Life(), Visits()

    class Local(Exception):
        """Cannot be found by its name."""

    def failing(error: str) -> None:
        visits(error)
        raise {"plain": ConnectionError("refused, password=hunter2"), "local": Local("x")}[error]

    with pytest.raises(ConnectionError):
        await life.ctx.subtask("plain", failing, "plain")
    with pytest.raises(Local):
        await life.ctx.subtask("local", failing, "local")
    assert life.runner.has_unsaved
    life.book.saved.append(life.runner.next_checkpoint())
    assert not life.runner.has_unsaved
    ctx = life.again(paused=True)
    with pytest.raises(ConnectionError, match=r"refused, password=\*\*\*"):
        await ctx.subtask("plain", failing, "plain")
    with pytest.raises(SubtaskFailed, match=r"'local' failed: .*Local: x"):
        await ctx.subtask("local", failing, "local")
    assert visits.names == ["plain", "local"]
    assert life.recorder.skipped == ["plain", "local"]
    with pytest.raises(ConnectionError):
        await life.resume().subtask("plain", failing, "plain")
    assert visits.names == ["plain", "local", "plain"]
