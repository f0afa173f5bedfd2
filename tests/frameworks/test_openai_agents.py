"""What only the adapter for the OpenAI Agents SDK must do."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("agents")

from agents import (
    Agent,
    ModelBehaviorError,
    RunContextWrapper,
    Runner,
    Tool,
    function_tool,
    handoff,
    set_tracing_disabled,
)
from agents.extensions.handoff_filters import remove_all_tools
from pydantic import BaseModel
from scenario import Journey, Quote, Result, Says, Script, Use, flights, weather
from with_openai_agents import ScriptedModel

from meshpoint import (
    ConfigurationError,
    Failed,
    IncompatibleState,
    MeshpointError,
    Ok,
    Outcomes,
    Paused,
    Peer,
    QuestionUpdate,
)
from meshpoint import TaskExecutionContext as Context
from meshpoint.frameworks import BUDGET, Approval, Budget
from meshpoint.frameworks.openai_agents import durable
from meshpoint.model.ids import TaskId
from meshpoint.testing import TestMesh, crash_matrix

set_tracing_disabled(True)

LONG = bool(os.environ.get("MESHPOINT_FRAMEWORKS"))
"""Whether `make frameworks` runs the tests."""
ASK = Use("weather", {"request": "Rome"}, "call-w")
GO = Use("guide", {"input": "rules"}, "call-g")
travel = Peer("travel", str, str)


def calls(*turns: Sequence[Use]) -> Script:
    """A script that calls the tools of each turn, then repeats all results."""

    def script(answers: int, results: Sequence[Result]) -> Says:
        if answers < len(turns):
            return Says(uses=tuple(turns[answers]))
        return Says(" | ".join(each.text for each in results))

    return script


def agent_of(journey: Journey, *tools: Tool, name: str = "travel", **options: Any) -> Agent[Any]:
    """An agent of the SDK."""
    return Agent(name, model=ScriptedModel(journey), tools=[*tools], **options)


def wrap(agent: Agent[Any], **options: Any) -> Any:
    """The agent as an agent of the mesh."""
    return durable(agent, **{"peers": [flights, weather], "stream": False, **options})


def stubs(mesh: TestMesh) -> None:
    mesh.stub(weather).returns("sunny")
    mesh.stub(flights).returns(Quote(price=120))


async def decide(task: Any, mesh: TestMesh, decisions: dict[str, bool]) -> list[str]:
    """Approve the questions whose prompts contain any of the texts, and return all prompts."""
    prompts = list[str]()
    async for update in task.updates():
        if isinstance(update, QuestionUpdate):
            prompts.append(update.prompt or "")
            approved = next(may for text, may in decisions.items() if text in prompts[-1])
            await mesh.complete(update.question_id, Approval(approved=approved))
    return prompts


def booking(booked: list[int]) -> Tool:
    @function_tool(needs_approval=True)
    def book(offer: int) -> str:
        """Books an offer."""
        booked.append(offer)
        return f"booked {offer}"

    return book


def handed(*turns: Sequence[Use], **options: Any) -> tuple[Journey, Journey, Agent[Any]]:
    """An agent that hands over to `expert`, which calls the tools of each turn."""
    desk = Journey(calls([Use("transfer_to_expert", {}, "call-h")]))
    expert = Journey(lambda answers, results: calls(*turns)(answers - 1, results))
    target = agent_of(expert, name="expert")
    return desk, expert, agent_of(desk, handoffs=[handoff(target, **options)])


TURNS = ([ASK], [Use("flights", {"city": "Rome"}, "call-f")])


@pytest.mark.parametrize("crash", [{"after": "record", "times": 3}, {"before": "checkpoint"}])
async def test_an_agent_waits_after_a_handoff(crash: dict[str, Any]) -> None:
    desk, expert, root = handed(*TURNS)
    async with TestMesh(wrap(root, output=str)) as mesh:
        stubs(mesh)
        mesh.crash(**crash)
        assert (await mesh.call(travel, "Rome?")).endswith('sunny | {"price":120}')
    assert (desk.model_calls, expert.model_calls) == ([1], [2, 3, 4])


@pytest.mark.skipif(not LONG, reason="takes many seconds")
async def test_a_crash_at_each_point_of_a_handoff() -> None:
    runs = list[list[list[int]]]()
    desk, expert, root = handed(*TURNS)

    def setup(mesh: TestMesh) -> None:
        stubs(mesh)
        runs.append([[], []])
        desk.model_calls, expert.model_calls = runs[-1]

    report = await crash_matrix(wrap(root, output=str), "Rome?", setup=setup)
    assert isinstance(report.outcome, Ok)
    assert report.outcome.value.endswith('sunny | {"price":120}')
    for run, made in zip(report.runs, runs[1:], strict=False):
        again = [each for each in run.repeated if "step 'model'" in each]
        assert sum(map(len, made)) == 4 + len(again), str(run)


async def test_a_handoff_in_a_turn_with_a_peer() -> None:
    desk, _, root = handed([ASK])
    desk.script = calls([Use("transfer_to_expert", {}, "call-h"), ASK])
    async with TestMesh(wrap(root, output=str)) as mesh:
        stubs(mesh)
        mesh.crash(after="record", times=3)
        outcome = await (await mesh.send(travel, "Rome?")).outcome()
        assert isinstance(outcome, Ok), outcome
        assert "sunny" in outcome.value
    assert desk.model_calls == [1]


async def test_a_filter_of_a_handoff_changes_what_the_next_agent_sees() -> None:
    desk, expert, root = handed([ASK], input_filter=remove_all_tools)
    expert.script = calls([ASK])
    desk.script = calls([ASK], [Use("transfer_to_expert", {}, "call-h")])
    async with TestMesh(wrap(root, output=str)) as mesh:
        stubs(mesh)
        mesh.crash(after="record", times=4)
        outcome = await (await mesh.send(travel, "Rome?")).outcome()
        assert isinstance(outcome, Ok), outcome
        assert outcome.value == "sunny"
        assert mesh.stub(weather).requests == ["Rome", "Rome"]
    assert (desk.model_calls, expert.model_calls) == ([1, 2], [1, 2])


async def test_nested_history_of_a_handoff() -> None:
    desk, expert, root = handed([ASK], nest_handoff_history=True)
    # not `calls`, which takes the summary of the history for an answer
    expert.script = lambda _, results: Says(results[-1].text) if results else Says(uses=(ASK,))
    desk.script = calls([ASK], [Use("transfer_to_expert", {}, "call-h")])
    async with TestMesh(wrap(root, output=str)) as mesh:
        stubs(mesh)
        mesh.crash(after="record", times=4)
        outcome = await (await mesh.send(travel, "Rome?")).outcome()
        assert isinstance(outcome, Ok), outcome
        assert outcome.value == "sunny"


async def test_agents_of_one_name_keep_their_tools() -> None:
    """Two agents are called `expert`: the task resumes in the agent that has waited."""
    booked, first, second = list[int](), list[int](), list[int]()
    book = Use("book", {"offer": 17}, "call-b")
    experts = [
        agent_of(
            Journey(lambda answers, results: calls([book], [ASK])(answers - 1, results)),
            booking(each),
            name="expert",
        )
        for each in (first, second)
    ]
    root = agent_of(
        Journey(calls([Use("to_second", {}, "call-h")])),
        handoffs=[
            handoff(each, tool_name_override=name)
            for each, name in zip(experts, ("to_first", "to_second"), strict=True)
        ],
    )
    async with TestMesh(wrap(root, output=str)) as mesh:
        stubs(mesh)
        task = await mesh.send(travel, "Rome?")
        assert len(await decide(task, mesh, {"book": True})) == 1
        outcome = await task.outcome()
        assert isinstance(outcome, Ok), outcome
        assert outcome.value.endswith("booked 17 | sunny")
    assert (first, second) == ([], [17])
    assert not booked


def guided(*turns: Sequence[Use], tools: Sequence[Tool] = (), **options: Any) -> Any:
    """An agent whose tool `guide` is an agent, which calls the tools of each turn."""
    below, above = Journey(calls(*turns)), Journey(calls([GO, ASK]))
    guide = agent_of(below, *tools, name="guide")
    tool = guide.as_tool(tool_name="guide", tool_description="Guides.", **options)
    return below, above, agent_of(above, tool)


@pytest.mark.parametrize(
    "crash", [{"after": "record", "times": 2}, {"before": "checkpoint"}, {"before": "resume"}, {}]
)
@pytest.mark.parametrize("approved", [True, False])
async def test_an_agent_as_a_tool_asks(crash: dict[str, Any], approved: bool) -> None:
    booked = list[int]()
    book = [Use("book", {"offer": each}, f"call-{each}") for each in (17, 18)]
    below, above, root = guided(book, tools=[booking(booked)])
    async with TestMesh(wrap(root)) as mesh:
        stubs(mesh)
        if crash:
            mesh.crash(**crash)
        task = await mesh.send(travel, "Rome?")
        prompts = await decide(task, mesh, {"17": approved, "18": True})
        outcome = await task.outcome()
    assert isinstance(outcome, Ok), outcome
    first = "booked 17" if approved else "The call was not approved."
    assert outcome.value == f"{first} | booked 18 | sunny"
    assert set(prompts) == {f'Run book with {{"offer": {each}}}?' for each in (17, 18)}
    assert booked == ([17, 18] if approved else [18])
    assert below.model_calls == above.model_calls == [1, 2]
    assert outcome.usage.by_source.keys() == {"agent", "guide"}


@pytest.mark.parametrize("second", [True, False])
async def test_an_approval_of_a_nested_call_is_not_for_a_later_one(second: bool) -> None:
    """The model gives both calls the same id."""
    booked = list[int]()
    book = [[Use("book", {"offer": each}, "same")] for each in (17, 1000)]
    _, _, root = guided(*book, tools=[booking(booked)])
    async with TestMesh(wrap(root)) as mesh:
        stubs(mesh)
        task = await mesh.send(travel, "Rome?")
        prompts = await decide(task, mesh, {"17": True, "1000": second})
        outcome = await task.outcome()
    assert isinstance(outcome, Ok), outcome
    assert prompts == [f'Run book with {{"offer": {each}}}?' for each in (17, 1000)]
    assert booked == ([17, 1000] if second else [17])


async def test_an_approval_of_a_call_is_not_for_a_nested_one() -> None:
    booked, nested = list[int](), list[int]()
    _, above, root = guided([Use("book", {"offer": 1000}, "same")], tools=[booking(nested)])
    above.script = calls([Use("book", {"offer": 17}, "same")], [GO])
    root.tools.append(booking(booked))
    async with TestMesh(wrap(root)) as mesh:
        task = await mesh.send(travel, "Rome?")
        prompts = await decide(task, mesh, {"17": True, "1000": False})
        outcome = await task.outcome()
    assert isinstance(outcome, Ok), outcome
    assert prompts == [f'Run book with {{"offer": {each}}}?' for each in (17, 1000)]
    assert (booked, nested) == ([17], [])


async def test_two_nested_agents_ask_at_once() -> None:
    """Their calls have the same id and the same arguments."""
    booked = list[int]()
    above = Journey(calls([GO, Use("guide", {"input": "prices"}, "call-2")]))
    below = Journey(calls([Use("book", {"offer": 17}, "same")]))
    guide = agent_of(below, booking(booked), name="guide")
    root = agent_of(above, guide.as_tool(tool_name="guide", tool_description="Guides."))
    async with TestMesh(wrap(root)) as mesh:
        task = await mesh.send(travel, "Rome?")
        prompts = await decide(task, mesh, {"book": True})
        outcome = await task.outcome()
    assert isinstance(outcome, Ok), outcome
    assert outcome.value == "booked 17 | booked 17"
    assert len(prompts) == 2
    assert booked == [17, 17]


async def test_an_agent_in_an_agent_in_a_tool_asks() -> None:
    booked = list[int]()
    below, above, middle = guided([Use("book", {"offer": 17}, "b")], tools=[booking(booked)])
    above.script = calls([GO])
    top = Journey(calls([Use("planner", {"input": "plan"}, "call-p"), ASK]))
    middle.name = "planner"
    tool = middle.as_tool(tool_name="planner", tool_description="Plans.")
    async with TestMesh(wrap(agent_of(top, tool))) as mesh:
        stubs(mesh)
        mesh.crash(after="record", times=5)
        task = await mesh.send(travel, "Rome?")
        assert len(await decide(task, mesh, {"book": True})) == 1
        outcome = await task.outcome()
    assert isinstance(outcome, Ok), outcome
    assert outcome.value == "booked 17 | sunny"
    assert [each.model_calls for each in (top, above, below)] == [[1, 2]] * 3
    assert booked == [17]


@pytest.mark.parametrize("approved", [True, False])
async def test_an_agent_as_a_tool_may_need_approval(approved: bool) -> None:
    below, _, root = guided(needs_approval=True)
    below.script = calls()
    async with TestMesh(wrap(root)) as mesh:
        stubs(mesh)
        task = await mesh.send(travel, "Rome?")
        prompts = await decide(task, mesh, {"guide": approved})
        outcome = await task.outcome()
    assert isinstance(outcome, Ok), outcome
    assert prompts == ['Run guide with {"input": "rules"}?']
    assert len(below.model_calls) == approved


async def test_an_agent_as_a_tool_that_is_also_a_handoff_waits_for_peers() -> None:
    below, above, root = guided([ASK])
    above.script = calls([GO])
    root.handoffs.append(root.tools[0]._agent_instance)
    async with TestMesh(wrap(root, output=str)) as mesh:
        stubs(mesh)
        outcome = await (await mesh.send(travel, "Rome?")).outcome()
    assert isinstance(outcome, Ok), outcome
    assert outcome.value == "sunny"
    assert below.offered.keys() == {"flights", "weather"}


async def test_a_failed_agent_in_a_tool_is_an_error_of_the_tool() -> None:
    def fail(answers: int, results: Sequence[Result]) -> Says:
        raise ValueError("no model")

    below, _, root = guided()
    below.script = fail
    async with TestMesh(wrap(root)) as mesh:
        stubs(mesh)
        mesh.crash(after="record", times=2)
        outcome = await (await mesh.send(travel, "Rome?")).outcome()
    assert isinstance(outcome, Ok), outcome
    assert outcome.value.startswith("An error occurred")
    assert outcome.value.endswith("sunny")
    assert below.model_calls == [1]


class Later(MeshpointError):
    """The task cannot continue here."""


@pytest.mark.parametrize("failing", ["model guide", "tool"])
async def test_an_error_of_ours_settles_the_task(
    monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """The SDK makes errors of tools results for the model."""
    _, above, root = guided([Use("look", {}, "call-l")], tools=[looking()])
    above.script = calls([GO])
    task = Context(TaskId("task"))
    step = task.step
    names = list[str]()

    async def fail(name: str, *arguments: Any) -> Any:
        names.append(name)
        if name.startswith("tool") if failing == "tool" else len(names) == 2:
            raise Later("later")
        return await step(name, *arguments)

    monkeypatch.setattr(Context, "step", lambda _, *arguments: fail(*arguments))
    with pytest.raises(Later, match="later"):
        await wrap(root).start(task, "Rome?")
    assert above.model_calls == [1]


def looking() -> Tool:
    @function_tool
    def look() -> str:
        """Looks."""
        return "rain"

    return look


async def test_an_error_of_a_tool_is_recorded() -> None:
    failed = list[int]()

    @function_tool
    def fail() -> str:
        """Fails."""
        failed.append(1)
        raise ValueError("wrong")

    journey = Journey(calls([Use("fail", {}, "1"), ASK]))
    async with TestMesh(wrap(agent_of(journey, fail))) as mesh:
        stubs(mesh)
        mesh.crash(after="record", times=3)
        result = await mesh.call(travel, "Rome?")
    assert result.startswith("An error occurred")
    assert result.endswith("sunny")
    assert failed == [1]


class Plan(BaseModel):
    city: str
    price: int


async def test_the_output_has_the_type_of_the_agent() -> None:
    def script(answers: int, results: Sequence[Result]) -> Says:
        return Says('{"city": "Rome", "price": 7}') if answers else Says(uses=(ASK,))

    root = agent_of(Journey(script), output_type=Plan)
    async with TestMesh(built := wrap(root)) as mesh:
        stubs(mesh)
        mesh.crash(after="record")
        assert await mesh.call(built, "Rome?") == Plan(city="Rome", price=7)


async def test_an_output_that_does_not_fit_fails_the_task() -> None:
    def script(answers: int, results: Sequence[Result]) -> Says:
        return Says('{"city": "Rome"}') if answers else Says(uses=(ASK,))

    async with TestMesh(wrap(agent_of(Journey(script), output_type=Plan))) as mesh:
        stubs(mesh)
        outcome = await (await mesh.send(travel, "Rome?")).outcome()
    assert isinstance(outcome, Failed)
    assert "parsing model output" in outcome.message


async def test_a_lifespan_and_a_context_of_each_segment() -> None:
    entered, contexts = list[str](), list[Any]()

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[str]:
        entered.append("in")
        yield "client"
        entered.append("out")

    @function_tool
    def client(ctx: RunContextWrapper[Any]) -> str:
        """Names the client."""
        contexts.append(ctx.context)
        return str(ctx.context["client"])

    use = [Use("client", {}, "1")]
    built = wrap(
        agent_of(Journey(calls(use, [ASK], [Use("client", {}, "2")])), client),
        lifespan=lifespan,
        context=lambda ctx: {"client": ctx.resources, "task": ctx.task_id},
    )
    async with TestMesh(built) as mesh:
        stubs(mesh)
        assert await mesh.call(travel, "Rome?") == "client | sunny | client"
    assert entered == ["in", "out"]
    assert contexts[0] is not contexts[1]


class Booking(BaseModel):
    seats: list[str] = []
    flight: str | None = None


@dataclass
class Seats:
    seats: list[str] = field(default_factory=list)
    flight: str | None = None


def _read(context: Any, name: str) -> Any:
    return context.get(name) if isinstance(context, dict) else getattr(context, name)


@pytest.mark.parametrize("make", [Booking, Seats, lambda: {"seats": []}])
@pytest.mark.parametrize(
    "crash", [{"before": "checkpoint"}, {"before": "resume"}, {"before": "end"}]
)
async def test_a_stored_context_survives(make: Any, crash: dict[str, Any]) -> None:
    """What tools keep in it is there after a pause and after a crash."""

    @function_tool
    def choose(ctx: RunContextWrapper[Any], seat: str) -> str:
        """Chooses a seat."""
        _read(ctx.context, "seats").append(seat)
        if isinstance(ctx.context, dict):
            ctx.context["flight"] = f"with {seat}"
        else:
            ctx.context.flight = f"with {seat}"
        return " ".join(_read(ctx.context, "seats"))

    @function_tool
    def show(ctx: RunContextWrapper[Any]) -> str:
        """Shows the seats."""
        return f"{_read(ctx.context, 'seats')} {_read(ctx.context, 'flight')}"

    turns = [[Use("choose", {"seat": "1A"}, "1")], [ASK], [Use("choose", {"seat": "2B"}, "2")]]
    script = calls(*turns, [Use("show", {}, "3")])
    built = wrap(
        agent_of(Journey(script), choose, show), context=lambda ctx: make(), store_context=True
    )
    async with TestMesh(built) as mesh:
        stubs(mesh)
        mesh.crash(**crash)
        assert await mesh.call(travel, "Rome?") == ("1A | sunny | 1A 2B | ['1A', '2B'] with 2B")


async def test_changes_of_parallel_tools_to_a_stored_context_are_repeated_in_order() -> None:
    first_ended = asyncio.Event()

    @function_tool
    async def choose(ctx: RunContextWrapper[Any], seat: str) -> str:
        """Chooses a seat."""
        if seat == "1A":
            await first_ended.wait()
        ctx.context.flight = seat
        first_ended.set()
        return seat

    @function_tool
    def show(ctx: RunContextWrapper[Any]) -> str:
        """Shows the flight."""
        return str(ctx.context.flight)

    turns = [[Use("choose", {"seat": "1A"}, "1"), Use("choose", {"seat": "2B"}, "2")], [ASK]]
    script = calls(*turns, [Use("show", {}, "3")])
    built = wrap(
        agent_of(Journey(script), choose, show), context=lambda ctx: Booking(), store_context=True
    )
    async with TestMesh(built) as mesh:
        stubs(mesh)
        mesh.crash(before="checkpoint")
        assert await mesh.call(travel, "Rome?") == "1A | 2B | sunny | 1A"


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (object(), "not a object"),
        ({"at": object()}, "cannot be stored"),
        ({"pair": (1, 2)}, "JSON would change it"),
    ],
)
async def test_a_context_that_cannot_be_stored_fails_the_task(made: Any, problem: str) -> None:
    built = wrap(agent_of(Journey(calls([ASK]))), context=lambda ctx: made, store_context=True)
    async with TestMesh(built) as mesh:
        stubs(mesh)
        outcome = await (await mesh.send(travel, "Rome?")).outcome()
    assert isinstance(outcome, Failed)
    assert problem in outcome.message


async def test_a_context_is_not_stored_by_default() -> None:
    """The SDK itself stores each `dict`."""
    built = wrap(agent_of(Journey(calls([ASK]))), context=lambda ctx: {"key": object()})
    paused = await built.start(Context(TaskId("task")), "Rome?")
    assert isinstance(paused, Paused)
    secret = wrap(agent_of(Journey(calls([ASK]))), context=lambda ctx: {"key": "secret"})
    paused = await secret.start(Context(TaskId("task")), "Rome?")
    assert isinstance(paused, Paused)
    assert b"secret" not in paused.state + (paused.append or b"")


async def test_two_tasks_of_one_agent_do_not_meet() -> None:
    """They run at the same time in one replica, with the same ids of calls."""
    booked = list[int]()
    below, _, root = guided([Use("book", {"offer": 17}, "call-b")], tools=[booking(booked)])
    asked, answer = list[int](), asyncio.Event()

    async def meet() -> None:
        asked.append(1)
        if len(asked) == 2:
            answer.set()
        await answer.wait()

    below.pause = meet
    async with TestMesh(wrap(root)) as mesh:
        stubs(mesh)
        tasks = [await mesh.send(travel, "Rome?") for _ in range(2)]
        async with asyncio.TaskGroup() as group:
            deciding = [
                group.create_task(decide(task, mesh, {"book": is_first}))
                for task, is_first in zip(tasks, (True, False), strict=True)
            ]
        results = [await each.outcome() for each in tasks]
    assert [getattr(each, "value", each) for each in results] == [
        "booked 17 | sunny",
        "The call was not approved. | sunny",
    ]
    assert [each.result() for each in deciding] == [['Run book with {"offer": 17}?']] * 2
    assert booked == [17]


async def test_one_agent_may_be_wrapped_twice() -> None:
    """Each has its own peers, also while the other one runs."""
    asked, answer = asyncio.Event(), asyncio.Event()
    journey = Journey(calls([ASK]))

    async def wait() -> None:
        if not asked.is_set():
            asked.set()
            await answer.wait()

    journey.pause = wait
    root = agent_of(journey)
    others = {"first": [weather], "second": [flights, weather]}
    built = [wrap(root, name=name, peers=peers) for name, peers in others.items()]
    async with TestMesh(*built) as mesh:
        stubs(mesh)
        first = await mesh.send(Peer("first", str, str), "Rome?")
        await asked.wait()
        assert await mesh.call(Peer("second", str, str), "Oslo?") == "sunny"
        assert journey.offered.keys() == {"flights", "weather"}
        answer.set()
        assert await first.result() == "sunny"
        assert journey.offered.keys() == {"weather"}


async def test_outside_a_task_the_agent_is_as_before() -> None:
    journey = Journey(calls([Use("look", {}, "1")]))
    root = agent_of(journey, looking())
    async with TestMesh(wrap(root)) as mesh:
        assert await mesh.call(travel, "Rome?") == "rain"
    assert journey.offered.keys() == {"look", "flights", "weather"}
    assert (await Runner.run(root, "Rome?")).final_output == "rain"
    assert journey.offered.keys() == {"look"}


async def test_tools_that_depend_on_the_run() -> None:
    @function_tool(is_enabled=lambda ctx, agent: ctx.context == "rain")
    def look() -> str:
        """Looks."""
        return "rain"

    journey = Journey(calls([Use("look", {}, "1"), ASK]))
    built = wrap(agent_of(journey, look), context=lambda ctx: "rain")
    async with TestMesh(built) as mesh:
        stubs(mesh)
        assert await mesh.call(travel, "Rome?") == "rain | sunny"


async def test_an_approved_tool_that_is_gone_does_not_run() -> None:
    booked = list[int]()
    journey = Journey(calls([Use("book", {"offer": 17}, "1")]))
    task = Context(TaskId("task"))
    paused = await wrap(agent_of(journey, booking(booked))).start(task, "Rome?")
    assert isinstance(paused, Paused)
    (call,) = paused.calls
    outcomes = Outcomes({call.id: Ok({"approved": True})})
    with pytest.raises(ModelBehaviorError, match="Tool book not found"):
        await wrap(agent_of(journey)).resume(task, paused.state, outcomes)
    assert booked == []


async def test_an_agent_of_a_handoff_that_is_gone_parks_the_task() -> None:
    _, _, root = handed([ASK])
    task = Context(TaskId("task"))
    paused = await wrap(root, output=str).start(task, "Rome?")
    assert isinstance(paused, Paused)
    root.handoffs.clear()
    outcomes = Outcomes({each.id: Ok("sunny") for each in paused.calls})
    with pytest.raises(IncompatibleState):
        await wrap(root, output=str).resume_with_log(
            task, paused.state, [paused.append or b""], outcomes
        )


async def test_another_version_of_the_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshpoint.frameworks.openai_agents import agent as module

    built = wrap(agent_of(Journey(calls([ASK], [ASK]))))
    task = Context(TaskId("task"))
    paused = await built.start(task, "Rome?")
    assert isinstance(paused, Paused)
    outcomes = Outcomes({each.id: Ok("sunny") for each in paused.calls})
    log = [] if paused.append is None else [paused.append]
    monkeypatch.setattr(module, "_VERSION", "99.0.0")
    again = await built.resume_with_log(task, paused.state, log, outcomes)
    assert isinstance(again, Paused)
    later = paused.state.replace(b'"$schemaVersion":"', b'"$schemaVersion":"9')
    assert later != paused.state
    with pytest.raises(IncompatibleState, match="cannot read it"):
        await built.resume_with_log(task, later, log, outcomes)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"max_turns": 0}, "max_turns is 0"),
        ({"max_turns": "3"}, "max_turns is '3'"),
        ({"run_config": {"model": "x"}}, "run_config is"),
        ({"hooks": 3}, "hooks is 3"),
        ({"context": {"a": 1}}, "context is"),
        ({"store_context": True}, "without context="),
    ],
)
def test_wrong_options_are_named(options: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        wrap(agent_of(Journey(calls())), **options)


@pytest.mark.parametrize("wrong", [3, Agent, None])
def test_what_is_no_agent_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="not an agent of the OpenAI Agents SDK"):
        durable(wrong)


async def test_the_budget_of_an_agent_in_a_tool() -> None:
    """The tool fails, and the next request of the outer agent asks the person."""
    below, above, root = guided([Use("look", {}, "call-l")], tools=[looking()])
    above.script, asked = calls([GO]), list[str]()
    built = wrap(root, budget=Budget(requests=2, when_exceeded="ask"))
    async with TestMesh(built) as mesh:
        task = await mesh.send(travel, "Rome?")
        async for update in task.updates():
            if isinstance(update, QuestionUpdate):
                asked.append(update.name)
                await task.complete(BUDGET, Approval(approved=True))
        outcome = await task.outcome()
    assert isinstance(outcome, Ok), outcome
    assert outcome.value.startswith("An error occurred")
    assert asked == [BUDGET.name]
    assert (above.model_calls, below.model_calls) == ([1, 2], [1])
