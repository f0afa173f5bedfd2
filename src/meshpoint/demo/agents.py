"""The agents of the demonstration: `travel` pauses twice; `flights`, `hotels` and `weather` take their time.

How long each takes comes from its input, so that a seed repeats the pace of a run.
"""

from __future__ import annotations

import asyncio
import random

from pydantic import BaseModel

from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.model.context import TaskExecutionContext


class Trip(BaseModel):
    """What is asked of `travel`, and of its peers. `wish` is what a peer is to do."""

    city: str
    number: int = 1
    seed: int = 0
    wish: str = "offer"


class Itinerary(BaseModel):
    """What `travel` answers."""

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
    """Ask three peers at once, think, book a room, think, answer. Each wait is a pause, each thought a segment."""
    flight, hotel, weather = await ctx.gather(ask_flights(trip), ask_hotels(trip), ask_weather(trip))
    await _think(ctx, trip, "compare")
    confirmed = await ctx.call(ask_hotels(trip.model_copy(update={"wish": "book"})))
    await _think(ctx, trip, "write")
    return Itinerary(
        number=trip.number, city=trip.city, flight=flight, hotel=hotel, weather=weather, confirmed=confirmed
    )


@agent("flights")
async def flights(ctx: TaskExecutionContext, trip: Trip) -> str:
    """A seat."""
    chance = await _while_working(trip, "flights")
    return f"MP{chance.randint(100, 999)} to {trip.city}, {chance.randint(60, 400)} EUR"


@agent("hotels")
async def hotels(ctx: TaskExecutionContext, trip: Trip) -> str:
    """A room, or the booking of one."""
    chance = await _while_working(trip, "hotels")
    if trip.wish == "book":
        return f"room {chance.randint(1, 99)} is yours"
    return f"{chance.choice(('Hotel Post', 'The Anchor', 'Albergo Sole'))}, {chance.randint(50, 250)} EUR"


@agent("weather")
async def weather(ctx: TaskExecutionContext, trip: Trip) -> str:
    """A forecast."""
    chance = await _while_working(trip, "weather")
    return f"{chance.choice(('sun', 'rain', 'wind', 'fog'))}, {chance.randint(-5, 35)} °C"


async def _while_working(trip: Trip, who: str) -> random.Random:
    chance = random.Random(f"{trip.seed} {trip.number} {who} {trip.wish}")
    await asyncio.sleep(chance.uniform(0.8, 2.0) if trip.wish == "offer" else chance.uniform(0.5, 1.0))
    return chance


async def _think(ctx: TaskExecutionContext, trip: Trip, what: str) -> None:
    """Be busy, unless this part of the function only runs again."""
    if not ctx.replaying:
        await asyncio.sleep(random.Random(f"{trip.seed} {trip.number} {what}").uniform(0.5, 0.9))
