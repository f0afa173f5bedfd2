"""Models that write odd tool calls and text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from scenario import (
    FRAMEWORKS,
    TOOLS,
    Framework,
    Journey,
    Result,
    Says,
    Use,
    flights,
    hotels,
    load_framework,
    weather,
)
from test_scenario import ROME, stubs, travel

from meshpoint import Failed, Ok, QuestionUpdate
from meshpoint.frameworks import Approval
from meshpoint.testing import TestMesh

WEATHER = {"request": "Rome"}
CITY = {"city": "Rome"}


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> Framework:
    return load_framework(request.param)


def tell(results: Sequence[Result]) -> Says:
    return Says(" | ".join(f"{each.tool}: {each.text}" for each in results))


async def test_an_id_that_each_turn_repeats(framework: Framework) -> None:
    turns = [
        Use("weather", WEATHER, "same"),
        Use("clock", {}, "same"),
        Use("hotels", CITY, "same"),
    ]

    def script(answers: int, results: Sequence[Result]) -> Says:
        return Says(uses=(turns[answers],)) if answers < len(turns) else tell(results)

    async with TestMesh(framework.build(Journey(script, TOOLS))) as mesh:
        stubs(mesh)
        result = await mesh.call(travel, ROME)
        assert [len(mesh.stub(each).requests) for each in (weather, hotels)] == [1, 1]
    assert result.strip() == 'weather: sunny | clock: noon | hotels: {"price":80}'


async def test_an_id_with_a_misfit_is_used_again(framework: Framework) -> None:
    """The arguments of a call are checked, although its id has had a result."""
    turns = [CITY, {"city": "Rome", "days": "many"}, {"city": "Oslo"}]

    def script(answers: int, results: Sequence[Result]) -> Says:
        if answers < len(turns):
            return Says(uses=(Use("flights", turns[answers], "same"),))
        return Says("done")

    journey = Journey(script, TOOLS)
    async with TestMesh(framework.build(journey)) as mesh:
        stubs(mesh)
        assert (await mesh.call(travel, ROME)).strip() == "done"
        assert [each.city for each in mesh.stub(flights).requests] == ["Rome", "Oslo"]
    assert journey.model_calls == [1, 2, 3, 4]


@pytest.mark.parametrize("same", ["same", ""])
async def test_an_id_that_one_turn_repeats(framework: Framework, same: str) -> None:
    uses = (Use("weather", WEATHER, same), Use("clock", {}, same), Use("hotels", CITY, same))

    def script(answers: int, results: Sequence[Result]) -> Says:
        return tell(results) if answers else Says(uses=uses)

    async with TestMesh(framework.build(Journey(script, TOOLS))) as mesh:
        stubs(mesh)
        result = await mesh.call(travel, ROME)
    assert sorted(result.strip().split(" | ")) == [
        "clock: noon",
        'hotels: {"price":80}',
        "weather: sunny",
    ]


@pytest.mark.parametrize("approved", [17, 1000])
async def test_an_approval_is_for_one_of_two_calls_with_one_id(
    framework: Framework, approved: int
) -> None:
    def script(answers: int, results: Sequence[Result]) -> Says:
        if answers:
            return tell(results)
        return Says(uses=tuple(Use("book", {"offer": offer}, "same") for offer in (17, 1000)))

    journey, prompts = Journey(script, TOOLS), list[str]()
    async with TestMesh(framework.build(journey)) as mesh:
        task = await mesh.send(travel, ROME)
        async for update in task.updates():
            if isinstance(update, QuestionUpdate):
                prompts.append(update.prompt or "")
                is_approved = f'{{"offer": {approved}}}' in prompts[-1]
                await mesh.complete(update.question_id, Approval(approved=is_approved))
        result = await task.result()
    assert sorted(prompts) == ['Run book with {"offer": 1000}?', 'Run book with {"offer": 17}?']
    assert result.count("booked") == 1
    assert f"booked {approved}" in result
    assert journey.tool_calls["book"] == 1


def nest(depth: int) -> Any:
    nested: Any = "Rome"
    for _ in range(depth):
        nested = [nested]
    return nested


@pytest.mark.parametrize(
    "said",
    [
        Says("\ud800"),
        Says(uses=(Use("weather", {"request": "\ud800"}, "1"),)),
        Says(uses=(Use("visas", {"country": "\ud800"}, "1"),)),
        Says(uses=(Use("clock", {"\ud800": 1}, "1"),)),
        Says(uses=(Use("weather", WEATHER, "\ud800"),)),
        Says(uses=(Use("no such tool", {}, "1"),)),
        Says(uses=(Use("", {}, "1"),)),
        Says(uses=(Use("hotels", {"city": nest(3000)}, "1"),)),
        Says(uses=(Use("visas", {"country": nest(3000)}, "1"),)),
        Says(uses=(Use("visas", {"country": "x" * 3_000_000}, "1"),)),
        Says(uses=(Use("weather", {"request": "x" * 3_000_000}, "1"),)),
    ],
    ids=range(11),
)
async def test_odd_output_of_a_model_ends_the_task(framework: Framework, said: Says) -> None:
    def script(answers: int, results: Sequence[Result]) -> Says:
        return Says("done") if answers else said

    async with TestMesh(framework.build(Journey(script, TOOLS))) as mesh:
        stubs(mesh)
        outcome = await (await mesh.send(travel, ROME)).outcome()
    assert isinstance(outcome, Ok | Failed)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("tool", "argument"),
    [("visas", "country"), ("clock", "zone"), ("hotels", "days"), ("weather", "request")],
)
async def test_numbers_that_are_no_json_are_invalid_arguments(
    framework: Framework, tool: str, argument: str, number: float
) -> None:
    """The model gets the error, and may correct them."""

    def script(answers: int, results: Sequence[Result]) -> Says:
        if answers:
            return tell(results)
        return Says(uses=(Use(tool, {argument: number}, "1"), Use("visas", {"country": "I"}, "2")))

    journey = Journey(script, TOOLS)
    async with TestMesh(framework.build(journey)) as mesh:
        stubs(mesh)
        result = await mesh.call(travel, ROME)
        assert not mesh.stub(hotels).requests
        assert not mesh.stub(weather).requests
    assert "visas: none for I" in result
    assert journey.model_calls == [1, 2]
    assert journey.tool_calls == {"visas": 1}
    assert result.count("|") == 1, "both calls have a result"
