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
from runs import AttemptHarness

from meshpoint.errors import IncompatibleState, SubtaskFailed, SubtaskRefused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import TaskId
from meshpoint.model.subtasks import SubtaskStatus
from meshpoint.model.usage import Tokens
from meshpoint.ports.agent import Plan
from meshpoint.subtasks import runner
from meshpoint.subtasks.versions import subtask
from run_log import RunLog


class Ratios(BaseModel):
    margin: float
    at: datetime


def ratios(margin: float) -> Ratios:
    return Ratios(margin=margin, at=datetime(2026, 1, 1, tzinfo=UTC))


async def double(number: int) -> int:
    return 2 * number


async def test_a_deliverable_is_recorded_before_it_is_returned() -> None:
    harness, seen = AttemptHarness(), list[str]()

    async def saving(name: str) -> None:
        seen.append("saved")

    harness.subtask_log.before_save = saving
    assert await harness.ctx.subtask("double", double, 4) == 8
    seen.append("returned")
    assert seen == ["saved", "returned"]
    record = harness.record("double")
    assert (record.status, record.result, record.retry, record.generation) == (
        SubtaskStatus.COMPLETED,
        "8",
        0,
        0,
    )


@pytest.mark.parametrize("end", ["crashed", "paused", "resumed"])
async def test_a_recorded_subtask_does_not_run_again(end: str) -> None:
    harness, visits = AttemptHarness(), RunLog()

    async def step(number: int) -> int:
        visits("step")
        return number + len(visits.names)

    first = await harness.ctx.subtask("step", step, 4)
    ctx = harness.resume() if end == "resumed" else harness.rerun(paused=end == "paused")
    assert await ctx.subtask("step", step, 4) == first == 5
    assert visits.names == ["step"]
    assert harness.recorder.skipped == ["step"]
    assert len(harness.subtask_log.saved) == 1
    (reused,) = [event for event in harness.events if event.step is Step.SUBTASK_REUSED]
    assert reused.detail["subtask"] == "step"


async def test_a_record_that_holds_needs_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, versions = AttemptHarness(), RunLog()
    await harness.ctx.subtask("double", double, 4)
    recorded = harness.record("double")

    def count(function: Callable[..., Any]) -> str:
        versions("version")
        return str(recorded.function)

    monkeypatch.setattr(runner, "version_with_uses", count)
    assert await harness.rerun().subtask("double", double, 4) == 8
    assert versions.names == []
    assert await harness.resume().subtask("double", double, 4) == 8
    assert versions.names == ["version"]


def test_a_task_without_subtasks_is_no_operation() -> None:
    runner = AttemptHarness(Plan(version="1", subtasks=("a",))).runner
    assert (runner.is_operation, runner.has_unsaved) == (False, False)
    assert (runner.progress.current, runner.progress.pending) == ("a", ("a",))


async def test_the_task_becomes_an_operation_once() -> None:
    plan = Plan(version="1", type="analysis", exclusive=True, preserve=True)
    harness = AttemptHarness(plan)
    assert not harness.runner.is_operation
    harness.ctx.subject = "ACME"
    await harness.ctx.subtask("a", double, 1)
    await harness.ctx.subtask("b", double, 1)
    ctx = harness.rerun()
    await ctx.subtask("c", double, 1)
    (operation,) = harness.subtask_log.operations
    assert (operation.type, operation.subject, operation.parameters) == (
        "analysis",
        "ACME",
        {"input": 1},
    )
    assert operation.exclusive
    assert operation.preserve


async def test_the_checkpoint_describes_the_agent() -> None:
    plan = Plan(version="7", subtasks=("a", "b"), type="analysis")
    harness = AttemptHarness(plan)
    harness.ctx.subject = "ACME"
    await harness.ctx.subtask("a", double, 1)
    (saved,) = harness.subtask_log.saved
    assert (saved.operation_id, saved.agent, saved.seq) == ("task", "analyst", 1)
    assert (saved.subject, saved.agent_version, saved.planned) == ("ACME", "7", ("a", "b"))
    assert saved.current_subtask == "b"
    assert saved.agent_config == {"type": "analysis", "exclusive": False, "preserve": False}


async def test_each_checkpoint_has_its_own_sequence_number() -> None:
    harness = AttemptHarness()
    await harness.ctx.subtask("a", double, 1)
    await harness.ctx.subtask("b", double, 1)
    ctx = harness.rerun()
    await ctx.subtask("c", double, 1)
    assert [checkpoint.seq for checkpoint in harness.subtask_log.saved] == [1, 2, 3]
    assert harness.runner.final_checkpoint("why", {"type": "ValueError"}).seq == 4


async def test_a_checkpoint_says_which_records_it_changes() -> None:
    harness = AttemptHarness()
    await harness.ctx.subtask("a", double, 1)
    await harness.ctx.subtask("b", double, 1)
    ctx = harness.rerun()
    await ctx.subtask("a", double, 1)
    await ctx.subtask("c", double, 1)
    saved = harness.subtask_log.saved
    assert [each.records_from for each in saved] == [1, 1, 1]
    assert [each.changed for each in saved] == [None, {"b"}, {"c"}]
    assert harness.runner.final_checkpoint("why", None).changed == frozenset()


async def test_what_an_abandoned_checkpoint_changed_is_written_by_the_next() -> None:
    harness = AttemptHarness()

    async def losing(name: str) -> None:
        if name.islower():
            raise asyncio.CancelledError("nobody knows whether it was written")

    harness.subtask_log.before_save = losing
    for name in ("a", "b"):
        with pytest.raises(asyncio.CancelledError):
            await harness.ctx.subtask(name, double, 1)
        await harness.ctx.subtask(name.upper(), double, 1)
    first, second = harness.subtask_log.saved
    assert (first.seq, first.records_from, first.changed) == (2, 2, None)
    assert (second.seq, second.records_from, second.changed) == (4, 2, frozenset({"b", "B"}))


async def test_a_failure_writes_the_records_whose_tokens_it_has_counted() -> None:
    harness = AttemptHarness()

    def spend() -> None:
        harness.ctx.token_usage.record(Tokens(input=1), model="small")

    await harness.ctx.subtask("a", double, 1)
    await harness.ctx.subtask("b", spend)
    assert harness.runner.final_checkpoint("why", None).changed == frozenset({"b"})


async def test_an_agent_without_a_version_writes_all_records() -> None:
    """An earlier release would not notice that it lacks some of them."""
    harness = AttemptHarness(Plan())
    await harness.ctx.subtask("a", double, 1)
    await harness.ctx.subtask("b", double, 1)
    last = harness.runner.final_checkpoint("why", None)
    for checkpoint in (*harness.subtask_log.saved, last):
        assert (checkpoint.records_from, checkpoint.changed) == (None, None)


async def test_the_final_checkpoint_has_the_reason() -> None:
    harness = AttemptHarness()
    await harness.ctx.subtask("a", double, 1)
    last = harness.runner.final_checkpoint("out of paper", {"type": "ValueError"})
    assert (last.failure_reason, last.error_details) == ("out of paper", {"type": "ValueError"})
    assert harness.statuses(last) == {"a": "completed"}
    assert harness.subtask_log.saved[-1].failure_reason is None


async def test_subtasks_in_a_user_made_context_are_not_recorded() -> None:
    ctx = TaskExecutionContext(TaskId("mine"))
    assert await ctx.subtask("a", double, 4) == 8
    assert await ctx.subtask("a", ratios, 0.5) == ratios(0.5)
    assert (ctx.progress.k, ctx.progress.n, ctx.saved_progress) == (0, 0, None)


async def test_a_model_is_restored_as_a_model() -> None:
    harness = AttemptHarness()
    first = await harness.ctx.subtask("ratios", ratios, 0.5)
    second = await harness.rerun().subtask("ratios", ratios, 0.5)
    assert first == second == ratios(0.5)
    assert type(second) is Ratios


async def test_without_an_annotation_even_the_first_run_returns_plain_json() -> None:
    def bare(number):  # type: ignore[no-untyped-def]  # what is tested
        return ratios(number), {1, 2}

    harness = AttemptHarness()
    first: Any = await harness.ctx.subtask("bare", bare, 0.5)
    assert first == [{"margin": 0.5, "at": "2026-01-01T00:00:00Z"}, [1, 2]]
    assert await harness.rerun().subtask("bare", bare, 0.5) == first


async def test_a_returned_value_is_a_separate_copy() -> None:
    """A caller that changes the returned value does not change the record."""
    returned: dict[str, int] = {"a": 1}

    def make() -> dict[str, int]:
        return returned

    harness = AttemptHarness()
    got = await harness.ctx.subtask("make", make)
    got["b"] = 2
    assert returned == {"a": 1}
    await harness.ctx.subtask("next", double, 1)
    assert harness.record("make").result == '{"a":1}'


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
    "a coroutine function": (double, 8),
    "a function": (lambda number: 2 * number, 8),
    "a lambda that returns an awaitable": (lambda number: double(number + 0), 8),
    "a partial": (functools.partial(double), 8),
    "a partial of a method": (functools.partial(Calculator(2).times), 8),
    "a bound method": (Calculator(3).times, 12),
    "a callable object": (Calculator(3), 12),
    "a class": (Halved, Halved(4)),
    "a builtin": (str, "4"),
}


@pytest.mark.parametrize(("function", "result"), CALLABLES.values(), ids=CALLABLES)
async def test_any_callable_can_be_a_subtask(function: Callable[..., Any], result: Any) -> None:
    harness = AttemptHarness()
    assert await harness.ctx.subtask("step", function, 4) == result
    assert await harness.rerun().subtask("step", function, 4) == result
    assert await harness.resume().subtask("step", function, 4) == result
    assert len(harness.subtask_log.saved) == 1


async def test_a_deliverable_that_no_longer_fits_reruns_it_and_later_subtasks() -> None:
    """Its version is unchanged, so the function counts as the same, but its annotation is new."""

    @subtask(version="1")
    def old() -> int:
        return 1

    @subtask(version="1")
    def new() -> Ratios:
        return ratios(0.5)

    harness = AttemptHarness()
    await harness.ctx.subtask("step", old)
    await harness.ctx.subtask("next", double, 1)
    ctx = harness.resume()
    assert await ctx.subtask("step", new) == ratios(0.5)
    await ctx.subtask("next", double, 1)
    reasons = harness.reasons(Step.SUBTASK_RERUN)
    assert reasons["step"].startswith("its deliverable no longer fits: Ratios: ")
    assert reasons["next"] == "after 'step', which runs again"


async def test_a_deliverable_that_no_longer_fits_within_an_attempt_needs_another_version() -> None:
    def old() -> int:
        return 1

    def new() -> Ratios:
        raise AssertionError("a recorded subtask runs again")

    harness = AttemptHarness()
    await harness.ctx.subtask("step", old)
    ctx = harness.rerun()
    for name in ("step", "next"):
        with pytest.raises(IncompatibleState, match="'step': its recorded result no longer fits"):
            await ctx.subtask(name, new)
    assert harness.runner.mismatch is not None
    assert await harness.rerun().subtask("step", old) == 1


async def set_all_fields(ctx: TaskExecutionContext) -> str:
    ctx.flags["parsed"] = {"pages": 3}
    ctx.produced_artifacts.append({"name": "report"})
    ctx.artifact_signals_to_return.append({"artifact": "report"})
    ctx.response_buffer += "parsed. "
    ctx.token_usage.record(Tokens(input=100, output=10), model="small")
    return "done"


def context_state(ctx: TaskExecutionContext) -> list[Any]:
    return [
        ctx.flags.to_plain(),
        ctx.produced_artifacts.to_plain(),
        ctx.artifact_signals_to_return.to_plain(),
        ctx.response_buffer,
        ctx.token_usage.model_dump(),
    ]


@pytest.mark.parametrize("end", ["crashed", "resumed"])
async def test_context_changes_of_a_subtask_are_restored_once(end: str) -> None:
    harness = AttemptHarness()
    harness.ctx.flags["before"] = True
    await harness.ctx.subtask("parse", set_all_fields, harness.ctx)
    harness.ctx.response_buffer += "after. "
    expected = context_state(harness.ctx)
    ctx = harness.resume() if end == "resumed" else harness.rerun()
    ctx.flags["before"] = True
    assert await ctx.subtask("parse", set_all_fields, ctx) == "done"
    ctx.response_buffer += "after. "
    assert context_state(ctx) == expected
    assert ctx.token_usage.total.input == 100


async def test_two_subtasks_count_their_tokens_once_each() -> None:
    def used(ctx: TaskExecutionContext, tokens: int) -> None:
        ctx.token_usage.record(Tokens(input=tokens), model="small")

    harness = AttemptHarness()
    begin: Callable[[], TaskExecutionContext]
    for begin in (lambda: harness.ctx, harness.rerun, harness.rerun, harness.resume):
        ctx = begin()
        await ctx.subtask("a", used, ctx, 10)
        await ctx.subtask("b", used, ctx, 5)
        assert ctx.token_usage.total.input == 15


async def test_a_subtask_that_sets_nothing_records_no_context() -> None:
    harness = AttemptHarness()
    harness.ctx.flags["secret plan"] = "no"
    await harness.ctx.subtask("a", double, 1)
    assert harness.record("a").context is None


async def test_context_changes_of_concurrent_subtasks_are_all_restored() -> None:
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

    harness = AttemptHarness()
    ctx = harness.ctx
    await asyncio.gather(ctx.subtask("first", first, ctx), ctx.subtask("second", second, ctx))
    expected = context_state(ctx)
    assert expected[0] == {"first": 1, "second": 2}
    ctx = harness.resume()
    await asyncio.gather(ctx.subtask("first", first, ctx), ctx.subtask("second", second, ctx))
    assert context_state(ctx) == expected


@pytest.mark.parametrize("name", ["", " a", "a ", "a\n", "a\0b", "x" * 101, 7, None])
async def test_an_invalid_subtask_name_is_refused(name: Any) -> None:
    harness = AttemptHarness()
    with pytest.raises(SubtaskRefused, match="is not a valid subtask name"):
        await harness.ctx.subtask(name, double, 1)
    assert not harness.runner.is_operation


@pytest.mark.parametrize("name", ["a", "10k parsing", "ß/…", "x" * 100])
async def test_any_other_subtask_name_is_accepted(name: str) -> None:
    harness = AttemptHarness()
    assert await harness.ctx.subtask(name, double, 1) == 2
    assert list(harness.statuses()) == [name]


@pytest.mark.parametrize("reused", [False, True])
async def test_two_subtasks_of_one_name_are_refused(reused: bool) -> None:
    harness = AttemptHarness()
    await harness.ctx.subtask("a", double, 1)
    if reused:
        await harness.rerun().subtask("a", double, 1)
    with pytest.raises(SubtaskRefused, match=r"two subtasks of this run are called 'a'.*'a-2'"):
        await harness.ctx.subtask("a", double, 2)
    assert await harness.ctx.subtask("a-2", double, 2) == 4


async def test_a_nested_subtask_is_refused() -> None:
    harness = AttemptHarness()

    async def outer() -> int:
        return await harness.ctx.subtask("inner", double, 1)

    with pytest.raises(SubtaskRefused, match="subtask 'inner' begins inside subtask 'outer'"):
        await harness.ctx.subtask("outer", outer)


async def test_a_nested_subtask_in_a_child_task_is_refused() -> None:
    harness = AttemptHarness()

    async def outer() -> int:
        return await asyncio.create_task(harness.ctx.subtask("inner", double, 1))

    with pytest.raises(SubtaskRefused, match="begins inside subtask 'outer'"):
        await harness.ctx.subtask("outer", outer)


async def test_an_unserializable_argument_is_refused_before_anything_runs() -> None:
    harness, visits = AttemptHarness(), RunLog()

    def step(given: Any) -> None:
        visits("step")

    with pytest.raises(
        SubtaskRefused, match=r"subtask 'step': argument \"given\['client'\]\" is a object"
    ):
        await harness.ctx.subtask("step", step, {"client": object()})
    assert visits.names == []
    assert not harness.runner.is_operation


@pytest.mark.parametrize(
    "value", [object(), float("nan"), iter([1])], ids=["an object", "nan", "an iterator"]
)
async def test_a_deliverable_that_cannot_be_stored_is_refused(value: Any) -> None:
    harness = AttemptHarness()

    def step():  # type: ignore[no-untyped-def]  # what is tested
        return value

    with pytest.raises(
        SubtaskRefused, match=r"subtask 'step' returned a .* that cannot be recorded"
    ):
        await harness.ctx.subtask("step", step)
    assert harness.subtask_log.saved == []
    last = harness.runner.final_checkpoint("why", None)
    assert harness.statuses(last) == {"step": "failed"}
    assert harness.record("step", last).result is None
    assert harness.runner.progress.completed == ()


async def test_a_deliverable_of_another_type_than_declared_is_refused() -> None:
    def step() -> int:
        return "seven"  # type: ignore[return-value]  # wrong on purpose

    harness = AttemptHarness()
    with pytest.raises(
        SubtaskRefused, match="subtask 'step' returned a str that cannot be recorded: int"
    ):
        await harness.ctx.subtask("step", step)


async def test_an_exception_propagates_unchanged_and_fails_the_subtask() -> None:
    def step() -> None:
        raise KeyError("price")

    harness = AttemptHarness()
    with pytest.raises(KeyError, match="price"):
        await harness.ctx.subtask("step", step)
    assert harness.statuses(harness.runner.final_checkpoint("why", None)) == {"step": "failed"}
    assert harness.runner.paused_subtask is None
    (failure,) = [
        event
        for event in harness.events
        if (event.step, event.phase) == (Step.SUBTASK, Phase.FAILED)
    ]
    assert (failure.detail["error"], failure.detail["error_type"]) == (
        "KeyError: 'price'",
        "KeyError",
    )


async def test_a_failed_subtask_runs_again_in_the_next_run() -> None:
    harness, visits = AttemptHarness(), RunLog()

    def step() -> int:
        visits("step")
        if len(visits.names) == 1:
            raise ConnectionError("a glitch")
        return 7

    with pytest.raises(ConnectionError):
        await harness.ctx.subtask("step", step)
    assert await harness.resume().subtask("step", step) == 7
    assert harness.reasons(Step.SUBTASK_RERUN) == {}, (
        "an incomplete subtask is not reported as repeated"
    )


RANDOM_SOURCES: dict[str, Callable[[], Any]] = {"now": lambda: datetime.now(UTC), "chance": uuid4}


@pytest.mark.parametrize("chance", RANDOM_SOURCES.values(), ids=RANDOM_SOURCES)
async def test_a_nondeterministic_input_is_reported_by_name(chance: Callable[[], Any]) -> None:
    harness = AttemptHarness()

    def step(asked: int, at: Any) -> int:
        return asked

    await harness.ctx.subtask("step", step, 1, at=chance())
    assert await harness.rerun().subtask("step", step, 1, at=chance()) == 1
    assert harness.reasons(Step.SUBTASK_DIFFERS) == {"step": "input 'at' differs"}
    assert harness.statuses(harness.runner.final_checkpoint("why", None)) == {"step": "completed"}


async def test_a_random_value_from_its_own_subtask_is_accepted() -> None:
    harness = AttemptHarness()

    def random_number() -> str:
        return str(uuid4())

    def step(key: str) -> str:
        return key

    keys = []
    begin: Callable[[], TaskExecutionContext]
    for begin in (lambda: harness.ctx, harness.rerun, harness.rerun, harness.resume):
        ctx = begin()
        keys.append(await ctx.subtask("step", step, await ctx.subtask("key", random_number)))
    assert len(set(keys)) == 1


async def test_a_name_of_an_earlier_handler_is_refused() -> None:
    harness = AttemptHarness(handlers=True)
    await harness.ctx.subtask("fetch", double, 1)
    with pytest.raises(SubtaskRefused, match="two subtasks of this run are called 'fetch'"):
        await harness.rerun(paused=True).subtask("fetch", double, 1)


async def test_a_rerun_handler_reuses_its_subtasks() -> None:
    harness, visits = AttemptHarness(handlers=True), RunLog()

    def step() -> None:
        visits("step")

    await harness.rerun(paused=True).subtask("step", step)
    await harness.rerun().subtask("step", step)
    assert visits.names == ["step"]


async def test_in_a_new_attempt_each_handler_reuses_its_subtasks() -> None:
    harness, visits = AttemptHarness(handlers=True), RunLog()

    def step(name: str) -> None:
        visits(name)

    await harness.ctx.subtask("first", step, "first")
    await harness.rerun(paused=True).subtask("second", step, "second")
    await harness.resume().subtask("first", step, "first")
    harness.generation = 1
    harness.begin(harness.subtask_log.saved[-1])
    await harness.ctx.subtask("second", step, "second")
    assert visits.names == ["first", "second"]


async def save_each_epoch(ctx: TaskExecutionContext, epochs: int) -> int:
    for epoch in range(epochs):
        await ctx.save_progress({"epoch": epoch})
    raise ConnectionError("gone")


async def test_state_saved_by_an_earlier_run_does_not_count_as_progress() -> None:
    """A run that saves the same state again and crashes must not count as progress."""
    harness = AttemptHarness()
    with pytest.raises(ConnectionError):
        await harness.ctx.subtask("crawl", save_each_epoch, harness.ctx, 1)
    assert harness.subtask_log.progressed == [True]
    for epochs, later_epochs in ((1, [False]), (2, [False, True])):
        harness.subtask_log.progressed.clear()
        with pytest.raises(ConnectionError):
            await harness.rerun().subtask("crawl", save_each_epoch, harness.ctx, epochs)
        assert harness.subtask_log.progressed == later_epochs
    harness.subtask_log.progressed.clear()
    await harness.rerun().subtask("doubled", double, 1)
    assert harness.subtask_log.progressed == [True]


async def test_a_caught_error_is_raised_again_when_the_function_is_replayed() -> None:
    harness, visits = AttemptHarness(), RunLog()

    class Local(Exception):
        """Cannot be found by its name."""

    def failing(error: str) -> None:
        visits(error)
        raise {"plain": ConnectionError("refused, password=hunter2"), "local": Local("x")}[error]

    with pytest.raises(ConnectionError):
        await harness.ctx.subtask("plain", failing, "plain")
    with pytest.raises(Local):
        await harness.ctx.subtask("local", failing, "local")
    assert harness.runner.has_unsaved
    harness.subtask_log.saved.append(harness.runner.next_checkpoint())
    assert not harness.runner.has_unsaved
    ctx = harness.rerun(paused=True)
    with pytest.raises(ConnectionError, match=r"refused, password=\*\*\*"):
        await ctx.subtask("plain", failing, "plain")
    with pytest.raises(SubtaskFailed, match=r"'local' failed: .*Local: x"):
        await ctx.subtask("local", failing, "local")
    assert visits.names == ["plain", "local"]
    assert harness.recorder.skipped == ["plain", "local"]
    with pytest.raises(ConnectionError):
        await harness.resume().subtask("plain", failing, "plain")
    assert visits.names == ["plain", "local", "plain"]


async def test_a_pause_needs_a_checkpoint_only_if_something_is_unsaved() -> None:
    def failing() -> None:
        raise ConnectionError

    def interrupted() -> None:
        raise asyncio.CancelledError

    harness, unsaved = AttemptHarness(), list[bool]()

    def look() -> None:
        unsaved.append(harness.runner.has_unsaved)

    look()
    with pytest.raises(asyncio.CancelledError):
        await harness.ctx.subtask("stopped", interrupted)
    look()  # the operation has no checkpoint yet
    await harness.ctx.subtask("a", double, 1)
    look()
    with pytest.raises(ConnectionError):
        await harness.ctx.subtask("b", failing)
    look()
    harness.subtask_log.saved.append(harness.runner.next_checkpoint())
    look()
    harness.rerun()
    look()
    assert unsaved == [False, True, False, True, False, False]
