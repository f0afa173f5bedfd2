"""A travel agent and its two peers, for `travel.yaml`."""

import asyncio
from datetime import timedelta

from pydantic import BaseModel

from meshpoint import Failed, Peer, TaskExecutionContext, agent


class Trip(BaseModel):
    city: str
    days: int = 3


class Itinerary(BaseModel):
    city: str
    flight: str | None
    forecast: str | None


ask_flights = Peer("flights", Trip, str, timeout=timedelta(seconds=30))
ask_weather = Peer("weather", Trip, str, timeout=timedelta(seconds=30))


@agent("travel", version="1")
async def travel(ctx: TaskExecutionContext, trip: Trip) -> Itinerary:
    """Asks both peers; while they work, the task is a row that any replica may go on with."""
    flight, forecast = await ctx.gather(ask_flights(trip), ask_weather(trip), return_errors=True)
    return Itinerary(
        city=trip.city,
        flight=None if isinstance(flight, Failed) else flight,
        forecast=None if isinstance(forecast, Failed) else forecast,
    )


@agent("flights", version="1")
async def flights(ctx: TaskExecutionContext, trip: Trip) -> str:
    await asyncio.sleep(1)
    return f"MP101 to {trip.city}, 120 EUR"


@agent("weather", version="1")
async def weather(ctx: TaskExecutionContext, trip: Trip) -> str:
    await asyncio.sleep(0.5)
    return f"{trip.days} days of sun"
