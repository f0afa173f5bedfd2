"""Agents of other frameworks as entrypoints, with peers from the configuration."""

from __future__ import annotations

import importlib
import json
import linecache
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scenario import (
    FRAMEWORKS,
    TOOLS,
    Framework,
    Journey,
    Quote,
    Result,
    Says,
    Trip,
    Use,
    flights,
    load_framework,
    two_pauses,
)

from declared_adapters import declared_adapters
from meshpoint import Ok, Outcomes, Paused, Peer, TaskExecutionContext, agent
from meshpoint.agents import framework_objects
from meshpoint.agents.entrypoint import load_agent
from meshpoint.agents.versions import source_version
from meshpoint.local import local_mesh
from meshpoint.model.ids import TaskId

ROME = Trip(city="Rome", days=3)


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> Framework:
    return load_framework(request.param)


@agent("flights")
async def serve_flights(ctx: TaskExecutionContext, trip: Trip) -> Quote:
    """Finds a flight."""
    return Quote(price=100 + trip.days)


@agent("hotels")
async def serve_hotels(ctx: TaskExecutionContext, trip: Trip) -> Quote:
    """Finds a hotel."""
    return Quote(price=80)


def ask_flights(answers: int, results: Sequence[Result]) -> Says:
    """Ask the one peer, and return its answer."""
    if answers:
        return Says(results[0].text)
    return Says(uses=(Use("flights", {"city": "Rome", "days": 3}, "call-f"),))


async def test_an_entrypoint_names_an_agent_of_a_framework(
    framework: Framework, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name and its peers come from the configuration."""
    monkeypatch.setattr(framework_objects, "entry_points", lambda group: declared_adapters())
    journey = Journey(ask_flights, TOOLS)
    module: Any = ModuleType("someones_app")
    module.planner = framework.raw(journey)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    travel = load_agent("someones_app:planner", "voyage")
    assert travel.name == "voyage"
    async with local_mesh(travel, serve_flights, serve_hotels, peers=["fl*"]) as mesh:
        plan = await mesh.call(Peer("voyage", str, str), "three days in Rome")
    assert plan.strip() == '{"price":103}'
    assert journey.offered["flights"] == "Finds a flight."
    assert "hotels" not in journey.offered


async def test_the_configuration_alone_gives_peers(framework: Framework) -> None:
    """They are added to the typed peers in the code."""
    journey = Journey(ask_flights, TOOLS)
    hotels = Peer("hotels", Trip, Quote, description="Typed.")
    built = framework.build(journey, peers=[hotels])
    async with local_mesh(built, serve_flights, serve_hotels, peers=["*"]) as mesh:
        plan = await mesh.call(Peer("travel", Trip, str), ROME)
    assert plan.strip() == '{"price":103}'
    assert journey.offered["hotels"] == "Typed."


async def test_a_call_to_a_peer_that_was_configured_is_answered(framework: Framework) -> None:
    """The outcome of a discovered peer needs no type, even if no peer is configured any more."""
    built = framework.build(Journey(two_pauses, TOOLS), peers=[flights, Peer("weather", str, str)])
    task = TaskExecutionContext(TaskId("task"))
    paused = await built.start(task, {"city": "Rome"})
    assert isinstance(paused, Paused)
    stored = json.loads(paused.state)
    for call in stored["calls"]:
        call["is_discovered"] = True
    journey = Journey(lambda answers, results: Says("done"), TOOLS)
    later = framework.build(journey, peers=[])
    outcomes = Outcomes({call.id: Ok("sunny") for call in paused.calls})
    await later.resume(task, json.dumps(stored).encode(), outcomes)
    assert [each.text for each in journey.seen if each.tool != "clock"] == ["sunny", "sunny"]


def test_another_library_or_source_is_another_version(
    framework: Framework, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a version tries the tasks that an earlier one has parked."""
    built = framework.build(Journey(ask_flights))
    monkeypatch.syspath_prepend(str(tmp_path))
    versions = set[str]()
    for text in ("agent = None\n", "agent = None  # corrected\n"):
        (tmp_path / "corrected_app.py").write_text(text)
        linecache.checkcache()
        module: Any = importlib.import_module("corrected_app")
        module.agent = built
        assert load_agent("corrected_app:agent") is built
        versions.add(source_version([built]))
    del sys.modules["corrected_app"]  # monkeypatch would restore it for the next framework
    monkeypatch.setattr(type(built), "library", "99.1")
    versions.add(source_version([built]))
    assert len(versions) == 3
