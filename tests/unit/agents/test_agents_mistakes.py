"""The message for each common mistake in agent code."""

from __future__ import annotations

import asyncio
import gc
import re
import warnings
from contextlib import suppress
from typing import Any

import pytest
from agent_samples import Quote, answer_any, create_context, double_peer, shout_peer

from meshpoint import (
    FIRST,
    AgentMisbehaved,
    ConfigurationError,
    Done,
    Failed,
    Paused,
    Peer,
    StatefulAgent,
    TaskExecutionContext,
    agent,
)
from meshpoint.local import local_mesh
from meshpoint.testing import TestMesh
from meshpoint.testing.conformance.agent import run_agent

flights = Peer("flights", str, int)
forecast = Peer("forecast", str, int)


async def error_of(body: Any) -> str:
    """What the function agent with this body raises in its first run."""

    @agent("travel")
    async def travel(ctx: TaskExecutionContext, trip: str) -> None:
        await body(ctx, trip)

    with pytest.raises(AgentMisbehaved) as caught:
        await travel.start(create_context(), "Rome")
    return str(caught.value)


async def test_asyncio_gather() -> None:
    async def body(ctx: TaskExecutionContext, trip: str) -> None:
        await asyncio.gather(flights(trip), forecast(trip))

    expected = "peer calls run in the agent's own task: await ctx.gather(flights(t), …)"
    assert (await error_of(body)).startswith(expected)


@pytest.mark.parametrize("method", ["gather", "gather_outcomes", "first"])
async def test_a_list_of_calls(method: str) -> None:
    async def body(ctx: TaskExecutionContext, trip: str) -> None:
        await getattr(ctx, method)([flights(trip), forecast(trip)])

    assert await error_of(body) == f"ctx.{method}: write ctx.{method}(*calls)"


async def test_nothing_to_wait_for() -> None:
    async def body(ctx: TaskExecutionContext, trip: str) -> None:
        await ctx.first()

    assert (await error_of(body)).startswith("ctx.first needs at least one call")


def test_milliseconds() -> None:
    expected = "timeout: 86400000 s is 2.7 years; durations are in seconds: timedelta(days=1)"
    with pytest.raises(ConfigurationError) as caught:
        Peer("flights", str, int, timeout=86400000)
    assert str(caught.value) == f"peer 'flights': {expected}"
    with pytest.raises(AgentMisbehaved, match="; durations are in seconds: "):
        FIRST.within(86400000)


def test_a_call_without_await() -> None:
    expected = "^peer call 'flights' was never awaited: nothing was sent$"
    with pytest.warns(RuntimeWarning, match=expected) as warned:
        flights("Rome")
    assert warned[0].filename == __file__
    call = flights("Rome")
    with pytest.warns(RuntimeWarning, match=expected):
        del call


@pytest.mark.filterwarnings("error")
def test_a_call_that_is_used_does_not_warn() -> None:
    call = flights("Rome").with_artifacts()
    call.as_call("c")
    del call


@pytest.mark.parametrize("durable", [True, False], ids=["in a replica", "directly"])
async def test_a_call_that_a_pause_unwinds_does_not_warn(durable: bool) -> None:
    @agent("travel")
    async def travel(ctx: TaskExecutionContext, trip: str) -> str:
        later = shout_peer(trip)
        price = (await double_peer(1)).price
        return f"{price} {await later}"

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if durable:
            async with TestMesh(travel) as mesh:
                mesh.stub(double_peer).returns(Quote(price=2))
                mesh.stub(shout_peer).returns("ROME")
                assert await mesh.call(travel, "rome") == "2 ROME"
        else:
            assert await run_agent(travel, "rome", answer_any) == "2 ROME"
        gc.collect()
    assert not [each for each in warned if each.category is RuntimeWarning]


async def test_a_call_in_stopped_code_does_not_warn() -> None:
    @agent("travel")
    async def travel(ctx: TaskExecutionContext, trip: str) -> str:
        later = flights(trip)
        ctx.cancelled.set()
        del later
        return trip

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert await travel.start(create_context(), "Rome") == Done("Rome")
    assert not warned


async def test_await_in_a_class_agent() -> None:
    class Travel(StatefulAgent[str, str, int]):
        name = "travel"

        async def on_request(self, ctx: TaskExecutionContext, request: str) -> Paused | Done[int]:
            return self.done(await flights(request))

    expected = 'return self.ask(state, {"f": flights(x)}, then=…)'
    async with local_mesh(Travel()) as mesh:
        task = await mesh.send(Travel(), "Rome")
        failed = await task.outcome()
    assert isinstance(failed, Failed)
    assert failed.message.endswith(expected)


async def test_await_in_a_script() -> None:
    with pytest.raises(AgentMisbehaved, match=re.escape("await mesh.call(flights, x)") + "$"):
        await flights("Rome")


async def test_a_call_of_an_agent_without_context() -> None:
    @agent("other-name")
    async def hotels(ctx: TaskExecutionContext, city: str) -> str:
        return city

    with pytest.raises(AgentMisbehaved) as caught:
        await hotels("Rome")  # type: ignore[call-arg, arg-type]  # wrong on purpose
    expected = "hotels is an agent: hotels.peer(t) calls it, hotels(ctx, t) runs it here"
    assert str(caught.value) == expected


SWALLOWED = "this except swallowed a pause: catch Exception"


async def swallow(body: Any) -> tuple[str, int]:
    """The message for `body`, and the number of the line in it that is named."""
    message = await error_of(body)
    place, _, text = message.partition(": ")
    file, _, line = place.removeprefix("travel, ").partition(":")
    assert (file, text) == ("test_agents_mistakes.py", SWALLOWED)
    return message, int(line) - body.__code__.co_firstlineno


async def test_bare_except_around_await() -> None:
    async def body(ctx: TaskExecutionContext, trip: str) -> None:
        try:
            await flights(trip)
        except:  # noqa: E722  # wrong on purpose
            trip = "nowhere"

    _, line = await swallow(body)
    assert line == 2


async def test_bare_except_in_a_loop() -> None:
    async def body(ctx: TaskExecutionContext, trip: str) -> None:
        for peer in (flights, forecast):
            with suppress(BaseException):
                await ctx.outcome(peer(trip))

    _, line = await swallow(body)
    assert line == 3


async def test_bare_except_below_the_function() -> None:
    async def careless(trip: str) -> int:
        try:
            return await flights(trip)
        except BaseException:
            return 0

    async def body(ctx: TaskExecutionContext, trip: str) -> None:
        await careless(trip)

    assert SWALLOWED in await error_of(body)
