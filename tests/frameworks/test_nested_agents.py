"""What agents of Pydantic AI use in the tools of another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("pydantic_ai")

from pydantic_ai import Agent, RunContext
from scenario import Journey, Result, Says, Use
from with_pydantic_ai import model_of

from meshpoint import Failed, Ok
from meshpoint.frameworks import Budget
from meshpoint.frameworks.pydantic_ai import MeshpointDurability, durable
from meshpoint.model.usage import Tokens
from meshpoint.testing import TestMesh


def ask_both(answers: int, results: Sequence[Result]) -> Says:
    """Two tools at once, each with an agent of its own; then the answer."""
    if answers:
        return Says(" ".join(each.text.strip() for each in results))
    return Says(uses=(Use("first", {}, "call-1"), Use("second", {}, "call-2")))


def travel_of(journey: Journey, *, shares_usage: bool, **options: Any) -> Any:
    """An agent whose tools run `scout`, with the capability or with the usage of the run."""
    capabilities = [] if shares_usage else [MeshpointDurability(stream=False)]
    scout = Agent(model_of(journey), name="scout", capabilities=capabilities)
    planner: Agent[None, str] = Agent(model_of(Journey(ask_both)), name="travel")

    async def run(ctx: RunContext[None]) -> str:
        usage = ctx.usage if shares_usage or journey.tools else None
        return (await scout.run("look", usage=usage)).output

    planner.tool(name="first")(run)
    planner.tool(name="second")(run)
    return durable(planner, stream=False, **options)


@pytest.mark.parametrize("kind", ["capability", "usage", "both"])
async def test_nested_requests_are_counted_once(kind: str) -> None:
    tools: dict[str, Any] = {"both": str} if kind == "both" else {}
    journey = Journey(lambda answers, results: Says("seen"), tools)
    travel = travel_of(journey, shares_usage=kind == "usage")
    async with TestMesh(travel) as mesh:
        mesh.crash(after="record", times=2)
        outcome = await (await mesh.send(travel, "hello")).outcome()
    assert isinstance(outcome, Ok)
    assert outcome.value.strip() == "seen seen"
    assert len(journey.model_calls) == 2
    usage = outcome.usage
    assert usage.by_source["agent"] == Tokens(input=20, output=14)
    assert usage.total == Tokens(input=40, output=28)
    if kind == "usage":
        assert usage.by_model["unknown"] == Tokens(input=20, output=14)
        assert usage.by_source["first"] == usage.by_source["second"] == Tokens(input=10, output=7)
    else:
        assert usage.by_model.keys() == {"script"}
        assert usage.by_source["scout"] == Tokens(input=20, output=14)


async def test_nested_requests_count_for_the_budget() -> None:
    journey = Journey(lambda answers, results: Says("seen"))
    travel = travel_of(journey, shares_usage=True, budget=Budget(requests=3))
    async with TestMesh(travel) as mesh:
        mesh.crash(before="record", times=2)
        outcome = await (await mesh.send(travel, "hello")).outcome()
    assert isinstance(outcome, Failed)
    assert outcome.message == "budget exceeded: requests 3 of 3"


async def test_an_agent_in_a_tool_stops_at_the_budget() -> None:
    """It has the capability, and would never stop by itself."""

    def insist(answers: int, results: Sequence[Result]) -> Says:
        return Says(uses=(Use("look", {}, f"call-{answers}"),))

    journey = Journey(insist)
    scout = Agent(
        model_of(journey), name="scout", capabilities=[MeshpointDurability(stream=False)]
    )

    @scout.tool_plain
    def look() -> str:
        return "nothing"

    planner = Agent(
        model_of(Journey(lambda answers, results: Says(uses=(Use("scout", {}, "call-s"),)))),
        name="travel",
    )

    @planner.tool_plain(name="scout")
    async def run_scout() -> str:
        return (await scout.run("look")).output

    travel = durable(planner, stream=False, budget=Budget(requests=5))
    async with TestMesh(travel) as mesh:
        outcome = await (await mesh.send(travel, "hello")).outcome()
    assert isinstance(outcome, Failed)
    assert outcome.message == "budget exceeded: requests 5 of 5"
    assert len(journey.model_calls) == 4
