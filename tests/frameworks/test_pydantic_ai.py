"""What only Pydantic AI has: the capability, deferred tools, tools that are not steps."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("pydantic_ai")

from pydantic_ai import Agent
from pydantic_ai.exceptions import CallDeferred
from scenario import (
    TOOLS,
    Journey,
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

from meshpoint import Failed, FunctionAgent, Ok, Peer, Question, TaskExecutionContext, agent
from meshpoint.errors import ConfigurationError
from meshpoint.frameworks import APPROVAL, Approval
from meshpoint.frameworks.pydantic_ai import MeshpointDurability, durable
from meshpoint.testing import TestMesh, crash_matrix

PEERS: list[Peer[Any, Any]] = [flights, hotels, weather]


def concierge_of(journey: Journey) -> FunctionAgent[Trip, str]:
    """A function agent that runs the travel agent, and asks a peer itself before and after."""
    scout = PydanticAI().agent(
        journey, capabilities=[MeshpointDurability(peers=PEERS, stream=False)]
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
    scout = PydanticAI().agent(
        Journey(two_pauses, TOOLS), capabilities=[MeshpointDurability(peers=PEERS, stream=False)]
    )

    @agent("travel")
    async def travel(ctx: TaskExecutionContext, trip: Trip) -> str:
        await asyncio.gather(scout.run("a"), scout.run("b"))
        return "never"

    async with TestMesh(travel) as mesh:
        stubs(mesh)
        outcome = await (await mesh.send(travel, ROME)).outcome()
    assert isinstance(outcome, Failed)
    assert "await one before the other" in outcome.message or "two open steps" in outcome.message


async def test_outside_a_task_the_capability_changes_nothing() -> None:
    journey = Journey(lambda answers, results: Says("done"), TOOLS)
    scout = PydanticAI().agent(journey, capabilities=[MeshpointDurability(peers=PEERS)])
    assert (await scout.run("hello")).output.strip() == "done"


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


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: durable(Agent("test")), "the agent has no name"),
        (lambda: durable(Agent("test", name="a b")), "name"),
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
