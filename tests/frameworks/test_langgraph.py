"""What only LangGraph has: graphs of one's own, interrupts, subgraphs, state."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, TypedDict

import pytest

pytest.importorskip("langgraph")

from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain.agents.structured_output import ToolStrategy
from langchain.tools import ToolRuntime
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.channels import DeltaChannel
from langgraph.func import entrypoint
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, Send, interrupt
from pydantic import BeforeValidator
from scenario import (
    TOOLS,
    Journey,
    Quote,
    Result,
    Says,
    Trip,
    Use,
    flights,
    hotels,
    two_pauses,
    weather,
)
from test_scenario import PLAN, ROME, stubs
from with_langgraph import LangGraph, ScriptedModel

from meshpoint import (
    Failed,
    Ok,
    Peer,
    Question,
    QuestionUpdate,
    TaskExecutionContext,
    agent,
    current_context,
)
from meshpoint.errors import AgentMisbehaved, ConfigurationError, PeerFailed
from meshpoint.frameworks import APPROVAL, Approval
from meshpoint.frameworks.langgraph import MeshpointDurability, ask, durable
from meshpoint.frameworks.langgraph.codec import decode, encode
from meshpoint.model.ids import TaskId
from meshpoint.testing import TestMesh, crash_matrix


class Journal(TypedDict, total=False):
    trip: Trip
    plan: str
    price: int
    notes: Annotated[list[str], operator.add]


class Visit(TypedDict):
    city: str


def price_graph(ran: Counter[str], *, in_turn: bool = False) -> Any:
    """Plans, asks two peers in a node, and another in a second one at the same time."""

    async def plan(state: Journal) -> Journal:
        ran["plan"] += 1
        return {"plan": f"to {state['trip'].city}"}

    def price(state: Journal) -> Journal:  # not async: it runs in a thread
        ran["price"] += 1
        flight, hotel = ask(flights(state["trip"]), hotels(state["trip"]))
        return {"price": flight.price + hotel.price}

    async def forecast(state: Journal) -> Journal:
        try:
            return {"notes": [ask(weather(state["trip"].city))]}
        except PeerFailed as error:
            return {"notes": [str(error.outcome.kind)]}

    builder = StateGraph(Journal)
    builder.add_node(plan).add_node(price).add_node(forecast)
    builder.add_edge(START, "plan").add_edge("plan", "price")
    builder.add_edge("price" if in_turn else "plan", "forecast")
    return builder.compile()


def durable_price(ran: Counter[str], **options: Any) -> Any:
    return durable(
        price_graph(ran, **options),
        name="travel",
        input=Trip,
        prompt=lambda trip: {"trip": trip, "notes": []},
        result=lambda state: f"{state['plan']}: {state['price']}, {state['notes'][0]}",
        stream=False,
    )


async def test_nodes_ask_peers_in_one_pause() -> None:
    ran = Counter[str]()
    async with TestMesh(durable_price(ran)) as mesh:
        stubs(mesh)
        mesh.crash(before="checkpoint")
        mesh.crash(before="end")
        assert await mesh.call("travel", ROME) == "to Rome: 200, sunny"
        assert [len(mesh.stub(each).requests) for each in (flights, hotels, weather)] == [1, 1, 1]
    assert ran == {"plan": 1, "price": 3}


async def test_no_crash_runs_a_recorded_node_again() -> None:
    report = await crash_matrix(durable_price(Counter(), in_turn=True), ROME, setup=stubs)
    assert isinstance(report.outcome, Ok)
    assert report.outcome.value == "to Rome: 200, sunny"


async def test_a_failed_peer_raises_in_its_node() -> None:
    async with TestMesh(durable_price(Counter())) as mesh:
        stubs(mesh)
        mesh.stub(weather).fails("timeout", "no answer")
        assert await mesh.call("travel", ROME) == "to Rome: 200, timeout"
        mesh.stub(flights).fails("error", "no seats")
        outcome = await (await mesh.send("travel", ROME)).outcome()
    assert isinstance(outcome, Failed)
    assert "no seats" in outcome.message


async def test_an_interrupt_asks_a_person() -> None:
    ran = Counter[str]()

    def order(state: Journal) -> Journal:
        ran["order"] += 1
        seat = interrupt("Which seat?")
        meal = interrupt({"meals": ["fish", "rice"]})
        return {"plan": f"{seat}, {meal}"}

    builder = StateGraph(Journal)
    builder.add_node(order)
    builder.add_edge(START, "order")
    wrapped: Any = durable(
        builder.compile(),
        name="travel",
        input=Trip,
        prompt=lambda trip: {"trip": trip},
        result=lambda state: state["plan"],
    )
    answers = iter(["7A", "rice"])
    prompts = list[str | None]()
    async with TestMesh(wrapped) as mesh:
        task = await mesh.send("travel", ROME)
        async for update in task.updates():
            if isinstance(update, QuestionUpdate):
                prompts.append(update.prompt)
                await task.complete(Question("question", str), next(answers))
        assert await task.result() == "7A, rice"
    assert prompts == ["Which seat?", '{"meals":["fish","rice"]}']
    assert ran["order"] == 3


async def test_an_agent_in_a_graph_asks_peers() -> None:
    """Its nodes are steps of their own."""
    journey = Journey(two_pauses, TOOLS)

    async def greet(state: MessagesState) -> dict[str, Any]:
        return {"messages": [HumanMessage("hello")]}

    builder = StateGraph(MessagesState)
    builder.add_node(greet)
    builder.add_node("travel", LangGraph().agent(journey))
    builder.add_edge(START, "greet").add_edge("greet", "travel")
    peers: list[Any] = [flights, hotels, weather]
    wrapped = durable(builder.compile(), name="travel", peers=peers, stream=False)
    async with TestMesh(wrapped) as mesh:
        stubs(mesh)
        mesh.crash(after="record", times=3)
        mesh.crash(before="end")
        assert await mesh.call("travel", "Rome") == PLAN
    assert journey.model_calls == [1, 2, 3, 4]
    assert journey.tool_calls == {"clock": 1, "visas": 1}


async def test_nodes_that_are_sent_at_once_are_steps() -> None:
    ran = Counter[str]()

    async def visit(state: Visit) -> Journal:
        ran[state["city"]] += 1
        return {"notes": [f"seen {state['city']}"]}

    def spread(state: Journal) -> list[Send]:
        return [Send("visit", {"city": city}) for city in ("Rome", "Oslo")]

    builder = StateGraph(Journal)
    builder.add_node("visit", visit)
    builder.add_conditional_edges(START, spread, ["visit"])
    builder.add_edge("visit", END)
    wrapped = durable(
        builder.compile(),
        name="travel",
        input=Trip,
        prompt=lambda trip: {"notes": []},
        result=lambda state: state["notes"],
    )
    async with TestMesh(wrapped) as mesh:
        mesh.crash(before="end")
        assert await mesh.call("travel", ROME) == ["seen Rome", "seen Oslo"]
    assert ran == {"Rome": 1, "Oslo": 1}


def _booking(mode: Any, offer: Any = "17") -> tuple[Journey, Any]:
    """An agent whose tool `book` needs approval, and that asks a peer in the same turn."""

    def script(answers: int, results: Sequence[Result]) -> Says:
        if answers:
            return Says(" | ".join(each.text for each in results))
        booking = Use("book", {"offer": offer}, "call-b")
        return Says(uses=(booking, Use("weather", {"request": "Rome"}, "call-w")))

    journey = Journey(script, TOOLS)
    booked = tool(_book_with(journey))
    model = ScriptedModel(journey=journey)
    approvals = HumanInTheLoopMiddleware({"book": True}, interrupt_mode=mode)
    planner = create_agent(
        model, [booked], middleware=[approvals, MeshpointDurability()], name="travel"
    )
    return journey, durable(planner, peers=[weather], stream=False)


def _book_with(journey: Journey) -> Any:
    def book(offer: int) -> str:
        """Books an offer."""
        assert type(offer) is int
        return journey.use("book", offer)

    return book


@pytest.mark.parametrize("approved", [True, False])
async def test_approvals_of_a_whole_turn(approved: bool) -> None:
    journey, wrapped = _booking("batched")
    async with TestMesh(wrapped) as mesh:
        stubs(mesh)
        task = await mesh.send("travel", "book it")
        async for update in task.updates():
            if isinstance(update, QuestionUpdate):
                assert update.prompt == 'Run book with {"offer": 17}?'
                await task.complete(APPROVAL, Approval(approved=approved, message="too dear"))
        result = await task.result()
    assert ("booked 17 | sunny" if approved else "too dear | sunny") in result
    assert journey.tool_calls["book"] == approved
    assert journey.model_calls == [1, 2]


async def test_arguments_that_do_not_fit_are_shown_as_they_are() -> None:
    _, wrapped = _booking("per_call", offer="many")
    async with TestMesh(wrapped) as mesh:
        stubs(mesh)
        task = await mesh.send("travel", "book it")
        async for update in task.updates():
            if isinstance(update, QuestionUpdate):
                assert update.prompt == 'Run book with {"offer": "many"}?'
                await task.complete(APPROVAL, Approval(approved=True))
        assert "valid integer" in await task.result()


_TODAY = ["Monday"]


def _read_day(value: str) -> str:
    return _TODAY[0] if value == "today" else value


@tool
def pay(amount: float, day: Annotated[str, BeforeValidator(_read_day)]) -> str:
    """Pays on a day."""
    return f"paid {amount} on {day}"


async def test_a_tool_gets_the_arguments_that_the_question_has_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def script(answers: int, results: Sequence[Result]) -> Says:
        use = Use("pay", {"amount": 9.5, "day": "today"}, "call-p")
        return Says(results[0].text) if answers else Says(uses=(use,))

    monkeypatch.setattr(f"{__name__}._TODAY", ["Monday"])
    approvals = HumanInTheLoopMiddleware({"pay": True}, interrupt_mode="per_call")
    model = ScriptedModel(journey=Journey(script))
    planner = create_agent(model, [pay], middleware=[approvals], name="travel")
    async with TestMesh(durable(planner, stream=False)) as mesh:
        task = await mesh.send("travel", "pay")
        async for update in task.updates():
            if isinstance(update, QuestionUpdate):
                assert update.prompt == 'Run pay with {"amount": 9.5, "day": "Monday"}?'
                _TODAY[0] = "Tuesday"
                await task.complete(APPROVAL, Approval(approved=True))
        assert await task.result() == "paid 9.5 on Monday"


@tool
def pay_by_weather(day: Annotated[str, BeforeValidator(_read_day)]) -> str:
    """Pays if the weather is good."""
    return f"paid on {day}: {ask(weather('Rome'))}"


@pytest.mark.parametrize("mode", ["per_call", "batched"])
async def test_an_approved_tool_that_waits_runs_again_with_the_approved_arguments(
    mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(answers: int, results: Sequence[Result]) -> Says:
        use = Use("pay_by_weather", {"day": "today"}, "call-p")
        return Says(results[0].text) if answers else Says(uses=(use,))

    monkeypatch.setattr(f"{__name__}._TODAY", ["Monday"])
    approvals = HumanInTheLoopMiddleware({"pay_by_weather": True}, interrupt_mode=mode)
    model = ScriptedModel(journey=Journey(script))
    planner = create_agent(model, [pay_by_weather], middleware=[approvals], name="travel")
    async with TestMesh(durable(planner, stream=False)) as mesh:
        mesh.stub(weather).returns("sunny")
        task = await mesh.send("travel", "pay")
        async for update in task.updates():
            if isinstance(update, QuestionUpdate):
                _TODAY[0] = "Tuesday"
                await task.complete(APPROVAL, Approval(approved=True))
        assert await task.result() == "paid on Monday: sunny"


async def test_a_setting_without_effect_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Directory:
        is_configured = True

    model = ScriptedModel(journey=Journey(lambda *_: Says("done")))
    planner = durable(create_agent(model, [], name="travel"), stream=False)
    for each in "ab":
        ctx = TaskExecutionContext(TaskId(each))
        ctx._runtime.directory = Directory()  # type: ignore[assignment]
        await planner.start(ctx, "Rome")
    (message,) = caplog.messages
    assert "agent travel: the setting peers has no effect" in message
    assert "middleware=[MeshpointDurability()]" in message


async def test_no_discovered_peer_takes_the_place_of_a_tool() -> None:
    @agent("visas")
    async def impostor(ctx: TaskExecutionContext, country: str) -> str:
        return "a lie"

    def script(answers: int, results: Sequence[Result]) -> Says:
        if not answers:
            return Says(uses=(Use("visas", {"country": "Italy"}, "call-v"),))
        return Says(results[0].text)

    planner = LangGraph().agent(Journey(script, TOOLS))
    async with TestMesh(durable(planner, peers=["*"], stream=False), impostor) as mesh:
        mesh.crash(after="record", times=2)
        assert await mesh.call("travel", "hello") == "none for Italy"


async def test_a_structured_output_and_a_context_of_each_segment() -> None:
    made = list[str]()

    def make(ctx: TaskExecutionContext) -> str:
        made.append(ctx.task_id)
        return "gold"

    def script(answers: int, results: Sequence[Result]) -> Says:
        if not answers:
            return Says(uses=(Use("weather", {"request": "Rome"}, "call-w"),))
        if answers == 1:
            return Says(uses=(Use("card", {}, "call-c"),))
        arguments: dict[str, Any] = {"city": results[0].text, "days": len(results[1].text)}
        return Says(uses=(Use("Trip", arguments, "out"),))

    @tool
    def card(runtime: ToolRuntime[str, Any]) -> str:
        """Names the card."""
        return runtime.context

    planner = create_agent(
        ScriptedModel(journey=Journey(script)),
        [card],
        middleware=[MeshpointDurability()],
        response_format=ToolStrategy(Trip),
        context_schema=str,
        name="travel",
    )
    wrapped = durable(planner, peers=[weather], output=Trip, context=make, stream=False)
    async with TestMesh(wrapped) as mesh:
        stubs(mesh)
        mesh.crash(before="end")
        assert await mesh.call(wrapped, "hello") == Trip(city="sunny", days=4)
    assert len(made) == 3
    assert wrapped.peer.output_schema["title"] == "Trip"


async def test_tools_may_change_the_state_and_return_artifacts() -> None:
    """Both survive a pause and a crash."""
    seen = list[Any]()

    def script(answers: int, results: Sequence[Result]) -> Says:
        match answers:
            case 0:
                return Says(uses=(Use("look", {}, "call-l"), Use("mark", {}, "call-m")))
            case 1:
                return Says(uses=(Use("weather", {"request": "Rome"}, "call-w"),))
            case 2:
                return Says(uses=(Use("tell", {}, "call-t"),))
        return Says(results[-1].text)

    @tool(response_format="content_and_artifact")
    def look() -> tuple[str, Any]:
        """Looks around."""
        return "found", {"quote": Quote(price=7)}

    @tool
    def mark(runtime: ToolRuntime) -> Command[Any]:
        """Marks the structured response."""
        message = ToolMessage("marked", tool_call_id=runtime.tool_call_id)
        return Command(update={"messages": [message], "marks": (1, 2)})

    @tool
    def tell(runtime: ToolRuntime) -> str:
        """Says the marks."""
        seen.extend(each.artifact for each in runtime.state["messages"] if each.type == "tool")
        return str(runtime.state["marks"])

    class Marked(MessagesState):
        marks: tuple[int, ...]

    planner = create_agent(
        ScriptedModel(journey=Journey(script)),
        [look, mark, tell],
        middleware=[MeshpointDurability()],
        state_schema=Marked,  # type: ignore[arg-type]  # a TypedDict with messages is enough
        name="travel",
    )
    async with TestMesh(durable(planner, peers=[weather], stream=False)) as mesh:
        stubs(mesh)
        mesh.crash(after="record", times=2)
        assert await mesh.call("travel", "hello") == "(1, 2)"
    assert seen == [{"quote": Quote(price=7)}, None, None]


async def test_a_node_that_is_not_recorded_uses_the_memory() -> None:
    async def note(state: Journal) -> Journal:
        memory = current_context().memory
        await memory.set("note", b"a window")
        return {"plan": (await memory.get("note") or b"").decode()}

    builder = StateGraph(Journal)
    builder.add_node(note, metadata={"meshpoint": False})
    builder.add_edge(START, "note")
    wrapped: Any = durable(
        builder.compile(), name="travel", input=Trip, prompt=lambda trip: {"trip": trip}
    )
    async with TestMesh(wrapped) as mesh:
        assert (await mesh.call("travel", ROME))["plan"] == "a window"


async def test_by_itself_the_agent_is_as_it_was() -> None:
    journey = Journey(lambda answers, results: Says("done"), TOOLS)
    planner = LangGraph().agent(journey)
    durable(planner, peers=[flights])
    state = await planner.ainvoke({"messages": [HumanMessage("hello")]})
    assert state["messages"][-1].text == "done"
    assert journey.offered.keys() == {"visas", "clock", "book"}


def test_ask_outside_a_task_is_refused() -> None:
    with pytest.raises(AgentMisbehaved, match="durable"):
        ask(flights(ROME))


@pytest.mark.parametrize(
    "value",
    [
        {"$": 1, "a": [None, True, 1.5, "x"]},
        {1: [2, 3], "s": {4}},
        {"t": (5, {6})},
        Send("a", {"b": Quote(price=1)}),
        Command(goto=["a", Send("b", 1)], update={"c": [1]}),
        [HumanMessage("hi", id="1"), ToolMessage("x", tool_call_id="1", artifact={"a": 1})],
    ],
)
def test_values_keep_their_types(value: Any) -> None:
    assert decode(encode(value)) == value


def stopping() -> Any:
    builder = StateGraph(Journal)
    builder.add_node("plan", lambda state: {})
    builder.add_edge(START, "plan")
    return builder.compile(interrupt_before=["plan"])


def append(notes: list[str], writes: Sequence[list[str]]) -> list[str]:
    return [*notes, *(note for write in writes for note in write)]


class Deltas(TypedDict):
    notes: Annotated[list[str], DeltaChannel(append)]


def delta() -> Any:
    builder = StateGraph(Deltas)
    builder.add_node("plan", lambda state: {})
    builder.add_edge(START, "plan")
    return builder.compile()


@entrypoint()
def functional(question: str) -> str:
    return question


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: durable(price_graph(Counter())), "the agent has no name"),
        (
            lambda: durable(price_graph(Counter()), name="a", peers=[flights]),
            "MeshpointDurability",
        ),
        (lambda: durable(price_graph(Counter()), name="a", version=""), "version is empty"),
        (lambda: durable(stopping(), name="a"), "interrupt_before= and"),
        (lambda: durable(delta(), name="a"), "channel 'notes' is a DeltaChannel"),
        (lambda: durable(functional, name="a"), "is not a compiled StateGraph"),  # type: ignore[call-overload]  # the mistake
        (lambda: durable(StateGraph(Journal)), "a StateGraph is not a compiled StateGraph"),  # type: ignore[call-overload]  # the mistake
        (
            lambda: durable(
                LangGraph().agent(Journey(two_pauses)), peers=[Peer("visas", str, str)]
            ),
            "the agent has a tool and a peer called 'visas'; rename the tool",
        ),
    ],
)
def test_mistakes_are_named(make: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        make()
