"""Stateful agents: handlers, their state, and what the next release can read."""

from __future__ import annotations

import json
from datetime import timedelta
from functools import partial
from typing import Any, Generic, TypeVar

import pytest
from agent_samples import Quote, a_context, double, obliging, refusing, shout
from pydantic import BaseModel, ConfigDict, JsonValue, computed_field

from meshpoint import (
    ALL,
    FIRST,
    AgentMisbehaved,
    Call,
    ConfigurationError,
    Done,
    Failed,
    FailureKind,
    IncompatibleState,
    InvalidInput,
    InvalidOutput,
    Join,
    Ok,
    Outcome,
    Outcomes,
    Paused,
    PeerFailed,
    Replies,
    StatefulAgent,
    TaskExecutionContext,
)
from meshpoint.ports.agent import readable_formats
from meshpoint.testing.conformance.agent import DurableAgentSuite, answered, run_agent


class Trip(BaseModel):
    to: str
    days: int


class Progress(BaseModel):
    model_config = ConfigDict(extra="forbid")

    trip: Trip
    prices: list[int] = []

    @computed_field  # type: ignore[prop-decorator]
    @property
    def total(self) -> int:
        return sum(self.prices)


class Travel(StatefulAgent[Trip, Progress, str]):
    """Asks for one quote a day, then for a greeting."""

    name = "travel"

    async def on_request(self, ctx: TaskExecutionContext, request: Trip) -> Paused | Done[str]:
        return self._next_day(Progress(trip=request))

    async def on_quote(self, ctx: TaskExecutionContext, state: Progress, replies: Replies) -> Paused | Done[str]:
        state.prices.append(replies.value("quote", double).price)
        if len(state.prices) < state.trip.days:
            return self._next_day(state)
        calls = {"there": shout(state.trip.to), "price": shout(str(state.total))}
        return self.ask(state, calls, then=self.on_greeting)

    async def on_greeting(self, ctx: TaskExecutionContext, state: Progress, replies: Replies) -> Done[str]:
        return self.done(" ".join(replies.value(key, shout) for key in replies))

    def _next_day(self, state: Progress) -> Paused:
        return self.ask(state, {"quote": double(len(state.prices) + 1)}, then=self.on_quote)


class TestStatefulAgentContract(DurableAgentSuite):
    def agent(self) -> Travel:
        return Travel()

    def request(self) -> JsonValue:
        return {"to": "Oslo", "days": 2}

    def answer(self, call: Call) -> Outcome:
        return obliging(call)


async def a_pause(tested: Any = None) -> Paused:
    result = await (tested or Travel()).start(a_context(), {"to": "Oslo", "days": 1})
    assert isinstance(result, Paused)
    return result


def with_state(pause: Paused, **changes: Any) -> bytes:
    stored = json.loads(pause.state)
    return json.dumps(stored | changes).encode()


async def test_handlers_follow_each_other_with_the_state_they_left() -> None:
    assert await run_agent(Travel(), Trip(to="Oslo", days=3), obliging) == "OSLO 12"


async def test_ask_says_what_is_called_and_keeps_the_state_of_this_moment() -> None:
    tested = Travel()
    state = Progress(trip=Trip(to="Oslo", days=1))
    join = FIRST.within(timedelta(seconds=3))
    pause = tested.ask(state, {"a": double(1), "b": shout("x")}, then=tested.on_quote, join=join)
    state.prices.append(1)
    assert pause.calls == (double(1).as_call("a"), shout("x").as_call("b"))
    assert pause.join == join
    assert tested.ask(state, {"a": double(1)}, then=tested.on_quote).join == ALL
    expected = {
        "format": "travel/1",
        "handler": "on_quote",
        "state": {"trip": {"to": "Oslo", "days": 1}, "prices": []},
    }
    assert json.loads(pause.state) == expected


async def test_done_hands_over_artifacts() -> None:
    assert Travel().done("x", artifacts=({"name": "map"},)) == Done("x", ({"name": "map"},))


async def test_wrong_input_and_output_name_the_field() -> None:
    class Sloppy(Travel):
        async def on_request(self, ctx: TaskExecutionContext, request: Trip) -> Done[str]:
            return Done(request.days)  # type: ignore[arg-type]

    with pytest.raises(InvalidInput, match="input of travel: Trip: days: "):
        await Travel().start(a_context(), {"to": "Oslo"})
    with pytest.raises(InvalidOutput, match="output of travel: str: "):
        await Sloppy().start(a_context(), {"to": "Oslo", "days": 1})


@pytest.mark.parametrize("returned", [None, "Oslo", Paused([double(1).as_call("a")], b"of my own")])
async def test_a_handler_that_returns_anything_else_is_named(returned: Any) -> None:
    class Broken(Travel):
        async def on_request(self, ctx: TaskExecutionContext, request: Trip) -> Any:
            return returned

    with pytest.raises(AgentMisbehaved, match=r"travel\.on_request returned .*; return self\.ask"):
        await Broken().start(a_context(), {"to": "Oslo", "days": 1})


async def a_stranger(ctx: TaskExecutionContext, state: Progress, replies: Replies) -> Done[str]:
    return Done("")


async def test_ask_refuses_what_could_not_be_resumed() -> None:
    tested = Travel()
    state = Progress(trip=Trip(to="Oslo", days=1))
    for handler in (a_stranger, partial(a_stranger), Travel().on_quote):
        with pytest.raises(AgentMisbehaved, match="`then` must be a method of the agent"):
            tested.ask(state, {"a": double(1)}, then=handler)
    with pytest.raises(AgentMisbehaved, match="the state for on_quote: Progress: "):
        tested.ask({"trip": 1}, {"a": double(1)}, then=tested.on_quote)  # type: ignore[arg-type]
    state.prices = ["much"]  # type: ignore[list-item]
    with pytest.raises(AgentMisbehaved, match=r"the state for on_quote: Progress: .*much"):
        tested.ask(state, {"a": double(1)}, then=tested.on_quote)
    with pytest.raises(AgentMisbehaved, match="at least one call"):
        tested.ask(Progress(trip=Trip(to="Oslo", days=1)), {}, then=tested.on_quote)


async def test_a_new_release_with_a_default_for_its_new_field_goes_on() -> None:
    class Wider(Progress):
        currency: str = "NOK"

    class NextTravel(StatefulAgent[Trip, Wider, str]):
        name = "travel"

        async def on_request(self, ctx: TaskExecutionContext, request: Trip) -> Done[str]:
            return self.done("")

        async def on_quote(self, ctx: TaskExecutionContext, state: Wider, replies: Replies) -> Done[str]:
            return self.done(f"{replies.value('quote', double).price} {state.currency}")

    pause = await a_pause()
    assert await NextTravel().resume(a_context(), pause.state, answered(pause, obliging)) == Done("2 NOK")


async def test_a_state_that_cannot_be_read_goes_back() -> None:
    pause = await a_pause()
    outcomes = answered(pause, obliging)
    for state, why in (
        (with_state(pause, handler="on_renamed"), "has no handler 'on_renamed'"),
        (with_state(pause, handler="version"), "has no handler 'version'"),
        (with_state(pause, state={"trip": {"to": "Oslo"}}), "the state for on_quote of travel: Progress: trip.days"),
        (with_state(pause, format="travel/2"), "reads .'travel/1'., not 'travel/2'"),
    ):
        with pytest.raises(IncompatibleState, match=why):
            await Travel().resume(a_context(), state, outcomes)


async def test_a_version_reads_the_versions_it_lists() -> None:
    class Second(Travel):
        version = "2"
        reads = ("1",)

    pause = await a_pause()
    assert Second().state_format == "travel/2"
    assert readable_formats(Second()) == {"travel/1", "travel/2"}
    resumed = await Second().resume(a_context(), pause.state, answered(pause, obliging))
    assert isinstance(resumed, Paused)
    with pytest.raises(IncompatibleState):
        await Travel().resume(a_context(), resumed.state, answered(resumed, obliging))


def test_replies_are_read_by_key_in_call_order_and_by_type() -> None:
    failed = Failed(FailureKind.TIMEOUT, "late")
    sent: dict[str, Outcome] = {"b": Ok({"price": 4}, ({"name": "x"},)), "a": failed, "c": Ok({"price": "much"})}
    replies = Replies(Outcomes(sent))
    assert list(replies) == ["b", "a", "c"]
    assert replies["b"] == sent["b"]
    assert replies.outcome("b", double) == Ok(Quote(price=4), ({"name": "x"},))
    assert replies.value("b", double) == Quote(price=4)
    assert replies.outcome("a", double) == failed
    assert replies.failed == {"a": failed}
    invalid = replies.outcome("c", double)
    assert isinstance(invalid, Failed)
    assert (invalid.kind, invalid.message[:37]) == (FailureKind.INVALID, "output of peer 'double': Quote: price")
    with pytest.raises(PeerFailed, match="peer 'double': timeout: late"):
        replies.value("a", double)
    with pytest.raises(AgentMisbehaved, match="no call 'd'; it has 'b', 'a', 'c'"):
        replies.outcome("d", double)


async def test_an_uncaught_failure_is_the_agents() -> None:
    with pytest.raises(PeerFailed, match="sorry"):
        await run_agent(Travel(), Trip(to="Oslo", days=1), refusing(peer="double"))


Request = TypeVar("Request")
Kept = TypeVar("Kept")


class Asking(StatefulAgent[Request, list[Kept], str], Generic[Kept, Request]):
    """A base with two open type parameters, in a different order."""

    async def on_request(self, ctx: TaskExecutionContext, request: Request) -> Paused | Done[str]:
        return self.ask([], {"a": double(1)}, then=self.on_answer)

    async def on_answer(self, ctx: TaskExecutionContext, state: list[Kept], replies: Replies) -> Done[str]:
        return self.done(f"{state} {replies.value('a', double).price}")


async def test_types_are_found_through_generic_bases() -> None:
    class Numbers(Asking[int, Trip]):
        name = "numbers"

    class Renamed(Numbers):
        name = "renamed"

    tested = Renamed()
    pause = await a_pause(tested)
    assert await tested.resume(a_context(), pause.state, answered(pause, obliging)) == Done("[] 2")
    with pytest.raises(IncompatibleState, match="list"):
        await tested.resume(a_context(), with_state(pause, state=["x"]), answered(pause, obliging))
    with pytest.raises(InvalidInput, match="Trip"):
        await tested.start(a_context(), 1)


def test_a_class_without_its_types_or_name_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"Bare: .*write class Bare\(StatefulAgent\[Input, State, Output\]\)"
    ):

        class Bare(StatefulAgent):  # type: ignore[type-arg]
            name = "bare"

    class Open(Asking[int, Request]):
        name = "open"

    with pytest.raises(ConfigurationError, match="Open: does not declare its input, state and output types"):
        Open()

    class Nameless(Asking[int, Trip]):
        """Complete except for its name."""

    with pytest.raises(ConfigurationError, match=r"agent\.name: Nameless has no name"):
        Nameless()

    class Spaced(Asking[int, Trip]):
        name = "a name"

    with pytest.raises(ConfigurationError, match="not a valid agent name"):
        Spaced()


async def test_an_agent_may_have_a_constructor_of_its_own() -> None:
    class Configured(Travel):
        def __init__(self, greeting: str, *, join: Join = ALL) -> None:
            self.greeting = greeting

    assert Configured("hello").greeting == "hello"
    with pytest.raises(TypeError):
        Configured()  # type: ignore[call-arg]
