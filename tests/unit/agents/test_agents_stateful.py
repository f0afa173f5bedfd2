"""Stateful agents: handlers, their state, and what the next release can read."""

from __future__ import annotations

import json
from datetime import timedelta
from functools import partial
from typing import Any, Generic, TypeVar

import pytest
from agent_samples import (
    Quote,
    answer_any,
    create_context,
    double_peer,
    failing_answers,
    shout_peer,
)
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

    @computed_field  # type: ignore[prop-decorator]  # mypy has no support for it
    @property
    def total(self) -> int:
        return sum(self.prices)


class Travel(StatefulAgent[Trip, Progress, str]):
    """Asks for one quote a day, then for a greeting."""

    name = "travel"

    async def on_request(self, ctx: TaskExecutionContext, request: Trip) -> Paused | Done[str]:
        return self._next_day(Progress(trip=request))

    async def on_quote(
        self, ctx: TaskExecutionContext, state: Progress, replies: Replies
    ) -> Paused | Done[str]:
        state.prices.append(replies.value("quote", double_peer).price)
        if len(state.prices) < state.trip.days:
            return self._next_day(state)
        calls = {"there": shout_peer(state.trip.to), "price": shout_peer(str(state.total))}
        return self.ask(state, calls, then=self.on_greeting)

    async def on_greeting(
        self, ctx: TaskExecutionContext, state: Progress, replies: Replies
    ) -> Done[str]:
        return self.done(" ".join(replies.value(key, shout_peer) for key in replies))

    def _next_day(self, state: Progress) -> Paused:
        return self.ask(state, {"quote": double_peer(len(state.prices) + 1)}, then=self.on_quote)


class TestStatefulAgentContract(DurableAgentSuite):
    def agent(self) -> Travel:
        return Travel()

    def request(self) -> JsonValue:
        return {"to": "Oslo", "days": 2}

    def answer(self, call: Call) -> Outcome:
        return answer_any(call)


async def start_and_pause(agent_: Any = None) -> Paused:
    result = await (agent_ or Travel()).start(create_context(), {"to": "Oslo", "days": 1})
    assert isinstance(result, Paused)
    return result


def replace_state(pause: Paused, **changes: Any) -> bytes:
    stored = json.loads(pause.state)
    return json.dumps(stored | changes).encode()


async def test_handlers_receive_the_state_of_the_previous_one() -> None:
    assert await run_agent(Travel(), Trip(to="Oslo", days=3), answer_any) == "OSLO 12"


async def test_ask_captures_the_calls_and_the_current_state() -> None:
    agent_under_test = Travel()
    state = Progress(trip=Trip(to="Oslo", days=1))
    join = FIRST.within(timedelta(seconds=3))
    pause = agent_under_test.ask(
        state,
        {"a": double_peer(1), "b": shout_peer("x")},
        then=agent_under_test.on_quote,
        join=join,
    )
    state.prices.append(1)
    assert pause.calls == (double_peer(1).as_call("a"), shout_peer("x").as_call("b"))
    assert pause.join == join
    assert (
        agent_under_test.ask(state, {"a": double_peer(1)}, then=agent_under_test.on_quote).join
        == ALL
    )
    expected = {
        "format": "travel/1",
        "handler": "on_quote",
        "state": {"trip": {"to": "Oslo", "days": 1}, "prices": []},
    }
    assert json.loads(pause.state) == expected


async def test_done_returns_artifacts() -> None:
    assert Travel().done("x", artifacts=({"name": "map"},)) == Done("x", ({"name": "map"},))


async def test_invalid_input_and_output_errors_name_the_field() -> None:
    class Sloppy(Travel):
        async def on_request(self, ctx: TaskExecutionContext, request: Trip) -> Done[str]:
            return Done(request.days)  # type: ignore[arg-type]  # wrong on purpose

    with pytest.raises(InvalidInput, match="input of travel: Trip: days: "):
        await Travel().start(create_context(), {"to": "Oslo"})
    with pytest.raises(InvalidOutput, match="output of travel: str: "):
        await Sloppy().start(create_context(), {"to": "Oslo", "days": 1})


@pytest.mark.parametrize(
    "returned", [None, "Oslo", Paused([double_peer(1).as_call("a")], b"of my own")]
)
async def test_a_handler_that_returns_anything_else_is_named(returned: Any) -> None:
    class Broken(Travel):
        async def on_request(self, ctx: TaskExecutionContext, request: Trip) -> Any:
            return returned

    with pytest.raises(AgentMisbehaved, match=r"travel\.on_request returned .*; return self\.ask"):
        await Broken().start(create_context(), {"to": "Oslo", "days": 1})


async def foreign_handler(
    ctx: TaskExecutionContext, state: Progress, replies: Replies
) -> Done[str]:
    return Done("")


async def test_ask_refuses_a_pause_that_could_not_be_resumed() -> None:
    agent_under_test = Travel()
    state = Progress(trip=Trip(to="Oslo", days=1))
    for handler in (foreign_handler, partial(foreign_handler), Travel().on_quote):
        with pytest.raises(AgentMisbehaved, match="`then` must be a method of the agent"):
            agent_under_test.ask(state, {"a": double_peer(1)}, then=handler)
    with pytest.raises(AgentMisbehaved, match="the state for on_quote: Progress: "):
        agent_under_test.ask({"trip": 1}, {"a": double_peer(1)}, then=agent_under_test.on_quote)  # type: ignore[arg-type]  # wrong on purpose
    state.prices = ["much"]  # type: ignore[list-item]  # wrong on purpose
    with pytest.raises(AgentMisbehaved, match=r"the state for on_quote: Progress: .*much"):
        agent_under_test.ask(state, {"a": double_peer(1)}, then=agent_under_test.on_quote)
    with pytest.raises(AgentMisbehaved, match="at least one call"):
        agent_under_test.ask(
            Progress(trip=Trip(to="Oslo", days=1)), {}, then=agent_under_test.on_quote
        )


async def test_a_new_state_field_with_a_default_keeps_old_states_readable() -> None:
    class Wider(Progress):
        currency: str = "NOK"

    class NextTravel(StatefulAgent[Trip, Wider, str]):
        name = "travel"

        async def on_request(self, ctx: TaskExecutionContext, request: Trip) -> Done[str]:
            return self.done("")

        async def on_quote(
            self, ctx: TaskExecutionContext, state: Wider, replies: Replies
        ) -> Done[str]:
            return self.done(f"{replies.value('quote', double_peer).price} {state.currency}")

    pause = await start_and_pause()
    assert await NextTravel().resume(
        create_context(), pause.state, answered(pause, answer_any)
    ) == Done("2 NOK")


async def test_an_unreadable_state_is_incompatible() -> None:
    pause = await start_and_pause()
    outcomes = answered(pause, answer_any)
    for state, reason in (
        (replace_state(pause, handler="on_renamed"), "has no handler 'on_renamed'"),
        (replace_state(pause, handler="version"), "has no handler 'version'"),
        (
            replace_state(pause, state={"trip": {"to": "Oslo"}}),
            "the state for on_quote of travel: Progress: trip.days",
        ),
        (replace_state(pause, format="travel/2"), "reads .'travel/1'., not 'travel/2'"),
    ):
        with pytest.raises(IncompatibleState, match=reason):
            await Travel().resume(create_context(), state, outcomes)


async def test_a_version_reads_the_versions_it_lists() -> None:
    class Second(Travel):
        version = "2"
        reads = ("1",)

    pause = await start_and_pause()
    assert Second().state_format == "travel/2"
    assert readable_formats(Second()) >= {"travel/1", "travel/2"}
    resumed = await Second().resume(create_context(), pause.state, answered(pause, answer_any))
    assert isinstance(resumed, Paused)
    with pytest.raises(IncompatibleState):
        await Travel().resume(create_context(), resumed.state, answered(resumed, answer_any))


def test_replies_are_read_by_key_in_call_order_and_by_type() -> None:
    failed = Failed(FailureKind.TIMEOUT, "late")
    sent: dict[str, Outcome] = {
        "b": Ok({"price": 4}, ({"name": "x"},)),
        "a": failed,
        "c": Ok({"price": "much"}),
    }
    replies = Replies(Outcomes(sent))
    assert list(replies) == ["b", "a", "c"]
    assert replies["b"] == sent["b"]
    assert replies.outcome("b", double_peer) == Ok(Quote(price=4), ({"name": "x"},))
    assert replies.value("b", double_peer) == Quote(price=4)
    assert replies.outcome("a", double_peer) == failed
    assert replies.failed == {"a": failed}
    invalid = replies.outcome("c", double_peer)
    assert isinstance(invalid, Failed)
    assert (invalid.kind, invalid.message[:37]) == (
        FailureKind.INVALID,
        "output of peer 'double': Quote: price",
    )
    with pytest.raises(PeerFailed, match="peer 'double': timeout: late"):
        replies.value("a", double_peer)
    with pytest.raises(AgentMisbehaved, match="no call 'd'; it has 'b', 'a', 'c'"):
        replies.outcome("d", double_peer)


async def test_an_uncaught_failure_fails_the_agent() -> None:
    with pytest.raises(PeerFailed, match="sorry"):
        await run_agent(Travel(), Trip(to="Oslo", days=1), failing_answers(peer="double"))


Request = TypeVar("Request")
Kept = TypeVar("Kept")


class Asking(StatefulAgent[Request, list[Kept], str], Generic[Kept, Request]):
    """A base with two open type parameters, in a different order."""

    async def on_request(self, ctx: TaskExecutionContext, request: Request) -> Paused | Done[str]:
        return self.ask([], {"a": double_peer(1)}, then=self.on_answer)

    async def on_answer(
        self, ctx: TaskExecutionContext, state: list[Kept], replies: Replies
    ) -> Done[str]:
        return self.done(f"{state} {replies.value('a', double_peer).price}")


async def test_types_are_found_through_generic_bases() -> None:
    class Numbers(Asking[int, Trip]):
        name = "numbers"

    class Renamed(Numbers):
        name = "renamed"

    agent_under_test = Renamed()
    pause = await start_and_pause(agent_under_test)
    assert await agent_under_test.resume(
        create_context(), pause.state, answered(pause, answer_any)
    ) == Done("[] 2")
    with pytest.raises(IncompatibleState, match="list"):
        await agent_under_test.resume(
            create_context(), replace_state(pause, state=["x"]), answered(pause, answer_any)
        )
    with pytest.raises(InvalidInput, match="Trip"):
        await agent_under_test.start(create_context(), 1)


def test_a_class_without_its_types_or_name_is_refused() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"Bare: .*write class Bare\(StatefulAgent\[Input, State, Output\]\)",
    ):

        class Bare(StatefulAgent):  # type: ignore[type-arg]  # wrong on purpose
            name = "bare"

    class Open(Asking[int, Request]):
        name = "open"

    with pytest.raises(
        ConfigurationError, match="Open: does not declare its input, state and output types"
    ):
        Open()

    class Nameless(Asking[int, Trip]):
        """Complete except for its name."""

    with pytest.raises(ConfigurationError, match=r"agent\.name: Nameless has no name"):
        Nameless()

    class Spaced(Asking[int, Trip]):
        name = "a name"

    with pytest.raises(ConfigurationError, match="not a valid agent name"):
        Spaced()


async def test_an_agent_can_have_its_own_constructor() -> None:
    class Configured(Travel):
        def __init__(self, greeting: str, *, join: Join = ALL) -> None:
            self.greeting = greeting

    assert Configured("hello").greeting == "hello"
    with pytest.raises(TypeError):
        Configured()  # type: ignore[call-arg]  # wrong on purpose
