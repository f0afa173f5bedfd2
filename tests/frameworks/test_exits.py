"""Errors of tools and models that are no `Exception`, or that a future cannot hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    load_framework,
)
from test_scenario import ROME, stubs, travel

from meshpoint import Failed, Ok
from meshpoint.testing import TestMesh

EXITS = [SystemExit, KeyboardInterrupt, GeneratorExit]
CALLS = {"clock": Use("clock", {}, "1"), "visas": Use("visas", {"country": "Italy"}, "1")}
"""A tool that is a plain function, and one that is async."""


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> Framework:
    return load_framework(request.param)


def raising(error: type[BaseException]) -> Callable[..., Any]:
    def fail(*arguments: Any) -> Any:
        raise error("boom")

    return fail


def call_once(tool: str) -> Callable[[int, Sequence[Result]], Says]:
    return lambda answers, _: Says("done") if answers else Says(uses=(CALLS[tool],))


async def run(framework: Framework, journey: Journey) -> Ok[Any] | Failed:
    async with TestMesh(framework.build(journey)) as mesh:
        stubs(mesh)
        return await (await mesh.send(travel, ROME)).outcome()


@pytest.mark.parametrize(
    ("tool", "error"),
    [("clock", StopIteration), ("visas", StopIteration), ("clock", GeneratorExit)],
)
async def test_a_tool_that_raises_what_no_future_can_hold_has_failed(
    framework: Framework, tool: str, error: type[BaseException]
) -> None:
    journey = Journey(call_once(tool), {**TOOLS, tool: raising(error)})
    outcome = await run(framework, journey)
    assert isinstance(outcome, Ok | Failed)  # as the framework handles any error of a tool
    assert journey.tool_calls[tool] == 1


@pytest.mark.parametrize(
    ("tool", "error"),
    [
        ("clock", SystemExit),
        ("clock", KeyboardInterrupt),
        *(("visas", error) for error in EXITS),
    ],
)
async def test_an_exit_in_a_tool_fails_the_task(
    framework: Framework, tool: str, error: type[BaseException]
) -> None:
    journey = Journey(call_once(tool), {**TOOLS, tool: raising(error)})
    outcome = await run(framework, journey)
    assert isinstance(outcome, Failed)
    assert f"{error.__name__}: boom" in outcome.message
    assert journey.model_calls == [1]


@pytest.mark.parametrize("error", [StopIteration, *EXITS])
async def test_an_exit_in_a_model_fails_the_task(
    framework: Framework, error: type[BaseException]
) -> None:
    outcome = await run(framework, Journey(raising(error)))
    assert isinstance(outcome, Failed)
