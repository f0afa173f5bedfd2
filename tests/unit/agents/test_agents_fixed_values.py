"""`ctx.now`, `ctx.uuid4` and `ctx.random` are the same in every run of agent code."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from agent_samples import answer_any, create_context, double_peer, resume_agent, start_and_pause

from meshpoint import (
    Context,
    Done,
    FunctionAgent,
    Paused,
    Peer,
    Replies,
    StatefulAgent,
    TaskExecutionContext,
    agent,
)
from meshpoint.model.ids import TaskId
from meshpoint.testing import TestMesh
from meshpoint.testing.conformance.agent import answered, run_agent

wait_peer = Peer("wait", int, int)


class Seen:
    """The values that the runs of an agent got, by place in its code."""

    def __init__(self) -> None:
        self.values: dict[str, list[Any]] = {}

    def add(self, place: str, value: Any) -> Any:
        self.values.setdefault(place, []).append(value)
        return value

    def draw(self, place: str, ctx: Context) -> None:
        self.add(place, (ctx.now(), ctx.uuid4(), ctx.random().random()))

    def assert_fixed(self, **runs: int) -> None:
        """Each place got one value in all its runs, and no other place got the same."""
        assert {place: len(values) for place, values in self.values.items()} == runs
        assert all(len(set(values)) == 1 for values in self.values.values()), self.values
        drawn = [str(values[0]).partition("UUID")[2] for values in self.values.values()]
        assert len(set(drawn)) == len(drawn)


def drawing(seen: Seen) -> FunctionAgent[int, int]:
    @agent("drawing")
    async def drawing(ctx: Context, number: int) -> int:
        seen.draw("first", ctx)
        seen.draw("again", ctx)
        number = await wait_peer(number)

        async def in_step(number: int) -> int:
            seen.draw("step" if number < 100 else "next step", ctx)
            return number + 100

        async def in_subtask(number: int) -> int:
            seen.draw("subtask", ctx)
            return await wait_peer(number)

        seen.draw("before step", ctx)
        number = await ctx.step("add", in_step, number)
        number = await ctx.step("add", in_step, number)
        number = await ctx.subtask("ask", in_subtask, number)
        seen.draw("last", ctx)
        await wait_peer(number)
        return number

    return drawing


async def ask_drawing(crash: Callable[[TestMesh], None], *, replay: bool = False) -> Seen:
    seen = Seen()
    async with TestMesh(drawing(seen), always_replay=replay) as mesh:
        mesh.stub(wait_peer).calls(lambda number: number)
        crash(mesh)
        assert await mesh.call("drawing", 1) == 201
    return seen


async def test_they_are_the_same_in_every_run() -> None:
    seen = await ask_drawing(lambda mesh: None)
    seen.assert_fixed(
        **{"first": 4, "again": 4, "before step": 3, "last": 2},
        **{"step": 1, "next step": 1, "subtask": 2},
    )
    assert seen.values["first"][0][0] == seen.values["again"][0][0]


async def test_a_second_run_in_tests_gets_the_same() -> None:
    seen = await ask_drawing(lambda mesh: None, replay=True)
    assert all(len(set(values)) == 1 for values in seen.values.values()), seen.values


def crash_after_a_step(mesh: TestMesh) -> None:
    mesh.crash(before="subtask")


def crash_after_a_subtask(mesh: TestMesh) -> None:
    mesh.crash(before="end")


def crash_after_a_pause(mesh: TestMesh) -> None:
    mesh.crash(after="checkpoint")


@pytest.mark.parametrize("crash", [crash_after_a_step, crash_after_a_subtask, crash_after_a_pause])
async def test_they_are_the_same_after_a_crash(crash: Callable[[TestMesh], None]) -> None:
    seen = await ask_drawing(crash)
    assert all(len(set(values)) == 1 for values in seen.values.values()), seen.values
    assert len(seen.values["first"]) > 4 or crash is crash_after_a_pause


async def test_a_subtask_records_the_time_around_it() -> None:
    seen = Seen()

    @agent("brief")
    async def brief(ctx: Context, number: int) -> int:
        seen.draw("before", ctx)
        number = await ctx.subtask("add", lambda: number + 1)
        seen.draw("after", ctx)
        return number

    async with TestMesh(brief) as mesh:
        mesh.crash(before="end")
        assert await mesh.call(brief, 1) == 2
    seen.assert_fixed(before=2, after=2)


async def test_class_agents_have_them_too() -> None:
    seen = Seen()

    class Drawing(StatefulAgent[int, int, int]):
        name = "class"

        async def on_request(self, ctx: TaskExecutionContext, request: int) -> Paused | Done[int]:
            seen.draw("request", ctx)
            await ctx.step("note", lambda: None)
            seen.draw("after step", ctx)
            return self.ask(request, {"a": wait_peer(request)}, then=self.on_answer)

        async def on_answer(
            self, ctx: TaskExecutionContext, state: int, replies: Replies
        ) -> Done[int]:
            seen.draw("answer", ctx)
            return self.done(state)

    async with TestMesh(Drawing()) as mesh:
        mesh.stub(wait_peer).calls(lambda number: number)
        mesh.crash(before="checkpoint")
        assert await mesh.call(Drawing(), 1) == 1
    seen.assert_fixed(request=2, **{"after step": 2}, answer=1)
    assert seen.values["request"][0][0] < seen.values["answer"][0][0]


async def test_time_moves_with_pauses() -> None:
    runs: list[list[datetime]] = []

    @agent("slow")
    async def slow(ctx: Context, number: int) -> int:
        runs.append(instants := [ctx.now()])
        for _ in range(2):
            await wait_peer(number)
            instants.append(ctx.now())
        return number

    async with TestMesh(slow) as mesh:
        asked, started = mesh.stub(wait_peer), mesh.now()
        task = await mesh.send(slow, 1)
        for _ in range(2):
            await asked.next_request()
            await mesh.advance(timedelta(days=1))
            asked.answer(1)
        assert await task.result() == 1
    first, second, last = runs[-1]
    assert [run[:1] for run in runs] == [[first]] * 3
    assert runs[1] == [first, second]
    assert first - started < timedelta(minutes=1)
    assert timedelta(days=1) <= second - first < timedelta(days=1, minutes=1)
    assert timedelta(days=1) <= last - second < timedelta(days=1, minutes=1)
    assert all(instant.tzinfo is UTC for instant in runs[-1])


async def test_values_differ_between_tasks() -> None:
    contexts = [TaskExecutionContext(TaskId(name)) for name in "ab"]
    ids = [ctx.uuid4() for ctx in contexts for _ in range(2)]
    assert len(set(ids)) == 4
    assert {each.version for each in ids} == {4}
    numbers = [ctx.random().random() for ctx in contexts for _ in range(2)]
    assert len(set(numbers)) == 4


class Tools:
    """The part of a segment's tools that random values need, in one attempt."""

    def __init__(self, attempt: int) -> None:
        self.place = (0, attempt)


async def test_an_attempt_draws_other_values_unless_it_resumes_at_a_pause() -> None:
    seen = Seen()

    @agent("drawing")
    async def drawing(ctx: Context, number: int) -> int:
        seen.add(f"{number}", (number, ctx.uuid4()))
        return (await double_peer(number)).price

    async def begin(number: int, attempt: int) -> Paused:
        ctx = create_context()
        ctx._runtime.tools = Tools(attempt)  # type: ignore[assignment]  # it has no more
        pause = await drawing.start(ctx, number)
        assert isinstance(pause, Paused)
        return pause

    await begin(1, 0)
    pause = await begin(2, 1)
    resumed = create_context()
    resumed._runtime.tools = Tools(2)  # type: ignore[assignment]  # it has no more
    await drawing.resume(resumed, pause.state, answered(pause, answer_any))
    seen.assert_fixed(**{"1": 1, "2": 2})


async def test_a_journal_without_them_is_as_before() -> None:
    @agent("plain")
    async def plain(ctx: Context, number: int) -> int:
        number = (await double_peer(number)).price
        ctx.uuid4()
        return number + (await double_peer(number)).price

    pause = await start_and_pause(plain)
    stored = json.loads(pause.state)
    assert set(stored["entries"][0]) == {"calls", "needed", "within_seconds", "usage"}
    assert "attempt" not in stored["context"]
    assert await run_agent(plain, 1, answer_any) == 6


async def test_a_time_that_an_earlier_release_did_not_record_is_that_of_the_run() -> None:
    ask_time = [False]
    instants: list[datetime] = []

    @agent("changed")
    async def changed(ctx: Context, number: int) -> int:
        if ask_time[0]:
            instants.append(ctx.now())
        number = (await double_peer(number)).price
        instants.append(ctx.now())
        return number

    pause = await start_and_pause(changed)
    ask_time[0] = True
    assert await resume_agent(changed, pause) == Done(2)
    assert datetime.now(UTC) - instants[0] < timedelta(hours=1)


async def test_a_cancellation_can_be_tested_and_awaited() -> None:
    ctx = create_context()
    assert not ctx.is_cancelled
    assert not ctx.cancelled, "a bare `if ctx.cancelled:`"
    ctx.cancelled.set()
    assert ctx.is_cancelled
    assert ctx.cancelled
    await ctx.wait_cancelled()
