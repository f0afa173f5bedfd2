"""What only the adapter for Strands must do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

pytest.importorskip("strands")

from pydantic import BaseModel
from scenario import TOOLS, Journey, Quote, Result, Says, Script, Use, flights, weather
from strands import Agent, ModelRetryStrategy, ToolContext, tool
from strands.agent.conversation_manager import SlidingWindowConversationManager
from strands.hooks import BeforeToolCallEvent
from strands.multiagent import GraphBuilder
from strands.tools.executors import SequentialToolExecutor
from strands.types.exceptions import ContextWindowOverflowException, ModelThrottledException
from strands.vended_interventions.hitl import HumanInTheLoop
from with_strands import FRAMEWORK, ScriptedModel

from meshpoint import (
    ConfigurationError,
    Failed,
    Ok,
    Outcomes,
    Paused,
    Peer,
    QuestionUpdate,
    agent,
)
from meshpoint import TaskExecutionContext as Context
from meshpoint.frameworks import APPROVAL, Approval
from meshpoint.frameworks.steps import record_step
from meshpoint.frameworks.strands import durable, recording
from meshpoint.local import local_mesh
from meshpoint.model.ids import TaskId, new_id
from meshpoint.operations import Operations
from meshpoint.testing import TestMesh

ASK = Use("weather", {"request": "Rome"}, "call-w")
travel = Peer("travel", str, str)


def call_then_tell(*uses: Use) -> Script:
    """A script that calls tools once, then repeats their results."""

    def script(answers: int, results: Sequence[Result]) -> Says:
        return Says(" | ".join(each.text for each in results)) if answers else Says(uses=uses)

    return script


def wrap(journey: Journey, *tools: Any, name: str = "travel", **options: Any) -> Any:
    """An agent with `tools`; `options` are passed to Strands."""
    return durable(
        lambda: Agent(ScriptedModel(journey), tools=[*tools], **options),
        name=name,
        peers=[flights, weather],
        stream=False,
    )


async def answer_questions(mesh: TestMesh, task: Any, answers: dict[str, Any]) -> list[str | None]:
    """Answer each question by its name, and return the prompts."""
    prompts = list[str | None]()
    async for update in task.updates():
        if isinstance(update, QuestionUpdate):
            prompts.append(update.prompt)
            await mesh.complete(update.question_id, answers[update.name])
    return prompts


async def test_the_window_of_a_conversation_moves_and_the_history_is_appended() -> None:
    pauses = 8

    def script(answers: int, results: Sequence[Result]) -> Says:
        return Says("x" * 2000, uses=(Use("weather", {"request": "Rome"}, f"call-{len(seen)}"),))

    seen, journey = list[int](), Journey(script)
    journey.pause = lambda: asyncio.sleep(0, seen.append(1))  # type: ignore[func-returns-value]
    built = wrap(journey, conversation_manager=SlidingWindowConversationManager(window_size=4))
    task = Context(TaskId("task"))
    paused, state, log, written = await built.start(task, "Rome"), b"", list[bytes](), 0
    for _ in range(pauses):
        assert isinstance(paused, Paused)
        written += len(paused.append or b"") + (0 if paused.state == state else len(paused.state))
        log = [] if paused.append is None else [*log, paused.append]
        state = paused.state
        outcomes = Outcomes({call.id: Ok("sunny") for call in paused.calls})
        paused = await built.resume_with_log(task, state, log, outcomes)
    assert written < pauses * 2 * 2000
    assert len(journey.seen) < pauses  # the model sees the window only


@pytest.mark.parametrize("crash", [{"before": "checkpoint"}, {"after": "record"}, {}])
async def test_an_interrupt_of_a_tool_is_a_question(crash: dict[str, Any]) -> None:
    runs = list[str]()

    @tool(context=True)
    def seat(flight: str, tool_context: ToolContext) -> str:
        """Chooses a seat."""
        runs.append(flight)
        return f"seat {tool_context.interrupt('seat', reason={'flight': flight})}"

    journey = Journey(call_then_tell(Use("seat", {"flight": "LH1"}, "call-s"), ASK))
    async with TestMesh(wrap(journey, seat)) as mesh:
        mesh.stub(weather).returns("sunny")
        if crash:
            mesh.crash(**crash)
        task = await mesh.send(travel, "Rome")
        prompts = await answer_questions(mesh, task, {"seat": "12A"})
        assert (await task.result()).strip() == "seat 12A | sunny"
    assert set(prompts) == {'{"flight":"LH1"}'}
    assert journey.model_calls == [1, 2]
    assert len(runs) <= 3


async def test_an_interrupt_of_a_hook_is_a_question() -> None:
    def confirm(event: BeforeToolCallEvent) -> None:
        if (
            event.tool_use["name"] == "clock"
            and event.interrupt("may-look", reason="Look?") != "yes"
        ):
            event.cancel_tool = "it may not look"

    @tool
    def clock() -> str:
        """Returns the time."""
        return "noon"

    journey = Journey(call_then_tell(Use("clock", {}, "call-c")))
    async with TestMesh(wrap(journey, clock, hooks=[confirm])) as mesh:
        task = await mesh.send(travel, "Rome")
        assert await answer_questions(mesh, task, {"may-look": "no"}) == ["Look?"]
        assert (await task.result()).strip() == "it may not look"


async def test_a_peer_may_need_approval() -> None:
    journey = Journey(call_then_tell(ASK))
    async with TestMesh(wrap(journey, interventions=[HumanInTheLoop()])) as mesh:
        mesh.stub(weather).returns("sunny")
        task = await mesh.send(travel, "Rome")
        answers = {APPROVAL.name: {"approved": True}}
        prompts = await answer_questions(mesh, task, answers)
        assert (await task.result()).strip() == "sunny"
    assert prompts == ['Run weather with {"request": "Rome"}?']


@pytest.mark.parametrize("crash", [{"after": "record", "times": 3}, {"before": "resume"}, {}])
async def test_an_agent_as_a_tool_is_recorded_and_asks(crash: dict[str, Any]) -> None:
    inner = Journey(call_then_tell(Use("book", {"offer": 17}, "call-b")), TOOLS)

    @tool
    def book(offer: int) -> str:
        """Books an offer."""
        return inner.use("book", offer)

    def build() -> Agent:
        scout = Agent(
            ScriptedModel(inner),
            name="scout",
            tools=[book],
            interventions=[HumanInTheLoop()],
            callback_handler=None,
        )
        return Agent(ScriptedModel(journey), tools=[scout])

    journey = Journey(call_then_tell(Use("scout", {"input": "go"}, "call-s"), ASK))
    built = durable(build, name="travel", peers=[weather], stream=False)
    async with TestMesh(built) as mesh:
        mesh.stub(weather).returns("sunny")
        if crash:
            mesh.crash(**crash)
        task = await mesh.send(travel, "Rome")
        async for update in task.updates():
            if isinstance(update, QuestionUpdate):
                assert "book" in (update.prompt or "")
                await task.complete(APPROVAL, Approval(approved=True))
        outcome = await task.outcome()
    assert isinstance(outcome, Ok), outcome
    assert " | ".join(map(str.strip, outcome.value.split("|"))) == "booked 17 | sunny"
    assert journey.model_calls == inner.model_calls == [1, 2]
    assert inner.tool_calls == {"book": 1}
    assert {"agent", "scout"} == outcome.usage.by_source.keys()


@pytest.mark.parametrize("point", ["record", "checkpoint", "resume"])
async def test_the_state_of_an_agent_survives(point: Any) -> None:
    @tool(context=True)
    def remember(word: str, tool_context: ToolContext) -> str:
        """Remembers a word."""
        tool_context.agent.state.set("word", word)
        return "done"

    @tool(context=True)
    def recall(tool_context: ToolContext) -> str:
        """Recalls the word."""
        return str(tool_context.agent.state.get("word"))

    def script(answers: int, results: Sequence[Result]) -> Says:
        turns = [(Use("remember", {"word": "Rome"}, "1"), ASK), (Use("recall", {}, "2"),)]
        return Says(uses=turns[answers]) if answers < 2 else Says(results[-1].text)

    async with TestMesh(wrap(Journey(script), remember, recall)) as mesh:
        mesh.stub(weather).returns("sunny")
        mesh.crash(after=point, times=3 if point == "record" else 1)
        assert (await mesh.call(travel, "Rome")).strip() == "Rome"


async def test_parallel_tools_change_the_state_in_the_order_of_their_ends() -> None:
    """Also when their records are repeated, which is in the order of the calls."""
    is_changed = asyncio.Event()

    @tool(context=True)
    async def slow(tool_context: ToolContext) -> str:
        """Changes the state last."""
        await is_changed.wait()
        tool_context.agent.state.set("last", "slow")
        return "done"

    @tool(context=True)
    async def quick(tool_context: ToolContext) -> str:
        """Changes the state first."""
        tool_context.agent.state.set("last", "quick")
        asyncio.get_running_loop().call_soon(is_changed.set)
        return "done"

    @tool(context=True)
    async def recall(tool_context: ToolContext) -> str:
        """Recalls the last change."""
        return str(tool_context.agent.state.get("last"))

    def script(answers: int, results: Sequence[Result]) -> Says:
        turns = [(Use("slow", {}, "1"), Use("quick", {}, "2")), (Use("recall", {}, "3"),)]
        return Says(uses=turns[answers]) if answers < 2 else Says(results[-1].text)

    async with TestMesh(wrap(Journey(script), slow, quick, recall)) as mesh:
        mesh.crash(after="record", times=3)
        assert (await mesh.call(travel, "Rome")).strip() == "slow"


async def test_an_agent_itself_runs_one_task_at_a_time() -> None:
    """It keeps the conversation that it had by itself."""
    journey = Journey(call_then_tell(ASK))
    agent = Agent(ScriptedModel(journey), name="travel", callback_handler=None)
    agent.messages.append({"role": "user", "content": [{"text": "hello"}]})
    built = durable(agent, peers=[weather])
    agent.messages.append({"role": "assistant", "content": [{"text": "hi"}]})
    async with TestMesh(built) as mesh:
        mesh.stub(weather).returns("sunny")
        results = [await mesh.send(travel, "Rome") for _ in range(5)]
        assert {(await each.result()).strip() for each in results} == {"sunny"}
    assert [each["content"] for each in agent.messages] == [[{"text": "hello"}], [{"text": "hi"}]]


async def test_one_agent_may_be_wrapped_twice() -> None:
    asked, answer = asyncio.Event(), asyncio.Event()
    journey = Journey(call_then_tell(ASK))

    async def wait() -> None:
        asked.set()
        await answer.wait()

    journey.pause = wait
    agent = Agent(ScriptedModel(journey), callback_handler=None)
    names = ("first", "second")
    async with TestMesh(*(durable(agent, name=each, peers=[weather]) for each in names)) as mesh:
        mesh.stub(weather).returns("sunny")
        first = await mesh.send(Peer("first", str, str), "Rome")
        await asked.wait()
        second = await mesh.send(Peer("second", str, str), "Oslo")
        answer.set()
        assert [(await each.result()).strip() for each in (first, second)] == ["sunny", "sunny"]
    assert agent.messages == []


@pytest.mark.parametrize("is_nested", [True, False])
async def test_a_function_must_build_each_agent(is_nested: bool) -> None:
    """Else a task would see the conversation of another one."""
    journey = Journey(lambda answers, results: Says(f"{answers} answers before"))
    shared = Agent(ScriptedModel(journey), name="shared", callback_handler=None)

    def build() -> Agent:
        return Agent(ScriptedModel(journey), tools=[shared]) if is_nested else shared

    async with TestMesh(durable(build, name="travel")) as mesh:
        assert (await mesh.call(travel, "Rome")).strip() == "0 answers before"
        outcome = await (await mesh.send(travel, "Oslo")).outcome()
    assert isinstance(outcome, Failed)
    assert "'shared' has the conversation of another run" in outcome.message


class Plan(BaseModel):
    city: str
    price: int


async def test_structured_output_is_the_result() -> None:
    def script(answers: int, results: Sequence[Result]) -> Says:
        if not answers:
            return Says(uses=(ASK,))
        return Says(uses=(Use("Plan", {"city": "Rome", "price": 7}, "call-p"),))

    built = durable(
        lambda: Agent(ScriptedModel(Journey(script))),
        name="travel",
        output=Plan,
        peers=[weather],
    )
    async with TestMesh(built) as mesh:
        mesh.stub(weather).returns("sunny")
        mesh.crash(after="record")
        assert await mesh.call(built, "Rome") == Plan(city="Rome", price=7)


async def test_an_overflow_shortens_the_conversation() -> None:
    overflows = iter([True])

    def script(answers: int, results: Sequence[Result]) -> Says:
        if answers == 1 and next(overflows, False):
            raise ContextWindowOverflowException("too long")
        return call_then_tell(ASK)(answers, results)

    journey = Journey(script)
    async with TestMesh(wrap(journey)) as mesh:
        mesh.stub(weather).returns("s" * 5000)
        mesh.crash(after="record", times=3)
        result = await mesh.call(travel, "Rome")
    assert "truncated" in result
    assert journey.model_calls == [1, 2, 2]


async def test_a_sequential_executor_waits_for_each_peer() -> None:
    uses = (ASK, Use("flights", {"city": "Rome"}, "call-f"))
    journey = Journey(call_then_tell(*uses))
    built = wrap(journey, tool_executor=SequentialToolExecutor())
    async with TestMesh(built) as mesh:
        mesh.stub(weather).returns("sunny")
        mesh.stub(flights).returns(Quote(price=120))
        assert (await mesh.call(travel, "Rome")).strip() == 'sunny | {"price":120}'
    assert journey.model_calls == [1, 2]


def test_what_is_not_supported_is_refused() -> None:
    journey = Journey(call_then_tell(ASK))
    for options, problem in (
        ({"checkpointing": True}, "checkpointing"),
        ({"background_tasks": True}, "background tasks"),
        ({"structured_output_model": Plan}, "write output="),
    ):
        agent = Agent(ScriptedModel(journey), name="travel", **options)
        with pytest.raises(ConfigurationError, match=problem):
            durable(agent)
    for wrong, problem in ((Agent(ScriptedModel(journey)), "no name"), (3, "not an agent")):
        with pytest.raises(ConfigurationError, match=problem):
            durable(wrong)  # type: ignore[arg-type]
    limits: Any
    for limits, problem in (
        ({"requests": 3}, "no limit is called 'requests'"),
        ({"turns": "3"}, "the limit of turns is '3'"),
        ({"turns": 0}, "the limit of turns is 0"),
        (3, "limits is 3"),
    ):
        with pytest.raises(ConfigurationError, match=problem):
            durable(FRAMEWORK.raw(journey), limits=limits)


def test_what_is_no_single_agent_is_refused() -> None:
    scout = Agent(ScriptedModel(Journey(call_then_tell(ASK))), name="scout")
    graph = GraphBuilder()
    graph.add_node(scout, "scout")
    graph.set_max_node_executions(3)
    with pytest.raises(ConfigurationError, match="a Graph is not an agent of Strands"):
        durable(graph.build(), name="graph")  # type: ignore[arg-type]
    tools: list[Any] = [scout.as_tool(preserve_context=True)]
    planner = Agent(ScriptedModel(Journey(call_then_tell(ASK))), name="travel", tools=tools)
    with pytest.raises(ConfigurationError, match="'scout' in tools= has preserve_context=True"):
        durable(planner)


async def test_a_tool_and_a_peer_of_one_name_are_refused() -> None:
    @tool(name="weather")
    def look(request: str) -> str:
        """Looks out of the window."""
        return "rain"

    async with TestMesh(wrap(Journey(call_then_tell(ASK)), look)) as mesh:
        outcome = await (await mesh.send(travel, "Rome")).outcome()
    assert isinstance(outcome, Failed)
    assert "a tool and a peer called 'weather'" in outcome.message


async def test_a_busy_model_is_asked_again_when_the_task_resumes(database_url: str) -> None:
    is_busy = True

    def script(answers: int, results: Sequence[Result]) -> Says:
        if answers and is_busy:
            raise ModelThrottledException("slow down")
        return call_then_tell(ASK)(answers, results)

    @agent("weather")
    async def serve(ctx: Context, city: str) -> str:
        return "sunny"

    journey, task_id = Journey(script), TaskId(new_id())
    built = wrap(journey, retry_strategy=ModelRetryStrategy(max_attempts=2, initial_delay=0))
    async with (
        local_mesh(built, serve, db_url=database_url, namespace="strands") as mesh,
        Operations(database_url, namespace="strands") as operations,
    ):
        failed = await (await mesh.send(travel, "Rome", task_id=task_id)).outcome()
        assert isinstance(failed, Failed)
        assert "slow down" in failed.message
        is_busy = False
        await operations.resume(task_id)
        resumed = await operations.wait(task_id)
    assert isinstance(resumed, Ok)
    assert str(resumed.value).strip() == "sunny"
    assert journey.model_calls == [1, 2, 2, 2]


async def test_a_crash_repeats_no_request_to_a_busy_model() -> None:
    busy = iter([True, True])

    def script(answers: int, results: Sequence[Result]) -> Says:
        if next(busy, False):
            raise ModelThrottledException("slow down")
        return call_then_tell(ASK)(answers, results)

    journey = Journey(script)
    built = wrap(journey, retry_strategy=ModelRetryStrategy(initial_delay=0))
    async with TestMesh(built) as mesh:
        mesh.stub(weather).returns("sunny")
        mesh.crash(after="record", times=4)
        assert (await mesh.call(travel, "Rome")).strip() == "sunny"
    assert journey.model_calls == [1, 1, 1, 2]


class Odd(BaseException):
    """No `Exception`."""


async def test_no_error_of_a_tool_loses_its_result() -> None:
    @tool
    async def fail() -> str:
        """Fails."""
        raise Odd("too odd")

    async with TestMesh(wrap(Journey(call_then_tell(Use("fail", {}, "1"), ASK)), fail)) as mesh:
        mesh.stub(weather).returns("sunny")
        result = await mesh.call(travel, "Rome")
    assert "Odd: too odd | sunny" in result


@pytest.mark.parametrize("arguments", [[17], 17, list(range(5000))])
async def test_an_approval_of_arguments_that_are_no_object(arguments: Any) -> None:
    journey = Journey(call_then_tell(Use("book", arguments, "1")), TOOLS)
    async with TestMesh(durable(FRAMEWORK.raw(journey))) as mesh:
        task = await mesh.send(travel, "Rome")
        prompts = await answer_questions(mesh, task, {APPROVAL.name: {"approved": True}})
        assert "Validation failed" in await task.result()
    assert str(arguments)[:20] in (prompts[0] or "")
    assert journey.tool_calls == {}


async def test_any_reason_of_an_interrupt_is_shown() -> None:
    @tool(context=True)
    def seat(tool_context: ToolContext) -> str:
        """Chooses a seat."""
        return str(tool_context.interrupt("seat", reason={"plane": ...}))

    async with TestMesh(wrap(Journey(call_then_tell(Use("seat", {}, "1"))), seat)) as mesh:
        task = await mesh.send(travel, "Rome")
        assert await answer_questions(mesh, task, {"seat": 0}) == ['{"plane":"Ellipsis"}']
        assert (await task.result()).strip() == "0"


async def test_an_approved_tool_that_waits_runs_again_with_the_approved_arguments() -> None:
    inputs = list[Any]()

    @tool(context=True)
    def pay(amount: int, tool_context: ToolContext) -> str:
        """Pays."""
        inputs.append(tool_context.tool_use["input"])
        return f"paid {amount} from {tool_context.interrupt('account')}"

    journey = Journey(call_then_tell(Use("pay", {"amount": "17"}, "1"), ASK))
    built = wrap(journey, pay, interventions=[HumanInTheLoop(allowed_tools=["weather"])])
    async with TestMesh(built) as mesh:
        mesh.stub(weather).returns("sunny")
        task = await mesh.send(travel, "Rome")
        answers = {APPROVAL.name: {"approved": True}, "account": "savings"}
        await answer_questions(mesh, task, answers)
        assert (await task.result()).strip() == "paid 17 from savings | sunny"
    assert len(inputs) > 1
    assert all(each == {"amount": 17} for each in inputs)


async def test_the_events_of_a_cancelled_tool_are_closed() -> None:
    """Strands leaves them open if it cancels the tool between two events."""
    waits, closed = asyncio.Event(), asyncio.Event()

    async def stream() -> AsyncGenerator[Any, None]:
        try:
            yield {}
        finally:
            await asyncio.sleep(0)
            closed.set()

    async def run_tool() -> None:
        recording._close_after(asyncio.current_task(), events)
        async for _ in events:
            waits.set()
            await asyncio.Event().wait()

    events = stream()
    tool_task = asyncio.create_task(run_tool())
    await waits.wait()
    tool_task.cancel()
    await closed.wait()
    assert tool_task.cancelled()


async def test_the_model_is_not_asked_again_after_a_step_has_lost_its_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Strands takes the cancelled tool for one without a result."""

    async def lose_tools(ctx: Context, name: str, function: Any) -> Any:
        if name.startswith("tool "):
            raise asyncio.CancelledError
        return await record_step(ctx, name, function)

    monkeypatch.setattr(recording, "record_step", lose_tools)
    journey = Journey(call_then_tell(Use("clock", {}, "call-c")), TOOLS)

    @tool
    def clock() -> str:
        """The time of day."""
        return journey.use("clock")

    async with TestMesh(wrap(journey, clock)) as mesh:
        outcome = await (await mesh.send(travel, "Rome")).outcome()
    assert isinstance(outcome, Failed), outcome
    assert journey.model_calls == [1]
