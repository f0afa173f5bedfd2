"""Cards built from agents, and peers built from cards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from pydantic import BaseModel, create_model

from meshpoint import AgentCard, AgentSkill, Context, Done, Paused, StatefulAgent, agent
from meshpoint.agents.cards import describe_agent
from meshpoint.agents.discovery import offer_peers, peer_of_card
from meshpoint.agents.versions import AgentVersions
from meshpoint.errors import ConfigurationError
from meshpoint.model.cards import MAX_CARD_BYTES
from meshpoint.model.ids import TaskId


class Query(BaseModel):
    """Where to."""

    city: str


class Quote(BaseModel):
    price: int


QUOTE = AgentSkill(id="quote", name="Quote a flight")


@agent("flights", version="3", skills=[QUOTE])
async def flights(ctx: Context, query: Query) -> Quote:
    """Find a flight.

    It knows all airlines.
    """
    return Quote(price=len(query.city))


class Hotels(StatefulAgent[Query, Query, Quote]):
    """Find a hotel."""

    name = "hotels"
    skills = (QUOTE,)

    async def on_request(self, ctx: Context, request: Query, /) -> Paused | Done[Quote]:
        return self.done(Quote(price=1))


class Bare:
    """An agent that declares no types."""

    name, state_format = "bare", "bare/7"

    async def start(self, ctx: Context, request: Any) -> Done[Any]:
        return Done(request)

    async def resume(self, ctx: Context, state: bytes, outcomes: Any) -> Done[Any]:
        return Done(None)


def test_the_card_of_a_function_agent() -> None:
    assert describe_agent(flights) == AgentCard(
        name="flights",
        description="Find a flight.\n\nIt knows all airlines.",
        version="3",
        input_schema=Query.model_json_schema(),
        output_schema=Quote.model_json_schema(),
        skills=(QUOTE,),
    )


def test_the_card_of_a_stateful_agent() -> None:
    card = describe_agent(Hotels())
    assert (card.description, card.version, card.skills) == ("Find a hotel.", "1", (QUOTE,))
    assert card.input_schema == Query.model_json_schema()


def test_an_agent_without_types_has_no_schemas() -> None:
    assert describe_agent(Bare()) == AgentCard(name="bare", version="bare/7")


def test_of_several_versions_the_first_is_described() -> None:
    @agent("flights", version="2")
    async def old(ctx: Context, query: str) -> Quote:
        return Quote(price=1)

    assert describe_agent(AgentVersions([flights, old])).version == "3"


def test_an_agent_may_write_its_own_card() -> None:
    class Described(Bare):
        card = AgentCard(name="bare", description="Anything.")

    assert describe_agent(Described()).description == "Anything."


def test_another_attribute_called_card_is_ignored() -> None:
    class Payment(Bare):
        card = "4111 1111 1111 1111"

    assert describe_agent(Payment()) == AgentCard(name="bare", version="bare/7")


def test_a_long_description_is_cut_and_a_large_schema_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fields: dict[str, Any] = {f"field_{number}": (str, ...) for number in range(2_000)}
    large = create_model("Large", **fields)

    async def verbose(ctx, request):  # type: ignore[no-untyped-def]
        return request

    verbose.__doc__ = "word " * 2_000
    verbose.__annotations__ = {"ctx": Context, "request": Query, "return": large}
    card = describe_agent(agent("verbose")(verbose))
    assert len(card.description) == 4_000
    assert card.description.endswith("…")
    assert card.input_schema == Query.model_json_schema()
    assert card.output_schema == {}
    assert len(card.model_dump_json()) < MAX_CARD_BYTES
    assert "its output schema is left out" in caplog.text


def test_a_type_without_a_schema_leaves_the_rest_of_the_card(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Odd(BaseModel):
        run: Callable[[], int]

    async def odd(ctx, request):  # type: ignore[no-untyped-def]
        return request

    odd.__annotations__ = {"ctx": Context, "request": Odd, "return": Query}
    card = describe_agent(agent("odd")(odd))
    assert card.input_schema == {}
    assert card.output_schema == Query.model_json_schema()
    assert "its card does not describe its input" in caplog.text


def test_a_peer_of_a_card_has_its_name_description_and_schemas() -> None:
    card = describe_agent(flights)
    peer = peer_of_card(card)
    assert (peer.name, peer.description) == ("flights", card.description)
    assert peer.input_schema == card.input_schema
    peer.input_schema["properties"].clear()
    assert peer.output_schema == card.output_schema
    assert card.input_schema == Query.model_json_schema()
    assert peer.write({"city": "Rome"}) == {"city": "Rome"}


class Cards:
    """A directory that holds what a test puts in."""

    def __init__(self, *cards: AgentCard) -> None:
        self.known, self.followed = cards, list[tuple[str, ...]]()
        self.is_configured = False

    def follow(self, patterns: Sequence[str]) -> None:
        self.followed.append(tuple(patterns))

    async def wait_ready(self) -> None:
        pass

    def cards(self, patterns: Sequence[str]) -> tuple[AgentCard, ...]:
        return self.known


async def test_offers_follow_the_directory() -> None:
    ctx, flight, hotel = Context(TaskId("t-1")), AgentCard(name="f"), AgentCard(name="h")
    assert await offer_peers(ctx, ["f"]) == ()
    ctx._runtime.directory = directory = Cards(flight)
    assert await offer_peers(ctx, ["f"]) == (flight,)
    assert await offer_peers(ctx, ["f"]) == (flight,)
    directory.known = (AgentCard(name="f", version="2"), hotel)
    assert await offer_peers(ctx, ["f"]) == directory.known
    directory.known = (hotel,)
    assert await offer_peers(ctx, ["f"]) == (hotel,)
    assert directory.followed == [("f",)] * 4


async def test_offers_check_their_patterns() -> None:
    with pytest.raises(ConfigurationError, match="matches no agent"):
        await offer_peers(Context(TaskId("t-1")), ["no name"])
