"""Function agents: how one is declared, and how its input, output and state are checked."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from agent_samples import (
    Quote,
    answer_any,
    create_context,
    double_peer,
    resume_agent,
    start_and_pause,
    travel,
)
from pydantic import BaseModel

from meshpoint import (
    ConfigurationError,
    Done,
    FunctionAgent,
    IncompatibleState,
    InvalidInput,
    InvalidOutput,
    Ok,
    Outcomes,
    TaskExecutionContext,
    agent,
)
from meshpoint.testing.conformance.agent import answered, run_agent


class Trip(BaseModel):
    to: str
    days: int = 1


@agent("typed")
async def typed(ctx: TaskExecutionContext, trip: Trip) -> Quote:
    return await double_peer(trip.days)


async def test_the_request_becomes_the_declared_input() -> None:
    assert await run_agent(typed, {"to": "Oslo", "days": 4}, answer_any) == Quote(price=8)
    assert await run_agent(typed, Trip(to="Oslo"), answer_any) == Quote(price=2)


async def test_a_wrong_request_names_the_field() -> None:
    with pytest.raises(InvalidInput, match="input of typed: Trip: days: "):
        await typed.start(create_context(), {"to": "Oslo", "days": "many"})


async def test_a_wrong_output_names_the_field() -> None:
    @agent("sloppy")
    async def sloppy(ctx: TaskExecutionContext, number: int) -> Quote:
        return {"price": "much"}  # type: ignore[return-value]  # wrong on purpose

    with pytest.raises(InvalidOutput, match="output of sloppy: Quote: price: "):
        await sloppy.start(create_context(), 1)


async def test_the_journal_of_another_version_is_incompatible() -> None:
    pause = await start_and_pause(travel)
    other = FunctionAgent(travel.function, "travel", version="4")
    with pytest.raises(
        IncompatibleState, match="travel/function/3, but this agent is travel/function/4"
    ):
        await resume_agent(other, pause)


async def test_a_request_that_json_cannot_hold_is_refused() -> None:
    @agent("measuring")
    async def measuring(ctx: TaskExecutionContext, width: float) -> float:
        return width

    for request in (float("nan"), "\ud800", object()):
        with pytest.raises(InvalidInput, match="measuring"):
            await measuring.start(create_context(), request)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize("entries", [0, 2])
async def test_a_journal_that_is_not_at_a_pause_is_incompatible(entries: int) -> None:
    pause = await start_and_pause(travel, 2)
    journal = json.loads(pause.state)
    journal["entries"] *= entries
    with pytest.raises(IncompatibleState, match="it is not at a pause"):
        await travel.resume(
            create_context(), json.dumps(journal).encode(), answered(pause, answer_any)
        )


async def test_outcomes_of_another_pause_are_refused() -> None:
    pause = await start_and_pause(travel)
    with pytest.raises(IncompatibleState, match=r"double\.0"):
        await travel.resume(create_context(), pause.state, Outcomes({"other": Ok(1)}))


async def test_a_recorded_input_that_no_longer_fits_is_incompatible() -> None:
    @agent("typed")
    async def stricter(ctx: TaskExecutionContext, days: list[int]) -> Quote:
        return Quote(price=0)

    pause = await start_and_pause(typed, {"to": "Oslo"})
    with pytest.raises(IncompatibleState, match="input of typed"):
        await resume_agent(stricter, pause)


def test_name_and_version_make_the_state_format() -> None:
    assert (travel.name, travel.version, travel.state_format) == (
        "travel",
        "3",
        "travel/function/3",
    )
    assert travel.__doc__ is not None
    assert "Several pauses" in travel.__doc__


async def test_types_of_the_enclosing_function_are_found() -> None:
    class Local(BaseModel):
        x: int

    @agent("local")
    async def local(ctx: TaskExecutionContext, request: Local) -> Local:
        return request

    assert await local.start(create_context(), {"x": 1}) == Done(Local(x=1))


async def no_types(ctx, request): ...  # type: ignore[no-untyped-def]  # what is tested
async def no_return(ctx: TaskExecutionContext, request: int): ...  # type: ignore[no-untyped-def]  # what is tested
async def one_parameter(ctx: TaskExecutionContext) -> int: ...  # type: ignore[empty-body]  # never called
async def keyword(ctx: TaskExecutionContext, *, request: int) -> int: ...  # type: ignore[empty-body]  # never called
async def unknown(ctx: TaskExecutionContext, request: Nowhere) -> int: ...  # type: ignore[name-defined, empty-body]  # noqa: F821
async def not_json(ctx: TaskExecutionContext, request: asyncio.Event) -> int: ...  # type: ignore[empty-body]  # never called
def not_async(ctx: TaskExecutionContext, request: int) -> int: ...  # type: ignore[empty-body]  # never called


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (no_types, "no_types does not annotate 'request'"),
        (no_return, "no_return does not annotate its return value"),
        (one_parameter, "one_parameter takes 1 parameter"),
        (keyword, "keyword takes 2 parameters"),
        (unknown, "an annotation of .*unknown is unknown.*Nowhere.*TYPE_CHECKING"),
        (not_json, "not_json, input: Event cannot become JSON"),
        (not_async, "not_async is not an async function; write async def not_async"),
    ],
)
def test_a_function_that_cannot_be_an_agent_is_named(function: Any, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        agent("broken")(function)


def test_the_decorator_requires_a_valid_queue_name() -> None:
    with pytest.raises(ConfigurationError, match=r'write @agent\("name"\)'):
        agent(one_parameter)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ConfigurationError, match=r"agent\.name"):
        agent("a name")(travel.function)
    with pytest.raises(ConfigurationError, match="version"):
        agent("x", version="")(travel.function)
