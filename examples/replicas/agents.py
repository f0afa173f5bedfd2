"""A travel agent and its two peers, for `travel.yaml`."""

import asyncio
from datetime import timedelta

from pydantic import BaseModel

from meshpoint import Ok, Peer, TaskExecutionContext, agent


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
    """Ask both peers. While they work, the task is a row that any replica can resume."""
    flight, forecast = await ctx.gather_outcomes(ask_flights(trip), ask_weather(trip))
    return Itinerary(
        city=trip.city,
        flight=flight.value if isinstance(flight, Ok) else None,
        forecast=forecast.value if isinstance(forecast, Ok) else None,
    )


@agent("flights", version="1")
async def flights(ctx: TaskExecutionContext, trip: Trip) -> str:
    await asyncio.sleep(1)
    return f"MP101 to {trip.city}, 120 EUR"


@agent("weather", version="1")
async def weather(ctx: TaskExecutionContext, trip: Trip) -> str:
    await asyncio.sleep(0.5)
    return f"{trip.days} days of sun"
