"""Replicas of an agent of another framework die, and no model is paid twice."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from meshpoint.model.outcomes import Ok

from .mesh import SHORT_LEASE, Mesh, Process

PLAN = (
    'flights: {"price":120} | clock: noon | weather: sunny | visas: none for Italy'
    ' | hotels: {"price":80}'
)
FRAMEWORKS = {
    "pydantic_ai": "pydantic_ai",
    "google_adk": "google.adk",
    "langgraph": "langgraph",
    "openai_agents": "agents",
    "agent_framework": "agent_framework",
    "strands": "strands",
}
"""The module that each framework installs, by the name of its adapter."""
KILLS = {
    "at the first pause": ("checkpoint:before", 0),
    "after the first pause": ("checkpoint:after", 0),
    "at the second pause": ("checkpoint:before", 1),
    "after the second pause": ("checkpoint:after", 1),
    "in a tool after a model call": ("step:before", 3),
}
LONG = bool(os.environ.get("MESHPOINT_FRAMEWORKS"))
SHORT = ("after the first pause", "in a tool after a model call")
"""The kills of the short form."""
CASES = [(framework, kill) for framework in FRAMEWORKS for kill in (KILLS if LONG else SHORT)]


def count_model_calls(replicas: list[Process]) -> int:
    """The requests to the model that have ended."""
    return sum(len(each.matching_events("step:after", name="model")) for each in replicas)


@pytest.mark.parametrize(("framework", "kill"), CASES)
async def test_a_killed_replica_pays_no_model_twice(mesh: Mesh, framework: str, kill: str) -> None:
    pytest.importorskip(FRAMEWORKS[framework])
    at, skip = KILLS[kill]
    options: dict[str, Any] = {**SHORT_LEASE, "entrypoint": f"framework_agents:{framework}"}
    config = mesh.backends.config("travel", **options)
    flights, hotels, weather = [await mesh.peer(name) for name in ("flights", "hotels", "weather")]
    client = await mesh.client()
    victim = await mesh.replica(config, "--at", at, "--skip", str(skip))
    reply = asyncio.ensure_future(
        _outcome_of(await client.send("travel", {"city": "Rome", "days": 3}))
    )
    answers = asyncio.ensure_future(_answer(flights, hotels, weather))
    await victim.wait_ended()
    others = [await mesh.replica(config) for _ in range(2)]
    outcome = await reply
    await answers
    assert isinstance(outcome, Ok)
    assert str(outcome.value).strip() == PLAN
    assert count_model_calls([victim, *others]) == 4
    assert all(each.requests.empty() for each in (flights, hotels, weather))
    assert client.duplicates == 0


async def _outcome_of(reply: Any) -> Any:
    return (await reply).outcome


async def _answer(flights: Any, hotels: Any, weather: Any) -> None:
    """Answer each peer once, the parallel ones in reverse order."""
    (forecast,), (flight,) = await weather.next_requests(), await flights.next_requests()
    await forecast.answer("sunny")
    await flight.answer({"price": 120})
    (hotel,) = await hotels.next_requests()
    await hotel.answer({"price": 80})
