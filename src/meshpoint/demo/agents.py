"""The agents of the demo: `travel` pauses twice; `flights`, `hotels` and `weather` are its peers.

Each response time is derived from the input, so that a seed makes a run repeatable.
"""

from __future__ import annotations

import asyncio
import random

from pydantic import BaseModel

from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.model.context import TaskExecutionContext


class Trip(BaseModel):
    """Input of `travel` and its peers. `action` is what a peer should do."""

    city: str
    number: int = 1
    seed: int = 0
    action: str = "offer"


class Itinerary(BaseModel):
    """Output of `travel`."""

    number: int
    city: str
    flight: str
    hotel: str
    weather: str
    confirmed: str


ask_flights = Peer("flights", Trip, str)
ask_hotels = Peer("hotels", Trip, str)
ask_weather = Peer("weather", Trip, str)


@agent("travel")
async def travel(ctx: TaskExecutionContext, trip: Trip) -> Itinerary:
    """Ask three peers concurrently, think, book a room, think, answer.

    Each wait is a pause, and each thought runs in its own segment.
    """
    flight, hotel, weather = await ctx.gather(
        ask_flights(trip), ask_hotels(trip), ask_weather(trip)
    )
    await _simulate_thinking(ctx, trip, "compare")
    confirmed = await ask_hotels(trip.model_copy(update={"action": "book"}))
    await _simulate_thinking(ctx, trip, "write")
    return Itinerary(
        number=trip.number,
        city=trip.city,
        flight=flight,
        hotel=hotel,
        weather=weather,
        confirmed=confirmed,
    )


@agent("flights")
async def flights(ctx: TaskExecutionContext, trip: Trip) -> str:
    """Offer a seat."""
    rng = await _simulate_work(trip, "flights")
    return f"MP{rng.randint(100, 999)} to {trip.city}, {rng.randint(60, 400)} EUR"


@agent("hotels")
async def hotels(ctx: TaskExecutionContext, trip: Trip) -> str:
    """Offer or book a room."""
    rng = await _simulate_work(trip, "hotels")
    if trip.action == "book":
        return f"room {rng.randint(1, 99)} is yours"
    return (
        f"{rng.choice(('Hotel Post', 'The Anchor', 'Albergo Sole'))}, {rng.randint(50, 250)} EUR"
    )


@agent("weather")
async def weather(ctx: TaskExecutionContext, trip: Trip) -> str:
    """Return a forecast."""
    rng = await _simulate_work(trip, "weather")
    return f"{rng.choice(('sun', 'rain', 'wind', 'fog'))}, {rng.randint(-5, 35)} °C"


async def _simulate_work(trip: Trip, agent_name: str) -> random.Random:
    rng = random.Random(f"{trip.seed} {trip.number} {agent_name} {trip.action}")
    await asyncio.sleep(rng.uniform(0.8, 2.0) if trip.action == "offer" else rng.uniform(0.5, 1.0))
    return rng


async def _simulate_thinking(ctx: TaskExecutionContext, trip: Trip, activity: str) -> None:
    """Take some time, unless this code is only replayed."""
    if not ctx.replaying:
        await asyncio.sleep(
            random.Random(f"{trip.seed} {trip.number} {activity}").uniform(0.5, 0.9)
        )
