"""What only Pydantic AI has: the capability, deferred tools, tools that are not steps."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest
from pydantic import BaseModel, Field, SecretStr

pytest.importorskip("pydantic_ai")

from pydantic_ai import Agent, DeferredToolRequests, RunContext, ToolOutput
from pydantic_ai.capabilities import ModelFallback, ProcessHistory
from pydantic_ai.exceptions import CallDeferred, ModelHTTPError
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.toolsets import DynamicToolset, FunctionToolset
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
from with_pydantic_ai import PydanticAI, model_of

from meshpoint import (
    Failed,
    FunctionAgent,
    Ok,
    Peer,
    Question,
    QuestionUpdate,
    TaskExecutionContext,
    agent,
)
from meshpoint.errors import ConfigurationError
from meshpoint.frameworks import APPROVAL, BUDGET, Approval, Budget
from meshpoint.frameworks.pydantic_ai import MeshpointDurability, durable
from meshpoint.testing import TestMesh, crash_matrix

PEERS: list[Peer[Any, Any]] = [flights, hotels, weather]


def concierge_of(journey: Journey, **options: Any) -> FunctionAgent[Trip, str]:
    """A function agent that runs the travel agent, and asks a peer itself before and after."""
    scout = PydanticAI().agent(
        journey, capabilities=[MeshpointDurability(peers=PEERS, stream=False, **options)]
    )

    @agent("travel")
    async def travel(ctx: TaskExecutionContext, trip: Trip) -> str:
        first = await weather(trip.city)
        plan = (await scout.run(f"{trip.days} days in {trip.city}")).output
        last = await weather(trip.city)
        return f"{first}; {plan.strip()}; {last}"

    return travel


async def test_a_function_agent_runs_an_agent_with_the_capability() -> None:
    journey = Journey(two_pauses, TOOLS)
    async with TestMesh(concierge_of(journey)) as mesh:
        stubs(mesh)
        assert await mesh.call("travel", ROME) == f"sunny; {PLAN}; sunny"
        assert len(mesh.stub(weather).requests) == 3
        assert len(mesh.stub(flights).requests) == 1
    assert journey.model_calls == [1, 2, 3, 4]
    assert journey.tool_calls == {"clock": 1, "visas": 1}


async def test_a_budget_of_the_capability_ends_the_task() -> None:
    journey = Journey(two_pauses, TOOLS)
    async with TestMesh(concierge_of(journey, budget=Budget(requests=3))) as mesh:
        stubs(mesh)
        mesh.crash(after="record")
        outcome = await (await mesh.send("travel", ROME)).outcome()
    assert isinstance(outcome, Failed)
    assert outcome.message == "budget exceeded: requests 3 of 3"
    assert journey.model_calls == [1, 2, 3]


@pytest.mark.parametrize("approved", [True, False])
async def test_a_person_raises_the_budget_of_the_capability(approved: bool) -> None:
    journey, prompts = Journey(two_pauses, TOOLS), list[str | None]()
    budget = Budget(requests=1, when_exceeded="ask")
    async with TestMesh(concierge_of(journey, budget=budget)) as mesh:
        stubs(mesh)
        task = await mesh.send("travel", ROME)
        async for update in task.updates():
            if isinstance(update, QuestionUpdate) and update.prompt not in prompts:
                prompts.append(update.prompt)
                is_allowed = approved or len(prompts) < 3
                await task.complete(BUDGET, Approval(approved=is_allowed, message="enough"))
        outcome = await task.outcome()
    assert prompts == [f"Budget reached: requests {n} of {n}. Allow {n + 1}?" for n in (1, 2, 3)]
    if approved:
        assert isinstance(outcome, Ok)
        assert outcome.value == f"sunny; {PLAN}; sunny"
        assert journey.model_calls == [1, 2, 3, 4]
    else:
        assert isinstance(outcome, Failed)
        assert outcome.message == "budget exceeded: requests 3 of 3: enough"


async def test_no_crash_of_a_function_agent_pays_a_model_twice() -> None:
    report = await crash_matrix(concierge_of(Journey(two_pauses, TOOLS)), ROME, setup=stubs)
    assert report.outcome == Ok(f"sunny; {PLAN}; sunny", usage=report.outcome.usage)
    assert len(report.runs) > 60


async def test_the_capability_asks_for_approval() -> None:
    def script(answers: int, results: Sequence[Result]) -> Says:
        if answers:
            return Says(results[0].text)
        return Says(uses=(Use("book", {"offer": 17}, "call-b"),))

    async with TestMesh(concierge_of(Journey(script, TOOLS))) as mesh:
        stubs(mesh)
        task = await mesh.send("travel", ROME)
        async for update in task.updates():
            if update.kind == "question":
                await task.complete(APPROVAL, Approval(approved=True))
        assert await task.result() == "sunny; booked 17; sunny"


async def test_runs_that_wait_at_the_same_time_are_refused() -> None:
    is_open, calls = asyncio.Event(), count()

    def script(answers: int, results: Sequence[Result]) -> Says:
        if next(calls):  # of the second run
            return Says(uses=(Use("weather", {"request": "Rome"}, "call-w"),))
        return Says(uses=(Use("visas", {"country": "Italy"}, "call-v"),))

    async def stay() -> None:
        is_open.set()
        await asyncio.Event().wait()

    journey = Journey(script, TOOLS, meet=stay)
    scout = PydanticAI().agent(
        journey, capabilities=[MeshpointDurability(peers=PEERS, stream=False)]
    )

    async def second() -> None:
        await is_open.wait()
        await scout.run("b")

    @agent("travel")
    async def travel(ctx: TaskExecutionContext, trip: Trip) -> str:
        await asyncio.gather(scout.run("a"), second())
        return "never"

    async with TestMesh(travel) as mesh:
        outcome = await (await mesh.send(travel, ROME)).outcome()
    assert isinstance(outcome, Failed)
    assert "await one before the other" in outcome.message


async def test_outside_a_task_the_capability_changes_nothing() -> None:
    journey = Journey(lambda answers, results: Says("done"), TOOLS)
    scout = PydanticAI().agent(journey, capabilities=[MeshpointDurability(peers=PEERS)])
    assert (await scout.run("hello")).output.strip() == "done"


async def test_a_number_that_is_no_json_goes_back_to_the_model() -> None:
    def script(answers: int, results: Sequence[Result]) -> Says:
        amounts = [float("nan"), 2.5]
        if answers < len(amounts):
            return Says(uses=(Use("pay", {"amount": amounts[answers]}, f"call-{answers}"),))
        return Says(results[-1].text)

    planner, paid = Agent(model_of(Journey(script)), name="travel"), list[float]()

    @planner.tool_plain
    async def pay(amount: float) -> str:
        paid.append(amount)
        return f"paid {amount}"

    async with TestMesh(durable(planner, stream=False)) as mesh:
        assert (await mesh.call("travel", "pay")).strip() == "paid 2.5"
    assert paid == [2.5]


async def test_a_deferred_tool_asks_a_question() -> None:
    def script(answers: int, results: Sequence[Result]) -> Says:
        if answers:
            return Says(results[0].text)
        return Says(uses=(Use("seats", {"row": "7"}, "call-s"),))

    planner = Agent(model_of(Journey(script)), name="travel")

    @planner.tool_plain
    async def seats(row: int) -> str:
        raise CallDeferred

    async with TestMesh(durable(planner, stream=False)) as mesh:
        task = await mesh.send("travel", "a window")
        async for update in task.updates():
            if update.kind == "question":
                assert (update.name, update.prompt) == ("seats", 'Run seats with {"row": 7}?')
                await task.complete(Question("seats", str), "7A")
        assert (await task.result()).strip() == "7A"


class Card(BaseModel):
    """Its JSON is not what it is read from."""

    number: SecretStr
    holder: str = Field(validation_alias="holderName")
    tries: int = Field(default=1, exclude=True)


async def test_an_approved_tool_gets_the_arguments_of_the_model() -> None:
    arguments: dict[str, Any] = {"number": "4711", "holderName": "Ada", "tries": 3}

    def script(answers: int, results: Sequence[Result]) -> Says:
        if answers:
            return Says(results[0].text)
        return Says(uses=(Use("pay", arguments, "call-p"),))

    planner = Agent(model_of(Journey(script)), name="travel")

    @planner.tool_plain(requires_approval=True)
    def pay(card: Card) -> str:
        return f"{card.number.get_secret_value()} {card.holder} {card.tries}"

    async with TestMesh(durable(planner, stream=False)) as mesh:
        task = await mesh.send("travel", "pay")
        async for update in task.updates():
            if update.kind == "question":
                await task.complete(APPROVAL, Approval(approved=True))
        assert (await task.result()).strip() == "4711 Ada 3"


async def test_long_arguments_are_cut_in_the_question_only() -> None:
    def script(answers: int, results: Sequence[Result]) -> Says:
        if answers:
            return Says(results[0].text)
        return Says(uses=(Use("mail", {"text": "x" * 20_000, "to": "ada"}, "call-m"),))

    planner = Agent(model_of(Journey(script)), name="travel")

    @planner.tool_plain(requires_approval=True)
    def mail(text: str, to: str) -> str:
        return f"{len(text)} to {to}"

    async with TestMesh(durable(planner, stream=False)) as mesh:
        task = await mesh.send("travel", "write")
        async for update in task.updates():
            if update.kind == "question":
                assert update.prompt is not None
                assert update.prompt.endswith('xxx… (20,010 characters), "to": "ada"}?')
                await task.complete(APPROVAL, Approval(approved=True))
        assert (await task.result()).strip() == "20000 to ada"


@pytest.mark.parametrize(
    ("name", "output", "tool"),
    [
        ("visas", Trip, "final_result"),
        ("final_result", Trip, "final_result"),
        ("final_result_Trip", [Trip, Quote], "final_result_Trip"),
        ("tell", ToolOutput(Trip, name="tell"), "tell"),
    ],
)
async def test_no_discovered_peer_takes_the_place_of_a_tool(
    name: str, output: Any, tool: str
) -> None:
    @agent(name)
    async def impostor(ctx: TaskExecutionContext, country: str) -> str:
        return "a lie"

    def script(answers: int, results: Sequence[Result]) -> Says:
        if not answers:
            return Says(uses=(Use("visas", {"country": "Italy"}, "call-v"),))
        return Says(uses=(Use(tool, {"city": results[0].text}, "out"),))

    planner: Agent[None, Any] = Agent(model_of(Journey(script)), name="travel", output_type=output)

    @planner.tool_plain
    def visas(country: str) -> str:
        return f"none for {country}"

    wrapped = durable(planner, peers=["*"], stream=False)
    async with TestMesh(wrapped, impostor) as mesh:
        assert await mesh.call("travel", "hello") == {"city": "none for Italy", "days": 2}


async def test_a_typed_peer_with_the_name_of_a_tool_is_named() -> None:
    planner = PydanticAI().agent(Journey(two_pauses, TOOLS))
    wrapped = durable(planner, peers=[Peer("visas", str, str)], stream=False)
    async with TestMesh(wrapped) as mesh:
        outcome = await (await mesh.send("travel", "hello")).outcome()
    assert isinstance(outcome, Failed)
    assert "the agent has a tool and a peer called 'visas'" in outcome.message


async def test_a_tool_that_is_not_recorded_uses_the_memory() -> None:
    from meshpoint import current_context

    def script(answers: int, results: Sequence[Result]) -> Says:
        if answers:
            return Says(results[0].text)
        return Says(uses=(Use("note", {}, "call-n"),))

    planner = Agent(model_of(Journey(script)), name="travel")

    @planner.tool_plain(metadata={"meshpoint": False})
    async def note() -> str:
        memory = current_context().memory
        await memory.set("note", "a window")
        return (await memory.get("note") or b"").decode()

    async with TestMesh(durable(planner, stream=False)) as mesh:
        assert (await mesh.call("travel", "hello")).strip() == "a window"


async def test_a_typed_output_and_dependencies_of_each_segment() -> None:
    made = list[str]()

    def make(ctx: TaskExecutionContext) -> str:
        made.append(ctx.task_id)
        return "gold"

    def script(answers: int, results: Sequence[Result]) -> Says:
        if not answers:
            return Says(uses=(Use("weather", {"request": "Rome"}, "call-w"),))
        if answers == 1:
            return Says(uses=(Use("card", {}, "call-c"),))
        days = len(results[-1].text)
        return Says(uses=(Use("final_result", {"city": results[0].text, "days": days}, "out"),))

    planner = Agent(model_of(Journey(script)), name="travel", deps_type=str, output_type=Trip)

    @planner.tool
    def card(ctx: RunContext[str]) -> str:
        return ctx.deps

    wrapped = durable(planner, peers=[weather], deps=make, stream=False)
    async with TestMesh(wrapped) as mesh:
        stubs(mesh)
        assert await mesh.call(wrapped, "hello") == Trip(city="sunny", days=4)
    assert len(made) == 2
    assert wrapped.peer.output_schema["title"] == "Trip"


@pytest.mark.parametrize("output_type", [str, [str, DeferredToolRequests]])
async def test_an_output_is_validated(output_type: Any) -> None:
    validated = list[str]()

    def script(answers: int, results: Sequence[Result]) -> Says:
        if not answers:
            return Says(uses=(Use("weather", {"request": "Rome"}, "call-w"),))
        return Says(results[0].text)

    planner: Agent[None, Any] = Agent(
        model_of(Journey(script)), name="travel", output_type=output_type
    )

    @planner.output_validator
    def shout(output: Any) -> Any:
        validated.append(str(output))
        return output.upper()

    wrapped = durable(planner, peers=[weather], stream=False)
    async with TestMesh(wrapped) as mesh:
        stubs(mesh)
        assert await mesh.call("travel", "hello") == "SUNNY"
    assert validated == ["sunny"]
    assert wrapped.peer.output_schema == {"type": "string"}


async def test_a_shortened_history_is_written_once() -> None:
    def keep_last(messages: list[ModelMessage]) -> list[ModelMessage]:
        return messages[-2:]

    lengths = list[int]()

    def script(answers: int, results: Sequence[Result]) -> Says:
        lengths.append(answers)
        if len(lengths) > 4:
            return Says("done")
        return Says(uses=(Use("weather", {"request": "Rome"}, f"call-{len(lengths)}"),))

    planner = Agent(
        model_of(Journey(script)), name="travel", capabilities=[ProcessHistory(keep_last)]
    )
    async with TestMesh(durable(planner, peers=[weather], stream=False)) as mesh:
        stubs(mesh)
        assert (await mesh.call("travel", "x" * 5000)).strip() == "done"
        assert len(mesh.stub(weather).requests) == 4
    assert max(lengths) <= 2


async def test_a_fallback_is_the_same_in_each_run() -> None:
    """The first model fails, the second answers. After a crash, neither is asked again."""
    asked = Counter[str]()

    def fail(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        asked["first"] += 1
        raise ModelHTTPError(503, "first")

    def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        asked["second"] += 1
        if len(messages) == 1:
            return ModelResponse(parts=[ToolCallPart("note", {}, "call-n")])
        return ModelResponse(parts=[TextPart("done")])

    second = FunctionModel(answer, model_name="second")
    planner = Agent(
        FunctionModel(fail, model_name="first"),
        name="travel",
        capabilities=[ModelFallback(second)],
    )

    @planner.tool_plain
    def note() -> str:
        return "noted"

    wrapped = durable(planner, stream=False, models={"second": second})
    async with TestMesh(wrapped) as mesh:
        mesh.crash(after="record", times=2)
        assert await mesh.call("travel", "hello") == "done"
    assert asked == {"first": 2, "second": 2}


def test_a_toolset_without_an_id_is_named() -> None:
    planner = Agent("test", name="travel", toolsets=[FunctionToolset()])
    with pytest.raises(ConfigurationError, match="unique `id`"):
        durable(planner)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: durable("openai:gpt-5", name="a"), "a str is not an agent of Pydantic AI"),  # type: ignore[call-overload]  # the mistake
        (lambda: durable(Agent("test")), "the agent has no name"),
        (
            lambda: durable(Agent("test", name="Triage Agent (v2)")),
            r"durable\('Triage Agent \(v2\)'\): .*; write name=\"triage_agent_v2\"",
        ),
        (lambda: durable(Agent(name="a")), "needs to have a `model`"),
        (lambda: durable(Agent("test", name="a"), peers=["a b"]), "'a b' matches no agent"),
        (lambda: durable(Agent("test", name="a"), version=""), "version is empty"),
        (
            lambda: durable(Agent("test", name="a", capabilities=[MeshpointDurability(peers=[])])),
            "has MeshpointDurability already",
        ),
        (
            lambda: durable(Agent("test", name="a"), on_peer_failure="retry"),  # type: ignore[call-overload]  # the mistake
            "on_peer_failure is 'retry'",
        ),
    ],
)
def test_mistakes_are_named(make: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        make()


def test_an_agent_is_bound_again_only_if_it_has_changed() -> None:
    planner, capability = Agent("test", name="travel"), MeshpointDurability()
    bound = capability.for_agent(planner)
    assert capability.for_agent(planner) is bound

    @planner.toolset(id="late")
    def late(ctx: RunContext[object]) -> FunctionToolset[object]:
        return FunctionToolset()

    with_toolset = capability.for_agent(planner)
    assert with_toolset is not bound
    planner.model = TestModel()
    with_model = capability.for_agent(planner)
    assert with_model is not with_toolset
    assert capability.for_agent(Agent(planner.model, name="travel")) is not with_model


def test_only_the_last_binding_of_a_capability_is_kept() -> None:
    """An agent with output validators is another copy in each run."""
    capability = MeshpointDurability()
    first = weakref.ref(capability.for_agent(Agent("test", name="travel")))
    for _ in range(2):
        capability.for_agent(Agent("test", name="travel"))
    gc.collect()
    assert first() is None


async def test_tools_of_a_dynamic_toolset_are_steps() -> None:
    runs = Counter[str]()

    def script(answers: int, results: Sequence[Result]) -> Says:
        if not answers:
            return Says(uses=(Use("seat", {"row": 7}, "call-s"),))
        return Says(results[0].text)

    def seat(row: int) -> str:
        runs["seat"] += 1
        return f"{row}A"

    def choose(ctx: RunContext[None]) -> FunctionToolset[None]:
        return FunctionToolset([seat])

    journey = Journey(script)
    planner = Agent(
        model_of(journey), name="travel", toolsets=[DynamicToolset(choose, id="seats")]
    )
    async with TestMesh(durable(planner, stream=False)) as mesh:
        mesh.crash(before="end")
        assert (await mesh.call("travel", "hello")).strip() == "7A"
    assert runs == {"seat": 1}
    assert journey.model_calls == [1, 2]


async def test_the_lifespan_starts_the_tools_of_the_agent() -> None:
    """The lifespan enters the agent, and `deps` gets what it yields."""
    started, open_sets = list[str](), set[str]()

    class Server(FunctionToolset[Any]):
        async def __aenter__(self) -> Server:
            started.append("server")
            open_sets.add("server")
            return self

        async def __aexit__(self, *error: object) -> None:
            open_sets.clear()

    def script(answers: int, results: Sequence[Result]) -> Says:
        if not answers:
            return Says(uses=(Use("weather", {"request": "Rome"}, "call-w"),))
        if answers == 1:
            return Says(uses=(Use("card", {}, "call-c"),))
        return Says(results[-1].text)

    server = Server(id="server")
    planner = Agent(model_of(Journey(script)), name="travel", deps_type=str, toolsets=[server])

    @planner.tool
    def card(ctx: RunContext[str]) -> str:
        return f"{ctx.deps}, {open_sets}"

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[str]:
        async with planner:
            started.append("replica")
            yield "gold"

    wrapped = durable(
        planner,
        peers=[weather],
        deps=lambda ctx: str(ctx.resources),
        lifespan=lifespan,
        stream=False,
    )
    async with TestMesh(wrapped) as mesh:
        stubs(mesh)
        assert (await mesh.call("travel", "hello")).strip() == "gold, {'server'}"
        assert started[:2] == ["server", "replica"]
