"""Peers that a test plays."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel

from meshpoint import (
    AgentFailed,
    ConfigurationError,
    Failed,
    FailureKind,
    Ok,
    Peer,
    TaskExecutionContext,
    agent,
    offer_peers,
    peer_of_card,
)
from meshpoint.model.declared_type import TypeMismatch
from meshpoint.testing import TestMesh


class Query(BaseModel):
    city: str


class Quote(BaseModel):
    price: int


flights = Peer("flights", Query, Quote)


@agent("travel")
async def travel(ctx: TaskExecutionContext, city: str) -> int | str:
    match await ctx.outcome(flights(Query(city=city))):
        case Ok(value=quote):
            return quote.price
        case Failed(kind=kind, message=message):
            return f"{kind.value}: {message}"


async def test_requests_and_answers_have_the_types_of_the_peer() -> None:
    async with TestMesh(travel) as mesh:
        asked = mesh.stub(flights).calls(lambda query: Quote(price=len(query.city)))
        assert await mesh.call(travel, "Rome") == 4
        assert asked.requests == [Query(city="Rome")]


async def test_an_async_function_may_wait_in_real_time() -> None:
    async def answer(query: Query) -> Quote:
        await asyncio.sleep(0.01)
        return Quote(price=7)

    async with TestMesh(travel) as mesh:
        mesh.stub(flights).calls(answer)
        assert await mesh.call(travel, "Rome") == 7


async def test_an_exception_is_a_failed_answer() -> None:
    def answer(query: Query) -> Quote:
        if query.city == "Oslo":
            raise AgentFailed("no flights")
        raise RuntimeError("a bug")

    async with TestMesh(travel) as mesh:
        mesh.stub(flights).calls(answer)
        assert await mesh.call(travel, "Oslo") == "error: no flights"
        assert await mesh.call(travel, "Rome") == "error: RuntimeError: a bug"


@pytest.mark.parametrize("kind", FailureKind)
async def test_each_kind_of_failure_can_be_played(kind: Any) -> None:
    async with TestMesh(travel) as mesh:
        mesh.stub(flights).fails(kind, "no")
        assert await mesh.call(travel, "Rome") == f"{kind}: no"


async def test_values_that_do_not_fit_are_refused() -> None:
    async with TestMesh(travel) as mesh:
        wrong: Any = "free"
        with pytest.raises(TypeMismatch):
            mesh.stub(flights).returns(wrong)
        with pytest.raises(ValueError, match="'eror': there is no such failure; there are error"):
            mesh.stub(flights).fails("eror")  # type: ignore[arg-type]
        mesh.stub(flights).calls(lambda _: wrong)
        assert str(await mesh.call(travel, "Rome")).startswith("error: stub 'flights': Quote")


async def test_a_stub_answers_open_requests_once_it_has_instructions() -> None:
    async with TestMesh(travel) as mesh:
        stub = mesh.stub(flights)
        task = await mesh.send(travel, "Rome")
        await stub.next_request()
        assert mesh.stub(flights).returns(Quote(price=3)) is stub
        assert await task.result() == 3


async def test_a_request_that_is_sent_again_counts_once() -> None:
    async with TestMesh(travel) as mesh:
        asked = mesh.stub(flights).returns(Quote(price=3))
        mesh.crash(after="dispatch")
        assert await mesh.call(travel, "Rome") == 3
        await mesh.advance(60)
        assert len(asked.requests) == 1


async def test_a_peer_can_be_named() -> None:
    async with TestMesh(travel) as mesh:
        asked = mesh.stub("flights").returns({"price": 5})
        assert await mesh.call(travel, "Rome") == 5
        assert asked.requests == [{"city": "Rome"}]


async def test_an_agent_of_the_mesh_cannot_be_a_stub() -> None:
    async with TestMesh(travel) as mesh:
        with pytest.raises(ConfigurationError, match="'travel' is served"):
            mesh.stub(travel)


async def test_the_error_of_an_unfit_answer_names_the_stub() -> None:
    async with TestMesh(travel) as mesh:
        with pytest.raises(TypeMismatch, match="stub 'flights': Quote: price: Field required"):
            mesh.stub(flights).returns({})  # type: ignore[arg-type]


@agent("scout")
async def scout(ctx: TaskExecutionContext, city: str) -> dict[str, Any]:
    """Call all peers that can be discovered."""
    cards = await offer_peers(ctx, ["*"])
    outcomes = await ctx.gather_outcomes(*[peer_of_card(card)({"city": city}) for card in cards])
    return {
        card.name: [card.description, outcome.value if isinstance(outcome, Ok) else "failed"]
        for card, outcome in zip(cards, outcomes, strict=True)
    }


async def test_stubs_are_discovered() -> None:
    described = Peer("hotels", Query, Quote, description="Find a hotel.")
    async with TestMesh(scout, always_replay=True) as mesh:
        asked = mesh.stub(described).returns(Quote(price=80))
        mesh.stub("trains").fails()
        assert await mesh.call(scout, "Rome") == {
            "hotels": ["Find a hotel.", {"price": 80}],
            "trains": ["", "failed"],
        }
        assert asked.requests == [Query(city="Rome")]
        mesh.stub(flights).returns(Quote(price=120))  # announces itself
        assert list(await mesh.call(scout, "Rome")) == ["flights", "hotels", "trains"]
