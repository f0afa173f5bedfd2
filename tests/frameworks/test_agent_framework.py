"""What only Agent Framework has: agents as tools, sessions, middleware, and its own limits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest
from pydantic import BaseModel, SecretStr
from scenario import TOKENS, Journey, Quote, Result, Says, Script, Use, hotels, weather

pytest.importorskip("agent_framework")

from agent_framework import (
    Agent,
    AgentSession,
    BaseChatClient,
    ChatContext,
    ChatMiddleware,
    ChatResponse,
    ContextProvider,
    FunctionInvocationContext,
    FunctionMiddleware,
    FunctionTool,
    Message,
    MiddlewareFailure,
    MiddlewareTermination,
    SessionContext,
    tool,
)
from with_agent_framework import ScriptedModel

from meshpoint import (
    ConfigurationError,
    Done,
    Failed,
    MeshpointError,
    Ok,
    Outcomes,
    Paused,
    Peer,
    QuestionUpdate,
    TaskExecutionContext,
    TextDelta,
)
from meshpoint.frameworks import APPROVAL, BUDGET, Approval, Budget
from meshpoint.frameworks.agent_framework import durable
from meshpoint.model.ids import TaskId
from meshpoint.testing import TestMesh

travel = Peer("travel", str, str)


def stubs(mesh: TestMesh) -> None:
    mesh.stub(weather).returns("sunny")
    mesh.stub(hotels).returns(Quote(price=80))


def report(results: Sequence[Result]) -> Says:
    return Says(" | ".join(f"{each.tool}={each.text}" for each in results))


def uses(*calls: Use) -> Script:
    """A script that makes the calls in one turn, then answers with their results."""
    return lambda answers, results: report(results) if answers else Says(uses=calls)


def in_turn(*calls: Use) -> Script:
    """A script that makes one call in each turn, then answers with the results."""

    def script(answers: int, results: Sequence[Result]) -> Says:
        return Says(uses=(calls[answers],)) if answers < len(calls) else report(results)

    return script


def agent_of(journey: Journey, name: str = "travel", **options: Any) -> Agent[Any]:
    return Agent(ScriptedModel(journey), name=name, **options)


WEATHER = Use("weather", {"request": "Rome"}, "call-w")


@tool
def visas(country: str) -> str:
    return f"none for {country}"


def guided(*calls: Use) -> tuple[Journey, Journey, Agent[Any]]:
    """The journeys of an agent and of the agent behind its tool, and the first agent."""
    below, above = Journey(in_turn(Use("visas", {"country": "Italy"}, "v"))), Journey(uses(*calls))
    guide = agent_of(below, "guide", description="Knows rules.", tools=[visas])
    return above, below, agent_of(above, tools=[guide.as_tool()])


ASK_GUIDE = Use("guide", {"task": "rules"}, "call-g")


@pytest.mark.parametrize("record", range(1, 7))
async def test_agents_as_tools_pay_no_model_twice(record: int) -> None:
    """Five steps are recorded, and the replica dies after some of them, or before the pause."""
    above, below, root = guided(ASK_GUIDE, WEATHER)
    async with TestMesh(durable(root, peers=[weather], stream=False)) as mesh:
        stubs(mesh)
        if record < 6:
            mesh.crash(after="record", times=record)
        else:
            mesh.crash(before="checkpoint")
        outcome = await (await mesh.send(travel, "Rome?")).outcome()
    assert isinstance(outcome, Ok)
    assert outcome.value == "guide=visas=none for Italy | weather=sunny"
    assert (above.model_calls, below.model_calls) == ([1, 2], [1, 2])
    assert below.offered.keys() == {"visas"}  # it could not wait
    assert outcome.usage.total.output == 4 * TOKENS


async def test_agents_as_tools_run_in_parallel() -> None:
    both = asyncio.Barrier(2)
    calls = [Use("guide", {"task": each}, f"call-{each}") for each in "ab"]
    _, below, root = guided(*calls)
    met = list[int]()

    async def meet() -> None:
        if len(met) < 2:
            met.append(1)
            await both.wait()

    below.pause = meet
    async with TestMesh(durable(root, stream=False)) as mesh:
        assert await mesh.call(travel, "Rome?") == " | ".join(["guide=visas=none for Italy"] * 2)


async def test_the_text_of_agents_as_tools_is_not_shown() -> None:
    _, _, root = guided(ASK_GUIDE)
    async with TestMesh(durable(root)) as mesh:
        task = await mesh.send(travel, "Rome?")
        texts = [each.text async for each in task.updates() if isinstance(each, TextDelta)]
    assert "".join(texts).strip() == "guide=visas=none for Italy"


async def test_agents_in_agents_in_tools() -> None:
    above, below, middle = guided(ASK_GUIDE)
    top = Journey(uses(Use("planner", {"task": "plan"}, "call-p")))
    planner = middle.as_tool(name="planner")
    async with TestMesh(durable(agent_of(top, tools=[planner]), stream=False)) as mesh:
        mesh.crash(after="record", times=4)
        assert await mesh.call(travel, "Rome?") == "planner=guide=visas=none for Italy"
    assert [each.model_calls for each in (top, above, below)] == [[1, 2]] * 3


async def test_an_agent_in_a_tool_stops_at_the_budget() -> None:
    _, below, root = guided(ASK_GUIDE)
    budget = Budget(requests=2)
    async with TestMesh(durable(root, stream=False, budget=budget)) as mesh:
        outcome = await (await mesh.send(travel, "Rome?")).outcome()
    assert isinstance(outcome, Failed)
    assert outcome.message == "budget exceeded: requests 2 of 2"
    assert below.model_calls == [1]


async def test_a_person_allows_more_for_an_agent_in_a_tool() -> None:
    """It starts again after the pause. Peers of the same turn are asked once."""
    above, _, root = guided(ASK_GUIDE, WEATHER, Use("visas", {"country": "Peru"}, "call-v"))
    asked = list[str]()

    @tool(name="visas")
    def own_visas(country: str) -> str:
        asked.append(country)
        return "needed"

    root = agent_of(above, tools=[*root.default_options["tools"], own_visas])
    budget = Budget(requests=2, when_exceeded="ask")
    wrapped = durable(root, peers=[weather], stream=False, budget=budget)
    async with TestMesh(wrapped) as mesh:
        stubs(mesh)
        task = await mesh.send(travel, "Rome?")
        async for update in task.updates():
            if isinstance(update, QuestionUpdate):
                await task.complete(BUDGET, Approval(approved=True))
        assert await task.result() == ("guide=visas=none for Italy | weather=sunny | visas=needed")
        assert mesh.stub(weather).requests == ["Rome"]
    assert above.model_calls == [1, 2]
    assert asked == ["Peru"]


class Later(MeshpointError):
    """The task cannot continue here."""


@pytest.mark.parametrize("is_nested", [False, True])
async def test_an_error_of_ours_settles_the_task(
    monkeypatch: pytest.MonkeyPatch, is_nested: bool
) -> None:
    """The framework makes errors of tools results for the model."""
    above, _, root = guided(ASK_GUIDE)
    if not is_nested:
        above = Journey(uses(Use("visas", {"country": "Italy"}, "call-v")))
        root = agent_of(above, tools=[visas])
    task = TaskExecutionContext(TaskId("task"))
    step = task.step

    async def fail(name: str, *arguments: Any) -> Any:
        if name.startswith("tool"):
            raise Later("later")
        return await step(name, *arguments)

    monkeypatch.setattr(TaskExecutionContext, "step", lambda _, *arguments: fail(*arguments))
    with pytest.raises(Later, match="later"):
        await durable(root, stream=False).start(task, "Rome?")
    assert above.model_calls == [1]


@pytest.mark.parametrize("at", ["record", "checkpoint", "resume"])
async def test_the_session_of_a_task_keeps_its_state(at: Any) -> None:
    remembered = list[str]()

    @tool
    def remember(city: str, ctx: FunctionInvocationContext) -> str:
        assert ctx.session is not None
        remembered.append(city)
        ctx.session.state["city"] = city
        return "done"

    @tool
    def recall(ctx: FunctionInvocationContext) -> str:
        assert ctx.session is not None
        return f"{ctx.session.state['user']} in {ctx.session.state['city']}"

    journey = Journey(
        in_turn(Use("remember", {"city": "Rome"}, "1"), WEATHER, Use("recall", {}, "2"))
    )
    root = agent_of(journey, tools=[remember, recall])
    wrapped = durable(root, peers=[weather], stream=False, state=lambda ctx: {"user": "Ada"})
    async with TestMesh(wrapped) as mesh:
        stubs(mesh)
        mesh.crash(after=at, times=2 if at == "record" else 1)
        result = await mesh.call(travel, "Rome?")
    assert result == "remember=done | weather=sunny | recall=Ada in Rome"
    assert remembered == ["Rome"]


async def test_parallel_tools_change_the_state_in_the_order_of_their_ends() -> None:
    """Also when their records are repeated, which is in the order of the calls."""
    is_changed = asyncio.Event()

    @tool
    async def slow(ctx: FunctionInvocationContext) -> None:
        await is_changed.wait()
        assert ctx.session is not None
        ctx.session.state["last"] = "slow"

    @tool
    async def quick(ctx: FunctionInvocationContext) -> None:
        assert ctx.session is not None
        ctx.session.state["last"] = "quick"
        asyncio.get_running_loop().call_soon(is_changed.set)

    @tool
    def recall(ctx: FunctionInvocationContext) -> str:
        assert ctx.session is not None
        return str(ctx.session.state["last"])

    def script(answers: int, results: Sequence[Result]) -> Says:
        turns = [(Use("slow", {}, "1"), Use("quick", {}, "2")), (Use("recall", {}, "3"),)]
        return Says(uses=turns[answers]) if answers < 2 else Says(results[-1].text)

    root = agent_of(Journey(script), tools=[slow, quick, recall])
    async with TestMesh(durable(root, stream=False)) as mesh:
        mesh.crash(after="record", times=3)
        assert await mesh.call(travel, "Rome?") == "slow"


async def test_tasks_do_not_share_the_state_that_they_begin_with() -> None:
    @tool
    def note(ctx: FunctionInvocationContext) -> str:
        assert ctx.session is not None
        noted = ctx.session.state["noted"]
        noted.append(1)
        return str(len(noted))

    start: dict[str, Any] = {"noted": []}
    root = agent_of(Journey(uses(Use("note", {}, "1"))), tools=[note])
    async with TestMesh(durable(root, stream=False, state=lambda ctx: start)) as mesh:
        assert [await mesh.call(travel, each) for each in "ab"] == ["note=1", "note=1"]


@pytest.mark.filterwarnings("ignore:AgentSession state value:RuntimeWarning")
async def test_a_state_that_cannot_be_stored_fails_the_task() -> None:
    @tool
    def remember(ctx: FunctionInvocationContext) -> str:
        assert ctx.session is not None
        ctx.session.state["lock"] = asyncio.Lock()
        return "done"

    journey = Journey(uses(Use("remember", {}, "1")))
    async with TestMesh(durable(agent_of(journey, tools=[remember]), stream=False)) as mesh:
        outcome = await (await mesh.send(travel, "Rome?")).outcome()
    assert isinstance(outcome, Failed)
    assert "the state of the session cannot be stored" in outcome.message
    assert journey.model_calls == [1]


async def test_context_providers_keep_their_state_and_leave_no_message() -> None:
    runs = list[int]()

    class Counts(ContextProvider):
        async def before_run(
            self,
            *,
            agent: Any,
            session: AgentSession,
            context: SessionContext,
            state: dict[str, Any],
        ) -> None:
            state["runs"] = state.get("runs", 0) + 1
            context.extend_messages(self.source_id, [Message("user", ["remember this"])])

        async def after_run(
            self,
            *,
            agent: Any,
            session: AgentSession,
            context: SessionContext,
            state: dict[str, Any],
        ) -> None:
            runs.append(state["runs"])

    journey = Journey(in_turn(WEATHER))
    root = agent_of(journey, context_providers=[Counts("counts")])
    wrapped = durable(root, peers=[weather], stream=False)
    task = TaskExecutionContext(TaskId("task"))
    paused = await wrapped.start(task, "Rome?")
    assert isinstance(paused, Paused)
    assert b"remember this" not in paused.state
    async with TestMesh(wrapped) as mesh:
        stubs(mesh)
        assert await mesh.call(travel, "Rome?") == "weather=sunny"
    assert runs == [2]
    assert len(root.context_providers) == 1


async def test_a_tool_without_a_function_asks_a_question() -> None:
    sign = FunctionTool(
        name="sign",
        description="Has a document signed.",
        input_model={"type": "object", "properties": {"document": {"type": "string"}}},
    )
    root = agent_of(Journey(uses(Use("sign", {"document": "visa"}, "call-s"))), tools=[sign])
    async with TestMesh(durable(root, stream=False)) as mesh:
        task = await mesh.send(travel, "Rome?")
        async for update in task.updates():
            if isinstance(update, QuestionUpdate):
                assert update.prompt == 'Run sign with {"document": "visa"}?'
                await mesh.complete(update.question_id, "signed")
        assert await task.result() == "sign=signed"


class Card(BaseModel):
    number: SecretStr
    days: int = 1


async def test_an_approved_tool_gets_what_the_question_has_shown() -> None:
    paid = list[Any]()

    @tool(approval_mode="always_require")
    def pay(card: Card, limit: float) -> str:
        paid.append((card, limit))
        return "paid"

    arguments: dict[str, Any] = {"card": {"number": "42", "days": "3"}, "limit": "1.5"}
    root = agent_of(Journey(uses(Use("pay", arguments, "call-p"))), tools=[pay])
    async with TestMesh(durable(root, stream=False)) as mesh:
        task = await mesh.send(travel, "Rome?")
        async for update in task.updates():
            if isinstance(update, QuestionUpdate):
                # JSON would not keep the secret.
                shown = '{"card": {"number": "42", "days": "3"}, "limit": 1.5}'
                assert update.prompt == f"Run pay with {shown}?"
                await task.complete(APPROVAL, Approval(approved=True))
        assert await task.result() == "pay=paid"
    ((card, limit),) = paid
    read = Card.model_validate(card)
    assert (read.number.get_secret_value(), read.days, limit) == ("42", 3, 1.5)


@pytest.mark.parametrize("limit", ["Infinity", "NaN"])
async def test_a_number_that_is_not_json_needs_no_approval(limit: str) -> None:
    """And it is never `None`, which may mean that there is no limit."""

    @tool(approval_mode="always_require")
    def pay(limit: float | None = None) -> str:
        raise AssertionError("it must not run")

    journey = Journey(uses(Use("pay", {"limit": float(limit)}, "call-p")))
    async with TestMesh(durable(agent_of(journey, tools=[pay]), stream=False)) as mesh:
        result = await mesh.call(travel, "Rome?")
    assert result == (
        f'pay=invalid arguments: NaN and Infinity are not JSON: {{"limit": {limit}}}'
    )


async def test_misfitting_arguments_need_no_approval() -> None:
    @tool(approval_mode="always_require")
    def book(offer: int) -> str:
        raise AssertionError("it must not run")

    @tool
    def cancel(offer: int) -> str:
        raise AssertionError("it must not run")

    many = {"offer": "many"}
    root = agent_of(
        Journey(uses(Use("book", many, "1"), Use("cancel", many, "2"), WEATHER)),
        tools=[book, cancel],
    )
    async with TestMesh(durable(root, peers=[weather], stream=False)) as mesh:
        stubs(mesh)
        mesh.crash(before="checkpoint")
        result = await mesh.call(travel, "Rome?")
    failed = "Error: Argument parsing failed."
    assert result == f"book={failed} | cancel={failed} | weather=sunny"


async def test_a_failed_tool_of_a_turn_with_a_peer_runs_once() -> None:
    ran = list[str]()

    @tool
    def book(offer: int) -> str:
        ran.append("book")
        raise ValueError("sold out")

    root = agent_of(Journey(uses(Use("book", {"offer": 1}, "1"), WEATHER)), tools=[book])
    async with TestMesh(durable(root, peers=[weather], stream=False)) as mesh:
        stubs(mesh)
        mesh.crash(after="record", times=2)
        assert await mesh.call(travel, "?") == "book=Error: Function failed. | weather=sunny"
    assert ran == ["book"]


async def test_a_failed_tool_that_is_not_recorded_is_over_at_the_pause() -> None:
    ran = list[int]()

    @tool(additional_properties={"meshpoint": False})
    def look() -> str:
        ran.append(1)
        raise ValueError("nothing")

    root = agent_of(Journey(uses(Use("look", {}, "1"), WEATHER)), tools=[look])
    async with TestMesh(durable(root, peers=[weather], stream=False)) as mesh:
        stubs(mesh)
        assert await mesh.call(travel, "?") == "look=Error: Function failed. | weather=sunny"
    assert ran == [1]


async def test_a_failed_agent_of_a_turn_with_a_peer_runs_once() -> None:
    """Its model and its tools would be paid twice."""

    def overloaded(answers: int, results: Sequence[Result]) -> Says:
        if answers:
            raise ValueError("overloaded")
        return Says(uses=(Use("visas", {"country": "Italy"}, "v"),))

    below, ran = Journey(overloaded), list[str]()

    @tool(name="visas")
    def own_visas(country: str) -> str:
        ran.append(country)
        return "none"

    guide = agent_of(below, "guide", description="Knows rules.", tools=[own_visas])
    root = agent_of(Journey(uses(ASK_GUIDE, WEATHER)), tools=[guide.as_tool()])
    async with TestMesh(durable(root, peers=[weather], stream=False)) as mesh:
        stubs(mesh)
        assert await mesh.call(travel, "?") == "guide=Error: Function failed. | weather=sunny"
    assert below.model_calls == [1, 2]
    assert ran == ["Italy"]


async def test_a_tool_that_is_not_recorded_runs_again() -> None:
    ran = list[int]()

    @tool(additional_properties={"meshpoint": False})
    def look() -> str:
        ran.append(1)
        return "nothing"

    root = agent_of(Journey(uses(Use("look", {}, "1"), WEATHER)), tools=[look])
    async with TestMesh(durable(root, peers=[weather], stream=False)) as mesh:
        stubs(mesh)
        mesh.crash(before="checkpoint")
        assert await mesh.call(travel, "Rome?") == "look=nothing | weather=sunny"
    assert len(ran) == 2


@pytest.mark.parametrize(
    ("limit", "requests"),
    [({"max_iterations": 3}, 4), ({"max_function_calls": 3}, 4), ({"max_duration_seconds": 3}, 4)],
)
async def test_limits_of_the_framework_hold_across_pauses(
    limit: Any, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After them, the model must answer without tools."""

    def insist(answers: int, results: Sequence[Result]) -> Says:
        seconds[0] += 1
        if not journey.is_allowed or answers > 5:
            return Says("enough")
        return Says(uses=(Use("weather", {"request": "Rome"}, f"call-{answers}"),))

    class Watched(Journey):
        is_allowed = True

    class Watch(ChatMiddleware):
        async def process(self, context: ChatContext, call_next: Any) -> None:
            options: Mapping[str, Any] = context.options or {}
            journey.is_allowed = options.get("tool_choice") != "none"
            await call_next()

    seconds = [100.0]
    for module in ("agent_framework._tools", "meshpoint.frameworks.agent_framework.segment"):
        monkeypatch.setattr(f"{module}.perf_counter", lambda: seconds[0])
    journey = Watched(insist)
    client = ScriptedModel(journey, **limit)
    root = Agent(client, name="travel", middleware=[Watch()])
    async with TestMesh(durable(root, peers=[weather], stream=False)) as mesh:
        stubs(mesh)
        assert await mesh.call(travel, "Rome?") == "enough"
        assert len(mesh.stub(weather).requests) == 3
    assert len(journey.model_calls) == requests


class Wraps(FunctionMiddleware):
    """Marks each result, and ends the run or aborts it after a tool."""

    def __init__(self, after: Callable[[str], None] = lambda name: None) -> None:
        self._after = after

    async def process(
        self, context: FunctionInvocationContext, call_next: Callable[[], Awaitable[None]]
    ) -> None:
        await call_next()
        text = "".join(str(each) for each in context.result)
        context.result = f"<{text}>"
        self._after(context.function.name)


async def test_middleware_sees_the_results_of_peers_and_tools() -> None:
    calls = Use("visas", {"country": "Italy"}, "call-v"), WEATHER
    root = agent_of(Journey(uses(*calls)), tools=[visas], middleware=[Wraps()])
    async with TestMesh(durable(root, peers=[weather], stream=False)) as mesh:
        stubs(mesh)
        mesh.crash(before="checkpoint")
        assert await mesh.call(travel, "?") == "visas=<none for Italy> | weather=<sunny>"


async def test_middleware_that_ends_the_run_does_so_after_the_pause() -> None:
    def end(name: str) -> None:
        raise MiddlewareTermination("enough")

    def script(answers: int, results: Sequence[Result]) -> Says:
        return Says("I ask.", uses=(WEATHER,))

    journey = Journey(script)
    root = agent_of(journey, middleware=[Wraps(end)])
    async with TestMesh(durable(root, peers=[weather], stream=False)) as mesh:
        stubs(mesh)
        assert await mesh.call(travel, "Rome?") == "I ask."
        assert mesh.stub(weather).requests == ["Rome"]
    assert journey.model_calls == [1]


async def test_middleware_that_answers_for_a_failed_request_does_not_see_a_pause() -> None:
    """The framework would store the messages in the session, so the model would get them twice."""
    seen = list[int]()

    class Apologizes(ChatMiddleware):
        async def process(self, context: ChatContext, call_next: Any) -> None:
            seen.append(len(context.messages))
            try:
                await call_next()
            except Exception:
                context.result = ChatResponse(messages=Message("assistant", ["sorry"]))

    root = agent_of(Journey(in_turn(WEATHER)), middleware=[Apologizes()])
    budget = Budget(requests=1, when_exceeded="ask")
    async with TestMesh(durable(root, peers=[weather], stream=False, budget=budget)) as mesh:
        stubs(mesh)
        task = await mesh.send(travel, "Rome?")
        async for update in task.updates():
            if isinstance(update, QuestionUpdate):
                await task.complete(BUDGET, Approval(approved=True))
        assert await task.result() == "weather=sunny"
    # The turn, its pause, its repetition, the end of the budget, and the last request.
    assert seen == [1, 3, 1, 3, 3]


async def test_middleware_that_aborts_the_run_fails_the_task() -> None:
    def abort(name: str) -> None:
        raise MiddlewareFailure("not allowed")

    calls = Use("visas", {"country": "Italy"}, "call-v"), WEATHER
    journey = Journey(uses(*calls))
    root = agent_of(journey, tools=[visas], middleware=[Wraps(abort)])
    async with TestMesh(durable(root, peers=[weather], stream=False)) as mesh:
        outcome = await (await mesh.send(travel, "Rome?")).outcome()
    assert isinstance(outcome, Failed)
    assert "not allowed" in outcome.message
    assert journey.model_calls == [1]


async def test_a_tool_that_aborts_the_run_fails_the_task_also_after_a_crash() -> None:
    ran = list[int]()

    @tool
    def look() -> str:
        ran.append(1)
        raise MiddlewareFailure("not allowed")

    journey = Journey(uses(Use("look", {}, "1")))
    async with TestMesh(durable(agent_of(journey, tools=[look]), stream=False)) as mesh:
        mesh.crash(after="record", times=2)
        outcome = await (await mesh.send(travel, "Rome?")).outcome()
    assert isinstance(outcome, Failed)
    assert "not allowed" in outcome.message
    assert (journey.model_calls, ran) == ([1], [1])


async def test_a_required_tool_is_required_once() -> None:
    """Also if a person has allowed the second request."""
    choices = list[Any]()

    class Watch(ChatMiddleware):
        async def process(self, context: ChatContext, call_next: Any) -> None:
            await call_next()
            choices.append((context.options or {}).get("tool_choice"))

    journey = Journey(uses(Use("visas", {"country": "Italy"}, "1")))
    options: Any = {"tool_choice": "required"}
    root = agent_of(journey, tools=[visas], default_options=options, middleware=[Watch()])
    budget = Budget(requests=1, when_exceeded="ask")
    async with TestMesh(durable(root, stream=False, budget=budget)) as mesh:
        task = await mesh.send(travel, "Rome?")
        async for update in task.updates():
            if isinstance(update, QuestionUpdate):
                await task.complete(BUDGET, Approval(approved=True))
        assert await task.result() == "visas=none for Italy"
    assert [_mode(each) for each in choices] == ["required", "auto"]


def _mode(choice: Any) -> Any:
    return choice.get("mode") if isinstance(choice, Mapping) else choice


class Plan(BaseModel):
    city: str
    price: int


async def test_the_output_has_the_type_of_the_format() -> None:
    def says(said: str) -> Agent[Any]:
        options: Any = {"response_format": Plan}
        return agent_of(Journey(lambda answers, results: Says(said)), default_options=options)

    agents = [says('{"city": "Rome", "price": 7}'), says('{"city": "Rome"}')]
    with pytest.raises(ConfigurationError, match=r"has a response_format; write output="):
        durable(agents[0])
    good, bad = [durable(each, output=Plan, stream=False) for each in agents]
    async with TestMesh(good) as mesh:
        assert await mesh.call(good, "Rome?") == Plan(city="Rome", price=7)
    async with TestMesh(bad) as mesh:
        outcome = await (await mesh.send(bad, "Rome?")).outcome()
    assert isinstance(outcome, Failed)
    assert "price: Field required" in outcome.message


def test_an_agent_that_cannot_be_durable_is_refused() -> None:
    class Remote(BaseChatClient[Any]):
        def _inner_get_response(self, **options: Any) -> Any:
            raise NotImplementedError

    journey = Journey(uses())
    stored: Any = {"conversation_id": "conv-1"}
    refused: list[tuple[Any, str]] = [
        ("gpt", "a str is not an Agent of Agent Framework"),
        (Agent(ScriptedModel(journey)), "the agent has no name"),
        (Agent(Remote(), name="a"), "a Remote does not call tools and middleware"),
        (agent_of(journey, default_options=stored), "a conversation that its provider stores"),
        (
            agent_of(journey, require_per_service_call_history_persistence=True),
            "stores its history after each request",
        ),
    ]
    for each, problem in refused:
        with pytest.raises(ConfigurationError, match=problem):
            durable(each)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"version": 1}, "version is 1"),
        ({"prompt": "Plan it."}, "prompt is 'Plan it.'"),
        ({"budget": 30}, "budget is 30"),
        ({"lifespan": 30}, "lifespan is 30"),
        ({"peers": weather}, "is not a list"),
        ({"peers": None}, "None is not a list"),
    ],
)
def test_a_wrong_option_is_refused(options: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        durable(agent_of(Journey(uses())), **options)


async def test_a_tool_with_the_name_of_a_peer_is_refused() -> None:
    @tool(name="weather")
    def own(request: str) -> str:
        return "rain"

    root = agent_of(Journey(uses(WEATHER)), tools=[own])
    async with TestMesh(durable(root, peers=[weather], stream=False)) as mesh:
        outcome = await (await mesh.send(travel, "Rome?")).outcome()
    assert isinstance(outcome, Failed)
    assert "the agent has a tool and a peer called 'weather'; rename the tool" in outcome.message


async def test_outside_a_task_the_agent_is_as_before() -> None:
    journey = Journey(uses(Use("visas", {"country": "Italy"}, "call-v")))
    root = agent_of(journey, tools=[visas])
    async with TestMesh(durable(root, peers=[weather], stream=False)) as mesh:
        assert await mesh.call(travel, "Rome?") == "visas=none for Italy"
    assert journey.offered.keys() == {"visas", "weather"}
    response = await root.run("Rome?")
    assert response.text == "visas=none for Italy"
    assert journey.offered.keys() == {"visas"}
    assert root.context_providers == []


async def test_a_tool_that_is_gone_keeps_its_result() -> None:
    calls = Use("visas", {"country": "Italy"}, "call-v"), WEATHER
    old = durable(agent_of(Journey(uses(*calls)), tools=[visas]), peers=[weather], stream=False)
    task = TaskExecutionContext(TaskId("task"))
    paused = await old.start(task, "Rome?")
    new = durable(agent_of(Journey(uses(*calls))), peers=[weather], stream=False)
    assert isinstance(paused, Paused)
    outcomes = Outcomes({each.id: Ok("sunny") for each in paused.calls})
    done = await new.resume(task, paused.state, outcomes)
    assert isinstance(done, Done)
    assert done.output == "visas=none for Italy | weather=sunny"


async def test_an_approved_tool_that_is_gone_does_not_run() -> None:
    """A tool that needs no approval any more still gets the approved arguments."""
    booked = list[int]()

    def book(offer: int) -> str:
        booked.append(offer)
        return "booked"

    needs = tool(book, approval_mode="always_require")
    journey = Journey(uses(Use("book", {"offer": "17"}, "call-b")))
    task = TaskExecutionContext(TaskId("task"))
    paused = await durable(agent_of(journey, tools=[needs]), stream=False).start(task, "Rome?")
    assert isinstance(paused, Paused)
    state = paused.state.replace(b'"offer":17', b'"offer":18')
    outcomes = Outcomes({each.id: Ok({"approved": True}) for each in paused.calls})
    results = list[Any]()
    for tools in ([visas], [tool(book)]):
        later = durable(agent_of(journey, tools=tools), stream=False)
        done = await later.resume(task, state, outcomes)
        assert isinstance(done, Done)
        results.append(done.output)
    assert results == ['book=Error: Requested function "book" not found.', "book=booked"]
    assert booked == [18]
